"""Numbers as researchers write them: 1e6, 10M, 2^20, 2**-4, 2^-4.5."""

import math
import re
from decimal import Decimal

_SUFFIX = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_POWER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:\^|\*\*)\s*([+-]?\d+(?:\.\d+)?)")
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
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    try:
        number = _read(value.strip().replace("_", "")) if isinstance(value, str) else value
        if math.isfinite(number):
            return number
    except (OverflowError, ZeroDivisionError):
        pass
    raise ValueError("not a finite number")


def _read(text: str) -> int | float:
    if power := _POWER.fullmatch(text):
        number = float(power[1]) ** float(power[2])  # refuses what is beyond a float, before it is computed exactly
        if isinstance(number, complex):
            raise ValueError("not a number")
        whole = number.is_integer() and "." not in text
        return int(int(power[1]) ** int(power[2])) if whole and int(power[2]) >= 0 else number
    if scaled := _SCALED.fullmatch(text):
        return float(Decimal(scaled[1]) * _SUFFIX[scaled[2]])  # Decimal: 0.7k is 700 exactly
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError as error:
        raise ValueError("not a number") from error
