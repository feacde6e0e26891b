"""What a study varies: `KEY=VALUES` in Hydra's sweep grammar, and the grid of settings that follows."""

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from abovemup.config.conf import choices
from abovemup.config.errors import RequestError
from abovemup.config.numbers import parse_float
from abovemup.config.values import shown

# A key, or several with a comma between them, to the values that it (they all) take in turn.
Axes = dict[str, list[str]]
Settings = dict[str, str]
Named = dict[str, dict[str, Settings]]  # axes whose values are names, each for some settings

_MOST = 10_000  # combinations; composing so many takes minutes
_MEASURED = {"eval.every": "pow2", "norms.every": "pow2"}  # by a run that serves several horizons


def typed(overrides: list[str]) -> dict[str, str]:
    """Key to what was typed for it. Raises RequestError for one that a study sets itself, or is given twice."""
    found: dict[str, str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.lstrip("+")  # Hydra's for a key that is new: here the same key
        if not (key and equals):
            raise RequestError(f"{text}: not KEY=VALUE.")
        if key in found:
            raise RequestError(f"{key} is given twice: keep one.")
        if key.partition(".")[0] == "run":
            raise RequestError(f"{key}: each cell has a folder of its own, in --dir.")
        found[key] = value
    return found


def values(key: str, given: Any, config_dir: Path | None = None) -> list[str]:
    """A list, or what was typed, as it was typed: values with commas between them, or one of Hydra's functions
    (choice, range, glob, sort), or log2range(first,last,step), its end included. Raises RequestError."""
    if given == []:
        raise RequestError(f"{key}: no value.")
    if isinstance(given, list):
        return list(dict.fromkeys(map(shown, given)))
    text = shown(given).strip()
    if text.startswith("log2range("):
        return _log2range(text)
    if found := re.fullmatch(r"choice\((.*)\)", text):
        text = found[1]
    elif re.match(r"(choice|range|glob|interval|sort|shuffle|tag|int|float|str|bool)\(", text):
        return _hydra(key, text, config_dir)
    # A comma within a list, a mapping or quotes separates nothing. Not Hydra's: it has no 2^-4.
    parts = re.findall(r"(?:\[[^]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"|[^,])+", text)
    return list(dict.fromkeys(map(str.strip, parts))) or [""]


def _hydra(key: str, text: str, config_dir: Path | None) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        found: list[Any] = [override.value()]
        if isinstance(found[0], Glob):
            found = found[0].filter(choices(config_dir).get(key, []))
        elif override.is_sweep_override():
            found = [*itertools.islice(override.sweep_iterator(), 1001)]
    except (HydraException, ValueError) as error:
        raise RequestError(f"{key}={text}: {str(error).splitlines()[0]}.") from error
    if not 0 < len(found) <= 1000:
        raise RequestError(f"{key}={text}: {'more than 1000 values' if found else 'no value'}.")
    return list(dict.fromkeys(f"{value:.12g}" if isinstance(value, float) else shown(value) for value in found))


def _log2range(text: str) -> list[str]:
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        first, last, step = map(parse_float, text.removeprefix("log2range(").removesuffix(")").split(","))
        count = round((last - first) / step)
        if text.endswith(")") and 0 <= count < 1000 and math.isclose(first + count * step, last, abs_tol=1e-9):
            return [f"2^{first + i * step:g}" for i in range(count + 1)]
    expected = "log2range(first,last,step), at most 1000 steps that lead from the first to the last"
    raise RequestError(f"{text}: expected {expected}.")


def grid(axes: Axes, fixed: Settings, named: Named | None = None) -> Iterator[tuple[Settings, Settings]]:
    """Axis to value, and all settings, of every combination; the last axis changes fastest, and wins.

    Several horizons are read from one run, which is measured at every power of two unless `fixed` says otherwise. Runs
    are local unless some key of tracking is given: a grid on W&B is asked for. Raises RequestError for far too many.
    """
    if (count := math.prod(map(len, axes.values()))) > _MOST:
        raise RequestError(f"{count} combinations: a study has at most {_MOST}. Take fewer values.")
    keys = {key for axis in axes for key in axis.split(",")} | fixed.keys()
    local = {} if any(key.partition(".")[0] == "tracking" for key in keys) else {"tracking": "local"}
    horizons = [value for key in ("train.tokens", "train.steps") for value in axes.get(key, [])]
    measured = _MEASURED if len(horizons) > 1 else {}
    for chosen in itertools.product(*axes.values()):
        at = dict(zip(axes, chosen, strict=True))
        settings = measured | local | fixed
        for axis, value in at.items():
            own = (named or {}).get(axis)
            settings |= dict.fromkeys(axis.split(","), value) if own is None else own[value]
        yield at, settings
