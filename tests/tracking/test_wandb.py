"""Most tests put a package called wandb in front of the real one: it writes down what it is told."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.schema import Tracking
from abovemup.tracking import wandb
from abovemup.tracking.jsonl import JsonlSink, rewind
from abovemup.tracking.summary import write_summary
from abovemup.tracking.wandb import WandbSink, logged_in, push
from abovemup.tracking.wandb_helper import follow, per_role

KEY = "0123456789abcdef" * 2 + "deadbeef"
FAKE = """
import json, os, time
def tell(**what):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def Settings(**settings):
    return settings
class Run:
    url = None
    class summary:
        @staticmethod
        def update(values): tell(summary=values)
    def define_metric(self, name, step_metric=None): tell(metric=[name, step_metric])
    def log(self, row, step, commit): tell(row=row, step=step)
    def finish(self, exit_code): tell(exit_code=exit_code)
def init(**what):
    tell(init=what)
    print("wandb: chatter")
    if what["mode"] == "online":
        Run.url = "https://wandb.test/run"
    MIDDLE
    return Run()
def teardown(): tell(teardown=True)
"""


class Fake:
    def __init__(self, folder: Path, middle: str) -> None:
        (folder / "wandb").mkdir()
        (folder / "wandb" / "__init__.py").write_text(FAKE.replace("MIDDLE", middle))
        self.path = folder / "told"

    def told(self, what: str) -> list[Any]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [told[what] for told in map(json.loads, lines) if what in told]

    def wait_for(self, what: str) -> None:
        for _ in range(6000):
            if self.told(what):
                return
            time.sleep(0.01)
        raise AssertionError(f"the helper never told its {what}")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    monkeypatch.setattr(wandb, "LIMIT", 60.0)  # on however busy a machine
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def make(middle: str = "pass") -> Fake:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "fake" / "told"))
        (tmp_path / "fake").mkdir()
        return Fake(tmp_path / "fake", middle)

    return make


def tracking(**changes: Any) -> Tracking:
    defaults: dict[str, Any] = {"name": "wandb", "every": 1, "layers": "roles", "mode": "offline"}
    defaults |= {"project": "p", "entity": None, "group": None, "tags": ["a"]}
    return Tracking(**defaults | changes)


def new_run(tmp_path: Path, **changes: Any) -> Path:
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"lr": 0.5, "tracking": vars(tracking(**changes))}))
    write_summary(run_dir / "summary.json", {"status": "running"})
    return run_dir


def leg(run_dir: Path, steps: range, notes: list[str], after: int | None = None, **changes: Any) -> WandbSink:
    """Log `steps`; the sink is not closed yet."""
    rows = JsonlSink(run_dir / "metrics.jsonl", after)
    experiment: Any = SimpleNamespace(tracking=tracking(**changes))
    sink = WandbSink(run_dir, experiment, notes.append)
    for step in steps:
        record = {"step": step, "tokens": 8 * step, "loss": math.inf if step == 3 else 1 / (1 + step)}
        rows.log(record)
        sink.log(record)
    return sink


END = {"status": "finished", "loss": math.nan, "steps": 6}


def end(sink: WandbSink, summary: dict[str, Any] = END) -> None:
    """As a run does: its summary is written before its sinks are closed."""
    write_summary(sink.run_dir / "summary.json", summary)
    sink.close(summary)


def test_each_row_once_with_our_axes_and_the_summary(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    seen, run_dir, notes = fake(), new_run(tmp_path), list[str]()
    sink = leg(run_dir, range(7), notes)
    end(sink)
    assert seen.told("step") == list(range(7))
    assert [row["tokens"] for row in seen.told("row")] == [8 * step for step in range(7)]
    assert seen.told("row")[3]["loss"] == math.inf
    assert ["*", "tokens"] in seen.told("metric")
    assert seen.told("summary") == [{"status": "finished", "loss": "nan", "steps": 6}]
    assert seen.told("exit_code") == [0]
    assert seen.told("teardown")
    (init,) = seen.told("init")
    assert init["config"] == {"lr": 0.5, "tracking": vars(tracking())}
    assert (init["mode"], init["project"], init["tags"], init["group"]) == ("offline", "p", ["a"], "my run")
    settings = init["settings"]
    assert (settings["console"], settings["silent"], settings["save_code"]) == ("off", True, False)
    assert settings["disable_git"]
    assert settings["disable_code"]
    assert len(notes) == 1  # the one line that says how to sync
    assert f"wandb sync '{run_dir}/wandb'/offline-run-*-{init['id']}" in notes[0]
    end(sink)
    assert len(notes) == 1


def test_online_the_url_is_said(tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, notes = fake(), list[str]()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    sink = leg(new_run(tmp_path), range(3), notes, mode="online")
    end(sink)
    assert notes == ["W&B: https://wandb.test/run"]
    assert sink.where == "https://wandb.test/run"
    assert seen.told("init")[0]["mode"] == "online"


def test_case_79_the_second_leg_is_a_new_run_with_the_whole_curve(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    seen, run_dir, notes = fake(), new_run(tmp_path), list[str]()
    end(leg(run_dir, range(7), notes), {"status": "interrupted"})
    rewind(run_dir / "metrics.jsonl", 4)
    end(leg(run_dir, range(5, 10), notes, after=4))
    first, second = seen.told("init")
    name, _, number = first["id"].rpartition("-")
    assert (number, second["id"]) == ("1", f"{name}-2")
    assert first["group"] == second["group"]
    assert seen.told("step") == list(range(7)) + list(range(10))
    assert seen.told("exit_code") == [1, 0]


def test_a_hanging_wandb_is_left_behind(
    tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "LIMIT", 0.2)
    seen, run_dir, notes = fake("time.sleep(100_000)"), new_run(tmp_path), list[str]()
    sink = leg(run_dir, range(3), notes)
    process = sink.process
    assert process is not None
    seen.wait_for("init")
    end(sink)
    assert process.returncode == -signal.SIGKILL
    assert notes[1:] == [f"W&B: not finished in 0.2 s; `abovemup runs push '{run_dir}'` uploads the whole run"]


def test_a_wandb_that_does_not_even_listen_is_left_behind(
    tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "LIMIT", 0.2)
    fake("os.kill(os.getpid(), 19)")  # SIGSTOP
    notes: list[str] = []
    end(leg(new_run(tmp_path), range(3), notes), {"status": "finished", "much": "x" * 10_000})
    assert len(notes) == 2


FAIL = f"raise RuntimeError('no network for {KEY}\\nmore {KEY}')"


def test_trouble_is_one_line_that_names_the_fix_and_no_key(
    tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE")
    seen, run_dir, notes = fake(FAIL), new_run(tmp_path), list[str]()
    sink = leg(run_dir, range(5), notes, mode="auto")
    assert notes == []
    end(sink)
    assert [init["mode"] for init in seen.told("init")] == ["online"]
    lost = f"RuntimeError: no network for ***; `abovemup runs push '{run_dir}'` uploads the whole run"
    assert (sink.where, notes) == (lost, [f"W&B: {lost}"])
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and "fake" not in p.parts and KEY in p.read_text()]


def test_a_wandb_that_breaks_while_it_runs(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    fake("Run.log = lambda self, row, step, commit: 1 / (2 - step)")
    notes: list[str] = []
    sink = leg(new_run(tmp_path), range(5), notes)
    end(sink)
    assert len(notes) == 2
    assert "ZeroDivisionError: division by zero; `abovemup runs push" in notes[1]
    assert sink.where in notes[1]


def test_a_helper_that_cannot_even_start_is_not_silent(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    fake()
    (tmp_path / "fake" / "yaml.py").write_text("raise ImportError")
    notes: list[str] = []
    sink = leg(new_run(tmp_path), range(3), notes)
    end(sink)
    assert len(notes) == 2
    assert "the upload ended with code 1; `abovemup runs push" in notes[1]
    assert sink.where in notes[1]


@pytest.mark.parametrize(("mode", "means"), [("", "offline"), ("dryrun", "offline"), ("online", "offline")])
def test_what_the_environment_says_of_auto(monkeypatch: pytest.MonkeyPatch, mode: str, means: str) -> None:
    """What is no mode says nothing; here is no key."""
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_MODE", mode)
    assert wandb.resolve_mode(tracking(mode="auto"), lambda line: None) == means


def test_rows_arrive_when_the_run_is_killed(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    seen, run_dir = fake(), new_run(tmp_path)
    # A forked child of the run (a data worker, say) outlives it and holds the pipe to the helper open.
    release = tmp_path / "release"
    code = (
        "import os, pathlib, time, test_wandb as t\n"
        f"sink = t.leg(pathlib.Path({str(run_dir)!r}), range(5), [])\n"
        f"if os.fork() == 0:\n    while not os.path.exists({str(release)!r}): time.sleep(0.01)\n"
        "else: os.kill(os.getpid(), 9)\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], env=in_tests())
    try:
        seen.wait_for("teardown")
    finally:
        release.touch()
    assert seen.told("step") == list(range(5))
    assert seen.told("summary") == [{"status": "running"}]  # the last that it said of itself
    assert seen.told("exit_code") == [1]


def test_no_helper_hangs_for_ever(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    fake("time.sleep(100_000)")
    code = "import sys; from abovemup.tracking import wandb_helper; wandb_helper.PATIENCE = 1; wandb_helper.main()"
    run_dir = new_run(tmp_path)
    (run_dir / "wandb").mkdir()
    arguments = [sys.executable, "-c", code, str(run_dir), "offline", "id-1", str(os.getpid())]
    assert subprocess.run(arguments, env=in_tests()).returncode == -signal.SIGALRM


def test_ctrl_c_and_sigterm_do_not_reach_the_helper(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    seen, run_dir, notes = fake(), new_run(tmp_path), list[str]()
    sink = leg(run_dir, range(3), notes)
    assert sink.process is not None
    seen.wait_for("row")
    assert os.getpgid(sink.process.pid) != os.getpgid(0)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        sink.process.send_signal(signum)
    end(sink)
    assert seen.told("step") == [0, 1, 2]
    assert seen.told("exit_code") == [0]


def test_what_surrounds_the_run_does_not_leak_into_it(
    tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("raise SystemExit('a file of the working directory')")
    monkeypatch.chdir(tmp_path)
    foreign = {"WANDB_RUN_ID", "WANDB_SERVICE", "WANDB_PROJECT", "WANDB_TAGS"}
    for name in foreign:
        monkeypatch.setenv(name, "somebody/else")
    seen = fake("tell(env=sorted(os.environ))")
    end(leg(new_run(tmp_path), range(2), []))
    assert not (foreign | {"WANDB_MODE"}) & set(seen.told("env")[0])
    assert seen.told("step") == [0, 1]


@pytest.mark.parametrize("changes", [{"mode": "disabled"}, {"name": "local"}, {"mode": "auto"}])
def test_off_is_off(tmp_path: Path, changes: dict[str, Any]) -> None:
    notes: list[str] = []  # auto: WANDB_MODE is disabled in tests
    run_dir = new_run(tmp_path)
    sink = leg(run_dir, range(3), notes, **changes)
    end(sink)
    assert (sink.process, sink.where, notes) == (None, None, [])
    assert not (run_dir / "wandb").exists()


def test_this_room_does_not_import_wandb_or_torch() -> None:
    code = (
        "import sys, abovemup.tracking.wandb, abovemup.tracking.wandb_helper;"
        "print([m for m in ('wandb', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=in_tests(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_without_wandb_installed_the_run_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    notes: list[str] = []
    sink = leg(new_run(tmp_path), range(3), notes)
    end(sink)
    assert sink.where is None
    assert len(notes) == 1
    assert "not installed" in notes[0]
    assert "\n" not in notes[0]


def test_online_without_a_key_goes_offline(
    tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake()
    notes: list[str] = []
    end(leg(new_run(tmp_path), range(3), notes, mode="online"))
    assert "wandb login" in notes[0]
    assert [init["mode"] for init in seen.told("init")] == ["offline"]


def test_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "netrc"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    assert not logged_in()
    path.write_text(f"machine example.com login user password {KEY}\n")
    assert not logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://example.com/")
    assert logged_in()
    monkeypatch.delenv("WANDB_BASE_URL")
    # What `wandb login --host` and `wandb init` write; a project's own comes first.
    ours, theirs = ("[default]\nbase_url = https://example.com\n", "[default]\nbase_url = https://other.com\n")
    (tmp_path / "settings").write_text(ours)
    assert logged_in()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(theirs)
    assert not logged_in()
    (tmp_path / "wandb" / "settings").write_text(ours)
    (tmp_path / "settings").write_text(theirs)
    assert logged_in()
    (tmp_path / "wandb" / "settings").write_text("base_url")
    assert not logged_in()
    (tmp_path / "wandb" / "settings").unlink()
    (tmp_path / "settings").unlink()
    path.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert logged_in()
    path.write_text("machine")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert logged_in()


def test_push_uploads_the_whole_run(tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run_dir = fake(), new_run(tmp_path)
    with pytest.raises(RequestError, match=r"no metrics\.jsonl"):
        push(run_dir)
    end(leg(run_dir, range(5), [], name="local"))
    with pytest.raises(RequestError, match="wandb login"):
        push(run_dir)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert push(run_dir) == "https://wandb.test/run"
    assert push(run_dir) == "https://wandb.test/run"
    assert seen.told("step") == 2 * list(range(5))
    first, second = seen.told("init")
    assert first["id"] == second["id"]
    assert first["id"].endswith("-push")
    assert seen.told("summary") == 2 * [{"status": "finished", "loss": "nan", "steps": 6}]


def test_a_push_that_fails_says_why(tmp_path: Path, fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    fake(FAIL)
    run_dir = new_run(tmp_path)
    end(leg(run_dir, range(5), [], name="local"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(RunFailed, match=r"no network for \*\*\*") as error:
        push(run_dir)
    assert KEY not in str(error.value)


def test_per_role() -> None:
    record = {
        "step": 1,
        "loss": 2.0,
        "norm/embedding/one_to_rms": 1.0,
        "norm/head/rms_to_inf": 1.5,
        "norm/layers.0.attention.wq/rms_to_rms": 4.0,
        "norm/layers.0.attention.wk/rms_to_rms": 2.0,
        "norm/layers.1.attention.wq/rms_to_rms": 3.5,
        "update/layers.0.attention.wq/rms_to_rms": 1.0,
        "update/layers.1.attention.wq/rms_to_rms": math.nan,
        "norm/layers.0.attention_norm/max_abs": 1.0,
        "norm/layers.0.attention.wq.bias/rms": 0.5,
    }
    row = per_role(record)
    assert all(math.isnan(row.pop(f"update/hidden/{what}")) for what in ("min", "median", "max"))
    assert row == {
        "step": 1,
        "loss": 2.0,
        "norm/embedding/one_to_rms": 1.0,
        "norm/head/rms_to_inf": 1.5,
        "norm/hidden/min": 2.0,
        "norm/hidden/median": 3.5,
        "norm/hidden/max": 4.0,
        **{f"norm/gain/{what}": 1.0 for what in ("min", "median", "max")},
        **{f"norm/bias/{what}": 0.5 for what in ("min", "median", "max")},
    }


def test_more_norms_are_grouped_by_role_and_norm() -> None:
    record = {"step": 1, "grad/layers.0.wq/rms_to_rms_dual": 5.0, "grad/head/rms_to_inf_dual": 6.0}
    record |= {"norm/layers.0.wq/rms_to_rms": 1.0, "norm/layers.0.wq/max_abs": 2.0, "norm/head/rms_to_inf": 3.0}
    record |= {"norm/head/rms_to_rms": 4.0, "norm/layers.0.norm/max_abs": 7.0, "norm/layers.0.norm/frobenius": 8.0}
    grouped = {"grad/hidden": 5.0, "norm/hidden": 1.0, "norm/hidden/max_abs": 2.0, "norm/gain": 7.0}
    grouped |= {"norm/gain/frobenius": 8.0}
    row = {"step": 1, "grad/head/rms_to_inf_dual": 6.0, "norm/head/rms_to_inf": 3.0, "norm/head/rms_to_rms": 4.0}
    for name, value in grouped.items():
        row |= {f"{name}/{what}": value for what in ("min", "median", "max")}
    assert per_role(record) == row


def test_all_layers_on_request(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    seen, run_dir = fake(), new_run(tmp_path, layers="all")
    record = {"step": 0, "tokens": 0, "norm/layers.0.a/rms_to_rms": 1.0}
    JsonlSink(run_dir / "metrics.jsonl").log(record)
    experiment: Any = SimpleNamespace(tracking=tracking())
    end(WandbSink(run_dir, experiment, print))
    assert seen.told("row") == [record]


def test_following_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    parts = ['{"step": 0}\n{"st', 'ep": 1}\n', "", '{"step": 2}\n{"step"']

    def over() -> bool:
        with path.open("a") as file:
            file.write(parts.pop(0))
        return not parts

    assert [row["step"] for row in follow(path, over)] == [0, 1, 2]


# ---- the real wandb ----


def rows_of(path: Path) -> list[dict[str, Any]]:
    """History rows of an offline run's .wandb file (LevelDB's log format after a header of 7 bytes)."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@pytest.mark.slow
