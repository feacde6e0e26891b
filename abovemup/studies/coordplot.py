"""What a coordinate check looks like: every layer's numbers over the sizes, as a picture and in a terminal."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from abovemup.studies.coordcheck import QUANTITIES, Check
from abovemup.tracking.plot import braille


def save_figure(checks: Sequence[Check], path: Path) -> None:
    """One row of panels a check, one line a layer; both axes are logarithmic. Unsound layers are drawn red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.3 * len(QUANTITIES), 2.6 * len(checks)), layout="constrained")
    grid = figure.subplots(len(checks), len(QUANTITIES), squeeze=False)
    for check, line in zip(checks, grid, strict=True):
        for (quantity, (_, title)), axes in zip(QUANTITIES.items(), line, strict=True):
            rows = [row for row in check.rows if row.quantity == quantity]
            for row in sorted(rows, key=lambda row: not row.sound):
                colour = "tab:red" if not row.sound else "0.7" if row.verdict == "none" else "tab:blue"
                axes.plot(check.sizes[: len(row.values)], row.values, color=colour, marker=".", linewidth=1)
            axes.set(xscale="log", yscale="log", xlabel=check.over, title=title)
            axes.set_xticks(check.sizes, [str(size) for size in check.sizes], minor=False)
            axes.minorticks_off()
            axes.title.set_size(9)
        line[0].set_ylabel(f"{check.parameterization} x {check.optimizer}\nlr {check.lr:g}, step {check.steps}")
    figure.savefig(path, dpi=110)


def curves(check: Check, width: int = 48, height: int = 3) -> Iterator[str]:
    """Lines for a terminal: of each quantity the layer that changes most, log2 of its value over log2 of the size."""
    for quantity, (_, title) in QUANTITIES.items():
        rows = [row for row in check.rows if row.quantity == quantity and not math.isnan(row.slope)]
        if rows:
            steepest = max(rows, key=lambda row: abs(row.slope))
            first, last = steepest.values[0], steepest.values[-1]
            yield f"{title}: {steepest.layer}, {first:.3g} -> {last:.3g} (slope {steepest.slope:+.2f})"
            columns: list[float | None] = [None] * (2 * width)  # at equal distances, which the plot joins
            for i, value in enumerate(steepest.values):
                columns[round(i * (2 * width - 1) / (len(steepest.values) - 1))] = math.log2(value)
            yield from braille(columns, height)
