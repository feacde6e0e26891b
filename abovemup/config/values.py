"""From what YAML and the command line hold to what the schema says. Open values may stay; `resolve` closes them."""

import dataclasses
import json
import re
from collections.abc import Callable
from fractions import Fraction
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from abovemup.config.cadence import parse_cadence, token_count
from abovemup.config.conf import GROUPS
from abovemup.config.diff import leaves
from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean, unknown_key
from abovemup.config.numbers import parse_float, parse_int
from abovemup.config.schema import ABOVE_0, BELOW_1, Cadence, Open, Range

_NUMBERS: dict[Any, tuple[Callable[[object], Any], str]] = {
    int: (parse_int, "an integer such as 64, 1e6, 10M or 2^20"),
    float: (parse_float, "a finite number such as 0.1, 1e-3 or 2^-4"),
    Cadence: (parse_cadence, 'steps (200), tokens ("2^16tok") or pow2'),
}
_STRICT = {ABOVE_0: "above 0, however small", BELOW_1: "below 1: use 0.99"}
_EXPECTED: dict[Any, str] = {
    bool: "expected true or false",
    NoneType: "null",
    list: "expected a list such as [a,b]",
    dict: "expected keys and values such as {a: 1}",
}


def coerce(cls: Any, raw: Any, path: str = "", opened: dict[str, Any] | None = None) -> Any:
    """A `cls` of the nested dict `raw`. With `opened` a nested dict again, whose open values stay, and are noted there.

    Raises RequestError that names the key: unknown (with the nearest), missing, of another type, or out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(raw, dict):
        key = path.rstrip(".")
        hint = f" A choice is written choices: {{{key}: {shown(raw)}}}." if key in GROUPS else ""
        raise RequestError(f"{key}={shown(raw)}: a section. Set a key in it: {path}{{{','.join(fields)}}}.{hint}")
    for name in raw:
        if name not in fields:
            key, _ = next(leaves({f"{path}{name}": raw[name]}))
            raise RequestError(unknown_key(key))
    values = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        key = f"{path}{name}"
        if name not in raw:
            if fields[name].default is dataclasses.MISSING and fields[name].default_factory is dataclasses.MISSING:
                raise RequestError(f"{key} is missing from the configuration: add it to the YAML file.")
        elif dataclasses.is_dataclass(kind):
            values[name] = coerce(kind, raw[name], f"{key}.", opened)
        else:
            values[name] = _value(key, kind, raw[name], opened)
    return cls(**values) if opened is None else values


def _value(key: str, kind: Any, value: Any, opened: dict[str, Any] | None) -> Any:
    kind, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    bounds, how = ({type(mark): mark for mark in marks}.get(of) for of in (Range, Open))
    hint = f" {bounds.hint}" if bounds and bounds.hint else ""
    try:
        if opened is not None and how and _is_open(how, value):
            opened[key] = value
            return value
        value = _convert(kind, value)
    except ValueError as error:
        raise RequestError(f"{key}={shown(value)}: {error}.{hint}") from error
    if bounds and isinstance(value, int | float) and not bounds.least <= value <= bounds.most:
        near, side = (bounds.least, "least") if value < bounds.least else (bounds.most, "most")
        need = _STRICT.get(near, f"at {side} {near}: use {near}")
        number = f"{value:g}" if isinstance(value, float) else value
        raise RequestError(f"{key}={number} must be {need}.{hint}")
    return value


def ratio(value: object) -> Fraction | None:
    """A fraction that is written as "8/3"; None when the value is not written so."""
    if isinstance(value, str) and re.fullmatch(r"\d+/[1-9]\d*", value.strip()):
        return Fraction(value.strip())
    return None


def _is_open(how: Open, value: Any) -> bool:
    """Whether it is one of the open forms that the key may have. Raises ValueError for a ratio that is too large."""
    share = ratio(value) if how.ratio else None
    if share is not None and not 0 < share <= how.ratio:
        raise ValueError(f"a ratio is above 0 and at most {how.ratio}")
    # Of a length, 1 is a step and 1.0 is all of the run.
    part = how.length and (token_count(value) is not None or (isinstance(value, float) and 0 <= value <= 1))
    return (how.null and value is None) or share is not None or part


def _convert(kind: Any, value: Any) -> Any:
    """The value as a type of the schema. Raises ValueError with what was expected."""
    origin, options = get_origin(kind), get_args(kind)
    if kind in _NUMBERS:
        parse, expected = _NUMBERS[kind]
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{error}; expected {expected}") from error
    if kind is str:
        return _text(value)
    if kind in (bool, NoneType) and isinstance(value, kind):
        return value
    if origin is Literal:
        return _one_of(options, value)
    if origin in (UnionType, Union):
        reasons = []
        for option in options:
            try:
                return _convert(option, value)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError("; or ".join(reasons))
    if origin is list and isinstance(value, list):
        return [_convert(options[0], item) for item in value]
    if origin is dict and isinstance(value, dict):
        json.dumps(value, allow_nan=False, default=str)  # refuses what is not finite
        return value
    raise ValueError(_EXPECTED[origin or kind])


def _one_of(options: tuple[Any, ...], value: Any) -> Any:
    if value in options:
        return value
    near = did_you_mean(str(value), [str(option) for option in options]).strip()
    raise ValueError(f"{near} Choices: {', '.join(map(str, options))}".strip())


def _text(value: Any) -> str:
    if value is None or isinstance(value, list | dict):
        raise ValueError("expected a text")
    if "\0" in (text := shown(value)):
        raise ValueError("a text has no NUL in it")
    return text


def shown(value: Any) -> str:
    """A value as one would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}: {shown(v)}' for k, v in value.items())}}}"
    return str(value)
