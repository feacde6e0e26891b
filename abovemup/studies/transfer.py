"""Does the optimum stay where it is? Of a scan of losses: where it lies, how sure that is, and how far it moves.

A coordinate is log2 of what may be constant at the optimum: lr, lr x steps, or a norm. In each, the optimum of a group
(a size, a horizon) is the vertex of a parabola at its best batch, and there is one bootstrap for all of it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abovemup.analysis.norm_fit import DULL, NEAREST, Array, FitRefused, parabola
from abovemup.studies.significance import paired

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
        row: dict[str, Any] = {"batch": scan.batches[b], "lr": float(scan.lrs[i]), "lowest": float(loss[i])}
        row |= {"x": float(x[i]), "loss": float(loss[i]), "noise": float(noises[b, i]), "a": math.nan, "reason": ""}
        try:
            if limited[b, i]:
                raise FitRefused("step_limited", "")
            kept = np.where(limited[b], math.nan, loss)
            fit = parabola(x, kept, np.zeros(last + 1) if std is None else std[b], None, 2**scan.lrs, k)
            row |= {key: fit[key] for key in ("x", "loss", "a")}
        except FitRefused as refusal:  # a divergence beside it is no edge of the grid of lr
            beside = name == "lr" and 0 < i < last and not np.isfinite(loss[i - 1 : i + 2]).all()
            row["reason"] = "" if beside and np.isfinite(loss[i]) else refusal.reason
        rows.append(row)
    best: dict[str, Any] = min(rows, key=lambda row: row["loss"])
    if not best["reason"] and len(rows) > 1 and best in (rows[0], rows[-1]):
        best["reason"] = "batch_edge"
    return best | {"sensitivity": sensitivity(scan.lrs, losses[rows.index(best)])}


def sensitivity(lrs: Array, losses: Array) -> float:
    """Octaves of lr around the best within 1 % of its loss, straight lines between the points; at an edge so far; nan
    where all diverged."""
    i, octaves = int(np.argmin(losses)), 0.0
    if not np.isfinite(losses[i]):
        return math.nan
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


def drift(scan: Scan, over: str) -> dict[str, Any]:
    """How far the best lr moves from the first group to the one where it lies farthest, in octaves.

    The interval is Student's over the paired seeds, of which a bootstrap of two or three would know too little.
    `transfers`: it lies within one step of the grid. `drifts`: it lies outside. `cannot tell`: neither, too
    few groups or whole seeds, or an optimum that is not known. `regret`: loss given up there with the first's lr.
    """
    scan = scan.whole()
    out, known = _unknown(scan, "lr", over, k=3)
    if "why" in out or out["seeds"] < 2:
        return {"why": "1 whole seed"} | out
    far = max(range(len(known)), key=lambda group: abs(known[group]["x"] - known[0]["x"]))
    each = [scan.pick([seed], -1) for seed in range(out["seeds"])]
    there, first = ([optimum(seed, "lr", group, k=3)["x"] for seed in each] for group in (far, 0))
    moved, half, _ = paired(there, first)
    low, high, step = moved - half, moved + half, float(np.diff(scan.lrs).min())
    at = scan.losses[far, scan.batches.index(known[0]["batch"]), scan.lrs == known[0]["lr"]]
    out |= {"drift": moved, "interval": [low, high], "step": step, "to": scan.groups[far]}
    out |= {"regret": float(at.mean()) - known[far]["lowest"]}
    if max(abs(low), abs(high)) <= step:
        return out | {"verdict": "transfers"}
    return out | ({"verdict": "drifts"} if low > step or high < -step else {"why": "the interval holds both"})


def spread(scan: Scan, name: str, over: str) -> dict[str, Any]:
    """Whether the optimum in `name` lies closer together over the groups than in every other coordinate.

    The spread is the population std of its log2 over the groups. A norm that hardly reacts to lr has little of it for
    nothing; so the regret counts too: the mean loss (nats) that the mean of the optima costs a group, by its parabola.
    `transfers`: a spread below every other's, and a regret below that of all that is DULL, in 95 % of the bootstrap of
    the runs or, of several seeds, by a paired t-test. `drifts`: both above those of the one with the least regret, as
    surely. `cannot tell`: neither, too few groups, or an optimum that is not known (an edge of the lr or batch grid,
    step-limited). `spreads`: coordinate -> [spread, 95 % interval, regret].
    """
    scan = scan.whole()
    out, _ = _unknown(scan, name, over)
    if "why" in out:
        return out
    spreads, regrets, out["spreads"] = {}, {}, {}
    alone = [scan.pick([seed], -1) for seed in range(out["seeds"])]
    for of in (name, *(other for other in scan.x if other != name)):
        x, bends = vertices(scan, of), [optimum(scan, of, group)["a"] for group in range(len(scan.groups))]
        shown = interval(x[1:].std(axis=1))
        if len(alone) > 1:
            x = np.array([x[0], *([optimum(seed, of, group)["x"] for group in range(x.shape[1])] for seed in alone)])
        spreads[of], regrets[of] = x.std(axis=1), (bends * (x - x.mean(axis=1, keepdims=True)) ** 2).mean(axis=1)
        out["spreads"][of] = [float(spreads[of][0]), *shown, float(regrets[of][0])]
    out["step"] = float(np.diff(scan.lrs).min())
    own, regret = spreads.pop(name), regrets.pop(name)
    dull = np.min([regrets[of] for of in DULL], axis=0) * (1 - 1e-6)  # a norm that is but lr is none
    if _surely(own, np.min([*spreads.values()], axis=0), len(alone)) and _surely(regret, dull, len(alone)):
        return out | {"verdict": "transfers", "rival": min(spreads, key=lambda of: float(spreads[of][0]))}
    rival = min(regrets, key=lambda of: float(np.nan_to_num(regrets[of][0], nan=math.inf)))
    count = len(regrets)  # it was chosen among as many
    above = _surely(spreads[rival], own, len(alone), count) and _surely(regrets[rival], regret, len(alone), count)
    return out | {"rival": rival} | ({"verdict": "drifts"} if above else {"why": f"not surely closer than {rival}"})


def _surely(a: Array, b: Array, seeds: int, tests: int = 1) -> bool:
    """Whether a is below b: of both the first is the estimate, and the others are draws, or seeds (paired t-test)."""
    if not a[0] < b[0]:
        return False
    if seeds > 1:  # a bootstrap of two or three was wrong every fifth time
        mean, _, p = paired(a[1:], b[1:])
        return bool(mean < 0 and p <= (1 - SURE) / tests)
    return bool((a < b)[1:].mean() >= 1 - (1 - SURE) / 2 / tests)  # of both sides, as the t-test


def _unknown(scan: Scan, name: str, over: str, k: int = NEAREST) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The beginning of a verdict, with `why` where there can be none; and the optimum of each group."""
    seeds, count = scan.losses.shape[-1], len(scan.groups)
    out: dict[str, Any] = {"arm": scan.arm, "seeds": seeds, "verdict": "cannot tell"}
    if not seeds:
        return out | {"why": "no seed is whole"}, []
    if name not in scan.x:
        return out | {"why": f"{name} was not measured"}, []
    if count < NEEDED[over]:
        return out | {"why": f"{count} of the {NEEDED[over]} that it takes"}, []
    known = [optimum(scan, name, group, k) for group in range(count)]
    refused = [f"{row['reason']} at {group}" for group, row in zip(scan.groups, known, strict=True) if row["reason"]]
    return out | ({"why": ", ".join(refused)} if refused else {}), known
