"""Optimizers compared: each arm is tuned by as many trials as the others, and its best is repeated on fresh seeds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis.runs import final_norms, norms_by_role, trajectory
from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.keys import differences, flatten
from abovemup.config.numbers import parse_float
from abovemup.config.schema import Experiment
from abovemup.geometry.parameterization import ADAM
from abovemup.studies import significance
from abovemup.studies.axes import Settings, grid, typed
from abovemup.studies.board import look
from abovemup.studies.budget import Budget, sequences
from abovemup.studies.cells import Cell, cell, place
from abovemup.studies.plan import optimizer_share
from abovemup.studies.transfer import sensitivity
from abovemup.tracking.summary import write_summary
from abovemup.training.routes import table

_SEEDS = ("train.seed", "data.seed")
# Tuned for each arm, or set by the budget: no override for all arms. (An experiment is a preset for one optimizer.)
_OWN = ("optimizer", "schedule", "experiment", "train.batch_size", "train.tokens", "train.steps", *_SEEDS)
_ROUTED = {"name", "lr", "momentum", "weight_decay", "norm_control", "eps", "lr_scale", "roles"}
# A decay comes last: of what is tried before, which has a constant lr, all horizons are read, of each arm as many runs.
_EXTRAS = ("momentum", "warmup", "lr", "head", "embedding", "decay")
_MORE = ", more for all where one is best at an edge"
_WIDER = 2  # times that a grid may be extended


@dataclass(frozen=True)
class Trial:
    """`stage`: grid, one of the extras, or seed. `lr` and `batch` (tokens a step) are log2."""

    arm: str
    stage: str
    settings: Settings  # what is not shared
    lr: float
    batch: float
    cell: Cell


Loss = Callable[[Trial], float]  # at the longest horizon; inf without one


@dataclass(frozen=True)
class Comparison:
    arms: dict[str, Experiment]  # before they are tuned
    shared: Settings
    budget: Budget
    config_dir: Path | None
    extras: tuple[str, ...]
    fresh: list[str]  # seeds on which nothing is tuned

    def trial(self, arm: str, stage: str, settings: Settings) -> Trial:
        _, asked = next(grid({}, self.shared | {"optimizer": arm} | settings))
        overrides = [f"{key}={value}" for key, value in asked.items()]
        e = compose(overrides, config_dir=self.config_dir)
        batch = log2(e.train.batch_size * e.train.seq_len)
        return Trial(arm, stage, settings, log2(e.optimizer.lr), batch, cell(e, overrides))


def ask(arms: list[str], overrides: list[str], budget: Budget, config_dir: Path | None) -> Comparison:
    """Raises RequestError for arms that cannot be compared, and for an override that is not for all to share."""
    asked = typed(overrides)
    if len({*arms}) < max(2, len(arms)):
        raise RequestError("compare takes two or more different optimizers: abovemup compare adam scion")
    for key in asked:
        if {key, key.partition(".")[0]} & {*_OWN}:
            raise RequestError(f"{key} is tuned for each arm, or set by the budget: drop it, or write your own budget.")
    lrs = {arm: budget.lr.get(arm, []) for arm in arms}
    shared = budget.fixed | asked | dict.fromkeys(_SEEDS, budget.seeds[0]) | {"train.tokens": str(budget.tokens[-1])}
    each = {arm: shared | {"optimizer": arm, "train.batch_size": "1"} for arm in arms}
    made = {arm: compose([f"{k}={v}" for k, v in each[arm].items()], config_dir=config_dir) for arm in arms}
    if missing := [arm for arm in arms if len(lrs[arm]) < 2]:
        raise RequestError(f"budget {budget.name} has no grid of lr for {missing[0]}: write a budget that has one.")
    # The same count for each: the middle of a longer grid. Without verdicts hardly more than whether it works.
    n = min(map(len, lrs.values())) if budget.verdicts else 2
    middle = {arm: values[(len(values) - n) // 2 :][:n] for arm, values in lrs.items()}
    sequences(budget.batch, asked.get("train.seq_len", budget.fixed["train.seq_len"]))
    budget = replace(budget, lr=middle, batch=budget.batch if budget.verdicts else budget.batch[-1:])
    for (a, x), (b, y) in combinations(made.items(), 2):
        if _effect(x) == _effect(y):
            raise RequestError(f"{a} and {b} are one optimizer: at equal lr and momentum nothing differs. Drop one.")
        if odd := [key for key, *_ in differences(x, y) if not key.startswith(("optimizer.", "run."))]:
            raise RequestError(f"{a} and {b} differ in {', '.join(odd)} too: an arm is its keys of optimizer.")
    extras, seeds = (_EXTRAS, 5) if budget.verdicts else (_EXTRAS[:1], 2)
    last = max(map(int, budget.seeds))
    return Comparison(made, shared, budget, config_dir, extras, [str(last + 1 + n) for n in range(seeds)])


def _effect(e: Experiment) -> object:
    """What the optimizer does at one lr and one momentum, which are tuned, however it is written."""
    left = {key: value for key, value in vars(e.optimizer).items() if key not in _ROUTED}
    routes = table(replace(e, optimizer=replace(e.optimizer, momentum=0.0)))
    return left, [{key: value for key, value in vars(route).items() if key != "norm"} for route in routes]


def stages(asked: Comparison, loss: Loss) -> Iterator[list[Trial]]:
    """All trials so far, each time with more, which follow from the losses of those; at last with the fresh seeds."""
    budget, seq_len = asked.budget, next(iter(asked.arms.values())).train.seq_len
    lrs = {arm: sorted(log2(parse_float(lr)) for lr in budget.lr[arm]) for arm in asked.arms}
    batches = sorted(map(log2, budget.batch))
    for _ in range(1 + _WIDER * budget.verdicts):
        trials: list[Trial] = []
        for arm in lrs:
            for lr, batch in product(lrs[arm], batches):
                settings = {"optimizer.lr": f"2^{lr:g}", "train.batch_size": str(round(2**batch) // seq_len)}
                trials.append(asked.trial(arm, "grid", settings))
        yield trials
        sides = {side for arm in lrs for side in edges(trials, arm, loss)}
        if not sides:
            break
        for name, end in sides:
            for values in lrs.values() if name == "lr" else [batches]:
                beyond = 2 * values[end] - values[1 if end == 0 else -2]
                size = round(2**beyond)
                if name == "lr" or (size % seq_len == 0 and all(n % size == 0 for n in budget.tokens)):
                    values.insert(len(values) if end else 0, beyond)
    for extra in asked.extras:
        for arm, e in asked.arms.items():
            top, step = best(trials, arm, loss), lrs[arm][1] - lrs[arm][0]
            trials += [asked.trial(arm, extra, top.settings | change) for change in _tries(extra, e, top.lr, step)]
        yield trials
    tops = {arm: best(trials, arm, loss).settings for arm in lrs}
    seeds = [dict.fromkeys(_SEEDS, seed) for seed in asked.fresh]
    yield trials + [asked.trial(arm, "seed", tops[arm] | seed) for arm, seed in product(tops, seeds)]


def foreseen(asked: Comparison) -> list[Cell]:
    """The cells there will be if no arm's best lies at an edge of a grid."""
    middle = {arm: np.mean([log2(parse_float(lr)) for lr in lrs]) for arm, lrs in asked.budget.lr.items()}
    batch = np.mean(np.log2(asked.budget.batch))
    *_, trials = stages(asked, lambda t: float(abs(t.lr - middle[t.arm]) + abs(t.batch - batch)))
    return list({t.cell.id: t.cell for t in trials}.values())


