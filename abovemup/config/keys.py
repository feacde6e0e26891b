"""The keys of an experiment, dotted (model.width): its values at them, and the nearest one to a misspelled name."""

import dataclasses
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

from abovemup.config.conf import GROUPS
from abovemup.config.schema import Experiment

SECTIONS = tuple(f.name for f in dataclasses.fields(Experiment) if dataclasses.is_dataclass(f.type))
_ABOUT_COMPOSING = ("cannot_match", "choices", "derived")


@cache
def fields(cls: Any = Experiment, path: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every key -> what the schema says of it."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(cls):
        key, kind = f"{path}{field.name}", field.type
        found |= fields(kind, f"{key}.") if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {key: field}
    return found


@cache
def keys() -> list[str]:
    """What can be set. A group's `name` is not among it: it follows the choice."""
    return [key for key in fields() if "." in key and key not in {f"{group}.name" for group in GROUPS}]


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of everything in a nested dict. A dict at a key of the schema, or an empty one, is a value."""
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, dict) and value and key not in fields():
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def flatten(experiment: Experiment) -> dict[str, Any]:
    """Key -> value of every setting; how it was composed (choices, open keys, the preset's notes) is left out."""
    return {k: v for k, v in leaves(dataclasses.asdict(experiment)) if k not in _ABOUT_COMPOSING}


def differences(a: Experiment, b: Experiment) -> list[tuple[str, Any, Any]]:
    """(key, value in a, value in b) of every setting that differs, in the schema's order."""
    left, right = flatten(a), flatten(b)
    return [(key, left[key], right[key]) for key in left if left[key] != right[key]]


def nearest(name: str, among: list[str]) -> list[str]:
    """The most similar of `among`, by the whole name or its last part; several when a last part is in several."""
    last = {other: other.rpartition(".")[2] for other in among}
    if "." in name:
        same = [other for other in among if last[other] == name.rpartition(".")[2]]
        return get_close_matches(name, same, 1, 0) or get_close_matches(name, among, 1)
    near = get_close_matches(name, sorted(set(last.values())), 1)
    return [other for other in among if last[other] in near][:3]


def did_you_mean(name: str, among: list[str]) -> str:
    """The question to add to a message, or nothing."""
    near = nearest(name, among)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def unknown_key(key: str) -> str:
    """What to say about a key that is not in the schema."""
    return f"unknown key {key}.{did_you_mean(key, keys() if '.' in key else [*keys(), *GROUPS])}"
