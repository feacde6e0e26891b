"""The learning rate's factor at every corner."""

from math import isfinite
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from abovemup.config.schema import Schedule
from abovemup.optim.composite import Composite
from abovemup.optim.schedule import factor
from abovemup.optim.steepest import SteepestDescent

NAMES = ("constant", "cosine", "wsd")


def schedule(name: Any, warmup: int = 0, decay: int = 0, final: float = 0.0) -> Schedule:
    return Schedule(name=name, warmup=warmup, decay=decay, final=final)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(1, 0, 0), (4, 4, 0), (4, 6, 0), (4, 0, 0), (4, 0, 4), (4, 2, 4), (1, 1, 1)]
)
def test_corners(name: str, steps: int, warmup: int, decay: int) -> None:
    """Case 29: finite, between nothing and the peak, no step without a rate, defined beyond the end."""
    for final in (0.0, 0.1, 1.0):
        values = [factor(step, schedule(name, warmup, decay, final), steps) for step in range(1, steps + 4)]
        assert all(isfinite(value) and 0 <= value <= 1 for value in values)
        assert all(value > 0 for value in values[:steps])


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    steps=st.integers(1, 50),
    warmup=st.integers(0, 60),
    decay=st.integers(0, 60),
    final=st.floats(0, 1),
    step=st.integers(0, 200),
)
def test_bounds(name: str, steps: int, warmup: int, decay: int, final: float, step: int) -> None:
    assert 0 <= factor(step, schedule(name, warmup, decay, final), steps) <= 1


def values(s: Schedule, steps: int) -> list[float]:
    return [factor(step, s, steps) for step in range(1, steps + 3)]


def test_shapes() -> None:
    assert values(schedule("constant"), 3) == [1, 1, 1, 1, 1]
    assert values(schedule("constant", warmup=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert values(schedule("constant", warmup=4), 4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert values(schedule("constant", warmup=8), 4)[:4] == [0.125, 0.25, 0.375, 0.5]
    assert values(schedule("wsd", decay=4), 6) == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert values(schedule("wsd", warmup=2, decay=2, final=0.5), 6) == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.5]
    assert values(schedule("wsd", warmup=2), 3) == [0.5, 1, 1, 1, 1]
    assert values(schedule("cosine"), 2) == pytest.approx([1, 0.5, 0, 0])
    assert values(schedule("cosine", warmup=2, final=0.5), 4) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.5])
    assert values(schedule("cosine", warmup=2), 2)[:2] == [0.5, 1]


@pytest.mark.parametrize("name", NAMES)
def test_legs_give_the_single_run(name: str) -> None:
    """Case 39: stopped anywhere, any number of times, every group's list of rates is that of one run."""
    s = schedule(name, warmup=2, decay=3, final=0.1)

    def leg(first: int, last: int) -> list[list[float]]:
        """Steps of a process that knows nothing of the ones before it."""
        parts = [SteepestDescent([{"params": [Parameter(torch.ones(2, 2))], "lr": lr}], lr=lr) for lr in (0.1, 0.3)]
        optimizer = Composite(parts)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        rates = []
        for step in range(first, last + 1):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor(step, s, 6)
            rates.append([part.param_groups[0]["lr"] for part in parts])
        return rates

    whole = leg(1, 6)
    for stop in (1, 3, 5):
        assert leg(1, stop) + leg(stop + 1, 6) == whole
        for again in range(stop + 1, 6):
            assert leg(1, stop) + leg(stop + 1, again) + leg(again + 1, 6) == whole
    assert all(pair[1] / pair[0] == pytest.approx(3) for pair in whole)
