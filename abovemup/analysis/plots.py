"""What the fits look like: a colour is a batch size, or a horizon where batch is the axis."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure


def norm(answer: dict[str, Any], points: pd.DataFrame, path: Path) -> None:
    """A panel a horizon and model: the runs, the parabolas with their vertices, the band."""
    panels = list(points.groupby(["model", "tokens"], dropna=False))
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    band, x = answer["band"], np.linspace(points.x.min(), points.x.max(), 300)
    for ((model, tokens), group), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        if band:
            axes.axvspan(*(band["log2_norm"] + side * band["half_width"] for side in (-1, 1)), color="0.9")
        axes.set(title=f"{model}, {tokens:.4g} tokens", xlabel=f"log2 {answer['norm']}", ylabel="loss")
        rows = [row for row in answer["optima"] if row["model"] == model and str(row["tokens"]) == str(tokens)]
        for i, row in enumerate(rows):
            runs = group[group.batch.astype(str) == str(row["batch"])]
            axes.plot(runs.x, runs.loss, ".", color=f"C{i % 10}", label=f"batch {row['batch']:.4g}")
            if not row["reason"]:
                near = x[abs(x - row["x"]) < 1]
                axes.plot(near, row["a"] * near**2 + row["b"] * near + row["c"], color=f"C{i % 10}", linewidth=0.8)
                axes.plot(row["x"], row["loss"], "D", color=f"C{i % 10}", markersize=5)
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)


@contextlib.contextmanager
def _axes(path: Path, x: str, y: str) -> Iterator[Any]:
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    yield axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)


def rule(answer: dict[str, Any], rows: pd.DataFrame, path: Path) -> None:
    """The best lr over batch size, a colour a horizon, and the law as lines."""
    table = pd.DataFrame(answer["optima"]) if "optima" in answer else rows
    law = answer["rules"].get("lr", {}).get("exponents")
    with _axes(path, "log2 batch (tokens)", "log2 best lr") as axes:
        for i, (tokens, group) in enumerate(table.dropna(subset="lr").groupby("tokens")):
            at = group[["batch", "lr", "tokens"]].assign(constant=2.0).astype(float).map(np.log2)
            label = f"{tokens:.4g} tokens" if law else None
            axes.plot(at.batch, at.lr, "o", color=f"C{i % 10}", label=label)
            if law:
                axes.plot(at.batch, at[[*law]].to_numpy() @ np.array([*law.values()]), "--", color=f"C{i % 10}")


def growth(answer: dict[str, Any], rows: pd.DataFrame, path: Path) -> None:
    """log2(norm) over log2(tokens), a colour a batch size, the breaks marked."""
    batches = sorted(rows.batch.unique())
    with _axes(path, "log2 tokens", f"log2 {answer['norm']}") as axes:
        for i, batch in enumerate(batches):
            axes.plot([], [], color=f"C{i % 10}", label=f"batch {batch:.4g}")
        for curve in answer["curves"]:
            colour = f"C{batches.index(curve['batch']) % 10}"
            run = rows[(rows.run == curve["run"]) & (rows.tokens > 0)].sort_values("tokens")
            axes.plot(np.log2(run.tokens), run.x, color=colour, linewidth=0.8)
            corners = [(np.log2(corner["tokens"]), corner["log2_norm"]) for corner in curve["breaks"]]
            axes.plot(*zip(*corners, strict=True), "o", color=colour, fillstyle="none") if corners else None
