"""What a bench says: a ratio of two figures taken side by side, and the target it has to meet."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ratio:
    """`ours` over `peer`, two medians (or bests) in `unit`."""

    name: str
    ours: float
    peer: float
    unit: str
    target: float
    at_least: bool = False  # else at most

    @property
    def value(self) -> float:
        return self.ours / self.peer

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target


def in_turns(
    works: Sequence[Callable[[], object]],
    count: int,
    of: Callable[[Sequence[float]], float],
    where: torch.device = CPU,
) -> list[float]:
    """`of` (a median, a minimum) the seconds of each, which takes `count` turns with the others; the first warms up."""
    times = [[seconds(where, work) for work in works] for _ in range(count + 1)]
    return [of(column) for column in zip(*times[1:], strict=True)]


def seconds(where: torch.device, work: Callable[[], object]) -> float:
    began = clock(where)
    work()
    return clock(where) - began


def clock(where: torch.device) -> float:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter()


def beneath(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command prints, started by a shell: a process's peak memory would begin at that of the one it was forked
    from. Raises CalledProcessError."""
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    env = os.environ | (environment or {})
    return subprocess.run(shell, check=True, capture_output=True, text=True, env=env).stdout
