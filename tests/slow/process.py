"""The real command in processes of its own: started, watched, ended."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.training.tiny import TINY

BIN = Path(sys.executable).with_name("abovemup")
PATIENCE = 300  # seconds after which something hangs, on however busy a machine


def tiny(*overrides: str) -> list[str]:
    """TINY with more overrides, of which a later one wins."""
    return [f"{k}={v}" for k, v in dict(o.split("=", 1) for o in (*TINY, *overrides)).items()]


@dataclass(frozen=True)
class Ended:
    """`code` is what a shell would say: 128 + the signal of a process that a signal ended."""

    code: int
    out: str
    err: str


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`abovemup ...` running in `folder`; it does not outlive the block."""
    command = [str(BIN), *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=PATIENCE)
    return Ended(128 - process.returncode if process.returncode < 0 else process.returncode, out, err)


def run(folder: Path, *arguments: str) -> Ended:
    with started(folder, *arguments) as process:
        return ended(process)


def shell(folder: Path, script: str, *arguments: str) -> Ended:
    """Bash runs `script`, in which "$@" is `abovemup` with these arguments."""
    command = ["bash", "-c", script, "bash", str(BIN), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    return Ended(result.returncode, result.stdout, result.stderr)


def until(process: subprocess.Popen[str], condition: Callable[[], bool], pause: float = 0.005) -> bool:
    """Wait for `condition`; False when the process has ended before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(pause)
    return True


def rows_in(run: Path) -> int:
    """Rows that metrics.jsonl has by now."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
