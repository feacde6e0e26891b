"""Does the best learning rate stay where it is over the sizes? Numbers with an interval over seeds, and a figure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_RESAMPLES = 2000


@dataclass(frozen=True)
class Curve:
    """One arm at one size: `losses` (lrs, seeds) at `lrs` = log2(lr), ascending; inf diverged, nan not there yet."""

    arm: tuple[str, ...]
    size: str
    lrs: Array
    losses: Array
    same_as: tuple[str, ...] | None = None  # the earlier arm that is the same runs

    def whole(self) -> list[int]:
        """The seeds whose whole grid is there."""
        return [int(i) for i in np.flatnonzero(~np.isnan(self.losses).any(axis=0))]


@dataclass(frozen=True)
class Best:
    grid: float  # log2(lr) of the grid's smallest loss
    vertex: float  # of the parabola through it and its two neighbours; `grid` beside an edge or a divergence
    loss: float  # at `grid`; inf where everything diverged
    edge: bool  # the best may lie outside the grid


def best(lrs: Array, losses: Array) -> Best:
    """Of the losses (lrs,)."""
    i = int(np.argmin(losses))
    edge = i in (0, len(lrs) - 1)
    vertex = float(lrs[i])
    if not edge and np.isfinite(losses[i - 1 : i + 2]).all():
        curvature, slope, _ = np.polyfit(lrs[i - 1 : i + 2] - lrs[i], losses[i - 1 : i + 2], 2)
        vertex -= float(slope / (2 * curvature)) if curvature > 0 else 0
    return Best(float(lrs[i]), vertex, float(losses[i]), edge)


def bootstrap(curve: Curve, seeds: list[int]) -> Array:
    """The fitted best of the mean over `seeds` drawn with replacement: the same draws for every curve, so paired."""
    drawn = np.sort(np.random.default_rng(0).choice(seeds, size=(_RESAMPLES, len(seeds))), axis=1)
    few, which = np.unique(drawn, axis=0, return_inverse=True)  # of 3 seeds only 10
    found = [best(curve.lrs, curve.losses[:, picked].mean(axis=1)).vertex for picked in few]
    return np.array(found)[which]


def interval(values: Array) -> list[float]:
    """The middle 95 %."""
    return [float(q) for q in np.quantile(values, [0.025, 0.975], method="inverted_cdf")]


def row(curve: Curve) -> dict[str, Any]:
    """The best lr of an arm at a size, as log2, with its interval over the seeds that are whole."""
    seeds = curve.whole()
    out: dict[str, Any] = {"arm": curve.arm, "size": curve.size, "same_runs_as": curve.same_as}
    out |= {"seeds": len(seeds), "missing": int(np.isnan(curve.losses).sum())}
    if not seeds:
        return out
    found = best(curve.lrs, curve.losses[:, seeds].mean(axis=1))
    return out | {"best": vars(found), "interval": interval(bootstrap(curve, seeds)) if len(seeds) > 1 else None}


def drift(first: Curve, last: Curve) -> dict[str, Any]:
    """How far the best lr of an arm moves from its first size to its last, in octaves, and whether that is far.

    `transfers`: the interval lies within one step of the grid. `drifts`: it lies outside. `cannot tell`: neither, fewer
    than 2 whole seeds, or a best at an edge of the grid. `regret`: loss given up at the last size with the first's lr.
    """
    seeds = sorted({*first.whole()} & {*last.whole()})
    out: dict[str, Any] = {"arm": first.arm, "seeds": len(seeds), "verdict": "cannot tell"}
    if len(seeds) < 2:
        return out | {"why": f"{len(seeds)} whole seeds"}
    a, b = (best(curve.lrs, curve.losses[:, seeds].mean(axis=1)) for curve in (first, last))
    kept = np.flatnonzero(np.isclose(last.lrs, a.grid))
    out["regret"] = float(last.losses[kept[0], seeds].mean()) - b.loss if len(kept) else math.nan
    if a.edge or b.edge:
        return out | {"why": "best at the edge of the grid"}
    moved, step = bootstrap(last, seeds) - bootstrap(first, seeds), float(np.diff(first.lrs).min())
    low, high = interval(moved)
    out |= {"drift": b.vertex - a.vertex, "interval": [low, high], "step": step}
    if max(abs(low), abs(high)) <= step:
        return out | {"verdict": "transfers"}
    return out | ({"verdict": "drifts"} if low > step or high < -step else {"why": "the interval holds both"})


def sentence(drifts: list[dict[str, Any]], change: str) -> str:
    """The verdict on `change`, arm by arm."""
    parts = []
    for verdict in ("transfers", "drifts", "cannot tell"):
        told = [
            " ".join(d["arm"]) + (f" ({d['why']})" if "why" in d else "") for d in drifts if d["verdict"] == verdict
        ]
        parts += [f"{verdict}: {', '.join(told)}"] if told else []
    steps = "/".join(dict.fromkeys(f"{d['step']:g}" for d in drifts if "step" in d))
    within = f"{steps} octave" if steps else "a step of the grid"
    return f"The best lr {change} (transfers: it stays within {within}): {'; '.join(parts)}."


def by_arm(curves: list[Curve]) -> Iterator[list[Curve]]:
    for arm in dict.fromkeys(curve.arm for curve in curves):
        yield [curve for curve in curves if curve.arm == arm]


def draw(curves: list[Curve], size: str, folder: Path) -> None:
    """figure.png: a panel an arm, a line a size (mean and range of seeds), the best marked (edge: hollow)."""
    from matplotlib.figure import Figure

    rows = len({curve.arm[:-1] for curve in curves})
    columns = -(-len({curve.arm for curve in curves}) // rows)
    figure = Figure(figsize=(3.2 * columns, 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True, sharex="row").flat
    for group, axes in zip(by_arm(curves), panels, strict=False):
        axes.set(title=" ".join(group[0].arm), xlabel="log2 lr", ylabel="validation loss")
        for i, curve in enumerate(group):
            losses = curve.losses[:, curve.whole()]
            if losses.size:
                found, colour = best(curve.lrs, losses.mean(axis=1)), f"C{i}"
                axes.plot(curve.lrs, losses.mean(axis=1), ".-", color=colour, label=f"{size} {curve.size}")
                axes.fill_between(curve.lrs, losses.min(axis=1), losses.max(axis=1), color=colour, alpha=0.2)
                axes.plot(found.grid, found.loss, "o", color=colour, fillstyle="none" if found.edge else "full")
                axes.axvline(found.vertex, color=colour, linewidth=0.8, linestyle=":")
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(folder / "figure.png", dpi=120)
