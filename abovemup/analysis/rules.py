"""Power laws of learning rate and batch size over tokens, by least squares in log2, with intervals. B, D in tokens."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from abovemup.analysis.norm_fit import CELL, FitRefused, best_batches, cells, optimum

Exponents = dict[str, float]
Intervals = dict[str, list[float]]
DRAWS = 200


@dataclass(frozen=True)
class Rule:
    """log2(of) = sum of exponents[name] log2(name) + exponents["constant"]; `covariance` has the order of exponents."""

    of: str
    exponents: Exponents
    covariance: list[list[float]]
    r2: float
    n: int
    residual: float  # standard deviation, in octaves
    ranges: dict[str, list[float]]  # of each name, what was fitted

    @property
    def errors(self) -> Exponents:
        return {name: math.sqrt(self.covariance[i][i]) for i, name in enumerate(self.exponents)}

    def intervals(self) -> Intervals:
        """95 %, of each exponent, by Student's t."""
        t = float(stats.t.ppf(0.975, self.n - len(self.exponents)))
        return {k: [v - t * self.errors[k], v + t * self.errors[k]] for k, v in self.exponents.items()}

    def predict(self, at: dict[str, float]) -> tuple[float, list[float], list[float]]:
        """log2(of) at values of the names, its 95 % interval, and that of one more observation."""
        x = np.array([*(math.log2(at[name]) for name in self.exponents if name != "constant"), 1.0])
        value = float(x @ np.array(list(self.exponents.values())))
        variance = float(x @ np.array(self.covariance) @ x)
        t = float(stats.t.ppf(0.975, self.n - len(x)))
        halves = [t * math.sqrt(variance), t * math.sqrt(variance + self.residual**2)]
        return value, [value - halves[0], value + halves[0]], [value - halves[1], value + halves[1]]

    def beyond(self, at: dict[str, float]) -> dict[str, float]:
        """How many octaves each value lies outside what was fitted; inside ones are left out."""
        out: dict[str, float] = {}
        for name, (low, high) in self.ranges.items():
            octaves = max(math.log2(at[name] / high), math.log2(low / at[name]))
            out |= {name: octaves} if octaves > 1e-9 else {}
        return out


def power_law(of: str, table: pd.DataFrame, names: list[str]) -> Rule:
    """Unweighted OLS of log2(table[of]) on log2 of the columns `names`. FitRefused for too few or degenerate rows."""
    rows = table[[of, *names]].dropna()
    x = np.column_stack([np.log2(rows[names].to_numpy(float)), np.ones(len(rows))])
    need = x.shape[1] + 1
    if len(rows) < need:
        raise FitRefused("few_points", f"{of} over {', '.join(names)}: {len(rows)} optima, {need} are needed.")
    if np.linalg.matrix_rank(x - [*x[:, :-1].mean(axis=0), 0.0]) < x.shape[1]:
        grid = " and ".join(names)
        raise FitRefused("no_spread", f"{of}: {grid} must vary on their own: add horizons or batch sizes.")
    y = np.log2(rows[of].to_numpy(float))
    found, *_ = np.linalg.lstsq(x, y, rcond=None)
    rest = y - x @ found
    variance = float(rest @ rest) / (len(y) - x.shape[1])
    total = float(((y - y.mean()) ** 2).sum())
    return Rule(
        of,
        dict(zip([*names, "constant"], map(float, found), strict=True)),
        (variance * np.linalg.inv(x.T @ x)).tolist(),
        1 - float(rest @ rest) / total if total else math.nan,
        len(rows),
        math.sqrt(variance),
        {name: [float(rows[name].min()), float(rows[name].max())] for name in names},
    )


def lr_over_tokens(lr: Rule, batch: Rule) -> tuple[float, float]:
    """The exponent of lr*(D) when the batch is B*(D), and its error: beta + alpha b, errors taken as independent."""
    alpha, beta, b = lr.exponents["batch"], lr.exponents["tokens"], batch.exponents["tokens"]
    errors = (lr.errors["tokens"], b * lr.errors["batch"], alpha * batch.errors["tokens"])
    return beta + alpha * b, math.hypot(*errors)


