"""The figures of arXiv:2510.03871 from any source: each one a table, and how it is to be drawn."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis import norm_fit, rules
from abovemup.analysis.attempts import attempted
from abovemup.analysis.norm_fit import CELL, FitRefused
from abovemup.analysis.results import Answer
from abovemup.analysis.sources import ROLES, Source

_DRAWN = {"row": "", "column": "", "mode": "markers", "error": np.nan, "size": 7.0, "opacity": 1.0, "text": ""}
_FEW = 4  # learning rates, and batch sizes, of which the growth of the norm is drawn


@dataclass
class Figure:
    """`table` has a row a point: x, y, error (+- y), text (hover), size, opacity, the row and column of its panel, its
    series, mode (markers, lines, lines+markers), keys of its colour and dash, and what else a reader of the CSV wants.
    `band`: two x with grey between them. `ticks`: names of x = 0, 1, ...
    """

    title: str
    table: pd.DataFrame
    x: str
    y: str = "loss (nats)"
    band: tuple[float, float] | None = None
    ticks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        table = self.table.dropna(subset=["x"])
        new: dict[str, Any] = {**_DRAWN, "colour": table["series"], "dash": table["series"]}
        for key, value in new.items():
            table[key] = table[key].fillna(value) if key in table else value
        if "lr" in table:
            told = ", lr " + table.lr.map(power) + ", batch " + table.batch.map(power)
            name = table.run if "run" in table else table.get("model", "")
            table["text"] = table.text.where(table.text != "", (name + told).fillna(""))
        self.table = table.sort_values(["row", "column"], key=natural, kind="stable", ignore_index=True)

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of the x axis, where less than an octave is drawn: so little does not fill a figure."""
        low, high = (end([*self.table.x, *(self.band or ())]) for end in (min, max))
        return ((low + high - 1) / 2, (low + high + 1) / 2) if high - low < 1 else None


def natural(values: "pd.Series[Any]") -> "pd.Series[Any]":
    """To sort texts by the numbers in them: w64 before w128, 2^-4 before 2^-3.5."""
    return values if pd.api.types.is_numeric_dtype(values) else values.map(numbered)


def numbered(text: str) -> str:
    return re.sub(r"(?<=\^)-?\d+(\.\d+)?|\d+(\.\d+)?", lambda m: f"{1e9 + float(m[0]):.6f}", text)


def power(count: Any) -> str:
    return f"2^{np.log2(count):.4g}" if isinstance(count, int | float | np.number) and 0 < count < np.inf else "?"


def norm_against_loss(source: Source, answer: Answer) -> Figure:
    points = _measured(source, answer)
    points = points[points.tokens == points.tokens.max()]
    points = points.merge(points.loc[points.groupby("model").loss.idxmin(), ["model", "batch"]])
    points = points.assign(series="runs", shade=np.log2(points.lr.to_numpy(float)), column=points.model)
    parts = [points]
    for model, runs in points.groupby("model"):
        at, low, high = runs.x[runs.loss.idxmin()], runs.loss.min(), runs.loss.max()
        path = [runs.x.min(), at, at, at, runs.x.max()]
        parts.append(_line(path, [low, low, high, low, low], "lowest", column=model))
    title = f"Norm against loss at {power(points.tokens.max())} tokens and the best batch size; the shade is log2 lr."
    return Figure(title, pd.concat(parts), f"log2 {answer['norm']}")


def norm_growth(source: Source, answer: Answer) -> Figure:
    curves = source.curves(answer["norm"])
    curves = curves[curves.x.notna() & (curves.tokens > curves.batch) & curves.lr.notna()]
    for key in ("batch", "lr"):
        values = np.sort(curves[key].unique())
        few = np.linspace(0, len(values) - 1, min(_FEW, len(values))).round().astype(int)
        curves = curves[curves[key].isin(values[few])]
    curves = curves[curves.run == curves.groupby(["model", "batch", "lr"]).run.transform("first")]
    curves["octave"] = (8 * np.log2(curves.tokens)).round()
    curves = curves.drop_duplicates(["run", "octave"]).sort_values(["batch", "lr", "tokens"])
    if not (curves.groupby("run").size() > 2).any():
        raise FitRefused("few_points", "no run has logged the norm at three token counts, and its lr.")
    curves = curves.assign(colour=curves.batch.map(power), dash=curves.lr.map(power), column=curves.model, mode="lines")
    curves["series"] = "batch " + curves.colour + ", lr " + curves.dash
    curves = curves.assign(y=curves.x, x=np.log2(curves.tokens))
    title = "Growth of the norm: a colour is a batch size (tokens), a dash a learning rate."
    return Figure(title, curves, "log2 tokens", f"log2 {answer['norm']}")


