"""Power laws of learning rate and batch size over tokens, by least squares in log2, with intervals. B, D in tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from abovemup.analysis.attempts import attempted
from abovemup.analysis.norm_fit import Array, FitRefused, Intercept, best_batches, cells, optimum

Exponents = dict[str, float]
Intervals = dict[str, list[float]]
DRAWS = 200
NEAR, STEP = 2.0, 0.25  # octaves


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

    def predict(self, at: dict[Any, Any]) -> tuple[float, list[float], list[float]]:
        """log2(of) at values of the names, its 95 % interval, and that of one more observation."""
        x = np.log2([(at | {"constant": 2.0})[name] for name in self.exponents])
        value = float(x @ np.array(list(self.exponents.values())))
        variance = float(x @ np.array(self.covariance) @ x)
        t = float(stats.t.ppf(0.975, self.n - len(x)))
        halves = [t * math.sqrt(variance), t * math.sqrt(variance + self.residual**2)]
        return value, [value - halves[0], value + halves[0]], [value - halves[1], value + halves[1]]

    def beyond(self, at: dict[str, float]) -> dict[str, float]:
        """How many octaves each value lies outside what was fitted; inside ones are left out."""
        octaves = {k: max(math.log2(at[k] / high), math.log2(low / at[k])) for k, (low, high) in self.ranges.items()}
        return {name: far for name, far in octaves.items() if far > 1e-9}


def power_law(of: str, table: pd.DataFrame, names: list[str], by: str | None = None) -> Rule:
    """Unweighted OLS of log2(table[of]) on log2 of the columns `names`. FitRefused for too few or degenerate rows.

    Rows that have one value of `by`, a run's, err together: they count as one (Liang and Zeger 1986).
    """
    rows = table.assign(constant=2.0).dropna(subset=[of, *names])
    y, x = np.log2(rows[of].to_numpy(float)), np.log2(rows[[*names, "constant"]].to_numpy(float))
    grid, n, terms = " and ".join(names), rows[by].nunique() if by else len(rows), x.shape[1]
    if n <= terms:
        raise FitRefused("few_points", f"{of} over {grid}: {n} optima, {terms + 1} are needed.")
    if np.linalg.matrix_rank(x - [*x[:, :-1].mean(axis=0), 0.0]) < terms:
        raise FitRefused("no_spread", f"{of}: {grid} must vary on their own: add horizons or batch sizes.")
    found, *_ = np.linalg.lstsq(x, y, rcond=None)
    rest = y - x @ found
    variance, bread = float(rest @ rest) / (len(y) - terms), np.linalg.inv(x.T @ x)
    middle = variance * x.T @ x
    if by:
        scores = pd.DataFrame(x * rest[:, None]).groupby(rows[by].to_numpy()).sum().to_numpy()
        middle = scores.T @ scores * n / (n - 1)
    return Rule(
        of,
        dict(zip([*names, "constant"], map(float, found), strict=True)),
        (bread @ middle @ bread).tolist(),
        1 - float(rest @ rest / ((y - y.mean()) ** 2).sum()) if np.ptp(y) else math.nan,
        n,
        math.sqrt(variance),
        {name: [float(rows[name].min()), float(rows[name].max())] for name in names},
    )


def lr_over_tokens(lr: Rule, batch: Rule) -> tuple[float, float]:
    """The exponent of lr*(D) when the batch is B*(D), and its error: beta + alpha b, errors taken as independent."""
    alpha, beta, b = lr.exponents["batch"], lr.exponents["tokens"], batch.exponents["tokens"]
    errors = (lr.errors["tokens"], b * lr.errors["batch"], alpha * batch.errors["tokens"])
    return beta + alpha * b, math.hypot(*errors)


def tables(optima: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What the laws are fitted on: lr*(B, D) on all optima, B*(D) on best batches that are not at an edge."""
    best = best_batches(optima)
    return {"lr": optima, "batch": best[(best.reason == "") & (optima.batch.nunique() > 2)]}


def laws(optima: pd.DataFrame, first: pd.DataFrame | None = None) -> tuple[dict[str, Rule], dict[str, str]]:
    """lr*(B, D) and B*(D) of the optima that there are, lr of `first` horizons; and why those that there are not."""
    rows, names = tables(optima), {"lr": ["batch", "tokens"], "batch": ["tokens"], "first_horizon": ["tokens", "batch"]}
    rows |= {"first_horizon": first} if first is not None else {}

    def law(name: str) -> Rule:
        return power_law("lr" if name == "first_horizon" else name, rows[name], names[name])

    return attempted(rows, law, FitRefused)


