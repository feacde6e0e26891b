"""Numbers as researchers write them: 1e6, 10M, 2^20, 2**-4, 2^-4.5."""

import math
import re
from decimal import Decimal

_SUFFIX = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_POWER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(?:\^|\*\*)\s*([+-]?\d+(?:\.\d+)?)")
_SCALED = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKMBT])")


def parse_int(value: object) -> int:
    """An integer from 64, "64", "1e6", 1e6, "10M", "16k" (16,000) or "2^20". Raises ValueError for anything else."""
    if isinstance(value, bool):
        raise ValueError("not an integer")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        if re.fullmatch(r"[+-]?\d+", text):
            return int(text)
        power = _POWER.fullmatch(text)
        if power and power[1].lstrip("+-").isdigit() and power[2].lstrip("+").isdigit():
            parse_float(text)  # refuses what is beyond a float, before it is computed
            return int(int(power[1]) ** int(power[2]))
    number = parse_float(value)
    if not number.is_integer():
        raise ValueError("not an integer")
    return int(number)


def parse_float(value: object) -> float:
    """A finite float from 0.1, "1e-3", "2^-4", "2**-4", "2^-4.5" or "10M". Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    try:
        number = _float(value.strip().replace("_", "")) if isinstance(value, str) else float(value)
    except (OverflowError, ZeroDivisionError) as error:
        raise ValueError("not a finite number") from error
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _float(text: str) -> float:
    if power := _POWER.fullmatch(text):
        number = float(power[1]) ** float(power[2])
        if isinstance(number, complex):
            raise ValueError("not a number")
        return float(number)
    if scaled := _SCALED.fullmatch(text):
        return float(Decimal(scaled[1]) * _SUFFIX[scaled[2]])  # Decimal: 0.7k is 700 exactly
    try:
        return float(text)
    except ValueError as error:
        raise ValueError("not a number") from error
