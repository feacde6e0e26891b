"""`abovemup data prepare`, killed at moments of its own."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.data.opening import jsonl, sentences

from .process import ended, run, started

pytestmark = pytest.mark.slow


def command(folder: Path, out: str, workers: int) -> list[str]:
    options = ["--path", str(folder / "a.jsonl"), "--out", out, "--workers", str(workers)]
    return ["data", "prepare", "text", *options, "tokenizer.vocab_size=300"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill")
    jsonl(folder / "a.jsonl", (text * 20 for text in sentences(20_000)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_killed_at_random_moments_the_shards_are_the_same_bits(folder: Path) -> None:
    began = time.monotonic()
    assert run(folder, *command(folder, "whole", 2)).code == 0
    took = time.monotonic() - began
    moments = random.Random(0)
    kills = 0
    for leg in range(5):
        with started(folder, *command(folder, "out", 1 + leg % 3)) as process:
            time.sleep(moments.uniform(0.1, 0.35) * took)
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert kills > 1
    last = run(folder, *command(folder, "out", 3))
    assert last.code == 0, last.err
    assert contents(folder / "out") == contents(folder / "whole")
    assert run(folder, "data", "verify", "out").code == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once(folder: Path, signum: int, code: int) -> None:
    part = folder / f"out{code}.part"
    with started(folder, *command(folder, f"out{code}", 2)) as process:
        while not any(part.glob("train-*.bin")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signum)
        result = ended(process)
    assert result.code == code
    assert "Traceback" not in result.err
    assert part.is_dir()
