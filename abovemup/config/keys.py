"""The keys of the schema, and the nearest one to a misspelled name."""

import dataclasses
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from abovemup.config.conf import GROUPS
from abovemup.config.diff import leaves
from abovemup.config.schema import Experiment

SECTIONS = tuple(f.name for f in dataclasses.fields(Experiment) if dataclasses.is_dataclass(f.type))


@cache
def keys() -> dict[str, Any]:
    """Every key that can be set -> its type. A group's `name` is not one: it follows the choice."""
    kinds = {key: kind for key, kind in leaves(_kinds(Experiment)) if "." in key}
    return {key: kind for key, kind in kinds.items() if key not in {f"{group}.name" for group in GROUPS}}


def _kinds(cls: Any) -> dict[str, Any]:
    return {k: _kinds(kind) if dataclasses.is_dataclass(kind) else kind for k, kind in get_type_hints(cls).items()}


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
    return f"unknown key {key}.{did_you_mean(key, list(keys()) if '.' in key else [*keys(), *GROUPS])}"
