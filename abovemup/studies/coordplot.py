"""What a coordinate check looks like: every layer's numbers over the sizes, as a picture, a table and in words."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from abovemup.studies.coordcheck import NORM_TOLERANCE, QUANTITIES, RMS_TOLERANCE, Check, Row
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
                axes.plot(check.sizes, row.values, color=colour, marker=".", linewidth=1)
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


def heading(check: Check) -> str:
    over = f"log2({check.over}), {check.over} {', '.join(map(str, check.sizes))}"
    pair = f"{check.parameterization} x {check.optimizer}, lr {check.lr:g}"
    return f"{pair}: slopes of log2(value at step {check.steps}) over {over}"


def table(check: Check) -> tuple[list[str], list[list[str]]]:
    """Columns, and the slopes of each layer."""
    cells = {(row.layer, row.quantity): cell(row) for row in check.rows}
    layers = dict.fromkeys(row.layer for row in check.rows)
    columns = ["layer", *(column for column, _ in QUANTITIES.values())]
    return columns, [[layer, *(cells.get((layer, quantity), "") for quantity in QUANTITIES)] for layer in layers]


def cell(row: Row) -> str:
    slope = f"{row.slope:+.2f}" + ("" if row.exact else "<=")
    return f"({slope})" if row.verdict == "none" else slope if row.sound else f"{slope}!"


def notes(check: Check) -> Iterator[str]:
    """What the marks mean and the metrics are conditional on; at the smallest size both bounds of what is composed, and
    M, R, P; what diverged; and whether it is flat, in a sentence."""
    yield "! outside the tolerance; brackets: shown, not judged; <= the value is an upper bound."
    if loose := [(r.input_rms, r.layer) for r in check.rows if r.input_rms is not None and r.layer[:5] != "head."]:
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for _, layer in loose}))
        largest, layer = max(loose)
        measured = f"the largest input RMS measured: {largest:.3g}, {layer}"
        yield f"No norm in front of {kinds}: their metrics are conditional on RMS(x) = 1 ({measured})."
    values = {row.layer: row.values[0] for row in check.rows if row.quantity == "forward"}
    if values:
        yield f"At the smallest {check.over}, found by gradient ascent <= the metric <= composed of the layers:"
        for layer, metrics in check.bounds.items():
            named = ((QUANTITIES[name][0], *pair) for name, pair in metrics.items())
            yield f"  {layer}: " + ", ".join(f"{low:.3g} <= {name} <= {high:.3g}" for name, low, high in named)
        largest, centred, pair = (values[layer] for layer in ("head.M", "head.R", "head"))
        yield f"  head: M {largest:.3g} (largest logit), R {centred:.3g} <= P {pair:.3g} <= 2R (difference of two)"
    yield from (f"diverged at {check.over} {size}" for size in check.diverged)
    held = f"role norms within {NORM_TOLERANCE:g}; RMS of residual stream, FFN middle and output < {RMS_TOLERANCE:g}"
    name = f"{check.parameterization} x {check.optimizer}"
    wrong = sorted((row for row in check.rows if not row.sound), key=lambda row: -abs(row.slope))
    worst = ", ".join(f"{QUANTITIES[w.quantity][0]} of {w.layer} {w.verdict} {w.slope:+.2f}" for w in wrong[:3])
    not_flat = f"not flat: {name}: {len(wrong)} slopes; {worst or 'it diverged'} ({held})"
    yield f"flat: {name} ({held})" if check.flat else not_flat
