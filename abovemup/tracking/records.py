"""A record, and how it is written down."""

import json
import math
from collections.abc import Mapping
from typing import Any

from abovemup.config.schema import OUTPUT_NORMS

Record = dict[str, float | int]
Summary = Mapping[str, Any]


def dumps(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON, with non-finite numbers as the strings "nan", "inf" and "-inf" at any depth."""
    try:
        return json.dumps(values, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_named(values), allow_nan=False, indent=indent)


def loads(line: str | bytes) -> Record:
    """One row back, strings as floats again. Raises ValueError for anything but an object of numbers with a step."""
    row: Any = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not a row")
    return {key: float(value) if isinstance(value, str) else value for key, value in row.items()}


def output_norm(row: Record) -> float | None:
    return next((row[key] for key in OUTPUT_NORMS if key in row), None)


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return value