def optima_over_horizons(source: Source, answer: Answer) -> Figure:
    found = pd.DataFrame(answer["optima"])
    if found.tokens.nunique() < 2 <= found.model.nunique():
        raise FitRefused("few_horizons", "there is one horizon.")
    return _optima(answer, found, "tokens", "model")


def optima_over_models(source: Source, answer: Answer) -> Figure:
    found = pd.DataFrame(answer["optima"])
    if found.model.nunique() < 2:
        raise FitRefused("few_models", "there is one model.")
    return _optima(answer, found, "model", "tokens")


def optima_by_variant(source: Source, answer: Answer) -> Figure:
    """The paper's figure 6: whether smoothing, or the parabola, moves the optima."""
    parts = [
        norm_fit.optima(points, source.fixed(answer["norm"]), fitted).assign(variant=f"{kind}, {how}")
        for kind, points in source.points(answer["norm"]).items()
        for fitted, how in ((False, "lowest point"), (True, "parabola"))
    ]
    return _optima(answer, _told_apart(pd.concat(parts), "variant"), "scan", "variant", "Optima by smoothing and fit")


def _told_apart(found: pd.DataFrame, by: str) -> pd.DataFrame:
    """Optima that are ranked within each of `by`, a line a model and horizon."""
    return found.assign(scan=found.model + ", " + found.tokens.map(power), model=found[by] + ", " + found.model)


def _optima(answer: Answer, found: pd.DataFrame, series: str, column: str, of: str = "Optimal norm and loss") -> Figure:
    known = found[found.x.notna()].sort_values([series, "batch"], key=natural)
    if known.empty:
        raise FitRefused("no_optimum", f"nothing has an optimum: {found.advice.iloc[0]}")
    losses = known.groupby(CELL[:2], dropna=False).loss
    rank, best = losses.rank(ascending=False), known.loss == losses.transform("min")
    known = known.assign(mode="lines+markers", size=6 * 1.85 ** (rank / 4), opacity=np.where(best, 1, 0.5))
    known = known.assign(y=known.loss, error=known.get("loss_error", np.nan))
    for to, key in (("series", series), ("column", column)):
        known[to] = known[key].map(power) + " tokens" if key == "tokens" else known[key]
    line = "horizon" if series == "tokens" else series
    title = f"{of} at each batch size, a line for each {line}; the largest point is the lowest loss, grey the band."
    title = title if answer.get("band") else title.replace(", grey the band", "")
    return Figure(title, known, f"log2 {answer['norm']}", band=_ends(answer.get("band")))


def first_horizon(source: Source, answer: Answer) -> Figure:
    law = _law(answer, "first_horizon")
    found = rules.first_horizons(source.curves(answer["norm"]), answer["band"])
    found = found[found.lr.notna()].assign(x=lambda t: np.log2(t.tokens), y=lambda t: np.log2(t.lr), dash="runs")
    found["series"] = found["colour"] = found.batch.map(power)
    constant = (found.y + found.x - 1.5 * np.log2(found.batch)).mean()
    parts = [found]
    for batch, runs in found.groupby("batch"):
        ends = np.array([runs.x.min(), runs.x.max()])
        fit = [law.predict({"batch": batch, "tokens": 2.0**x})[0] for x in ends]
        rule = 1.5 * np.log2(runs.batch.iloc[0]) - ends + constant
        for name, y in (("fitted", fit), ("batch^1.5 / tokens", rule)):
            parts.append(_line(ends, y, f"{power(batch)} {name}", colour=power(batch), dash=name))
    title = "Tokens at which a run's norm is first in the optimal band; a colour is a batch size (tokens)."
    return Figure(title, pd.concat(parts), "log2 tokens at first", "log2 lr")


