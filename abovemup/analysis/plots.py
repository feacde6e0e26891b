"""What the scan of a norm looks like: a colour is a batch size."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure


def draw(answer: dict[str, Any], points: pd.DataFrame, path: Path) -> None:
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
