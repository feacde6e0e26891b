"""SIGTERM and Ctrl-C to the real process, wherever they land."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from abovemup.training import checkpoint
from tests.slow.process import Ended, ended, rows_in, run, started, tiny, until
from tests.training.tiny import rows

pytestmark = pytest.mark.slow

LONG_CALL = """
import pathlib
import torch

class LongCall(torch.optim.SGD):
    def step(self, closure=None):
        matrix = torch.randn(4000, 4000)
        pathlib.Path("called").touch()
        torch.linalg.svdvals(matrix)
"""
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


def check_what_is_left(end: Ended, signum: signal.Signals, folder: Path) -> Path | None:
    """The code of the signal; a run that can go on, or nothing at all. Returns the run's folder."""
    assert end.code == CODES[signum], end
    assert "Traceback" not in end.err
    if not (folder / "runs").exists():
        return None
    (left,) = (folder / "runs").iterdir()
    assert json.loads((left / "summary.json").read_text())["status"] == "interrupted"
    path = checkpoint.choose(left, None, pytest.fail)
    assert path is not None
    state = checkpoint.load(path)
    # The newest row is the checkpoint's, unless that one only waits for its evaluation.
    written = [row["step"] for row in rows(left)]
    assert written == list(range(state.step + (state.pending is None)))
    assert f"abovemup train --resume runs/{left.name}" in end.out
    return left


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("moment", ["importing", "starting", "training"])
def test_at_any_moment(moment: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed of the moment:", seed)
    dice = random.Random(seed)
    signum = dice.choice(list(CODES))
    endless = tiny("train.steps=100000", "eval.every=50", "checkpoint.every=0", "run.name=one")
    with started(tmp_path, "train", *endless) as process:
        if moment == "training":
            enough = dice.randint(1, 120)
            assert until(process, lambda: rows_in(tmp_path / "runs/one") >= enough), ended(process)
        elif moment == "importing":
            assert until(process, lambda: loads_torch(process.pid)), ended(process)
            time.sleep(dice.uniform(0, 0.5))
        else:
            time.sleep(dice.uniform(1.5, 6))
        process.send_signal(signum)
        left = check_what_is_left(ended(process), signum, tmp_path)
    assert (moment != "training") or left is not None


@pytest.mark.parametrize("signum", CODES)
def test_while_data_are_prepared(signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABOVEMUP_CACHE", str(tmp_path / "cache"))
    with started(tmp_path, "train", "tracking=local") as process:
        assert until(process, lambda: any(tmp_path.glob("cache/corpora/*.lock"))), ended(process)
        time.sleep(random.uniform(0, 2))
        process.send_signal(signum)
        check_what_is_left(ended(process), signum, tmp_path)
    for path in (tmp_path / "cache/corpora").iterdir():
        # A fast machine has finished it by then: it may be there, but not half of it.
        whole = path.suffix in (".lock", ".part") or run(tmp_path, "data", "verify", str(path)).code == 0
        assert whole, "half a corpus passes for a whole one"


def test_while_it_evaluates(tmp_path: Path) -> None:
    slow = tiny("train.steps=8", "eval.every=5", "eval.tokens=2^14", "eval.batch=1")
    with started(tmp_path, "train", *slow, "run.name=one") as process:
        assert until(process, lambda: rows_in(tmp_path / "runs/one") == 5), ended(process)  # steps 0 to 4
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        one = check_what_is_left(ended(process), signal.SIGTERM, tmp_path)
    assert one is not None
    assert run(tmp_path, "train", "--resume", "one").code == 0
    assert run(tmp_path, "train", *slow, "run.name=two").code == 0
    assert rows(one) == rows(tmp_path / "runs/two")


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """Also while one call of torch's goes on for long, in which Python's own handlers have to wait."""
    (tmp_path / "mine.py").write_text(LONG_CALL)
    with started(tmp_path, "train", *tiny("optimizer.target=mine:LongCall", "run.name=one")) as process:
        assert until(process, lambda: (tmp_path / "called").exists()), ended(process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        end = ended(process)
    assert end.code == 130, end
    # Not the end of a run that stopped in good order, which is "interrupted" and has a checkpoint.
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["status"] == "running"