def lr_over_batch(source: Source, answer: Answer) -> Figure:
    found = pd.DataFrame(answer["optima"])
    found = found[found.lr.notna() & found.x.notna()]
    if found.batch.nunique() < 2:
        raise FitRefused("few_batches", "fewer than two batch sizes have an optimal lr.")
    worse = found.loss - found.groupby(CELL[:2]).loss.transform("min")
    share = (worse / worse.groupby([found.model, found.tokens]).transform("max")).fillna(0)
    found = found.assign(opacity=1 - 0.8 * share, size=np.where(worse == 0, 13, 7), column=found.model, dash="optima")
    found = found.assign(x=np.log2(found.batch), y=np.log2(found.lr), error=found.lr_error / found.lr / np.log(2))
    found["series"] = found["colour"] = found.tokens.map(power)
    parts = [found]
    for tokens, rows in found.groupby("tokens"):
        if "lr" in answer.get("rules", {}):
            y = [_law(answer, "lr").predict({"batch": b, "tokens": tokens})[0] for b in rows.batch]
            colour, model = power(tokens), rows.column.iloc[0]
            parts.append(_line(rows.x, y, f"{colour} law", colour=colour, dash="law", column=model))
    title = "Optimal lr over batch size, a colour for each horizon: paler is a higher loss, larger the best batch."
    return Figure(title, pd.concat(parts), "log2 batch (tokens)", "log2 lr")


def batch_over_tokens(source: Source, answer: Answer) -> Figure:
    law, best = _law(answer, "batch"), pd.DataFrame(answer["best"]).query("reason == ''")
    best = best.assign(x=np.log2(best.tokens), y=np.log2(best.batch), series="best batch")
    at = np.linspace(best.x.min(), best.x.max(), 30)
    told = [(value, *ends) for value, ends, _ in (law.predict({"tokens": 2.0**x}) for x in at)]
    lines = zip(("law", "95 % low", "95 % high"), zip(*told, strict=True), strict=True)
    parts = [best, *(_line(at, y, name, colour=name[:4]) for name, y in lines)]
    title = f"Best batch over tokens: B* ~ D^({law.exponents['tokens']:.3f} +- {law.errors['tokens']:.3f})."
    return Figure(title, pd.concat(parts), "log2 tokens", "log2 batch (tokens)")


def layout(points: pd.DataFrame) -> Figure:
    roles = [*ROLES]
    points = points[np.isfinite(points.loss)] if {*roles} <= {*points} else points[:0]
    mean = points.groupby([*CELL, *roles], as_index=False).agg(y=("loss", "mean")) if len(points) else points
    if mean.empty or (mean.groupby(CELL).size() < 2).all() or mean[roles].nunique(axis=1).max() < 2:
        raise FitRefused("no_layouts", "all runs have one lr for all roles: vary optimizer.lr_scale.head and others.")
    losses = mean.groupby(CELL).y
    rank, top = losses.rank(method="first"), np.ceil(0.1 * losses.transform("size"))
    mean["series"] = np.select([rank <= 3, rank <= top], ["3 best", "best 10 %"], "others")
    mean["text"], mean["opacity"] = "loss " + mean.y.map("{:.4g}".format), np.where(mean.series == "others", 0.3, 1)
    mean["row"], mean["column"] = mean.tokens.map(power), "batch " + mean.batch.map(power)
    mean = mean.sort_values("series", ascending=False).reset_index(names="line")
    parts = [mean.assign(x=i, y=np.log2(mean[role])) for i, role in enumerate(roles)] + [mean.assign(x=3, y=np.nan)]
    table = pd.concat(parts).sort_values(["series", "line", "x"], ascending=[False, True, True]).assign(mode="lines")
    title = "Learning rates of the roles, a line a layout: the three best, the best tenth, and the others."
    return Figure(title, table, "", "log2 lr", ticks=tuple(ROLES.values()))


def parabolas(source: Source, answer: Answer) -> Figure:
    points = _measured(source, answer)
    parts = [points.assign(y=points.loss, error=points["std"], series="runs")]
    for fit in pd.DataFrame(answer["optima"]).query("x == x").to_dict("records"):
        where = {key: fit[key] for key in CELL}
        text = ", ".join(f"{key}={fit.get(key, np.nan):.4g}" for key in ("a", "b", "c", "x", "loss", "lr"))
        parts.append(pd.DataFrame([where | {"x": fit["x"], "y": fit["loss"], "series": "optimum", "text": text}]))
        if fit.get("a") == fit.get("a", np.nan):
            own = points.x[(points[CELL] == list(where.values())).all(axis=1)]
            at = np.linspace(max(own.min(), fit["x"] - 2), min(own.max(), fit["x"] + 2), 40)
            parts.append(_line(at, fit["a"] * at**2 + fit["b"] * at + fit["c"], "parabola", **where))
    table = pd.concat(parts)
    table["row"], table["column"] = table.model + ", " + table.tokens.map(power), "batch " + table.batch.map(power)
    title = "The scan of each horizon and batch size (in tokens), and its parabola."
    return Figure(title, table, f"log2 {answer['norm']}", band=_ends(answer.get("band")))


