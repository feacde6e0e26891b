"""Two renderers of `figures.Figure`: plotly for the browser, matplotlib for files. Colours are those of Okabe and Ito,
and who does not see them apart has dashes and markers."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from abovemup.analysis.figures import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "triangle-up": "^", "star": "*"}


def traces(figure: Figure) -> Iterator[tuple[int, int, str, dict[str, Any], pd.DataFrame]]:
    """Row and column of the panel (from 0), name, {mode, colour, dash, marker} and points of each thing to draw."""
    keys = {name: list(dict.fromkeys(figure.table[name])) for name in ("row", "column", "colour", "dash")}
    for (_, _, series, mode), points in figure.table.groupby(["row", "column", "series", "mode"], sort=False):
        row, column, colour, dash = (found.index(points[name].iloc[0]) for name, found in keys.items())
        style = {"mode": mode, "colour": COLOURS[colour % len(COLOURS)], "dash": [*DASHES][dash % len(DASHES)]}
        style["marker"] = [*MARKERS][(colour + colour // len(COLOURS)) % len(MARKERS)]
        yield row, column, str(series), style, points


def panels(figure: Figure) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(figure.table.row)), list(dict.fromkeys(figure.table.column))


def html(figure: Figure, name: str) -> str:
    """A <div> and the script that draws it; plotly's own script is to be there once."""
    from markupsafe import escape  # plotly reads some tags in texts
    from plotly.subplots import make_subplots

    rows, columns = panels(figure)
    wide = max(12, 150 // len(columns))
    told = ["<br>".join(map(escape, textwrap.wrap(column, wide, break_on_hyphens=False))) for column in columns]
    titles: Any = {"row_titles": rows, "column_titles": told, "x_title": figure.x, "y_title": figure.y}
    drawn = make_subplots(len(rows), len(columns), shared_xaxes="all", shared_yaxes="all", **titles)
    seen: set[str] = set()
    for row, column, series, style, points in traces(figure):
        marker: Any = {"symbol": style["marker"], "color": style["colour"]}
        marker |= {name: points[name].tolist() for name in ("size", "opacity")}
        if "shade" in points and points.shade.notna().all():
            ends = {"cmin": figure.table.shade.min(), "cmax": figure.table.shade.max()}
            marker |= {"color": points.shade.tolist(), "colorscale": "Cividis", "colorbar": {"x": 1.15}, **ends}
        trace: Any = {"x": points.x.tolist(), "y": points.y.tolist(), "text": points.text.map(escape).tolist()}
        trace |= {"type": "scatter", "mode": style["mode"], "name": str(escape(series)), "legendgroup": series}
        trace |= {"showlegend": series not in seen, "line": {"color": style["colour"], "dash": style["dash"]}}
        trace |= {"opacity": float(points.opacity.iloc[0])} if style["mode"] == "lines" else {}
        trace |= {"error_y": {"array": points.error.tolist(), "visible": bool(points.error.notna().any())}}
        trace |= {"marker": marker, "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}"}
        drawn.add_trace(trace, row + 1, column + 1)
        seen.add(series)
    if figure.band:
        drawn.add_vrect(*figure.band, fillcolor="grey", opacity=0.2, line_width=0)
    if figure.ticks:
        drawn.update_xaxes(tickvals=list(range(len(figure.ticks))), ticktext=list(figure.ticks))
    if figure.ends:
        drawn.update_xaxes(autorangeoptions={"include": figure.ends})
    top = 30 + 18 * max(text.count("<br>") for text in told)
    margin = {"t": top, "b": 60, "l": 70, "r": 20}
    drawn.update_layout(template="plotly_white", height=140 + top + 220 * len(rows), width=1160, margin=margin)
    return str(drawn.to_html(full_html=False, include_plotlyjs=False, div_id=name, config={"displaylogo": False}))


def save(figure: Figure, *paths: Path) -> None:
    """In the file types that the paths end in."""
    from matplotlib.figure import Figure as Canvas

    rows, columns = panels(figure)
    size = max(6.4, 2.6 * len(columns)), max(4.4, 2.2 * len(rows))
    canvas = Canvas(figsize=size, layout="constrained")
    axes = canvas.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    seen: dict[str, Any] = {}
    for row, column, series, style, points in traces(figure):
        at, colour = axes[row][column], style["colour"]
        if "lines" in style["mode"]:
            dash, alpha = DASHES[style["dash"]], points.opacity.iloc[0] if style["mode"] == "lines" else 1
            seen.setdefault(series, *at.plot(points.x, points.y, dash, color=colour, linewidth=1, alpha=alpha))
        if "markers" in style["mode"]:
            look: Any = {"s": points["size"] ** 2 / 2, "marker": MARKERS[style["marker"]], "alpha": points.opacity}
            shaded = "shade" in points and points.shade.notna().all()
            ends = {"vmin": figure.table.shade.min(), "vmax": figure.table.shade.max()} if shaded else {}
            look |= {"c": points.shade, "cmap": "cividis", **ends} if shaded else {"color": colour}
            marks = at.scatter(points.x, points.y, **look)
            at.errorbar(points.x, points.y, points.error, fmt="none", ecolor=colour, linewidth=0.7)
            if shaded and series not in seen:
                canvas.colorbar(marks, ax=axes)
            seen.setdefault(series, marks)
    for i, line in enumerate(axes):
        for j, at in enumerate(line):
            at.set_title("\n".join(textwrap.wrap(f"{rows[i]} {columns[j]}", 36)), fontsize=7)
            at.axvspan(*figure.band, color="0.9", zorder=0) if figure.band else None
            at.set_xticks(range(len(figure.ticks)), figure.ticks) if figure.ticks else None
            at.set_xlim(figure.ends) if figure.ends else None
    canvas.supxlabel(figure.x)
    canvas.supylabel(figure.y)
    canvas.legend(seen.values(), seen.keys(), loc="outside right upper", fontsize=6, frameon=False)
    for path in paths:
        canvas.savefig(path, dpi=120)
