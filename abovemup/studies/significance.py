"""What a comparison may conclude: paired differences, speed-ups, how easily each arm is tuned; and a figure of it."""

from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]
Row = dict[str, Any]


def paired(a: ArrayLike, b: ArrayLike, sure: float = 0.95) -> tuple[float, float, float]:
    """Mean of a - b, half its interval, and p of the paired t-test. Both (n,), of the same seeds.

    nan for a single seed, and where one has no loss or diverged.
    """
    x, y = np.asarray(a, float), np.asarray(b, float)
    if len(x) < 2 or not np.isfinite([x, y]).all():
        return np.nan, np.nan, np.nan
    d = x - y
    if np.ptp(d) == 0:  # t is infinite, or 0 / 0
        return float(d[0]), 0.0, float(d[0] == 0)
    test = stats.ttest_1samp(d, 0)
    low, high = test.confidence_interval(sure)
    return float(d.mean()), float(high - low) / 2, float(test.pvalue)


def holm(p: ArrayLike) -> Array:
    """p of as many tests, (n,), adjusted so that any false one of them is as rare (Holm 1979). nan, the last, stays."""
    ps = np.asarray(p, float)
    order, adjusted = np.argsort(ps), np.empty(len(ps))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(ps[order] * np.arange(len(ps), 0, -1)))
    return adjusted


def best_of(losses: ArrayLike) -> Array:
    """The expected best loss of k of the n trials, drawn without replacement, for k = 1 ... n; inf where all k may have
    diverged. The i-th smallest is the best of C(n - i, k - 1) of the C(n, k) draws."""
    ranked = np.sort(np.asarray(losses, float))
    n = len(ranked)
    sums = [sum(ranked[i - 1] * comb(n - i, k - 1) for i in range(1, n - k + 2)) for k in range(1, n + 1)]
    return np.array([float(total) / comb(n, k) for k, total in enumerate(sums, start=1)])


def speedup(tokens: ArrayLike, a: ArrayLike, b: ArrayLike) -> float:
    """Tokens of b over tokens of a at the lowest loss that both reach; each loss (n,) at rising `tokens`.

    Linear in log2(tokens) between horizons; nan where the better is below that loss from its first horizon on.
    """
    known = np.isfinite(a) & np.isfinite(b)
    x, y = (np.minimum.accumulate(np.asarray(losses, float)[known]) for losses in (a, b))
    if not known.any() or max(x[-1], y[-1]) > min(x[0], y[0]):
        return np.nan
    at, t = [], np.log2(np.asarray(tokens, float)[known])
    for curve in (x, y):
        falling, first = np.unique(-curve, return_index=True)  # each loss where it is first reached
        at.append(np.interp(-max(x[-1], y[-1]), falling, t[first]))
    return float(2 ** (at[1] - at[0]))


def pairs(arms: dict[str, Row], tokens: list[int], verdicts: bool) -> list[Row]:
    """Every two arms {losses, loss, tuned, curve, edge, trials}, the better first; `reason`: why nothing is told."""
    rows: list[Row] = []
    for (a, x), (b, y) in combinations(sorted(arms.items(), key=lambda arm: float(arm[1]["loss"])), 2):
        numbers = dict(zip(("difference", "half", "p"), paired(y["losses"], x["losses"]), strict=True))
        ratios = {name: speedup(tokens, x[of], y[of]) for name, of in (("speedup", "tuned"), ("crossing", "curve"))}
        rows.append({"better": a, "worse": b} | numbers | ratios)
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        edge = arms[row["worse"]]["edge"]
        reasons = {
            "this budget concludes nothing": not verdicts,
            "a seed diverged": np.isnan(p),
            "they had unequal numbers of trials": arms[row["better"]]["trials"] != arms[row["worse"]]["trials"],
            f"{row['worse']} is best at the edge of its grid of {edge}": edge,
            f"{row['difference']:.4f} +- {row['half']:.4f} nats, Holm p = {p:.2g}": p >= 0.05,
        }
        row |= {"holm": float(p), "reason": next((reason for reason, holds in reasons.items() if holds), "")}
    return rows


def sentence(arms: dict[str, Row], pairs: list[Row], conditions: str) -> str:
    """The best arm against each other one. Where only some have momentum, it is said of each."""
    mixed, told = len({row["momentum"] > 0 for row in arms.values()}) > 1, []
    name = {a: f"{a} ({'with' if row['momentum'] else 'no'} momentum)" if mixed else a for a, row in arms.items()}
    for row in pairs[: len(arms) - 1]:
        a, b = name[row["better"]], name[row["worse"]]
        size = f"{row['difference']:.4f} +- {row['half']:.4f} nats (Holm p = {row['holm']:.2g})"
        told.append(f"cannot tell {a} from {b}: {row['reason']}" if row["reason"] else f"{a} beats {b} by {size}")
    return f"{'; '.join(told)} ({conditions})."


def draw(arms: dict[str, Row], tokens: list[int], path: Path) -> None:
    """Loss over lr at the best batch size, tuned loss over horizons, and the expected best of k trials."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    scan, horizons, effort = figure.subplots(1, 3)
    for arm, row in arms.items():
        scan.plot(row["lrs"], row["lr_losses"], ".-", label=arm)
        horizons.plot(np.log2(tokens), row["tuned"], ".-")
        effort.plot(range(1, len(row["best_of"]) + 1), row["best_of"])
    scan.set(xlabel="log2 lr", ylabel="validation loss")
    horizons.set(xlabel="log2 tokens", ylabel="tuned validation loss")
    effort.set(xlabel="trials, drawn at random", ylabel="expected best loss")
    scan.legend()
    figure.savefig(path, dpi=120)