def first_horizons(curves: pd.DataFrame, band: dict[str, Any]) -> pd.DataFrame:
    """Of each run at a constant lr of curves {run, batch, lr, tokens, x} the first row with log2 norm x in the band.

    The band is at least the paper's, +- 0.2: rows are logged only so often. Not step 0, where a norm may be in it.
    """
    inside = (curves.x - band["log2_norm"]).abs() <= max(0.2, band["half_width"])
    found = curves[inside & (curves.tokens > 0) & curves.constant & ~curves.diverged].sort_values("tokens")
    return found.drop_duplicates("run")


def growing(curves: pd.DataFrame, band: dict[str, Any]) -> Rule:
    """The norm that runs have on their way, over lr, batch and tokens: of curves as above the rows within NEAR octaves
    of the band. What does not vary is no factor, and is in `ranges`. Raises FitRefused."""
    near = curves[(curves.x - band["log2_norm"]).abs().le(NEAR) & (curves.tokens > 0) & curves.constant]
    near = near[~near.diverged & near.lr.notna()]
    rows = near.assign(norm=2**near.x, octave=np.log2(near.tokens) // STEP)
    rows = rows.drop_duplicates(["run", "octave"])  # a log has ever more rows an octave, which are not more evidence
    names = ["lr", "batch", "tokens"]
    law = power_law("norm", rows, [name for name in names if rows[name].nunique() > 1], by="run")
    return replace(law, ranges={name: [float(rows[name].min()), float(rows[name].max())] for name in names})


def over_rows(law: Rule, table: pd.DataFrame) -> Intervals:
    """95 % bootstrap intervals of a law over the rows of its table, where the runs behind them are not known."""
    names = list(law.exponents)
    logs = np.log2(table.assign(constant=2.0)[[law.of, *names]].dropna().to_numpy(float))
    drawn = logs[np.random.default_rng(0).integers(len(logs), size=(DRAWS, len(logs)))]
    drawn = drawn[np.linalg.matrix_rank(drawn[..., 1:]) == len(names)]
    return _middle((np.linalg.pinv(drawn[..., 1:]) @ drawn[..., :1])[..., 0], names)


def over_runs(points: pd.DataFrame, intercept: Intercept) -> dict[str, Intervals]:
    """The same of both laws over the runs (model, batch, lr; seeds averaged), each with all its horizons."""
    scan = cells(points)
    runs: dict[Any, int] = {}
    owners = {
        (model, tokens, batch): np.array([runs.setdefault((model, batch, lr), len(runs)) for lr in cell["lr"]])
        for (model, tokens, batch), cell in scan.items()
    }

    def draw(rng: np.random.Generator) -> dict[str, Exponents]:
        counts = np.bincount(rng.integers(len(runs), size=len(runs)), minlength=len(runs))
        rows = []
        for key, cell in scan.items():
            picked = np.repeat(np.arange(len(owners[key])), counts[owners[key]])
            resampled = {name: values[picked] for name, values in cell.items()}
            rows.append(optimum(key, resampled, (intercept or {}).get(key[0])))
        return {of: law.exponents for of, law in laws(pd.DataFrame(rows))[0].items()}

    return _bootstrap(draw)


def _bootstrap(draw: Callable[[np.random.Generator], dict[str, Exponents]]) -> dict[str, Intervals]:
    rng = np.random.default_rng(0)
    drawn = pd.DataFrame([draw(rng) for _ in range(DRAWS)])
    each = {str(of): pd.DataFrame(drawn[of].dropna().tolist()) for of in drawn}
    return {of: ends for of, found in each.items() if (ends := _middle(found.to_numpy(), [*map(str, found)]))}


def _middle(found: Array, names: Sequence[str]) -> Intervals:
    """95 % of each column; none where a tenth of the draws refused: the rest would be the lucky."""
    if len(found) < 0.9 * DRAWS:
        return {}
    return dict(zip(names, np.quantile(found, [0.025, 0.975], axis=0).T.tolist(), strict=True))


def lines(laws: dict[str, Any]) -> list[dict[str, Any]]:
    """A row an exponent, with its intervals as text: a table of the `rules` of an answer."""
    return [
        {"law": name, "of": of, "exponent": value, "error": law["errors"][of], "r2": law["r2"], "n": law["n"]}
        | {f"{kind} (95 %)": interval(law[kind].get(of)) for kind in ("ols", "bootstrap")}
        for name, law in laws.items()
        for of, value in law["exponents"].items()
    ]


def interval(ends: list[float] | None) -> str:
    return f"{ends[0]:.3g} to {ends[1]:.3g}" if ends else "cannot tell"


def read(law: dict[str, Any]) -> Rule:
    """The law of an answer. Raises LookupError, TypeError."""
    return Rule(**{field.name: law[field.name] for field in fields(Rule)})
