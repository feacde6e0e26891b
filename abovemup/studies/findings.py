"""What an ablation's runs say: points.csv, a table, a figure, and one sentence with a verdict, beside the paper's."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis.norm_fit import DULL, NEAREST
from abovemup.analysis.runs import Damaged, logged
from abovemup.config.numbers import parse_float
from abovemup.studies.ablate import OUTPUT, Ablation, Point
from abovemup.studies.board import look
from abovemup.studies.cells import Cell, place
from abovemup.studies.transfer import Scan, drift, interval, optimum, spread, vertices
from abovemup.tracking.summary import write_summary

LIMITED = 0.75  # octaves: a norm that is as near to the most that its steps allow is step-limited
_CONDITIONS = ("model", "data", "data.path", "optimizer", "optimizer.momentum", "schedule")
_MOST = 12  # arms that a figure and a sentence name
_UNTUNED = ("edge", "batch_edge", "step_limited")
_SCALE = "optimizer.lr_scale."
_WORDS = {"size": "sizes", "tokens": "horizons"}


def report(ablation: Ablation, asked: list[Point], folder: Path) -> dict[str, Any]:
    """The table and the verdict on what is there so far; writes points.csv, result.json and the figure in `folder`."""
    frame = measured(ablation, asked, folder)
    frame.drop(columns=["arm", "h", "b", "id", "ended"]).to_csv(folder / "points.csv", index=False)
    scans = [scan_of(own, ablation.fit) for _, own in frame.groupby("arm", sort=False)]
    draw(ablation, scans, folder)
    same = same_runs(frame)
    table = [row for scan in scans for row in rows(ablation, scan, same)]
    last = [row for row in table if row["group"] == scans[0].groups[-1] and math.isfinite(row.get("lowest", math.nan))]
    settings = (f"{key}={ablation.fixed[key]}" for key in _CONDITIONS if key in ablation.fixed)
    untuned = f"batch {frame.batch[0]:,} tokens, not tuned; " if frame.batch.nunique() == 1 else ""
    seeds, horizons = len(ablation.axes[ablation.seeds]), ", ".join(f"{n:,}" for n in sorted({*frame.tokens}))
    sure = f"a bootstrap over {seeds} seeds" if seeds > 1 else "what the residuals of one seed leave open"
    out = {
        "question": ablation.question,
        "paper": ablation.paper,
        "cells": frame.drop_duplicates("id").ended.value_counts(sort=False).to_dict(),
        "fit": ablation.fit,
        "table": table,
        "verdicts": [*verdicts(ablation, scans)] if ablation.verdicts else [],
        "layout": layout(ablation.arms, last) if ablation.verdicts else None,
        "conditions": f"{', '.join(settings)}; {untuned}validation loss at {horizons} tokens; intervals: the "
        f"middle 95 % of {sure}.",
    }
    out["verdict"] = sentence(ablation, out, last)
    write_summary(folder / "result.json", out)
    return out


def measured(ablation: Ablation, asked: list[Point], folder: Path) -> pd.DataFrame:
    """A row a point and horizon (h is its index), as in points.csv; a run that goes on has those that it has passed."""
    cells, table = {p.cell.id: p.cell for p in asked}, []
    known = {id: _passed(folder, cell, ablation.tokens or [cell.tokens]) for id, cell in cells.items()}
    for p in asked:
        ended, passed = known[p.cell.id]
        for h, tokens in enumerate(ablation.tokens or [p.cell.tokens]):
            row = passed.get(tokens, {})
            norms = {key.removeprefix("norm/"): value for key, value in row.items() if key.startswith("norm/")}
            most = math.nan if p.growth is None else 1 + p.growth * (tokens // p.batch)
            table.append(
                dict(zip(ablation.arms, p.arm, strict=True))
                | {"size": p.size, "tokens": tokens, "batch": p.batch, "lr": p.lr, "seed": p.seed}
                | {"status": "finished" if row else ended}
                | {"val_loss": row.get("val/loss", math.inf if ended == "diverged" else math.nan), **norms}
                | {"step_limited": norms.get(OUTPUT, math.nan) > most * 2**-LIMITED, "cell": p.cell.name}
                | {"arm": p.arm, "h": h, "b": 0 if "batch" in ablation.size else p.batch}
                | {"id": p.cell.id, "ended": ended}
            )
    return pd.DataFrame(table)


def _passed(folder: Path, cell: Cell, horizons: list[int]) -> tuple[str, dict[int, dict[str, Any]]]:
    """How the cell stands, and tokens -> what was measured there."""
    status, rows = look(folder, cell).status, {}
    with suppress(Damaged):
        rows = {int(row["tokens"]): row for row in logged(place(folder, cell)) if "val/loss" in row}
    return status, {n: rows[n] for n in horizons if n in rows and (n < cell.tokens or status == "finished")}


def scan_of(own: pd.DataFrame, fit: str) -> Scan:
    """Of the rows of one arm; groups are its sizes, and in each the horizons. A norm counts that is there everywhere.

    Where the lr is fitted nothing is step-limited: that says something of a norm.
    """
    known = {key: [*dict.fromkeys(own[key])] for key in ("size", "h", "b", "lr", "seed")}
    known |= {key: sorted(known[key]) for key in ("b", "lr")}
    shape = [len(found) for found in known.values()]
    at = tuple(pd.Categorical(own[key], found).codes for key, found in known.items())

    def dense(values: Any, empty: Any = math.nan) -> Any:
        whole = np.full(shape, empty)
        whole[at] = values
        return whole.reshape(-1, *shape[2:])

    there = own[own.status == "finished"]
    norms = [key for key in own if "/" in str(key) and len(there) and there[key].gt(0).all()]
    x = {str(key): dense(np.log2(own[key].astype(float))) for key in norms}
    x |= {key: dense(np.log2(own.lr) + power * np.log2(own.tokens / own.batch)) for key, power in DULL.items()}
    each = own.drop_duplicates(["size", "h"])
    groups = [f"{size} {n:,}".strip() for size, n in zip(each["size"], each.tokens, strict=True)]
    limited = dense(own.step_limited & (fit != "lr"), False)
    return Scan(own.arm.iloc[0], groups, known["b"], np.log2(known["lr"]), dense(own.val_loss), x, limited)


def rows(ablation: Ablation, scan: Scan, same: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Of each size and horizon the optimum over the seeds that are whole: x is log2 of what is fitted."""
    sizes = np.repeat(ablation.sizes, len(scan.groups) // len(ablation.sizes)).tolist()
    for group, (label, size) in enumerate(zip(scan.groups, sizes, strict=True)):
        one = scan.pick([group]).whole()
        row: dict[str, Any] = {"arm": scan.arm, "size": size, "group": label, "seeds": one.losses.shape[-1]}
        row |= {"missing": int(np.isnan(scan.losses[group]).sum()), "same_runs_as": same.get((scan.arm, size))}
        if row["seeds"]:
            fit, k = ablation.fit if ablation.fit in one.x else "lr", _nearest(ablation)
            row |= optimum(one, fit, 0, k) | {"interval": interval(vertices(one, fit, k)[1:, 0])}
            row |= {} if fit == ablation.fit else {"x": math.nan, "reason": "not_measured"}
        yield row


def _nearest(ablation: Ablation) -> int:
    return 3 if ablation.fit == "lr" else NEAREST


def same_runs(frame: pd.DataFrame) -> dict[Any, Any]:
    """(arm, size) -> the earlier arm that is the same runs there."""
    first: dict[frozenset[Any], Any] = {}
    groups = frame.groupby(["arm", "size"], sort=False).id
    owners = {key: first.setdefault(frozenset(ids), key[0]) for key, ids in groups}
    return {key: owner for key, owner in owners.items() if owner != key[0]}


def verdicts(ablation: Ablation, scans: list[Scan]) -> Iterator[dict[str, Any]]:
    """Of each arm over the sizes at the longest horizon, or over the horizons at each size."""
    sizes = ablation.sizes
    for scan in scans if ablation.over != "arms" else ():
        index = np.arange(len(scan.groups)).reshape(len(sizes), -1)
        parts = {"": scan.pick(index[:, -1])}
        if ablation.over == "tokens":
            parts = {s: scan.pick(at) for s, at in zip(sizes, index, strict=True)}
        for size, part in parts.items():
            found = drift(part, ablation.over) if ablation.fit == "lr" else spread(part, ablation.fit, ablation.over)
            yield found | {"name": " ".join([*scan.arm, *([size] if len(parts) > 1 else [])]) or "it"}


def layout(axes: list[str], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the best scales of the lr gain over the best uniform lr, and over uniform at the best run's head lr, which
    is what the paper's 6 % is (figure 4b). None without such axes."""
    at = [i for i, axis in enumerate(axes) if axis.startswith(_SCALE)]
    head = [i for i in at if f"{_SCALE}head" in axes[i]]
    if not head or not rows:
        return None
    scales = [[parse_float(row["arm"][i]) for i in at] for row in rows]
    losses = np.array([row["lowest"] for row in rows])
    best = int(losses.argmin())
    uniform = {each[0]: loss for each, loss in zip(scales, losses, strict=True) if len({*each}) == 1}
    at_head = uniform.get(parse_float(rows[best]["arm"][head[0]]), math.nan)
    return {
        "over_uniform": 1 - losses[best] / min(uniform.values(), default=math.nan),
        "over_uniform_at_head": 1 - losses[best] / at_head,
        "edge": any(of in (min(each), max(each)) for of, each in zip(scales[best], np.transpose(scales), strict=True)),
    }


def sentence(ablation: Ablation, found: dict[str, Any], last: list[dict[str, Any]]) -> str:
    """The answer, of `last`, the rows of the arms at the end, where arms are compared."""
    if not ablation.verdicts:
        return "Nothing is concluded at this budget: it says that everything works."
    if ablation.over == "arms":
        return _compared(sorted(last, key=lambda row: float(row["lowest"])), found["layout"])
    told: dict[str, list[str]] = {"transfers": [], "drifts": [], "cannot tell": []}
    for row in found["verdicts"]:
        why = row.get("why", "")
        if "spreads" in row:
            own, rival = next(iter(row["spreads"].values())), row["spreads"][row["rival"]]
            why = f"spread {own[0]:.2f} octaves, regret {own[3]:.4f}; of {row['rival']} {rival[0]:.2f}, {rival[3]:.4f}"
        told[row["verdict"]].append(f"{row['name']} ({why})" if why else row["name"])
    steps = "/".join(dict.fromkeys(f"{row['step']:g}" for row in found["verdicts"] if "step" in row)) or "?"
    parts = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in told.items() if names)
    return f"The best {ablation.fit} over {_WORDS[ablation.over]} (lr step {steps} octave): {parts}."


def _compared(rows: list[dict[str, Any]], gains: dict[str, Any] | None) -> str:
    if not rows:
        return "No arm is complete."
    best, noise = rows[0], float(np.max([row["noise"] for row in rows]))  # nan if one is
    names = [" ".join([*row["arm"], f"({row['reason']})" * (row["reason"] in _UNTUNED)]).strip() for row in rows]
    far = [f"{name} {row['lowest'] - best['lowest']:+.4f}" for name, row in zip(names, rows, strict=True)][1:_MOST]
    each = ", ".join(f"{row['noise']:.4f} {name}" for name, row in zip(names, rows, strict=True))
    sure = "one seed: no claim" if math.isnan(noise) else f"noise of seeds {each if len(rows) < 4 else f'{noise:.4f}'}"
    told = f"The best tuned loss at {best['group']} is {best['lowest']:.4f}, of {names[0]}"
    if gains:
        sure += (
            f"; it is {gains['over_uniform']:.1%} below the best uniform lr, {gains['over_uniform_at_head']:.1%} below "
            f"uniform at its head's lr{', at an edge of the scan' if gains['edge'] else ''}"
        )
    return f"{'; '.join([told, *far, sure])}."


def draw(ablation: Ablation, scans: list[Scan], folder: Path) -> None:
    """figure.png: a panel an arm (of many the best), a line a size and horizon at its best batch (mean and range of
    seeds), its optimum dotted; step-limited points are hollow. Arms of one lr each are points of one panel."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    one = all(len(scan.lrs) == 1 for scan in scans)
    best = sorted(scans, key=lambda scan: np.nan_to_num(scan.losses, nan=math.inf).min())[: None if one else _MOST]
    count = 1 if one else len(best)
    columns, lines = min(4, count), -(-count // 4)
    figure = Figure(figsize=(3.4 * columns, 2.9 * lines), layout="constrained")
    panels = [*figure.subplots(lines, columns, squeeze=False, sharey=True).flat]
    lowest: list[float] = []
    for scan, axes in zip(best, panels * (len(best) if one else 1), strict=False):
        axes.set(title="" if one else " ".join(scan.arm), xlabel=f"log2 {ablation.fit}", ylabel="validation loss")
        for i, label in enumerate(scan.groups):
            alone = scan.pick([i]).whole()
            if alone.losses.size and ablation.fit in alone.x:
                name = "" if one and scan is not best[0] else label
                lowest.append(_line(axes, alone, ablation, colormaps["tab20"](i % 20), name))
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    curves = {label: curve for handles, labels in found for curve, label in zip(handles, labels, strict=True)}
    if curves:  # beside the panels, which have one size and horizon in one colour
        figure.legend(curves.values(), curves.keys(), loc="outside right upper", fontsize=7)
    for axes in panels[count:]:
        axes.set_visible(False)
    if lowest and panels[0].get_ylim()[1] > (top := max(lowest) + 1):  # what is a nat worse than the worst best
        panels[0].set_ylim(min(lowest) - 0.1, top)
    figure.savefig(folder / "figure.png", dpi=120)


def _line(axes: Any, one: Scan, ablation: Ablation, colour: Any, label: str) -> float:
    """Returns the lowest loss."""
    best = optimum(one, ablation.fit, 0, _nearest(ablation))
    b = one.batches.index(best["batch"])
    x = one.x[ablation.fit][0, b].mean(axis=-1)
    order = np.argsort(x)
    x, losses, limited = x[order], one.losses[0, b][order], one.limited[0, b].any(axis=-1)[order]
    axes.plot(x, losses.mean(axis=-1), color=colour, linewidth=0.8, label=label or None)
    axes.fill_between(x, losses.min(axis=-1), losses.max(axis=-1), color=colour, alpha=0.2)
    for at, fill in ((limited, "none"), (~limited, "full")):
        axes.plot(x[at], losses[at].mean(axis=-1), "o", color=colour, markersize=4, fillstyle=fill)
    if not best["reason"]:
        axes.axvline(best["x"], color=colour, linewidth=0.8, linestyle=":")
    return float(losses.mean(axis=-1).min())
