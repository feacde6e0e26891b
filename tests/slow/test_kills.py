"""A run that is killed again and again has the bits of the run that was left alone."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from abovemup.training import checkpoint
from tests.slow.process import ended, rows_in, run, started, tiny, until
from tests.training.tiny import read, rows, same_bits, weights

pytestmark = pytest.mark.slow

STEPS = 700
SETTINGS = tiny(f"train.steps={STEPS}", "checkpoint.every=5", "checkpoint.keep=3", "norms.every=10", "eval.every=20")
# Where a leg ends: after some more rows, while a checkpoint is being written, or while it starts up.
KILLS = ["rows"] * 5 + ["writing"] * 4 + ["starting"]
STOPS = {"SIGTERM": 143, "SIGINT": 130}


def being_written(folder: Path) -> bool:
    try:
        return any(name.startswith(".writing-") for name in os.listdir(folder / "checkpoints"))
    except FileNotFoundError:
        return False


def wait_for(moment: str, leg: subprocess.Popen[str], folder: Path, dice: random.Random) -> None:
    """Sleep until it is time to end this leg."""
    have = rows_in(folder)
    if moment == "starting":
        time.sleep(dice.uniform(0, 5))
        return
    # A resumed leg first takes back the rows after its checkpoint.
    seen = have + dice.randint(1, 40)
    assert until(leg, lambda: rows_in(folder) > seen), f"the leg ended by itself: {leg.communicate()}"
    if moment == "writing":
        assert until(leg, lambda: being_written(folder), pause=0), leg.communicate()
    time.sleep(dice.choice([0, dice.uniform(0, 0.02)]))


def test_kills_beside_the_training(tmp_path: Path) -> None:
    """While a thread writes a checkpoint: the one before it is whole, and the run goes on from there."""
    settings = tiny("train.steps=120", "checkpoint.every=5", "checkpoint.keep=2", "checkpoint.asynchronous=true")
    assert run(tmp_path, "train", *settings, "run.dir=straight").code == 0
    killed, command, caught = tmp_path / "killed", [*settings, "run.dir=killed"], 0
    for row in (20, 50, 80):
        with started(tmp_path, "train", *command) as leg:
            assert until(leg, lambda row=row: rows_in(killed) > row), leg.communicate()  # type: ignore[misc]
            assert until(leg, lambda: being_written(killed), pause=0), leg.communicate()
            leg.kill()
            assert ended(leg).code == 137
        caught += being_written(killed)
        whole = checkpoint.choose(killed, None, pytest.fail)
        assert whole is not None
        assert checkpoint.load(whole).step > row - 11
        command = ["--resume", "killed"]
    assert caught, "no kill came while a checkpoint was being written"
    assert run(tmp_path, "train", *command).code == 0
    assert rows(killed) == rows(tmp_path / "straight")
    names = [path.name for path in sorted((killed / "checkpoints").iterdir())]
    assert names == ["step_00000115", "step_00000120"]
    left, right = (read(folder / "checkpoints" / names[-1]) for folder in (killed, tmp_path / "straight"))
    assert same_bits(left.tensors(), right.tensors())


def test_ten_kills(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed of the moments:", seed)  # pytest shows it when the test fails
    dice = random.Random(seed)
    moments = KILLS[1:] + list(STOPS)
    dice.shuffle(moments)
    moments.insert(0, KILLS[0])  # before config.yaml is written there is nothing to resume
    killed, caught = tmp_path / "killed", 0
    with started(tmp_path, "train", *SETTINGS, "run.dir=straight") as straight:
        command = [*SETTINGS, "run.dir=killed"]
        for moment in moments:
            print(moment, "at row", rows_in(killed))
            with started(tmp_path, "train", *command) as leg:
                wait_for(moment, leg, killed, dice)
                leg.send_signal(getattr(signal, moment, signal.SIGKILL))
                end = ended(leg)
            assert end.code == STOPS.get(moment, 137), end
            caught += being_written(killed)
            command = ["--resume", "killed"]
        with started(tmp_path, "train", *command) as leg:
            end = ended(leg)
        assert end.code == 0, end
        assert ended(straight).code == 0
    assert caught, "no kill came while a checkpoint was being written"
    assert rows(killed) == rows(tmp_path / "straight")
    assert [row["step"] for row in rows(killed)] == list(range(STEPS + 1))
    assert same_bits(weights(killed, STEPS), weights(tmp_path / "straight", STEPS))
    names = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert names == [f"step_{step:08d}" for step in (STEPS - 10, STEPS - 5, STEPS)]
    left, right = (read(folder / "checkpoints" / names[-1]) for folder in (killed, tmp_path / "straight"))
    assert left.optimizer.keys() == right.optimizer.keys()
    assert all(same_bits(left.optimizer[name], right.optimizer[name]) for name in right.optimizer)
    assert left.rng.equal(right.rng)
    assert {path.name for path in killed.iterdir()} == {path.name for path in (tmp_path / "straight").iterdir()}
