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
    tree = dataclasses.asdict(experiment)
    return leaves({name: value for name, value in tree.items() if name not in _ABOUT_COMPOSING})


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a nested dict that is no dict with something in it, or optimizer.args."""
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, dict) and value and key != "optimizer.args":
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
