"""What a bench says: a ratio of two figures taken side by side, and the target it has to meet."""

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
