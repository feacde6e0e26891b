"""Does the optimum stay where it is? Of a scan of losses: where it lies, how sure that is, and how far it moves.

A coordinate is log2 of what may be constant at the optimum: lr, lr x steps, or a norm. In each, the optimum of a group
(a size, a horizon) is the vertex of a parabola at its best batch, and the same draws say how sure all of it is.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abovemup.analysis.norm_fit import DULL, NEAREST, Array, FitRefused, parabola
from abovemup.studies.significance import paired

NEEDED = {"size": 3, "tokens": 4}  # groups for a verdict on spreads
SURE = 0.95
_DRAWS = 5000  # as many as a level that is corrected for thirty norms needs


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

    def whole(self) -> "Scan":
        """With the seeds only whose whole grid is there."""
        return self.pick(np.flatnonzero(~np.isnan(self.losses).any(axis=(0, 1, 2))), -1)

    def pick(self, at: Any, axis: int = 0) -> "Scan":
        """Some groups (axis 0, a list of them), or seeds (-1)."""
        losses, limited, *x = (a.take(at, axis) for a in (self.losses, self.limited, *self.x.values()))
        groups = [self.groups[i] for i in at] if axis == 0 else self.groups
        return replace(self, groups=groups, losses=losses, limited=limited, x=dict(zip(self.x, x, strict=True)))


def fits(scan: Scan, name: str, group: int, k: int) -> list[dict[str, Any]]:
    """Of each batch, of the mean over all seeds: the vertex `x` and its loss, through the k points nearest to the
    lowest, and the pull of the runs on both; of the grid the best lr (log2), loss (lowest) and its std over the seeds
    (noise).

    `reason` says in a word why the vertex is not known; x is the lowest point's then.
    """
    each, limited, last = scan.losses[group], scan.limited[group].any(axis=-1), len(scan.lrs) - 1
    losses = each.mean(axis=-1)
    xs = np.log2((2.0 ** scan.x[name][group]).mean(axis=-1))
    with np.errstate(invalid="ignore"):  # nan where one diverged, and of one seed
        noises = each.std(axis=-1, ddof=1) if each.shape[-1] > 1 else losses * math.nan
    rows: list[dict[str, Any]] = []
    for b, (loss, x) in enumerate(zip(losses, xs, strict=True)):
        i = int(np.argmin(loss))
        row: dict[str, Any] = {"batch": scan.batches[b], "lr": float(scan.lrs[i]), "lowest": float(loss[i])}
        row |= {"x": float(x[i]), "loss": float(loss[i]), "noise": float(noises[b, i]), "a": math.nan, "reason": ""}
        row |= {"pull": np.zeros((2, last + 1)), "points": 0}
        try:
            if limited[b, i]:
                raise FitRefused("step_limited", "")
            kept = np.where(limited[b], math.nan, loss)
            fit = parabola(x, kept, np.zeros(last + 1), None, 2**scan.lrs, k)
            row |= {key: fit[key] for key in ("x", "loss", "a", "pull", "points")}
        except FitRefused as refusal:  # a divergence beside it is no edge of the grid of lr
            beside = name == "lr" and 0 < i < last and not np.isfinite(loss[i - 1 : i + 2]).all()
            row["reason"] = "" if beside and np.isfinite(loss[i]) else refusal.reason
            if not row["reason"]:
                row["pull"].fill(math.nan)  # it lies here, and nothing says how surely
        rows.append(row)
    return rows


def optimum(scan: Scan, name: str, group: int, k: int = NEAREST) -> dict[str, Any]:
    """That of `fits` at the batch of the least fitted loss, unless it is the least or largest; with the sensitivity."""
    rows = fits(scan, name, group, k)
    at = min(range(len(rows)), key=lambda b: float(rows[b]["loss"]))
    best = {key: value for key, value in rows[at].items() if key != "pull"}
    if not best["reason"] and len(rows) > 1 and at in (0, len(rows) - 1):
        best["reason"] = "batch_edge"
    return best | {"sensitivity": sensitivity(scan.lrs, scan.losses[group].mean(axis=-1)[at])}


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
    """(1 + draws, groups): the optimum of each group, then of each draw of what it might have been.

    A draw is of the seeds (a bootstrap, paired: all groups get the same). Of one seed it gives each run's loss another
    error, as large as its parabola's residuals say with the uncertainty of so few of them (Student's t, so that
    a vertex lies 95 % of the time where 95 % of the draws do), and each batch its chance to be the best; nan where no
    point is left over. The errors are the same for every coordinate. Horizons of a run have errors of their own: what
    they share would bring their optima closer together.
    """
    rng, count, groups = np.random.default_rng(0), scan.losses.shape[-1], range(len(scan.groups))
    found = [[optimum(scan, name, g, k)["x"] for g in groups]]
    if count > 1:
        drawn = np.sort(rng.choice(count, size=(_DRAWS, count)), axis=1)
        few, which = np.unique(drawn, axis=0, return_inverse=True)
        picks = [scan.pick(seeds, -1) for seeds in few]
        each = np.array([[optimum(pick, name, g, k)["x"] for g in groups] for pick in picks])
        return np.concatenate([found, each[which]])
    shape = (len(groups), len(scan.batches), _DRAWS)
    errors, residuals = rng.standard_normal((*shape, len(scan.lrs))), rng.standard_normal((*shape, NEAREST)) ** 2
    draws = np.empty((_DRAWS, len(groups)))
    for g in groups:
        x, losses = np.empty((2, shape[1], _DRAWS))
        for b, row in enumerate(fits(scan, name, g, k)):
            spare = max(0, row["points"] - 3)
            scale = np.sqrt(spare / residuals[g, b, :, :spare].sum(axis=-1)) if spare else 1.0
            x[b], losses[b] = np.array([[row["x"]], [row["loss"]]]) + scale * (row["pull"] @ errors[g, b].T)
        draws[:, g] = np.take_along_axis(x, losses.argmin(axis=0)[None], axis=0)[0]
    return np.concatenate([found, draws])


def interval(values: Array) -> list[float]:
    """The middle 95 %."""
    return [float(q) for q in np.quantile(values, [0.025, 0.975], method="inverted_cdf")]


def drift(scan: Scan, over: str) -> dict[str, Any]:
    """How far the best lr moves from the first group to the one where it lies farthest, in octaves.

    The interval is Student's over the paired seeds, of which a bootstrap of two or three would know too little.
    `transfers`: that of every group lies within one step of the grid. `drifts`: one lies outside, at a level that is
    corrected for as many groups (Bonferroni). `cannot tell`: neither, too few groups or whole seeds, or an optimum,
    also one of a seed, that is not known. `regret`: loss given up there with the first's lr.
    """
    scan = scan.whole()
    out, known = _unknown(scan, "lr", over, k=3)
    if "why" in out or out["seeds"] < 2:
        return {"why": "1 whole seed"} | out
    seeds = [[optimum(scan.pick([s], -1), "lr", g, k=3) for s in range(out["seeds"])] for g in range(len(known))]
    for group, each in zip(scan.groups, seeds, strict=True):
        if refused := [row["reason"] for row in each if row["reason"]]:
            return out | {"why": f"{refused[0]} at {group} of a seed"}
    step, (first, *others) = float(np.diff(scan.lrs).min()), ([row["x"] for row in each] for each in seeds)
    corrected = 1 - (1 - SURE) / len(others)
    moves, wide = ([paired(there, first, sure)[:2] for there in others] for sure in (SURE, corrected))
    far = max(range(1, len(known)), key=lambda group: abs(known[group]["x"] - known[0]["x"]))
    moved, half = moves[far - 1]
    at = scan.losses[far, scan.batches.index(known[0]["batch"]), scan.lrs == known[0]["lr"]]
    out |= {"drift": moved, "interval": [moved - half, moved + half], "step": step, "to": scan.groups[far]}
    out |= {"regret": float(at.mean()) - known[far]["lowest"]}
    if all(abs(mean) + half <= step for mean, half in moves):
        return out | {"verdict": "transfers"}
    outside = any(abs(mean) - half > step for mean, half in wide)
    return out | ({"verdict": "drifts"} if outside else {"why": "the intervals hold both"})


def spread(scan: Scan, name: str, over: str) -> dict[str, Any]:
    """Whether the optimum in `name` lies closer together over the groups than in every other coordinate.

    The spread is the population std of its log2 over the groups. A norm that hardly reacts to lr has little of it for
    nothing; so the regret counts too: the mean loss (nats) that the mean of the optima costs a group, by its parabola.
    `transfers`: a spread below every other's, and a regret below that of all that is DULL, in 95 % of the draws or, of
    several seeds, by a paired t-test. `drifts`: both above those of the one with the least regret, as surely.
    `cannot tell`: neither, too few groups, or an optimum that is not known (an edge of the lr or batch grid,
    step-limited, no more points than a parabola takes). `spreads`: coordinate -> [spread, 95 % interval, regret].
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
    """Whether a is below b: of both the first is the estimate, and the others are draws, or seeds (paired t-test). What
    is nan is not."""
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
    exact = {3: "3_points"} if seeds == 1 and name != "lr" else {}  # they leave nothing to tell an error by
    said = [row["reason"] or exact.get(row["points"], "") for row in known]
    refused = [f"{reason} at {group}" for group, reason in zip(scan.groups, said, strict=True) if reason]
    return out | ({"why": ", ".join(refused)} if refused else {}), known
