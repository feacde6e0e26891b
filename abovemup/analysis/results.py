"""The whole answer of each fit, as plain types: what `--json` prints and `abovemup predict --from` reads."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis import rules
from abovemup.analysis.growth import offset, parting, segments
from abovemup.analysis.norm_fit import CELL, FitRefused, band, best_batches, optima, with_variants
from abovemup.analysis.rules import Rule
from abovemup.analysis.sources import OUTPUT, Source

Answer = dict[str, Any]
CHEAP = 0.005  # of the lowest loss of a horizon: what a (lr, batch) pair of low sensitivity costs at most
_DULL = {"lr": 0.0, "lr x sqrt(steps)": 0.5, "lr x steps": 1.0}  # what a norm must beat to be worth its measurement


def norm(source: Source, name: str = OUTPUT) -> Answer:
    """Optima of all cells, best batches, and the band of the optimal norm; None with a `refusal` when it is unknown."""
    points = source.points(name)
    found = with_variants(points, source.intercept)
    best = best_batches(found)
    answer: Answer = {"norm": name, "optima": found.to_dict("records"), "best": best.to_dict("records")}
    try:
        answer |= {"band": band(best, points["smoothed"]), "refusal": None}
    except FitRefused as refusal:
        answer |= {"band": None, "refusal": {"reason": refusal.reason, "advice": str(refusal)}}
    return answer | _basis(source, points["smoothed"])


def ranking(source: Source) -> Answer:
    """Every norm, and the dull alternatives, by `regret`: the mean loss (nats) that its one optimum over all horizons
    or models costs each of them, by their own parabolas (free intercept); spread and error are in octaves."""
    rows = []
    for name in (*source.norms, *_DULL):
        points = source.points(OUTPUT if name in _DULL else name)["smoothed"]
        if name in _DULL:
            points = points.assign(x=np.log2(points.lr) + _DULL[name] * np.log2(points.tokens / points.batch))
        found = optima(points, None)
        best = best_batches(found)
        row: Answer = {"norm": name, "dull": name in _DULL, "refused": int((found.reason != "").sum())}
        known = best[best.reason == ""]
        if len(known) > 1:
            away = known.x - known.x.mean()
            row |= {"regret": float((known.a * away**2).mean()), "spread": float(away.std(ddof=0))}
            row |= {"error": float(known.x_error.mean()), "groups": len(known)}
        rows.append(row)
    if not any("regret" in row for row in rows):
        raise FitRefused("few_groups", "a ranking needs optima at 2 horizons or models at least.")
    return {"ranking": sorted(rows, key=lambda row: row.get("regret", np.inf))} | _basis(source, points)


def rule(source: Source, name: str = OUTPUT) -> Answer:
    """lr*(B, D), B*(D), lr*(D) and the rule of first horizons, with both intervals. Raises FitRefused with none."""
    answer: Answer = {"norm": name}
    laws: dict[str, Rule | FitRefused] = {}
    drawn: dict[str, Any] = {}
    points = found = first = source.rows
    if source.kind in ("runs", "points"):
        answer |= norm(source, name)
        points, found = source.points(name)["smoothed"], pd.DataFrame(answer["optima"])
        cheap = points.loss <= (1 + CHEAP) * points.groupby(CELL[:2], dropna=False).loss.transform("min")
        answer["low_sensitivity"] = points[cheap][[*CELL, "lr", "loss"]].to_dict("records")
        banded = source.kind == "runs" and answer["band"]
        first = rules.first_horizons(source.curves(name), answer["band"]) if banded else first.iloc[:0]
        drawn = rules.over_runs(points, source.intercept)
    if source.kind != "first":
        laws = rules.laws(found)
    if source.kind in ("runs", "first"):
        laws["first_horizon"] = rules.attempt("lr", first, ["tokens", "batch"])
    fits = {of: law for of, law in laws.items() if isinstance(law, Rule)}
    refused = {of: str(law) for of, law in laws.items() if isinstance(law, FitRefused)}
    if not fits:
        raise FitRefused("no_rule", "; ".join(refused.values()))
    tables = {"first_horizon": first} | ({} if drawn else {"lr": found, "batch": best_batches(found)})
    drawn |= {of: rules.over_rows(fits[of], table) for of, table in tables.items() if of in fits}
    answer |= {"refused": refused, "bootstrap": "over optima" if "lr" in tables else "over runs"}
    answer["rules"] = {
        of: asdict(law) | {"errors": law.errors, "ols": law.intervals(), "bootstrap": drawn.get(of, {})}
        for of, law in fits.items()
    }
    if {"lr", "batch"} <= {*fits}:
        exponent, error = rules.lr_over_tokens(fits["lr"], fits["batch"])
        answer["lr_over_tokens"] = {"exponent": exponent, "error": error}
    return answer | _basis(source, points)


def growth(source: Source, name: str = OUTPUT) -> Answer:
    """Segments of each curve, the offset by lr and where batch sizes part. Raises FitRefused when no curve is long."""
    curves = source.curves(name)
    curves = curves[curves.x.notna() & (curves.tokens > 0)]
    answer: Answer = {"norm": name, "curves": [], "refused": {}, "parting": parting(curves)}
    for run, group in curves.groupby("run"):
        try:
            fit = segments(np.log2(group.tokens.to_numpy(float)), group.x.to_numpy())
            answer["curves"].append({"run": run, "lr": group.lr.iloc[0], "batch": float(group.batch.iloc[0])} | fit)
        except FitRefused as refusal:
            answer["refused"][run] = str(refusal)
    if not answer["curves"]:
        raise FitRefused("few_points", next(iter(answer["refused"].values()), f"no run has logged {name}."))
    answer["offset"] = offset(curves)
    return answer | _basis(source, curves)


def _basis(source: Source, points: pd.DataFrame) -> Answer:
    """What a verdict rests on."""
    kept: Answer = {"loss": source.loss, "intercept": source.intercept, "runs": int(points.run.nunique())}
    kept |= {"models": sorted(points.model.unique()), "batch_sizes": sorted(points.batch.dropna().unique().tolist())}
    kept |= {"horizons": [float(points.tokens.min()), float(points.tokens.max()), int(points.tokens.nunique())]}
    return kept | {"conditions": source.conditions, "excluded": source.excluded}
