"""One logged key over tokens, a curve a run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from abovemup.analysis.runs import Row, logged, trajectory
from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean


def curves(rows: Sequence[Row], key: str) -> list[tuple[str, "pd.Series[float]"]]:
    """(run, values of `key` by tokens) of each run that has finite ones, from step 1 on: the axis is
    logarithmic. Raises RequestError when none has, with the nearest key; Damaged."""
    found = []
    for row in rows:
        frame = trajectory(Path(row["dir"]), [key])
        values = frame[(frame["step"] > 0) & np.isfinite(frame[key])].set_index("tokens")[key]
        found += [(row["run"], values)] if len(values) else []
    if not found:
        known = sorted({name for row in rows[:1] for each in logged(Path(row["dir"])) for name in each})
        raise RequestError(f"the runs have no finite {key}.{did_you_mean(key, known)}")
    return found


def save_figure(drawn: Sequence[tuple[str, "pd.Series[float]"]], key: str, path: Path) -> None:
    """All curves on logarithmic axes (a loss is linear), in the file type that `path` ends in, else PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, max(4.5, 0.16 * len(drawn))), layout="constrained")
    axes = figure.subplots()
    for (name, values), colour in zip(drawn, colormaps["viridis"](np.linspace(0, 0.9, len(drawn))), strict=True):
        axes.plot(values.index, values, color=colour, linewidth=1, label=name, marker="." if len(values) == 1 else None)
    axes.set_xscale("log", base=2)
    if key.startswith(("norm/", "update/")):
        axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens", ylabel=key)
    figure.legend(loc="outside right upper", fontsize=6, frameon=False)
    figure.savefig(path, dpi=120)
