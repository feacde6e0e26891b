"""How the output norm grows: segments of log2(norm) over log2(tokens), the offset by lr, where batch sizes part."""

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from abovemup.analysis.norm_fit import Array, FitRefused

STEP = 0.25  # octaves between the points of a fit: a log has ever more rows an octave, which are not more evidence
LEAST = 8  # points of a fit; a segment needs 4
APART = 0.25  # octaves between the norms of batch sizes that have parted


def segments(t: Array, x: Array, most: int = 3) -> dict[str, Any]:
    """The continuous polygon through x = log2(norm) over t = log2(tokens), both (n,), of 1 to `most` segments (BIC).

    Returns slopes with 95 % intervals by OLS, and the breaks {tokens, norm (log2), interval of tokens} with intervals
    by profile likelihood. Raises FitRefused for a log that spans fewer than 8 steps: a quarter octave each, or what
    lies between its rows where that is more (between the points of a log there is no evidence).
    """
    order = np.argsort(t)
    step = max(STEP, float(np.median(np.diff(np.unique(t)))) if np.ptp(t) else STEP)
    grid = np.arange(t.min(), t.max() + 1e-9, step)
    if len(grid) < LEAST:
        needed = f"{(LEAST - 1) * step:g} needed with a row every {step:.3g}"
        raise FitRefused("few_points", f"the norm is logged over {np.ptp(t):.1f} octaves of tokens, {needed}.")
    y, n = np.interp(grid, t[order], x[order]), len(grid)
    fits: list[tuple[float, float, tuple[int, ...]]] = []
    for count in range(min(most, len(grid) // 4)):
        for at in itertools.combinations(range(3, n - 3), count):
            if all(b - a >= 3 for a, b in itertools.pairwise(at)):
                terms = _terms(grid, at)
                found, *_ = np.linalg.lstsq(terms, y, rcond=None)
                rest = float(((y - terms @ found) ** 2).sum()) + 1e-12 * n
                fits.append((n * math.log(rest / n) + (2 + 2 * count) * math.log(n), rest, at))
    _, rest, breaks = min(fits)
    terms, free = _terms(grid, breaks), n - 2 - 2 * len(breaks)
    found, *_ = np.linalg.lstsq(terms, y, rcond=None)
    covariance = rest / free * np.linalg.inv(terms.T @ terms)
    near = rest * (1 + float(stats.f.ppf(0.95, 1, free)) / free)
    alike = np.array([at for _, other, at in fits if len(at) == len(breaks) and other <= near])
    sums = np.tril(np.ones((len(found) - 1, len(found) - 1)))  # a slope is the first one and the changes until it
    slopes = sums @ found[1:]
    half = float(stats.t.ppf(0.975, free)) * np.sqrt(np.diag(sums @ covariance[1:, 1:] @ sums.T))
    return {
        "slopes": slopes.tolist(),
        "slope_intervals": np.stack([slopes - half, slopes + half], axis=1).tolist(),
        "breaks": [
            {"tokens": 2 ** grid[i], "log2_norm": norm, "interval": (2.0 ** grid[[these.min(), these.max()]]).tolist()}
            for i, norm, these in zip(breaks, (terms @ found)[[*breaks]].tolist(), alike.T, strict=True)
        ],
    }


def _terms(grid: Array, at: tuple[int, ...]) -> Array:
    hinges = [np.maximum(grid - grid[i], 0.0) for i in at]
    return np.stack([np.ones_like(grid), grid - grid[0], *hinges], axis=1)


def offset(curves: pd.DataFrame) -> dict[str, Any] | None:
    """d log2(norm) / d log2(lr) at the first step that all curves {run, batch, lr, tokens, x} have, 95 % interval.

    None with fewer than 3 learning rates; a run whose roles have several is left out.
    """
    curves = curves[curves.lr.notna()].assign(t=np.log2(curves.tokens / curves.batch)).sort_values("t")
    if curves.lr.nunique() < 3:
        return None
    start = curves.groupby("run").t.min().max()
    lr, at = np.array([(np.log2(g.lr.iloc[0]), np.interp(start, g.t, g.x)) for _, g in curves.groupby("run")]).T
    fit = stats.linregress(lr, at)
    half = float(stats.t.ppf(0.975, len(at) - 2)) * fit.stderr
    return {"step": 2**start, "slope": fit.slope, "interval": [fit.slope - half, fit.slope + half], "curves": len(at)}


def parting(curves: pd.DataFrame) -> list[dict[str, Any]]:
    """Of each model and lr with several batch sizes the first step at which their log2 norms (means over seeds), at
    equal steps, lie APART."""
    out = []
    for (model, lr), group in curves.assign(t=np.log2(curves.tokens / curves.batch)).groupby(["model", "lr"]):
        each = [g for _, g in group.groupby(["batch", "t"], as_index=False).x.mean().groupby("batch")]
        low, high = max(g.t.min() for g in each), min(g.t.max() for g in each)
        if len(each) > 1 and high > low:
            grid = np.arange(low, high, STEP / 4)
            norms = np.stack([np.interp(grid, g.t, g.x) for g in each])
            apart = np.flatnonzero(np.ptp(norms, axis=0) >= APART)
            seen = {"step": 2 ** grid[apart[0]], "log2_norm": float(norms[:, apart[0]].mean())} if len(apart) else {}
            out.append({"model": model, "lr": lr, "batches": len(each), "until_step": 2**high} | seen)
    return out
