"""Numbers as researchers write them: 1e6, 10M, 2^20, 2**-4, 2^-4.5."""

import math
import re
from decimal import Decimal

_SUFFIX = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_POWER = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^|\*\*)\s*([+-]?\d+(?:\.\d+)?)")
_SCALED = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKMBT])")


def parse_int(value: object) -> int:
    """An integer from 64, "64", "1e6", 1e6, "10M", "16k" (16,000) or "2^20". Raises ValueError for anything else."""
    number = _parse(value)
    if isinstance(number, float) and not number.is_integer():
        raise ValueError("not an integer")
    return int(number)


def parse_float(value: object) -> float:
    """A finite float from 0.1, "1e-3", "2^-4", "2**-4", "2^-4.5" or "10M". Raises ValueError for anything else."""
    return float(_parse(value))


def _parse(value: object) -> int | float:
    """Exact where it is written as an integer."""
    try:
        number = _read(value.strip()) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            return number
    except (ValueError, OverflowError, ZeroDivisionError):
        pass
    raise ValueError("not a finite number")


def _read(text: str) -> int | float:
    if power := _POWER.fullmatch(text):
        number = float(power[1]) ** float(power[2])  # refuses what is beyond a float, before it is computed exactly
        return int(power[1]) ** int(power[2]) if power[1].isdigit() and power[2].isdigit() else number
    if scaled := _SCALED.fullmatch(text):
        return float(Decimal(scaled[1]) * _SUFFIX[scaled[2]])  # Decimal: 0.7k is 700 exactly
    try:
        return int(text)
    except ValueError:
        return float(text)
