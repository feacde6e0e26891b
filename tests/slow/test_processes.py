"""What the shell sees of a run: its exit code, its output in a pipe, and other runs beside it."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.slow.process import ended, rows_in, run, shell, started, tiny, until
from tests.training.tiny import rows

pytestmark = pytest.mark.slow

RAISES = """
import torch

class Raises(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no step")
"""


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, tiny()),
        (2, [*tiny(), "--sed=3"]),
        (2, tiny("optimizer.lrr=1")),
        (2, [*tiny(), "model.hidden"]),
        (2, tiny("data=text", "data.path=/nowhere")),
        (3, tiny("optimizer.lr=1e6", "optimizer.weight_decay=1e6")),
        (4, tiny("optimizer.target=mine:Raises")),
    ],
    ids=["finished", "option", "key", "word", "data", "diverged", "failed"],
)
def test_and_echo_ok(code: int, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RAISES)
    end = shell(tmp_path, '"$@" && echo ok', "train", *arguments)
    assert end.code == code, end
    assert end.out.endswith("ok\n") == (code == 0)
    assert "Traceback" not in end.err
    if code == 2:
        assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
        assert end.err
    else:
        (left,) = (tmp_path / "runs").iterdir()
        status = {0: "finished", 3: "diverged", 4: "failed"}[code]
        assert json.loads((left / "summary.json").read_text())["status"] == status


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_and_echo_ok_after_a_signal(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    """In the background too, where a shell has SIGINT ignored."""
    script = f'"$@" & until [ -s runs/one/metrics.jsonl ]; do sleep 0.1; done; kill -{signum} $!; wait $! && echo ok'
    end = shell(tmp_path, script, "train", *tiny("train.steps=100000", "run.name=one"))
    assert end.code == code, end
    assert not end.out.endswith("ok\n")


def test_four_runs_at_once(tmp_path: Path) -> None:
    """Two of them with the same settings, and so with the same name of their own making."""
    seeds = [0, 0, 1, 2]
    with ExitStack() as stack:
        commands = [tiny(f"train.seed={seed}") for seed in seeds]
        together = [stack.enter_context(started(tmp_path, "train", *command)) for command in commands]
        assert [ended(process).code for process in together] == [0] * 4
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 4
    found = sorted((int(folder.name.rpartition("-s")[2][0]), rows(folder)) for folder in folders)
    assert [seed for seed, _ in found] == seeds
    assert all([row["step"] for row in written] == list(range(7)) for _, written in found)
    assert found[0][1] == found[1][1]
    assert len({str(written) for _, written in found}) == 3
    for folder in folders:
        assert f"seed: {folder.name.rpartition('-s')[2][0]}\n" in (folder / "config.yaml").read_text()
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_one_folder_for_two(tmp_path: Path) -> None:
    settings = tiny("train.steps=300", "checkpoint.every=0")
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(tmp_path, "train", *settings, f"train.seed={seed}", "run.dir=one"))
            for seed in (1, 2)
        ]
        ends = [ended(process) for process in both]
    assert sorted(end.code for end in ends) == [0, 2]
    loser = next(end for end in ends if end.code)
    assert "one exists already" in loser.err
    winner = 1 + [end.code for end in ends].index(0)
    # What it left is the run of its own settings, as if nobody had been there.
    assert run(tmp_path, "train", *settings, f"train.seed={winner}", "run.dir=alone").code == 0
    assert rows(tmp_path / "one") == rows(tmp_path / "alone")


def test_a_run_is_not_trained_twice_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "train", *tiny("train.steps=100000", "run.name=one")) as first:
        assert until(first, lambda: rows_in(tmp_path / "runs/one") > 3), ended(first)
        second = run(tmp_path, "train", "--resume", "one")
        assert second.code == 2
        assert "is being trained by another process" in second.err
        assert first.poll() is None


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    script = '"$@" | head -3; echo code ${PIPESTATUS[0]}'
    end = shell(tmp_path, script, "train", *tiny("train.steps=60", "run.name=one"))
    lines = end.out.splitlines()
    assert len(lines) == 4, end
    assert lines[-1] == "code 0"
    assert [row["step"] for row in rows(tmp_path / "runs/one")] == list(range(61))
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["status"] == "finished"
    assert "Traceback" not in end.err


def test_no_escape_codes_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "20")  # nothing is cut to the width of a terminal that is not there
    end = shell(tmp_path, '"$@" 2>&1 | cat', "train", *tiny("run.name=one"))
    assert "\x1b" not in end.out
    assert "\r" not in end.out
    (last,) = (line for line in end.out.splitlines() if line.startswith("step 6/6"))
    assert all(name in last for name in ("loss", "val loss", "lr", "output norm", "tok/s"))
