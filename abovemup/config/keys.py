"""The keys of the schema, and the nearest one to a misspelled name."""

import dataclasses
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from abovemup.config.conf import GROUPS
from abovemup.config.schema import Experiment

SECTIONS = tuple(f.name for f in dataclasses.fields(Experiment) if dataclasses.is_dataclass(f.type))
FREE = "optimizer.args"  # what a user's own optimizer takes: any key below it


@cache
def keys() -> dict[str, Any]:
    """Every key that can be set -> its type. A group's `name` is not one: it follows the choice."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        _collect(get_type_hints(Experiment)[section], section, found)
    return {key: kind for key, kind in found.items() if not (key.endswith(".name") and key.partition(".")[0] in GROUPS)}


def _collect(cls: Any, path: str, found: dict[str, Any]) -> None:
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            _collect(kind, f"{path}.{name}", found)
        else:
            found[f"{path}.{name}"] = kind


def takes_text(kind: Any) -> bool:
    """Whether plain text is a value of this type: str, or str | None."""
    return kind is str or (get_origin(kind) is UnionType and str in get_args(kind) and int not in get_args(kind))


def is_key(key: str) -> bool:
    return key in keys() or key.startswith(FREE + ".")


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
