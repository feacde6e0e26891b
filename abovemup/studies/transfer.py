"""Does the optimum stay where it is? Of a scan of losses: where it lies, how sure that is, and how far it moves.

A coordinate is log2 of what may be constant at the optimum: lr, lr x steps, or a norm. In each, the optimum of a group
(a size, a horizon) is the vertex of a parabola at its best batch, and there is one bootstrap for all of it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abovemup.analysis.norm_fit import NEAREST, FitRefused, parabola

Array = NDArray[np.float64]
DULL = {"lr": 0.0, "lr x sqrt(steps)": 0.5, "lr x steps": 1.0}  # what a norm must beat: the power of steps
NEEDED = {"size": 3, "tokens": 4}  # groups for a verdict on spreads
SURE = 0.95  # of the bootstrap
_DRAWS = {"seeds": 2000, "runs": 100}  # few draws of seeds are distinct


@dataclass(frozen=True)
class Scan:
    """One arm. losses, limited and each of x are (groups, batches, lrs, seeds); lrs is log2(lr), ascending.

    A loss is inf where the run diverged and nan where it is not there yet; x is log2 of each coordinate.
    """

    arm: tuple[str, ...]
    groups: list[str]
    batches: list[int]  # tokens a step; 0 where each group has its own
    lrs: Array
    losses: Array
    x: dict[str, Array]
    limited: NDArray[np.bool_]  # the norm is as large as so few steps allow: no optimum is read there
    same_runs: bool = False  # groups are horizons of the same runs

    def whole(self) -> "Scan":
        """With the seeds only whose whole grid is there."""
        return self.pick(np.flatnonzero(~np.isnan(self.losses).any(axis=(0, 1, 2))), -1)

    def pick(self, at: Any, axis: int = 0) -> "Scan":
        """Some groups (axis 0, a list of them), or seeds (-1)."""
        losses, limited, *x = (a.take(at, axis) for a in (self.losses, self.limited, *self.x.values()))
        groups = [self.groups[i] for i in at] if axis == 0 else self.groups
        return replace(self, groups=groups, losses=losses, limited=limited, x=dict(zip(self.x, x, strict=True)))


def optimum(scan: Scan, name: str, group: int, k: int = NEAREST, std: Array | None = None) -> dict[str, Any]:
    """Of the mean over all seeds: the vertex `x` through the k points nearest to the lowest, fitted with `std`
    (batches, lrs), at the batch of the least fitted loss; of the grid the best lr (log2), batch, loss (lowest), and
    the std of that over the seeds (noise).

    `reason` says in a word why the vertex is not known; x is the lowest point's then.
    """
    losses, limited = scan.losses[group].mean(axis=-1), scan.limited[group].any(axis=-1)
    xs = np.log2((2.0 ** scan.x[name][group]).mean(axis=-1))
    noises = scan.losses[group].std(axis=-1, ddof=1) if scan.losses.shape[-1] > 1 else np.full(losses.shape, math.nan)
    rows: list[dict[str, Any]] = []
    last = len(scan.lrs) - 1
    for b, (loss, x) in enumerate(zip(losses, xs, strict=True)):
        i = int(np.argmin(loss))
        row: dict[str, Any] = {
            "batch": scan.batches[b],
            "lr": float(scan.lrs[i]),
            "lowest": float(loss[i]),
            "reason": "",
        }
        row |= {"x": float(x[i]), "loss": float(loss[i]), "noise": float(noises[b, i])}
        try:
            if limited[b, i]:
                raise FitRefused("step_limited", "")
            kept = np.where(limited[b], math.nan, loss)
            fit = parabola(x, kept, np.zeros(last + 1) if std is None else std[b], None, 2**scan.lrs, k)
            row |= {"x": fit["x"], "loss": fit["loss"]}
        except FitRefused as refusal:  # a divergence beside it is no edge of the grid of lr
            beside = name == "lr" and 0 < i < last and not np.isfinite(loss[i - 1 : i + 2]).all()
            row["reason"] = "" if beside and np.isfinite(loss[i]) else refusal.reason
        rows.append(row)
    best: dict[str, Any] = min(rows, key=lambda row: row["loss"])
    if not best["reason"] and len(rows) > 1 and best in (rows[0], rows[-1]):
        best["reason"] = "batch_edge"
    return best | {"sensitivity": sensitivity(scan.lrs, losses[rows.index(best)])}


def sensitivity(lrs: Array, losses: Array) -> float:
    """Octaves of lr around the best within 1 % of its loss, straight lines between the points; at an edge so far."""
    i, octaves = int(np.argmin(losses)), 0.0
    for way in (-1, 1):
        for j in range(i, len(lrs) - 1 if way > 0 else 0, way):
            here, there, limit = losses[j], losses[j + way], 1.01 * losses[i]
            part = 1.0 if there <= limit else (limit - here) / (there - here)
            octaves += part * abs(lrs[j + way] - lrs[j])
            if part < 1:
                break
    return float(octaves)


def vertices(scan: Scan, name: str, k: int = NEAREST) -> Array:
    """(1 + draws, groups): the optimum of each group, then of each draw of a bootstrap.

    It is over the seeds; of one seed over its runs: by random weights (the Bayesian bootstrap), with which no run, and
    no edge of the grid, gets lost; their variance, k / (k - 3), makes up for the fit's degrees of freedom. Draws are
    the same for every coordinate, and paired: all groups get the same seeds, and all horizons of a run its weight.
    """
    rng, count, groups = np.random.default_rng(0), scan.losses.shape[-1], range(len(scan.groups))
    found = [[optimum(scan, name, g, k)["x"] for g in groups]]
    if count > 1:
        drawn = np.sort(rng.choice(count, size=(_DRAWS["seeds"], count)), axis=1)
        few, which = np.unique(drawn, axis=0, return_inverse=True)
        picks = [scan.pick(seeds, -1) for seeds in few]
        each = np.array([[optimum(pick, name, g, k)["x"] for g in groups] for pick in picks])
        return np.concatenate([found, each[which]])
    shape = (_DRAWS["runs"], 1 if scan.same_runs else len(groups), *scan.losses.shape[1:3])
    weights = rng.gamma(max(1, k - 3) / k, size=shape) + 1e-9
    stds = np.broadcast_to(1 / np.sqrt(weights), (len(weights), len(groups), *shape[2:]))
    return np.array(found + [[optimum(scan, name, g, k, std[g])["x"] for g in groups] for std in stds])


def interval(values: Array) -> list[float]:
    """The middle 95 %."""
    return [float(q) for q in np.quantile(values, [0.025, 0.975], method="inverted_cdf")]


def drift(scan: Scan) -> dict[str, Any]:
    """How far the best lr moves from the first group to the last, in octaves, and whether that is far.

    `transfers`: the interval lies within one step of the grid. `drifts`: it lies outside. `cannot tell`: neither, fewer
    than 2 whole seeds, or an optimum that is not known. `regret`: loss given up at the last with the first's lr.
    """
    scan = scan.pick([0, len(scan.groups) - 1]).whole()
    seeds = scan.losses.shape[-1]
    out: dict[str, Any] = {"arm": scan.arm, "seeds": seeds, "verdict": "cannot tell"}
    if seeds < 2:
        return out | {"why": f"{seeds} whole seeds"}
    first, last = (optimum(scan, "lr", group, k=3) for group in (0, 1))
    at = int(np.flatnonzero(scan.lrs == first["lr"])[0])
    out["regret"] = float(scan.losses[1, scan.batches.index(first["batch"]), at].mean()) - last["lowest"]
    if reasons := {first["reason"], last["reason"]} - {""}:
        return out | {"why": ", ".join(sorted(reasons))}
    found, step = vertices(scan, "lr", k=3), float(np.diff(scan.lrs).min())
    moved = found[:, 1] - found[:, 0]
    low, high = interval(moved[1:])
    out |= {"drift": float(moved[0]), "interval": [low, high], "step": step}
    if max(abs(low), abs(high)) <= step:
        return out | {"verdict": "transfers"}
    return out | ({"verdict": "drifts"} if low > step or high < -step else {"why": "the interval holds both"})


def spread(scan: Scan, name: str, over: str) -> dict[str, Any]:
    """Whether the optimum in `name` lies closer together over the groups than in every other coordinate.

    The spread is the population std of its log2 over the groups. `transfers`: below every other's, in 95 % of the
    bootstrap too. `drifts`: above that of one other, as surely. `cannot tell`: neither, too few groups, or an optimum
    that is not known (an edge of the lr or batch grid, step-limited). `spreads`: coordinate -> [spread, 95 % interval].
    """
    scan = scan.whole()
    seeds, count = scan.losses.shape[-1], len(scan.groups)
    out: dict[str, Any] = {"arm": scan.arm, "seeds": seeds, "verdict": "cannot tell"}
    if not seeds:
        return out | {"why": "no seed is whole"}
    if name not in scan.x:
        return out | {"why": f"{name} was not measured"}
    if count < NEEDED[over]:
        return out | {"why": f"{count} of the {NEEDED[over]} that it takes"}
    reasons = {group: reason for i, group in enumerate(scan.groups) if (reason := optimum(scan, name, i)["reason"])}
    if reasons:
        return out | {"why": ", ".join(f"{reason} at {group}" for group, reason in reasons.items())}
    found = {other: vertices(scan, other).std(axis=1) for other in scan.x}
    own, others = found.pop(name), np.array(list(found.values()))
    rival = list(found)[int(np.argmin(others[:, 0]))]
    out |= {"spreads": {of: [float(s[0]), *interval(s[1:])] for of, s in {name: own, **found}.items()}}
    out |= {"rival": rival, "step": float(np.diff(scan.lrs).min()) if len(scan.lrs) > 1 else math.nan}
    below, above = own < others.min(axis=0), own > found[rival]
    if below[0] and below[1:].mean() >= SURE:
        return out | {"verdict": "transfers"}
    sure = above[0] and above[1:].mean() >= SURE
    return out | ({"verdict": "drifts"} if sure else {"why": f"about as close as {rival}"})
