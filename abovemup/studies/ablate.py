"""An ablation: a YAML file that says what is compared, and over what the optimum should stay; the runs that follow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from abovemup.config.cadence import due, parse_tokens
from abovemup.config.compose import compose
from abovemup.config.conf import defaults, files
from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment, NormName
from abovemup.config.values import shown
from abovemup.optim.routing import Route
from abovemup.studies import budget as budgets
from abovemup.studies.axes import Axes, Named, Settings, grid, typed, values
from abovemup.studies.budget import Budget, numbers, sequences
from abovemup.studies.cells import Cell, cell
from abovemup.training.routes import table

OUTPUT = "head/rms_to_inf"
_BATCH, _TOKENS, _STEPS, _SEEDS = "train.batch_size", "train.tokens", "train.steps", "train.seed,data.seed"
_EXPECTED = (
    "question, paper, over (size, tokens or arms), fit (lr, norm or one that is tracked); where they differ from the "
    "budget's, arms, size (one key), lr (optimizer: grid), batch, tokens, seeds (one key), fixed; budgets (name: these)"
)
_KNOWN = {"question", "paper", "over", "fit", "arms", "size", "lr", "batch", "tokens", "seeds", "fixed", "budgets"}


@dataclass
class Ablation:
    question: str
    paper: str  # its answer, and where
    over: str  # what the optimum should stay over; arms: they are compared by their best loss
    fit: str  # in what the optimum lies: lr, or a norm
    verdicts: bool
    fixed: Settings
    axes: Axes
    named: Named
    arms: list[str]  # axes: every combination is an arm
    size: str  # an axis, or "": none; its first value is where one would tune
    seeds: str  # an axis
    lr: Axes  # optimizer -> grid; "" is any
    tokens: list[int]  # horizons, all read from the longest run; none: each run's end

    @property
    def sizes(self) -> list[str]:
        return self.axes.get(self.size, [""])


@dataclass(frozen=True)
class Point:
    """A run that the ablation asks for; several points may share a cell."""

    arm: tuple[str, ...]
    size: str
    batch: int  # tokens a step
    lr: float
    seed: str
    growth: float | None  # what a step adds to the output norm at most; None: no bound
    cell: Cell


def load(name: str, overrides: list[str], config_dir: Path | None, budget: str = "pocket") -> Ablation:
    """The ablation at a budget, with what was typed: a key of an axis replaces it, another with several values is one
    more axis of arms, with one it is set in every cell. RequestError."""
    limits, asked = budgets.load(budget, config_dir), typed(overrides)
    with budgets.reading("ablation", name, config_dir, _EXPECTED) as tree:
        if odd := {*(tree.get("budgets") or ())} - {*files("budget", config_dir)}:
            raise RequestError(f"there is no budget {min(odd)}.")
        ablation, batch = _read(tree, limits, config_dir)
    if _BATCH not in ablation.axes:
        length = values("train.seq_len", asked.get("train.seq_len", ablation.fixed["train.seq_len"]))[0]
        ablation.axes[_BATCH] = [] if _BATCH in asked else sequences(batch, length)
    for axis in ablation.axes:
        if len({asked[key] for key in axis.split(",") if key in asked}) > 1:
            raise RequestError(f"{' and '.join(axis.split(','))} go together here: type one of them, it sets both.")
    for key, text in asked.items():
        _set(ablation, key, values(key, text, config_dir), text)
    if "data" in ablation.axes and "data.path" in ablation.fixed and "text" not in ablation.axes["data"]:
        ablation.axes["data"].append("text")
    if _STEPS in ablation.fixed and len(ablation.axes[_BATCH]) > 1:
        raise RequestError("train.steps is another horizon at each batch size: set train.tokens, or one batch size.")
    return ablation


def _read(tree: dict[str, Any], budget: Budget, config_dir: Path | None) -> tuple[Ablation, list[int]]:
    """Without its batch sizes, in tokens, which go with the length of a sequence."""
    own = (tree.get("budgets") or {}).get(budget.name) or {}
    if odd := {*tree, *own} - _KNOWN:
        raise ValueError(f"not {min(odd)}")
    settings = {**(tree.get("fixed") or {}), **(own.get("fixed") or {})}
    fixed = budget.fixed | {str(key): shown(value) for key, value in settings.items()}
    tree = {"seeds": {_SEEDS: budget.seeds}, "size": {}, "arms": {}, "lr": {}, **tree, **own}
    axes: Axes = {}
    named: Named = {}
    for key, given in (pair for part in ("seeds", "size", "arms") for pair in tree[part].items()):
        if isinstance(given, dict):
            named[key] = {str(n): {k: shown(v) for k, v in those.items()} for n, those in given.items()}
        axes[key] = [*given] if key in named else values(key, given, config_dir)
    batch, tokens = (numbers(tree, key) if key in tree else getattr(budget, key) for key in ("batch", "tokens"))
    lr = budget.lr | {str(optimizer): values("optimizer.lr", given) for optimizer, given in tree["lr"].items()}
    (seeds,), (size,) = tree["seeds"], tree["size"] or [""]
    over, question, paper, fit = (str(tree[key]) for key in ("over", "question", "paper", "fit"))
    if over not in ("size", "tokens", "arms"):
        raise ValueError(f"over: {over}")
    fit, arms, tokens = OUTPUT if fit == "norm" else fit, [*tree["arms"]], [] if _TOKENS in axes else tokens
    return Ablation(
        question, paper, over, fit, budget.verdicts, fixed, axes, named, arms, size, seeds, lr, tokens
    ), batch


def _set(ablation: Ablation, key: str, given: list[str], text: str) -> None:
    """What was typed for one key. Raises RequestError."""
    axis = next((axis for axis in ablation.axes if key in (axis, *axis.split(","))), None)
    if key == "optimizer.lr":
        ablation.lr = {"": given}
    elif axis is not None:
        if axis in ablation.named and (unknown := {*given} - {*ablation.named[axis]}):
            raise RequestError(f"{key}={min(unknown)}: it is one of {', '.join(ablation.named[axis])}.")
        ablation.axes[axis] = given
    elif key == _TOKENS:
        ablation.tokens = sorted(map(parse_tokens, given))
    elif len(given) > 1:
        ablation.axes[key] = given
        ablation.arms.append(key)
    else:
        ablation.fixed[key] = text
        ablation.tokens = [] if key == _STEPS else ablation.tokens


def points(ablation: Ablation, config_dir: Path | None) -> Iterator[Point]:
    """Every point: the first seed's whole grid, small sizes first, then the next. RequestError if one is no run."""
    for at, settings in grid(ablation.axes, ablation.fixed, ablation.named):
        if "data" in at and at["data"] not in ("text", "shards"):  # the path is for the arm that reads it
            settings.pop("data.path", None)
        if ablation.tokens:
            settings[_TOKENS] = str(ablation.tokens[-1])
        name = settings.get("optimizer", defaults()["optimizer"])
        lrs = ablation.lr.get(name, ablation.lr.get("", []))
        if not lrs:
            raise RequestError(f"no lr grid for optimizer={name}: set optimizer.lr=log2range(..).")
        for lr in lrs:
            overrides = [f"{key}={value}" for key, value in {**settings, "optimizer.lr": lr}.items()]
            e = compose(overrides, config_dir=config_dir)
            routes = table(e)
            layers = [route.name.removesuffix(".weight") for route in routes]
            if ablation.fit not in ("lr", *(f"{layer}/{norm}" for layer in layers for norm in get_args(NormName))):
                raise RequestError(f"fit: {ablation.fit} is not lr, norm, or a norm of a layer as {OUTPUT}.")
            run, arm = cell(e, overrides), tuple(at[axis] for axis in ablation.arms)
            batch, seed = e.train.batch_size * e.train.seq_len, at[ablation.seeds]
            if unread := [n for n in ablation.tokens[:-1] if not _passes(e, n, batch)]:
                raise RequestError(
                    f"{len(ablation.tokens)} horizons are read from one run at schedule=constant that is measured at "
                    f"each (eval.every=pow2, norms.every=pow2, whole steps), and {unread[0]} tokens are not, of {batch}"
                    " a step. A decayed run has one, its end: give one train.tokens, or branch tails off a constant "
                    "run, abovemup train --branch RUN@TOKENS."
                )
            yield Point(arm, at.get(ablation.size, ""), batch, e.optimizer.lr, seed, _growth(e, routes), run)


def _passes(e: Experiment, tokens: int, batch: int) -> bool:
    there = tokens % batch == 0 and all(due(every, tokens // batch, batch) for every in (e.eval.every, e.norms.every))
    return there and e.schedule.name == "constant"


def _growth(e: Experiment, routes: list[Route]) -> float | None:
    """What a step adds to the output norm at most: lr with its factors, where its step has the length of a norm."""
    heads = [r for r in routes if r.role == "head" and r.rule in ("rms_to_inf", "sign")]
    known = heads and heads[0].optimizer == "steepest_descent"
    return e.optimizer.lr * heads[0].lr_mult * heads[0].scale if known else None
