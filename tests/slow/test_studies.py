"""A study under stress: killed at random, run twice at once, with cells that diverge and fail, it is the same study."""

import json
import os
import pty
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from abovemup.cli.main import run
from abovemup.studies.board import announced
from tests.slow.process import BIN, ended, rows_in, started, until
from tests.training.tiny import rows, weights

pytestmark = pytest.mark.slow

TINY = [
    *("model.width=32", "model.head_dim=8", "model.base.width=32", "model.base.head_dim=8", "model.vocab_size=257"),
    *("data=synthetic", "data.states=256", "tracking=local", "train.seq_len=32", "train.batch_size=4"),
    *("eval.tokens=512", "norms.every=20", "eval.every=50", "checkpoint.every=20"),
]
STEPS = 300
GRID = ["optimizer.lr=2^-5,2^-4,2^-3", "train.seed=0,1", "train.tokens=19200,38400"]  # 6 runs of 2 horizons
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


def sweep(folder: Path, name: str, *overrides: str) -> list[str]:
    return ["sweep", *TINY, *overrides, f"--dir={folder / name}", "--jobs=2"]


def processes(mark: str) -> dict[int, str]:
    """Process -> where its output goes, of all that were started with MARK=mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = os.readlink(folder / "fd" / "1")
    return found


def cells_at(mark: str) -> list[int]:
    return [process for process, out in processes(mark).items() if out.endswith(".log")]


def written(study: Path) -> int:
    return sum(map(rows_in, study.glob("runs/*")))


def told(out: str) -> dict[str, str]:
    return {row["cell"]: row["status"] for row in json.loads(out)["cells"]}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the processes in /proc")
def test_killed_at_random_it_is_the_undisturbed_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 cells and 7 studies are killed, each at a random moment; two studies share the folder at the end."""
    seed = random.randrange(2**32)
    print("seed of the moments:", seed)
    dice = random.Random(seed)
    command, killed, mark = sweep(tmp_path, "killed", *GRID), tmp_path / "killed", str(tmp_path)
    assert run(sweep(tmp_path, "whole", *GRID)) == 0
    monkeypatch.setenv("MARK", mark)
    for number in range(7):
        with started(tmp_path, *command) as study:
            for victim in ("cell", "cell", "study"):
                seen = written(killed) + dice.randint(1, 40)
                assert until(study, lambda seen=seen: written(killed) > seen), study.communicate()
                if victim == "cell":
                    with suppress(ProcessLookupError):
                        os.kill(dice.choice(cells_at(mark)), signal.SIGKILL)
            signum = SIGNALS[number % 3]
            study.send_signal(signum)
            assert ended(study).code == 128 + signum
        deadline = time.monotonic() + 30
        while left := processes(mark):  # they end with the study
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    with started(tmp_path, *command) as one, started(tmp_path, *command) as two:
        ends = [ended(one), ended(two)]
    assert [end.code for end in ends] == [0, 0], ends

    names = sorted(path.name for path in (tmp_path / "whole" / "runs").iterdir())
    assert names == sorted(path.name for path in (killed / "runs").iterdir())
    assert len(names) == 6
    for name in names:
        assert rows(killed / "runs" / name) == rows(tmp_path / "whole" / "runs" / name)
        assert [row["step"] for row in rows(killed / "runs" / name)] == list(range(STEPS + 1))
    assert len(announced(killed)) == 12
    assert (killed / "points.csv").read_text() == (tmp_path / "whole" / "points.csv").read_text()


BAD = """
import torch

class Mine(torch.optim.SGD):
    def __init__(self, groups, lr, bad=None):
        super().__init__(groups, lr=lr)
        self.bad = bad
        if bad == "never": raise ValueError("no such thing")

    def step(self):
        if self.bad == "raises": raise ValueError("broken")
        if self.bad == "explodes": self.param_groups[0]["params"][0].data.mul_(float("inf"))
        super().step()
"""


def test_some_fail_and_one_diverges_and_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(BAD)
    kinds = "optimizer.args={},{bad: explodes},{bad: raises},{bad: never}"
    command = [*sweep(tmp_path, "study", "optimizer.target=mine:Mine", kinds, "train.steps=5"), "--json"]
    assert run(command) == 4
    said = capsys.readouterr()
    assert sorted(told(said.out).values()) == ["diverged", "failed", "failed", "finished"]
    errors = [row["error"] for row in json.loads(said.out)["cells"] if row["status"] == "failed"]
    for error, line in zip(("ValueError: broken", "ValueError: no such thing"), errors, strict=True):
        assert error in line
        assert error in said.err

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("study/[rl]*/*")}
    assert run(command) == 4  # nothing is tried again by itself
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("study/[rl]*/*")}
    good = BAD.replace('float("inf")', "1").replace("if self.bad ==", "if not")
    Path("mine.py").write_text(good.replace("if bad ==", "if not"))
    capsys.readouterr()
    assert run([*command, "--retry=failed"]) == 3
    assert sorted(told(capsys.readouterr().out).values()) == ["diverged", "finished", "finished", "finished"]
    assert run([*command, "--retry=diverged"]) == 0
    out = capsys.readouterr().out
    assert {*told(out).values()} == {"finished"}
    assert run(["study", "status", "study", "--json"]) == 0
    assert told(capsys.readouterr().out) == told(out)