def best(trials: list[Trial], arm: str, loss: Loss) -> Trial:
    """Of what has been tuned."""
    return min((t for t in trials if t.arm == arm and t.stage != "seed"), key=loss)


def edges(trials: list[Trial], arm: str, loss: Loss) -> list[tuple[str, int]]:
    """Of the grid of an arm the ends on which its best lies: (lr or batch, 0 or -1)."""
    scan = [t for t in trials if (t.arm, t.stage) == (arm, "grid")]
    top = best(scan, arm, loss)
    tried = {"lr": (top.lr, sorted({t.lr for t in scan})), "batch": (top.batch, sorted({t.batch for t in scan}))}
    return [(name, i) for name, (at, all) in tried.items() for i in (0, -1) if at == all[i] and len(all) > 1]


def ends(trials: list[Trial], top: Trial, e: Experiment) -> Iterator[str]:
    """Of the best of an arm what is the least or most that was tried, besides none at all."""
    base = flatten(e)
    for key, value in top.settings.items():
        if key.startswith(("schedule.", "optimizer.")) and key != "optimizer.lr":
            tried = [parse_float(t.settings[key]) for t in trials if key in t.settings] + [float(base[key] or 0)]
            if (at := parse_float(value)) and at in (min(tried), max(tried)):
                yield f"{key.partition('.')[2]}={value}"


def _tries(extra: str, e: Experiment, lr: float, step: float) -> list[Settings]:
    """What an extra changes of the best of an arm, at log2 `lr` of a grid of such steps: as many tries for every arm.

    Head and embedding have rates of their own where they step by Adam, which knows no norm; else the lr is refined.
    """
    if extra == "momentum":
        others = [m for m in (0.0, 0.95, 0.9, 0.8) if m != e.optimizer.momentum]
        return [{"optimizer.momentum": f"{m:g}"} for m in others[:2]]
    if extra == "warmup":
        return [{"schedule.warmup": "0.05"}, {"schedule.warmup": "0.2"}]
    if extra == "decay":
        return [{"schedule": "wsd", "schedule.decay": "0.2"}]
    if extra != "lr" and getattr(e.optimizer.roles, extra).norm == ADAM:
        rate = getattr(e.optimizer.lr_scale, extra)
        return [{f"optimizer.lr_scale.{extra}": f"{rate * factor:g}"} for factor in (0.25, 4)]
    between = step / {"lr": 2, "head": 4, "embedding": 8}[extra]
    return [{"optimizer.lr": f"2^{lr + side * between:g}"} for side in (-1, 1)]


