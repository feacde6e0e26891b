"""Which runs of a folder, in which order, and what is worth seeing of them. Rows are those of `runs.records`."""

import operator
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from abovemup.analysis.runs import Row
from abovemup.config.conf import GROUPS
from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean, fields
from abovemup.config.numbers import parse_float
from abovemup.config.values import shown

CONDITION = re.compile(r"([\w./-]+)(<=|>=|!=|=|<|>)(.*)")
ALWAYS = ("run", "status", "tokens", "loss", "val_loss")
SETTINGS = ("optimizer.name", "optimizer.lr", "train.batch_size", "model.width")
LOSSES = ("loss", "val_loss", "best_val_loss", "bits_per_byte")
BY_THE_WAY = ("experiment", "cannot_match", "choices", "derived", "run.", "tracking.", "checkpoint.")
_ORDER = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


def select(rows: Sequence[Row], conditions: Iterable[str]) -> list[Row]:
    """The rows for which all hold: key=value, key!=value, key<value, key<=value, key>value, key>=value.

    Numbers as elsewhere (2^20, 1e6); a float equals what a table shows of it, its first four digits. What is not a
    number is neither below nor above one. Raises RequestError for an unknown key or a bound that is no number.
    """
    kept = list(rows)
    for condition in conditions:
        if not (parts := CONDITION.fullmatch(condition)):
            raise RequestError(f"{condition}: a condition is expected, such as optimizer.lr=2^-4.")
        name, sign, text = parts.groups()
        key, number = known_key(name, rows), None
        with suppress(ValueError):
            number = parse_float(text)
        if sign in _ORDER and number is None:
            raise RequestError(f"{condition}: a number is expected, such as 0.1, 1e6 or 2^-4.")
        kept = [row for row in kept if _holds(row.get(key), sign, text, number)]
    return kept


def known_key(name: str, rows: Sequence[Row]) -> str:
    """A key of the rows; a group's choice as it is typed (optimizer). Raises RequestError with the nearest one."""
    known = list(dict.fromkeys(key for row in rows for key in row))
    name = f"{name}.name" if f"{name}.name" in known and name in GROUPS else name
    if rows and name not in known:
        raise RequestError(f"the runs have no {name}.{did_you_mean(name, known)}")
    return name


def ordered(rows: Sequence[Row], key: str) -> list[Row]:
    """By rising value: numbers, then texts, then what is missing or nan; equals in the order that they have.

    By a loss finished runs come first: a run that diverged or goes on is never best.
    """

    def place(row: Row) -> tuple[Any, ...]:
        value, unfinished = row.get(key), key in LOSSES and row["status"] != "finished"
        kind = 2 if value is None or value != value else not isinstance(value, int | float)
        return unfinished, kind, value if kind == 0 else shown(value) if kind == 1 else ""

    return sorted(rows, key=place)


def columns(rows: Sequence[Row]) -> list[str]:
    """What to show of the runs: how they stand, the main settings, and every other setting that differs.

    Not what follows from other settings in all of them, nor what the choice of an optimizer or a model decides alone.
    Runs of a version that did not have a setting say nothing of it.
    """
    having = {key: [row for row in rows if key in row] for key in fields() if not key.startswith(BY_THE_WAY)}
    typed = [key for key, those in having.items() if any(key not in (row.get("derived") or ()) for row in those)]
    found = [*ALWAYS, *SETTINGS]
    for key in typed:
        if all(row[key] == having[key][0][key] for row in having[key]):
            continue
        choice = f"{key.partition('.')[0]}.name"
        pairs = {(shown(row.get(choice)), shown(row[key])) for row in having[key]}
        if len({value for _, value in pairs}) > 1 and (key == choice or len(pairs) > len({name for name, _ in pairs})):
            found.append(key)
    return list(dict.fromkeys(found))


def _holds(value: Any, sign: str, text: str, number: float | None) -> bool:
    if number is None or isinstance(value, bool) or not isinstance(value, int | float):
        return sign not in _ORDER and (shown(value) == text) == (sign == "=")
    if sign in _ORDER:
        return bool(_ORDER[sign](value, number))
    same = f"{value:.4g}" == f"{number:.4g}" if isinstance(value, float) else value == number
    return same == (sign == "=")
