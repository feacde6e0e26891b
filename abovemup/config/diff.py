"""Where two experiments differ."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from abovemup.config.schema import Experiment

_ABOUT_COMPOSING = ("cannot_match", "choices", "derived")


def differences(a: Experiment, b: Experiment) -> list[tuple[str, Any, Any]]:
    """(key, value in a, value in b) of every setting that differs, in the schema's order."""
    left, right = dict(flatten(a)), dict(flatten(b))
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]


def flatten(experiment: Experiment) -> Iterator[tuple[str, Any]]:
    """(key, value) of every setting; how it was composed (choices, open keys, the preset's notes) is left out."""
    for name, value in dataclasses.asdict(experiment).items():
        if name not in _ABOUT_COMPOSING:
            yield from _leaves(name, value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value
