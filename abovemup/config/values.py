"""From what YAML and the command line hold to values of the schema's types. Open values pass; `resolve` closes them."""

import dataclasses
import json
import re
from collections.abc import Callable
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from abovemup.config.cadence import parse_cadence, token_count
from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean, unknown_key
from abovemup.config.numbers import parse_float, parse_int

# Keys that may be open, and how: null, a ratio ("1/2"), or a length of the schedule ("2^20tok", 0.1).
OPEN_NULL = frozenset(
    [
        *("model.heads", "model.kv_heads", "model.head_dim", "model.ffn", "model.vocab_size"),
        *("parameterization.base_width", "parameterization.base_depth", "parameterization.base_head_dim"),
        *("parameterization.base_kv_heads", "parameterization.base_ffn"),
        *("train.steps", "train.tokens", "train.micro_batch", "train.threads"),
        *("tokenizer.vocab_size", "eval.tokens", "schedule.decay"),
    ]
)
RATIOS = {"model.kv_heads": 1, "model.ffn": 1000}  # key -> most
_NUMBERS: dict[type, tuple[Callable[[object], int | float], str]] = {
    int: (parse_int, "an integer such as 64, 1e6, 10M or 2^20"),
    float: (parse_float, "a finite number such as 0.1, 1e-3 or 2^-4"),
}
LENGTHS = frozenset({"schedule.warmup", "schedule.decay"})


def ratio(value: object) -> Fraction | None:
    """A fraction that is written as "8/3"; None when the value is not written so."""
    if isinstance(value, str) and re.fullmatch(r"\d+/[1-9]\d*", value.strip()):
        return Fraction(value.strip())
    return None


def is_open(key: str, value: object) -> bool:
    if value is None:
        return key in OPEN_NULL
    if key in RATIOS:
        return ratio(value) is not None
    if key in LENGTHS:
        return isinstance(value, float) or (isinstance(value, str) and value.endswith("tok"))
    return False


def coerce(cls: Any, raw: Any, path: str = "", *, opened: bool = True) -> dict[str, Any]:
    """A nested dict with exactly the fields of dataclass `cls`, of their types; with `opened`, open values stay.

    Raises RequestError that names the key: unknown (with the nearest), missing, or of another type.
    """
    if not isinstance(raw, dict):
        raise RequestError(f"{path}: a section with keys is expected, not {raw!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in raw:
        if name not in fields:
            inner = list(raw[name])[:1] if isinstance(raw[name], dict) else []
            raise RequestError(unknown_key(".".join([f"{path}{name}", *inner])))
    values = {}
    for name, kind in get_type_hints(cls).items():
        key = f"{path}{name}"
        if name not in raw:
            if fields[name].default is dataclasses.MISSING and fields[name].default_factory is dataclasses.MISSING:
                raise RequestError(f"{key} is missing from the configuration: add it to the YAML file.")
            continue
        if dataclasses.is_dataclass(kind):
            values[name] = coerce(kind, raw[name], f"{key}.", opened=opened)
        else:
            values[name] = _coerce_value(key, kind, raw[name], opened)
    return values


def build(cls: Any, values: dict[str, Any]) -> Any:
    """The dataclass of a coerced dict."""
    kinds = get_type_hints(cls)
    return cls(**{k: build(kinds[k], v) if dataclasses.is_dataclass(kinds[k]) else v for k, v in values.items()})


def _coerce_value(key: str, kind: Any, value: Any, opened: bool) -> Any:
    try:
        if opened and key in LENGTHS:
            return _length(value)
        if opened and is_open(key, value):
            return value
        return _convert(kind, value)
    except ValueError as error:
        raise RequestError(f"{key}={shown(value)}: {error}.") from error


def _length(value: Any) -> Any:
    """None, steps as an int, tokens as "<n>tok", or a fraction of the run as a float: 1 is a step, 1.0 all."""
    try:
        if value is None or token_count(value) is not None:
            return value
        number = parse_float(value)
        if 0 <= number <= 1 and (isinstance(value, float) or "." in str(value)):
            return number
        return parse_int(value)
    except ValueError as error:
        raise ValueError('expected steps (100), tokens ("2^20tok") or a fraction of the run (0.1)') from error


def _convert(kind: Any, value: Any) -> Any:
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return _one_of(options, value)
    if get_origin(kind) is UnionType or str(get_origin(kind)) == "typing.Union":
        return _convert_union(options, value)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value
    if kind in _NUMBERS:
        parse, expected = _NUMBERS[kind]
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{error}; expected {expected}") from error
    if kind is str:
        return _text(value)
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ValueError("expected a list such as [a,b]")
        return [_convert(options[0], item) for item in value]
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError("expected keys and values such as {a: 1}")
        json.dumps(value, allow_nan=False, default=str)  # refuses what is not finite
        return value
    raise TypeError(f"the schema has a type this cannot read: {kind}")


def _convert_union(options: tuple[Any, ...], value: Any) -> Any:
    if value is None and NoneType in options:
        return None
    kinds = [option for option in options if option is not NoneType]
    if set(kinds) == {int, str}:
        try:
            return parse_cadence(value)
        except ValueError as error:
            raise ValueError('expected steps (200), tokens ("2^16tok") or pow2') from error
    literals = [option for option in kinds if get_origin(option) is Literal]
    if literals and value in get_args(literals[0]):
        return value
    rest = [option for option in kinds if get_origin(option) is not Literal]
    return _convert(rest[0], value)


def _one_of(options: tuple[Any, ...], value: Any) -> Any:
    if value in options:
        return value
    near = did_you_mean(str(value), [str(option) for option in options]).strip()
    raise ValueError(f"{near} Choices: {', '.join(map(str, options))}".strip())


def _text(value: Any) -> str:
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a text has no NUL in it")
        return value
    if value is None or isinstance(value, list | dict):
        raise ValueError("expected a text")
    return str(value).lower() if isinstance(value, bool) else str(value)


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