def loss_over_lr(scans: dict[str, pd.DataFrame], norm: str, bounds: dict[str, float | None]) -> Figure:
    """Of `scans` (arm -> points), arms being whatever the runs differ in."""
    points = pd.concat([scan[scan.tokens == scan.tokens.max()].assign(column=name) for name, scan in scans.items()])
    points = points[np.isfinite(points.loss) & points.lr.notna()]
    if points.empty:
        raise FitRefused("no_lr", "no run has a finite loss and one known lr.")
    groups = points.groupby(["column", *CELL, "lr"], as_index=False)
    mean = groups.agg(y=("loss", "mean"), error=("loss", "std"), seeds=("run", "nunique"))
    mean = mean.assign(x=np.log2(mean.lr), series=mean.model + ", batch " + mean.batch.map(power), mode="lines+markers")
    mean = mean.sort_values(["series", "x"], key=natural)
    return Figure("Loss over lr at the longest horizon, mean and std over seeds, a panel an arm.", mean, "log2 lr")


def lowest_points(scans: dict[str, pd.DataFrame], norm: str, bounds: dict[str, float | None]) -> Figure:
    low = pd.concat([norm_fit.optima(scan, None, fitted=False).assign(arm=name) for name, scan in scans.items()])
    return _optima({"norm": norm}, _told_apart(low, "arm"), "scan", "arm", "Lowest loss and its norm")


def norm_under_decay(scans: dict[str, pd.DataFrame], norm: str, bounds: dict[str, float | None]) -> Figure:
    """The paper's figure 8: W <- (1 - lr decay) W - lr step ends at norm(step) / decay, where that is known."""
    if len({*bounds.values()}) < 2:
        raise FitRefused("one_decay", "all runs have one weight decay, or their steps have another norm.")
    points = pd.concat([scan.assign(arm=name) for name, scan in scans.items()])
    points = points[np.isfinite(points.x) & points.lr.notna()]
    mean = points.groupby(["arm", *CELL, "lr"], as_index=False).agg(y=("x", "mean"))
    mean = mean.assign(x=np.log2(mean.tokens), colour=mean.arm, dash=mean.lr.map(power), mode="lines+markers")
    mean["series"], mean["column"] = mean.arm + ", lr " + mean.dash, mean.model + ", batch " + mean.batch.map(power)
    parts = [mean]
    for (arm, column), own in mean.groupby(["arm", "column"]):
        if (bound := bounds[arm]) is not None:
            ends, name = [own.x.min(), own.x.max()], f"{arm}, bound"
            parts.append(_line(ends, np.log2(bound), name, colour=arm, dash="bound", column=column))
    title = "The norm under weight decay and its bound: a colour is an arm, a dash a learning rate."
    return Figure(title, pd.concat(parts), "log2 tokens", f"log2 {norm}")


def drawn(functions: Sequence[Callable[..., Figure]], *arguments: Any) -> tuple[dict[str, Figure], list[str]]:
    """By name, and sentences on what is not drawn, and why."""
    named = {function.__name__: function for function in functions}
    found, refused = attempted(named, lambda name: named[name](*arguments), FitRefused)
    return found, [f"Not drawn, {name.replace('_', ' ')}: {why}" for name, why in refused.items()]


FIGURES = (
    *(norm_against_loss, norm_growth, optima_over_horizons, optima_over_models),
    *(first_horizon, lr_over_batch, batch_over_tokens, parabolas, optima_by_variant),
)
OF_ARMS = (loss_over_lr, lowest_points, norm_under_decay)


def _line(x: Any, y: Any, series: str, **more: Any) -> pd.DataFrame:
    return pd.DataFrame({"x": x, "y": y, "series": series, "mode": "lines", **more})


def _ends(band: Answer | None) -> tuple[float, float] | None:
    return (band["log2_norm"] - band["half_width"], band["log2_norm"] + band["half_width"]) if band else None


def _measured(source: Source, answer: Answer) -> pd.DataFrame:
    points = source.points(answer["norm"])["smoothed"]
    points = points[np.isfinite(points.loss) & np.isfinite(points.x)]
    if points.empty:
        raise FitRefused("nothing_finite", "no run has a finite loss and norm at a horizon.")
    return points.assign(y=points.loss)


def _law(answer: Answer, of: str) -> rules.Rule:
    if of in answer.get("rules", {}):
        return rules.read(answer["rules"][of])
    raise FitRefused("no_rule", answer.get("refused", {}).get(of, "its law was not fitted: there is no optimal band."))
