"""From what YAML and the command line hold to what the schema says. Open values may stay; `resolve` closes them."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from fractions import Fraction
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from abovemup.config.cadence import parse_cadence, token_count
from abovemup.config.conf import GROUPS
from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean, fields, unknown_key
from abovemup.config.numbers import parse_float, parse_int
from abovemup.config.schema import ABOVE_0, BELOW_1, Cadence, Experiment, Open, Range

Values = dict[str, Any]  # key -> value

_STRICT = {ABOVE_0: "above 0, however small", BELOW_1: "below 1: use 0.99"}
_EXPECTED: dict[Any, str] = {
    int: "expected an integer such as 64, 1e6, 10M or 2^20",
    float: "expected a finite number such as 0.1, 1e-3 or 2^-4",
    Cadence: 'expected steps (200), tokens ("2^16tok") or pow2',
    str: "expected a text without NUL",
    bool: "expected true or false",
    NoneType: "null",
    list: "expected a list such as [a,b]",
    dict: "expected keys and values such as {a: 1}",
}


def build(values: Values, cls: Any = Experiment, path: str = "") -> Any:
    """A `cls` of coerced values; what is not among them has a default."""
    parts = {}
    for field in dataclasses.fields(cls):
        key = f"{path}{field.name}"
        if dataclasses.is_dataclass(field.type):
            parts[field.name] = build(values, field.type, f"{key}.")
        elif key in values:
            parts[field.name] = values[key]
    return cls(**parts)


def coerce(values: Values, opened: Values | None = None) -> Values:
    """The values as the schema has them. With `opened`, those that are open stay, and are noted there.

    Raises RequestError that names the key: unknown (with the nearest), missing, of another type, or out of range.
    """
    refuse_unknown(values)
    for key, field in fields().items():
        if key not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise RequestError(f"{key} is missing from the configuration: add it to the YAML file.")
    return {key: _value(key, field.type, values[key], opened) for key, field in fields().items() if key in values}


def refuse_unknown(values: Values) -> None:
    """Raises RequestError for what is no key, with the nearest one, or the keys of a section."""
    for key, value in values.items():
        if key not in fields() and not key.startswith("optimizer.args."):
            inside = [name.removeprefix(f"{key}.").partition(".")[0] for name in fields() if name.startswith(f"{key}.")]
            if not inside:
                raise RequestError(unknown_key(key))
            hint = f" A choice is written choices: {{{key}: {shown(value)}}}." if key in GROUPS else ""
            names = ",".join(dict.fromkeys(inside))
            raise RequestError(f"{key}={shown(value)}: a section. Set a key in it: {key}.{{{names}}}.{hint}")


def _value(key: str, kind: Any, value: Any, opened: Values | None) -> Any:
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
    if kind in _PARSERS:
        with contextlib.suppress(ValueError):
            return _PARSERS[kind](value)
    elif origin is Literal:
        if value in options:
            return value
        near = did_you_mean(str(value), list(map(str, options)))
        raise ValueError(f"{near} Choices: {', '.join(map(str, options))}".strip())
    elif origin in (UnionType, Union):
        reasons = []
        for option in options:
            try:
                return _convert(option, value)
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError("; or ".join(reasons))
    elif isinstance(value, origin or kind):
        json.dumps(value, allow_nan=False, default=str)  # refuses what is not finite
        return [_convert(options[0], item) for item in value] if origin is list else value
    raise ValueError(_EXPECTED[kind if kind in _EXPECTED else origin])


def _text(value: Any) -> str:
    if value is None or isinstance(value, list | dict) or "\0" in shown(value):
        raise ValueError
    return shown(value)


_PARSERS: dict[Any, Callable[[Any], Any]] = {int: parse_int, float: parse_float, Cadence: parse_cadence, str: _text}


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