def report(asked: Comparison, trials: list[Trial], folder: Path) -> dict[str, Any]:
    """What came out; writes points.csv, result.json and figure.png in `folder`."""
    found = {t.cell.id: look(folder, t.cell) for t in trials}
    rows = [{"arm": t.arm, "stage": t.stage, "cell": t.cell.name} | t.settings | vars(found[t.cell.id]) for t in trials]
    pd.DataFrame(rows).to_csv(folder / "points.csv", index=False)
    tokens = asked.budget.tokens
    arms = {arm: _arm(asked, arm, trials, lambda t: found[t.cell.id].loss, folder) for arm in asked.arms}
    pairs = significance.pairs(arms, tokens, asked.budget.verdicts)
    e = next(iter(asked.arms.values()))
    where = f"paired t, {len(asked.fresh)} seeds; {e.model.name}, {e.data.name}, 2^{log2(tokens[-1]):g} tokens"
    out = {"verdict": significance.sentence(arms, pairs, where), "shared": shared(asked), "arms": arms, "pairs": pairs}
    write_summary(folder / "result.json", out)
    significance.draw(arms, tokens, folder / "figure.png")
    return out


def shared(asked: Comparison) -> dict[str, Any]:
    """What all arms have, to print."""
    e, budget = next(iter(asked.arms.values())), asked.budget
    scan, extras = len(next(iter(budget.lr.values()))), sum(len(_tries(extra, e, 0, 1)) for extra in asked.extras)
    return {
        "model": f"{e.model.name}, init {e.model.init}, parameterization {e.parameterization.name}",
        "data": f"{e.data.name}, {', '.join(map(str, budget.tokens))} tokens",
        "seeds": f"{budget.seeds[0]} to tune, then {', '.join(asked.fresh)}, each of the init and of the data order",
        "precision": e.train.dtype,
        "schedule": "constant, but for the trial of a decay",
        "trials of an arm": f"{scan} lr x {len(budget.batch)} batch sizes{_MORE * budget.verdicts}; "
        f"then {extras} of {', '.join(asked.extras)}",
    }


def _arm(asked: Comparison, arm: str, trials: list[Trial], loss: Loss, folder: Path) -> significance.Row:
    """`tuned`: the least loss, at each horizon, of the runs of constant lr; `curve`: that of the last one's best."""
    own = sorted((t for t in trials if t.arm == arm), key=lambda t: t.lr)
    tuning, scan, seeds = ([t for t in own if t.stage in kinds] for kinds in (("grid", *_EXTRAS), ("grid",), ("seed",)))
    top, fresh, losses = best(own, arm, loss), [place(folder, t.cell) for t in seeds], [loss(t) for t in seeds]
    line = [t for t in scan if t.batch == best(scan, arm, loss).batch]
    constant = [place(folder, t.cell) for t in sorted(tuning, key=loss) if "schedule" not in t.settings]
    logged = [trajectory(run, ["val/loss"]).set_index("tokens")["val/loss"] for run in constant]
    curves = np.array([run.reindex(asked.budget.tokens) for run in logged])
    times = pd.concat([trajectory(run, ["tokens_per_second", "memory"]) for run in fresh])
    took = times["tokens"].diff().clip(lower=0) / times["tokens_per_second"]
    experiment = compose([*top.cell.overrides], config_dir=asked.config_dir)
    lrs, lr_losses = [t.lr for t in line], [loss(t) for t in line]
    row = {
        "loss": float(np.mean(losses)),
        "sd": float(np.std(losses, ddof=1)),
        "best": " ".join(f"{key.removeprefix('optimizer.')}={value}" for key, value in top.settings.items()),
        "momentum": experiment.optimizer.momentum,
        "edge": " and ".join(sorted({name for name, _ in edges(own, arm, loss)})),
        "at the end of its tries": " ".join(ends(own, top, asked.arms[arm])),
        "trials": len({t.cell.id for t in tuning}),
        "octaves of lr within 1 %": sensitivity(np.array(lrs), np.array(lr_losses)),
        "seconds": float(took.sum() / len(fresh)),
        "memory, MiB": float(times["memory"].max() / 2**20),
        "optimizer's share of a step": optimizer_share(experiment),
    }
    row |= {f"norm, {each['role']} {each['norm']}": each["max"] for each in norms_by_role(final_norms(fresh[0]))}
    tuned, effort = np.fmin.reduce(curves).tolist(), significance.best_of([loss(t) for t in tuning]).tolist()
    plain = {"losses": losses, "tuned": tuned, "curve": curves[0].tolist(), "best_of": effort}
    return row | plain | {"lrs": lrs, "lr_losses": lr_losses}
