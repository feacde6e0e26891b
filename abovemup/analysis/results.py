"""The whole answer of each fit, as plain types: what `--json` prints and `abovemup predict --from` reads."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis import rules
from abovemup.analysis.growth import offset, parting, segments
from abovemup.analysis.norm_fit import CELL, DULL, FitRefused, band, best_batches, optima, with_variants
from abovemup.analysis.sources import OUTPUT, Source

Answer = dict[str, Any]
CHEAP = 0.005  # of the lowest loss of a horizon: what a (lr, batch) pair of low sensitivity costs at most


def norm(source: Source, name: str = OUTPUT) -> Answer:
    """Optima of all cells, best batches, and the band of the optimal norm; None with a `refusal` when it is unknown.
    Also the pairs of low sensitivity, with which a horizon's loss is at most CHEAP above its lowest."""
    both, intercept = source.points(name), source.fixed(name)
    points = both["smoothed"]
    found = with_variants(both, intercept)
    best = best_batches(found)
    answer: Answer = {"norm": name, "intercept": intercept, "band": None, "refusal": None}
    try:
        answer["band"] = band(best, points)
    except FitRefused as refusal:
        answer["refusal"] = {"reason": refusal.reason, "advice": str(refusal)}
    known = points[np.isfinite(points.loss) & points.lr.notna()]
    cheap = known[known.loss <= (1 + CHEAP) * known.groupby(CELL[:2], dropna=False).loss.transform("min")]
    answer |= {"optima": found.to_dict("records"), "best": best.to_dict("records")}
    answer["low_sensitivity"] = cheap[[*CELL, "lr", "loss"]].to_dict("records")
    return answer | _basis(source, points)


def ranking(source: Source) -> Answer:
    """Every norm, and the dull alternatives, by `regret`: the mean loss (nats) that its one optimum over all horizons
    or models costs each of them, by their own parabolas (free intercept); spread and error are in octaves. Norms known
    at fewer of them come later."""
    norms = [key.removeprefix("norm/") for key in map(str, source.rows) if key.startswith("norm/")]
    scans = {name: source.points(name)["smoothed"] for name in norms}
    points = next(iter(scans.values()))
    for name, power in DULL.items():
        scans[name] = points.assign(x=np.log2(points.lr) + power * np.log2(points.tokens / points.batch))
    rows = []
    for name, scan in scans.items():
        found = optima(scan, None)
        best = best_batches(found)
        row: Answer = {"norm": name, "dull": name in DULL, "refused": int((found.reason != "").sum())}
        known = best[best.reason == ""]
        if len(known) > 1:
            away = known.x - known.x.mean()
            row |= {"regret": float((known.a * away**2).mean()), "spread": float(away.std(ddof=0))}
            row |= {"error": float(known.x_error.mean()), "groups": len(known)}
        rows.append(row)
    if not any("regret" in row for row in rows):
        raise FitRefused("few_groups", "a ranking needs optima at 2 horizons or models at least.")
    order = sorted(rows, key=lambda row: (-row.get("groups", 0), row.get("regret", np.inf)))
    return {"ranking": order} | _basis(source, points)


def rule(source: Source, name: str = OUTPUT) -> Answer:
    """`norm`, and its `laws`."""
    return laws(source, norm(source, name))


def laws(source: Source, answer: Answer) -> Answer:
    """Adds lr*(B, D), B*(D), lr*(D), the rule of first horizons and the norm on the way, with both intervals. Raises
    FitRefused with none, and for several models: an lr law over the optima of all would be none."""
    if len(answer["models"]) > 1:
        text = f"the laws are of one model, here are {', '.join(answer['models'])}: choose by --where model.width=..."
        raise FitRefused("models", text)
    curves, band = source.curves(answer["norm"]), answer["band"] if source.horizons else None
    first = rules.first_horizons(curves, band) if band else None
    found = pd.DataFrame(answer["optima"])
    fits, answer["refused"] = rules.laws(found, first)
    if not fits:
        raise FitRefused("no_rule", "; ".join(answer["refused"].values()))
    drawn = rules.over_runs(source.points(answer["norm"])["smoothed"], answer["intercept"])
    if first is not None and "first_horizon" in fits:
        drawn["first_horizon"] = rules.over_rows(fits["first_horizon"], first)
    if band:
        try:
            fits["norm"] = rules.growing(curves, band)
        except FitRefused as refusal:
            answer["refused"]["norm"] = str(refusal)
    answer["rules"] = {
        of: asdict(law) | {"errors": law.errors, "ols": law.intervals(), "bootstrap": drawn.get(of, {})}
        for of, law in fits.items()
    }
    if {"lr", "batch"} <= {*fits}:
        exponent, error = rules.lr_over_tokens(fits["lr"], fits["batch"])
        answer["lr_over_tokens"] = {"exponent": exponent, "error": error}
    return answer


def growth(source: Source, name: str = OUTPUT) -> Answer:
    """Segments of each curve, the offset by lr and where batch sizes part. Raises FitRefused when no curve is long."""
    curves = source.curves(name)
    curves = curves[curves.x.notna() & (curves.tokens > 0)]
    found, refused = [], {}
    for run, group in curves.groupby("run"):
        try:
            fit = segments(np.log2(group.tokens.to_numpy(float)), group.x.to_numpy())
            found.append({"run": run, "lr": group.lr.iloc[0], "batch": float(group.batch.iloc[0])} | fit)
        except FitRefused as refusal:
            refused[run] = str(refusal)
    if not found:
        raise FitRefused("few_points", next(iter(refused.values()), f"no run has logged {name}."))
    answer = {"norm": name, "curves": found, "refused": refused, "parting": parting(curves), "offset": offset(curves)}
    return answer | _basis(source, curves)


def _basis(source: Source, points: pd.DataFrame) -> Answer:
    """What a verdict rests on."""
    kept: Answer = {"loss": source.loss, "runs": int(points.run.nunique()), "models": sorted(points.model.unique())}
    kept |= {"batch_sizes": sorted(points.batch.dropna().unique().tolist())}
    kept |= {"horizons": [float(points.tokens.min()), float(points.tokens.max()), int(points.tokens.nunique())]}
    return kept | {"conditions": source.conditions, "excluded": source.excluded}
