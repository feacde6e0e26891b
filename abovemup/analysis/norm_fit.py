"""The optimal norm of a scan: loss over log2(norm) as a parabola, its vertex, and what it says over horizons or models.

The procedure is that of arXiv:2510.03871, appendix A.4, with typed refusals where it would be nonsense. Of equal losses
the one with the smaller std, then the larger norm, is the lowest; of batch sizes with equal losses, the larger.
"""

import itertools
import math
import operator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]
Intercept = dict[str, float] | None  # of each model; None is free
CELL = ["model", "tokens", "batch"]  # one parabola; tokens is the horizon, batch is in tokens
NEAREST = 7
DULL = {"lr": 0.0, "lr x sqrt(steps)": 0.5, "lr x steps": 1.0}  # what a norm must beat: the power of steps


class FitRefused(Exception):
    """A fit would be nonsense: `reason` is one word for programs; the text says what is wrong, and what to do."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


def initial_loss(vocab_size: int, width: int) -> float:
    """The loss (nats) of a head whose rows have norm 1/sqrt(width), before training: the intercept at norm 1."""
    return math.log(vocab_size) + 1 / (2 * width)


def lowest(x: Array, loss: Array, std: Array, lr: Array | None = None) -> int:
    """Index of the smallest finite loss. FitRefused: nothing finite, fewer than 3 points, flat, at an edge.

    All (n,), in any order; a loss that is not finite is a run that diverged. Without lr the grid is that of the norms.
    """
    finite = np.flatnonzero(np.isfinite(loss) & np.isfinite(x))
    if not len(finite):
        raise FitRefused("nothing_finite", "no run has a finite loss and norm: lower the lr grid.")
    if (count := len(np.unique(x[finite]))) < 3:
        raise FitRefused("few_points", f"{count} finite points: run at least 3 learning rates.")
    if np.ptp(loss[finite]) <= 1e-10 * np.abs(loss[finite]).max():
        raise FitRefused("flat", f"every loss is {loss[finite[0]]:.4g}: train longer, or widen the lr grid.")
    best = int(max(finite, key=lambda i: (-loss[i], -std[i], x[i])))
    known = lr is not None and np.isfinite(lr[finite]).all()
    lrs = lr if lr is not None and known else x
    for side, end, name in ((-1, np.min, "smallest"), (1, np.max, "largest")):
        if end(lrs[finite]) == lrs[best] or end(x[finite]) == x[best]:
            advice = f"extend lr to {lrs[best] * 4.0**side:.4g}" if known else "extend lr that way"
            if known and len(beyond := lrs[side * lrs > side * lrs[best]]):
                advice = f"add lr between {lrs[best]:.4g} and {min(beyond, key=lambda at: abs(at - lrs[best])):.4g}"
            raise FitRefused("edge", f"the lowest loss is at the {name} lr or norm: {advice}.")
    return best


def parabola(
    x: Array, loss: Array, std: Array, intercept: float | None, lr: Array | None = None, k: int = NEAREST
) -> dict[str, Any]:
    """The weighted parabola through the k points nearest in x to the lowest. All (n,); loss in nats, x = log2(norm).

    `intercept` fixes c. Weights are 1/max(std^2, 1e-12), or equal when every std is 0. Raises FitRefused.
    Returns a, b, c of loss = a x^2 + b x + c, the vertex x and loss with standard errors (nan when no point is left
    over), how many points were fitted, and whether the vertex lies beyond those, though within all there are. `pull`
    (2, n): how far a standard error of each point's loss moves vertex and its loss; of both the errors are its norms.
    """
    seed = lowest(x, loss, std, lr)
    finite = np.flatnonzero(np.isfinite(loss) & np.isfinite(x))
    order = finite[np.argsort(np.abs(x[finite] - x[seed]), kind="stable")]
    used, rest = list(order[:k]), list(order[k:])
    for side in (-1, 1):
        missing = [i for i in rest if side * (x[i] - x[seed]) > 0]
        if missing and not any(side * (x[i] - x[seed]) > 0 for i in used):
            used[-1] = missing[0]  # the farthest
    xs, ys, stds = x[used], loss[used], std[used]
    root = np.ones(len(used)) if not stds.any() else 1 / np.sqrt(np.maximum(stds**2, 1e-12))
    terms = np.stack([xs**2, xs] + ([np.ones_like(xs)] if intercept is None else []), axis=1) * root[:, None]
    target = (ys - (intercept or 0.0)) * root
    fit, *_ = np.linalg.lstsq(terms, target, rcond=None)
    a, b, c = map(float, [*fit, intercept][:3])
    if a <= 1e-10:
        shape = "flat" if abs(a) <= 1e-10 else "concave"
        raise FitRefused(shape, f"the parabola is {shape} (a = {a:.2g}): more learning rates near the lowest loss.")
    vertex, bottom = -b / (2 * a), c - b * b / (4 * a)
    if not x[finite].min() <= vertex <= x[finite].max() or bottom < ys.min() - np.ptp(ys):
        ends = f"2^{x[finite].min():.2f} to 2^{x[finite].max():.2f}"
        text = f"the vertex 2^{vertex:.2f} with loss {bottom:.4g} lies outside the points, {ends}"
        raise FitRefused("outside", f"{text}: more learning rates near the lowest loss.")
    spare = len(used) - terms.shape[1]
    scale = ((target - terms @ fit) @ (target - terms @ fit)) / spare if spare else math.nan
    by_vertex = np.array([b / (2 * a**2), -1 / (2 * a), 0.0])[: len(fit)]
    by_loss = np.array([b**2 / (4 * a**2), -b / (2 * a), 1.0])[: len(fit)]
    pull = np.zeros((2, len(x)))
    pull[:, used] = np.sqrt(scale) * np.stack([by_vertex, by_loss]) @ np.linalg.pinv(terms)
    found = {"a": a, "b": b, "c": c, "x": vertex, "loss": bottom, "pull": pull}
    found |= dict(zip(("x_error", "loss_error"), map(float, np.linalg.norm(pull, axis=1)), strict=True))
    return found | {"points": len(used), "beyond": not xs.min() <= vertex <= xs.max()}


def nearest_lr(x: Array, loss: Array, lr: Array, at: dict[str, Any]) -> float:
    """The lr of the observed point, of all learning rates, that is nearest to the vertex in (x, loss)."""
    distance = np.where(np.isfinite(loss), (x - at["x"]) ** 2 + (loss - at["loss"]) ** 2, np.inf)
    return float(lr[np.argmin(distance)])


def cells(points: pd.DataFrame) -> dict[tuple[Any, ...], dict[str, Array]]:
    """(model, tokens, batch) -> arrays, seeds of one lr averaged (as the paper: arithmetic means).

    Their std is pooled over all lrs, and so weighs none: that of two or three seeds would be chance.
    """
    out = {}
    for key, group in points.groupby(CELL, sort=True, dropna=False):
        if group.lr.notna().all() and group.lr.duplicated().any():
            seeds = group.assign(norm=2**group.x).groupby("lr")
            mean = seeds[["norm", "loss"]].mean()
            pooled = math.sqrt(seeds.loss.var().mean())
            group = mean.assign(x=np.log2(mean.norm), std=pooled, lr=mean.index)
        group = group.fillna({"std": group["std"].mean()}).fillna({"std": 0.0})
        out[key] = {name: group[name].to_numpy(float) for name in ("x", "loss", "std", "lr")}
    return out


def optimum(key: Any, cell: dict[str, Array], intercept: float | None, fitted: bool = True) -> dict[str, Any]:
    """The best norm (log2), loss and lr of a cell, by its parabola or of its lowest point, or `reason` and `advice`;
    `lowest` is the smallest loss that was seen there."""
    x, loss, std, lr = (cell[name] for name in ("x", "loss", "std", "lr"))
    finite = loss[np.isfinite(loss)]
    found = dict(zip(CELL, key, strict=True)) | {"runs": len(finite), "lowest": finite.min(initial=math.inf)}
    found |= dict.fromkeys(("x", "x_error", "loss", "loss_error", "lr"), math.nan) | {"reason": "", "advice": ""}
    try:
        if fitted:
            fit = parabola(x, loss, std, intercept, lr)
            del fit["pull"]
            return found | fit | {"lr": nearest_lr(x, loss, lr, fit)}
        best = lowest(x, loss, std, lr)
        return found | {name: float(cell[name][best]) for name in ("x", "loss", "lr")}
    except FitRefused as refusal:
        return found | {"reason": refusal.reason, "advice": str(refusal)}


def optima(points: pd.DataFrame, intercept: Intercept, fitted: bool = True) -> pd.DataFrame:
    """A row a cell."""
    fixed = intercept or {}
    return pd.DataFrame([optimum(key, cell, fixed.get(key[0]), fitted) for key, cell in cells(points).items()])


def with_variants(points: dict[str, pd.DataFrame], intercept: Intercept) -> pd.DataFrame:
    """The optima of `points` ("smoothed" first, then "raw" if there are) with lr as mean over the paper's variants.

    {lowest point, fixed intercept, free intercept} x {smoothed, raw}; lr_error (ddof 1) is the paper's error bar, and
    `variants` says how many of them gave an optimum. Refusals and norms are those of the first fit.
    """
    fits = [(intercept, True), (None, False), (None, True)]
    fits = fits if intercept else fits[:2]  # without an intercept the last is the first
    frames = [optima(frame, *fit) for frame in points.values() for fit in fits]
    out, lrs = frames[0], pd.concat([frame.lr for frame in frames], axis=1)
    lrs = lrs.where(out.x.notna())
    new = {"lr_nearest": out.lr, "lr": lrs.mean(axis=1), "lr_error": lrs.std(axis=1)}
    return out.assign(**new, variants=sum(frame.x.notna() for frame in frames))


def best_batches(found: pd.DataFrame) -> pd.DataFrame:
    """Of each (model, tokens) the batch with the lowest fitted loss; `reason` where it is at an edge or not known."""
    rows = []
    cells = sorted(found.to_dict("records"), key=operator.itemgetter(*CELL))
    for _, same in itertools.groupby(cells, key=operator.itemgetter(*CELL[:2])):
        group = list(same)
        row = dict(min(group, key=lambda row: (math.inf if math.isnan(row["loss"]) else row["loss"], -row["batch"])))
        ends = {group[0]["batch"]: "down", group[-1]["batch"]: "up"}
        for lower in [each for each in group if each["lowest"] < row["loss"] and math.isnan(each["x"])][:1]:
            advice = f"batch {lower['batch']:.0f} is lower, and there {lower['advice']}"
            row |= {"reason": "batch_unknown", "advice": advice}
        if row["batch"] in ends and len(group) > 1 and not row["reason"]:
            advice = f"the best batch is the last of the grid, {row['batch']:.0f}: extend it {ends[row['batch']]}."
            row |= {"reason": "batch_edge", "advice": advice}
        rows.append(row)
    return pd.DataFrame(rows)


def band(best: pd.DataFrame, points: pd.DataFrame) -> dict[str, Any]:
    """The optimal norm: mean and population std of log2(norm) over horizons or models; its losses in `points`.

    One group has no spread: the band is its vertex's error. FitRefused when no best batch is known.
    """
    known = best[best.reason == ""]
    if known.empty:
        raise FitRefused(best.reason.iloc[0], best.advice.iloc[0])
    mean, half = float(known.x.mean()), float(known.x.std(ddof=0) if len(known) > 1 else known.x_error.iloc[0])
    inside = points[(points.x - mean).abs().le(half) & np.isfinite(points.loss)]
    each = inside.groupby(CELL[:2], dropna=False, as_index=False).loss
    losses = each.agg(pairs="size", lowest="min", highest="max").to_dict("records")
    return {"log2_norm": mean, "half_width": half, "groups": len(known), "losses_inside": losses}
