"""What a bench says: a ratio of two figures taken side by side, and the target it has to meet."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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


def beneath(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command prints, started by a shell: a process's peak memory would begin at that of the one it was forked
    from. Raises CalledProcessError."""
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    env = os.environ | (environment or {})
    return subprocess.run(shell, check=True, capture_output=True, text=True, env=env).stdout
