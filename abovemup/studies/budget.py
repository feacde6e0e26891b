"""How much a study may cost: the horizons, batch sizes and learning rates of its grid, and the model they are for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abovemup.config.conf import choices, files
from abovemup.config.errors import RequestError
from abovemup.config.io import read_yaml
from abovemup.config.keys import did_you_mean
from abovemup.config.numbers import parse_float, parse_int
from abovemup.config.values import shown
from abovemup.studies.axes import Axes, values


@dataclass(frozen=True)
class Budget:
    """`tokens` are the horizons and `batch` the tokens a step, both ascending; `lr` is optimizer -> its grid."""

    name: str
    verdicts: bool  # whether anything may be concluded
    tokens: list[int]
    batch: list[int]
    lr: Axes
    seeds: list[str]
    fixed: dict[str, str]


@contextmanager
def reading(kind: str, name: str, config_dir: Path | None, expected: str) -> Iterator[dict[str, Any]]:
    """What is in its file. Raises RequestError for one that does not exist, or lacks something."""
    choices(config_dir)  # refuses a folder that is none
    known = files(kind, config_dir)
    if name not in known:
        hint = did_you_mean(name, list(known)) or f" There are: {', '.join(known)}; your own needs --config-dir."
        raise RequestError(f"no {kind} {name}.{hint}")
    tree = read_yaml(known[name])
    try:
        yield tree
    except RequestError as error:
        raise RequestError(f"{known[name]}: {error}") from error
    except (LookupError, AttributeError, ValueError, TypeError) as error:
        raise RequestError(f"{known[name]}: expected {expected}. ({type(error).__name__}: {error})") from error


def numbers(tree: dict[str, Any], key: str) -> list[int]:
    """Ascending."""
    return sorted(int(parse_float(n)) for n in values(key, tree[key]))


def sequences(batch: list[int], seq_len: str) -> list[str]:
    """Of steps of so many tokens. Raises RequestError where they are no whole number."""
    try:
        length = parse_int(seq_len)
    except ValueError as error:
        raise RequestError(f"train.seq_len={seq_len}: {error}.") from error
    if odd := [n for n in batch if length < 1 or n < 1 or n % length]:
        raise RequestError(f"batch: {odd[0]} tokens are no whole number of sequences of train.seq_len={seq_len}.")
    return [str(n // length) for n in batch]


def load(name: str, config_dir: Path | None = None) -> Budget:
    """Raises RequestError for one that does not exist, or lacks something."""
    known = ["verdicts", "tokens", "batch", "lr", "seeds", "fixed"]
    with reading("budget", name, config_dir, "verdicts, tokens, batch, lr (optimizer: grid), seeds, fixed") as tree:
        if odd := {*tree} - {*known}:
            raise RequestError(f"not {min(odd)}.{did_you_mean(min(odd), known)}")
        lr = {str(optimizer): values("optimizer.lr", grid) for optimizer, grid in tree["lr"].items()}
        fixed, seeds = {str(key): shown(value) for key, value in tree["fixed"].items()}, values("seeds", tree["seeds"])
        tokens, batch = numbers(tree, "tokens"), numbers(tree, "batch")
        if tree["verdicts"] not in (True, False) or "train.seq_len" not in fixed:
            raise ValueError("verdicts is true or false, and fixed has train.seq_len")
        return Budget(name, tree["verdicts"], tokens, batch, lr, seeds, fixed)