def test_horizons_that_were_not_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer one goes on; a shorter one that was measured is read, and one that was not has a run of its own."""
    monkeypatch.chdir(tmp_path)
    losses = {}
    for steps in (60, 80, 50, 30):
        assert run([*sweep(tmp_path, "study", f"train.steps={steps}"), "--json"]) == 0
        losses[steps] = json.loads(capsys.readouterr().out)["cells"][0]["val_loss"]
    (name, aside) = sorted(path.name for path in tmp_path.glob("study/runs/*"))
    assert aside == f"{name}-at30"
    at = {row["step"]: row["val/loss"] for row in rows(tmp_path / "study" / "runs" / name) if "val/loss" in row}
    assert {*at} == {0, 50, 60, 80}
    assert [at[steps] for steps in (60, 80, 50)] == [losses[steps] for steps in (60, 80, 50)]
    starts = [log.read_text().count("step 0/") for log in tmp_path.glob("study/logs/*.log")]
    assert starts == [2]  # once, and once aside


def test_a_study_on_a_terminal(tmp_path: Path) -> None:
    """A live table that ends with all cells finished; drawn for real, on a pseudo-terminal."""
    reader, writer = pty.openpty()
    command = [str(BIN), *sweep(tmp_path, "study", "optimizer.lr=2^-5,2^-4", "train.steps=400")]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150", "LINES": "30"}
    with subprocess.Popen(command, stdout=writer, stderr=writer, env=environment) as process:
        os.close(writer)
        shown = b""
        with suppress(OSError):  # Linux says so when the other end is closed
            while part := os.read(reader, 2**16):
                shown += part
    os.close(reader)
    assert process.returncode == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert re.search(r"2\^-5 +running +\d+/400", text)
    assert "cells: 2 running" in text
    assert "cells: 2 finished; best: val loss" in text
    assert f"all: abovemup study status {tmp_path / 'study'}" in text


def test_cells_of_several_processes(tmp_path: Path) -> None:
    """They end with their study, keep a checkpoint, and go on; what comes out is what one process gives."""
    command = sweep(tmp_path, "two", "optimizer.lr=2^-4", "train.steps=200", "--nproc=2")
    with started(tmp_path, *command) as study:
        assert until(study, lambda: written(tmp_path / "two") > 20)
        study.send_signal(signal.SIGTERM)
        assert ended(study).code == 143
    assert run(command) == run(sweep(tmp_path, "one", "optimizer.lr=2^-4", "train.steps=200")) == 0
    (two,), (one,) = (list((tmp_path / name / "runs").iterdir()) for name in ("two", "one"))
    assert two.name == one.name
    assert json.loads((two / "summary.json").read_text())["processes"] == 2
    assert (tmp_path / "two" / "logs" / f"{two.name}.log").read_text().count("step 0/200") == 1
    for ours, alone in zip(rows(two), rows(one), strict=True):
        assert ours["step"] == alone["step"]
        assert ours.get("loss", 0) == pytest.approx(alone.get("loss", 0), rel=1e-4)


def test_tails_branch_off_the_constant_run_and_have_the_bits_of_whole_ones(tmp_path: Path) -> None:
    study = tmp_path / "decay"
    command = ["ablate", "decay", "--budget=smoke", "optimizer.lr=2^-3", f"--dir={study}"]
    assert run([*command, "schedule=wsd"]) == 0  # whole: there is nothing to branch from
    whole = {folder.name: folder.rename(tmp_path / folder.name) for folder in (study / "runs").iterdir()}
    assert run(command) == 0
    points = set()
    for name, alone in whole.items():
        tail = study / "runs" / name
        points.add(str(json.loads((tail / "summary.json").read_text())["branched_from"]).partition("@")[2])
        ours = rows(tail)[1:]  # the first is of what it starts from
        assert ours == rows(alone)[-len(ours) :]
        steps = ours[-1]["step"]
        ends = (weights(folder, steps) for folder in (tail, alone))
        assert all(a.equal(b) for a, b in zip(*(end.values() for end in ends), strict=True))
    assert points == {"4096", "8192"}