def attempt(of: str, table: pd.DataFrame, names: list[str]) -> Rule | FitRefused:
    """The power law, or why not."""
    try:
        return power_law(of, table, names)
    except FitRefused as refusal:
        return refusal


def laws(optima: pd.DataFrame) -> dict[str, Rule | FitRefused]:
    """lr*(B, D) of the optima that there are, and B*(D) of best batches that are not at an edge of their grid."""
    best = best_batches(optima)
    inner = best[(best.reason == "") & (optima.batch.nunique() > 2)]
    return {"lr": attempt("lr", optima, ["batch", "tokens"]), "batch": attempt("batch", inner, ["tokens"])}


def first_horizons(curves: pd.DataFrame, band: dict[str, Any]) -> pd.DataFrame:
    """Of each (batch, lr) of curves {batch, lr, tokens, x} the first logged row with log2 norm x in the band.

    The band is at least the paper's, +- 0.2: rows are logged only so often.
    """
    inside = curves[(curves.x - band["log2_norm"]).abs() <= max(0.2, band["half_width"])].sort_values("tokens")
    return inside.groupby(["batch", "lr"], as_index=False).first()


def over_rows(law: Rule, table: pd.DataFrame) -> Intervals:
    """95 % bootstrap intervals of a law over the rows of its table, where the runs behind them are not known."""
    names = [name for name in law.exponents if name != "constant"]
    y, *x = np.log2(table[[law.of, *names]].dropna().to_numpy(float)).T
    terms = np.stack([*x, np.ones_like(y)], axis=1)

    def draw(rng: np.random.Generator) -> dict[str, Exponents]:
        picked = rng.integers(len(y), size=len(y))
        found, _, rank, _ = np.linalg.lstsq(terms[picked], y[picked], rcond=None)
        return {"": dict(zip(law.exponents, map(float, found), strict=True))} if rank == len(found) else {}

    return _bootstrap(draw).get("", {})


def over_runs(points: pd.DataFrame, intercept: float | None) -> dict[str, Intervals]:
    """The same of both laws over the runs (model, batch, lr; seeds averaged), each with all its horizons."""
    scan = cells(points)
    runs: dict[Any, int] = {}
    owners = {
        key: np.array([runs.setdefault((key[0], key[2], lr), len(runs)) for lr in scan[key]["lr"]]) for key in scan
    }

    def draw(rng: np.random.Generator) -> dict[str, Exponents]:
        counts = np.bincount(rng.integers(len(runs), size=len(runs)), minlength=len(runs))
        rows = []
        for key, cell in scan.items():
            picked = np.repeat(np.arange(len(owners[key])), counts[owners[key]])
            row: dict[str, Any] = dict(zip(CELL, key, strict=True)) | {"x": math.nan, "loss": math.nan, "lr": math.nan}
            with contextlib.suppress(FitRefused):
                row |= optimum({name: values[picked] for name, values in cell.items()}, intercept)
            rows.append(row)
        return {of: law.exponents for of, law in laws(pd.DataFrame(rows)).items() if isinstance(law, Rule)}

    return _bootstrap(draw)


def _bootstrap(draw: Callable[[np.random.Generator], dict[str, Exponents]]) -> dict[str, Intervals]:
    """The middle 95 % of each exponent, seeded; none where a tenth of the draws refuse: the rest would be the lucky."""
    rng = np.random.default_rng(0)
    drawn = [draw(rng) for _ in range(DRAWS)]
    out = {}
    for of in dict.fromkeys(of for each in drawn for of in each):
        found = pd.DataFrame([each[of] for each in drawn if of in each])
        if len(found) >= 0.9 * DRAWS:
            out[of] = {str(name): found[name].quantile([0.025, 0.975]).tolist() for name in found}
    return out