def test_two_real_offline_legs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run_dir, notes = new_run(tmp_path), list[str]()
    end(leg(run_dir, range(7), notes), {"status": "interrupted"})
    rewind(run_dir / "metrics.jsonl", 4)
    end(leg(run_dir, range(5, 10), notes, after=4))
    assert len(notes) == 2
    first, second = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert first.stem.removesuffix("-1") == second.stem.removesuffix("-2")
    for path, steps in ((first, range(7)), (second, range(10))):
        rows = rows_of(path)
        assert [row["step"] for row in rows] == list(steps)
        assert [row["_step"] for row in rows] == list(steps)
        assert [row["tokens"] for row in rows] == [8 * step for step in steps]
    for path in run_dir.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_real_service_that_is_terminated(tmp_path: Path) -> None:
    """A batch system sends SIGTERM to every process of the job, wandb's service among them."""
    run_dir, notes = new_run(tmp_path), list[str]()
    sink = leg(run_dir, range(5), notes)
    assert sink.process is not None
    service = f"wandb-core.*--pid {sink.process.pid}$"
    while not list(run_dir.glob("wandb/offline-run-*/*.wandb")):
        time.sleep(0.05)
    (pid,) = subprocess.run(["pgrep", "-f", service], capture_output=True, text=True).stdout.split()
    os.kill(int(pid), signal.SIGTERM)
    end(sink)
    assert len(notes) == 2
    assert "abovemup runs push" in notes[1]


def in_tests() -> dict[str, str]:
    """The environment for a process that imports this file."""
    root = Path(__file__).parents[2]
    paths = [os.environ.get("PYTHONPATH", ""), str(root), str(Path(__file__).parent)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_the_module_is_not_shadowed() -> None:
    assert wandb.__name__ == "abovemup.tracking.wandb"
