"""What a fit reads: our runs and studies, points.csv of an ablation, and CSV files in the paper's columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis import paper
from abovemup.analysis.norm_fit import initial_loss
from abovemup.config.errors import RequestError
from abovemup.config.numbers import parse_float

OUTPUT = "head/rms_to_inf"
CONDITIONS = (*paper.CONDITIONS, "model.init", "parameterization.base_depth", "tokenizer.name")
_SMOOTHED = (2**33, range(8 * paper.SEQUENCE, 128 * paper.SEQUENCE + 1))  # horizons from, batches: the paper's windows
_WINDOW = 16  # loss=window: the mean over the last 1/16 of the tokens
# Columns of the paper's files (its public toolkit's, raw and preprocessed, and those read off its figures) -> ours.
_PAPER = {
    "_step": "step",
    "loss_metrics/global_avg_loss": "loss",
    "train_loss": "loss",
    "train_loss_mean": "loss",
    "train_loss_std": "std",
    "output_norm": f"norm/{OUTPUT}",
    "output_norm_mean": f"norm/{OUTPUT}",
    "norm": f"norm/{OUTPUT}",
    "track_param_rms_to_l1/model_part_0/output": f"norm/{OUTPUT}",  # its misnomer for RMS -> infinity
    "track_param_rms_to_inf/model_part_0/output": f"norm/{OUTPUT}",
    "track_param_rms_to_inf/output": f"norm/{OUTPUT}",
    "row": "tokens",
    "horizon": "tokens",
    "mean_lr_over_6_variants": "lr",
    "first_horizon": "tokens",
    "run_name": "run",
}


@dataclass
class Source:
    """Rows {run, model, batch, lr, tokens, loss, std, norm/<layer>/<norm>}; batch and tokens in tokens, loss in nats.

    kind: "runs" (a row a logged step), "points" (a row a run and horizon), "optima" (a row a batch and horizon) or
    "first" (a row a batch and lr: the first horizon in the band). A run that diverged has the loss inf.
    """

    kind: str
    rows: pd.DataFrame
    loss: str
    conditions: dict[str, Any]
    intercept: float | None
    horizons: set[int] = field(default_factory=set)
    excluded: dict[str, str] = field(default_factory=dict)  # run -> why

    def curves(self, norm: str = OUTPUT) -> pd.DataFrame:
        """The rows with x = log2(norm), nan where it was not measured. Raises RequestError for an unknown norm."""
        if f"norm/{norm}" not in self.rows:
            there = ", ".join(sorted(self.norms)) or "none"
            raise RequestError(f"--norm {norm}: not measured here. There are: {there}.")
        values = self.rows[f"norm/{norm}"].astype(float)
        return self.rows.assign(x=np.log2(values.where(values > 0)))

    @property
    def norms(self) -> list[str]:
        return [name.removeprefix("norm/") for name in map(str, self.rows) if name.startswith("norm/")]

    def points(self, norm: str = OUTPUT) -> dict[str, pd.DataFrame]:
        """At the exact horizons: "smoothed", and "raw" of single steps where that is another."""
        rows = self.curves(norm)
        found = {"smoothed": rows} if self.kind == "points" else at_horizons(rows, self.loss, self.horizons)
        for name, frame in found.items():
            bad = np.isfinite(frame.loss) & (frame.loss >= (self.intercept or np.inf))
            self.excluded |= dict.fromkeys(frame.run[bad].astype(str), "at a horizon no better than untrained")
            found[name] = frame[~bad]
        if found["smoothed"].empty:
            raise RequestError("no run has this loss and norm at the horizons. Give others: --horizons 2^20,2^21")
        return found


def open_source(path: Path, loss: str | None = None, where: Sequence[str] = (), horizons: Sequence[int] = ()) -> Source:
    """Reads `path`. loss: paper, val or window; None is val, else window, for our runs. Raises RequestError."""
    if path.name == "points.csv" and (path.parent / "runs").is_dir():
        path = path.parent
    if not path.is_file():
        return _runs(path, loss, where, {*horizons})
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is no folder of runs and no CSV file: {error}.") from error
    table = _where(table, where, path)
    return _ablation(table, path) if {"cell", "val_loss"} <= {*table} else _paper(table, path, {*horizons})


def _where(table: pd.DataFrame, where: Sequence[str], path: Path) -> pd.DataFrame:
    for text in where:
        key, _, value = text.partition("=")
        if key not in table:
            raise RequestError(f"--where {text}: {path} has no {key}.")
        try:
            table = table[pd.to_numeric(table[key]) == parse_float(value)]
        except (ValueError, TypeError):
            table = table[table[key].astype(str) == value]
    if table.empty:
        raise RequestError(f"{path} has no run{f' with {chr(32).join(where)}' if where else ''}.")
    return table


def _conditions(table: pd.DataFrame, keys: Sequence[str], path: Path) -> dict[str, Any]:
    """What all the runs share. Raises RequestError when they do not: one fit over several of them would be none."""
    values = {key: table[key].dropna().unique().tolist() for key in keys if key in table}
    for key, found in values.items():
        if len(found) > 1:
            raise RequestError(f"{path} mixes {key}: {', '.join(map(str, found))}. Choose: --where {key}={found[0]}.")
    return {key: found[0] for key, found in values.items() if found}


def _paper(table: pd.DataFrame, path: Path, horizons: set[int]) -> Source:
    logs = [str(name) for name in table if str(name).startswith("log2_")]
    table = table.assign(**{name[5:]: 2.0 ** table[name] for name in logs}).rename(columns=_PAPER)
    if "bs" not in table and "lr" in table:  # Fig. 1a
        table = table.assign(bs=128, tokens=2**33)
    if "bs" not in table or not {"tokens", "step"} & {*table}:
        raise RequestError(f"{path}: expected bs, a horizon or step, and norms or lrs, as in the paper's files.")
    table["batch"] = table.bs * paper.SEQUENCE
    if "tokens" not in table:
        table["tokens"] = (table.batch * table.step).round()
    table["tokens"] = table.tokens.map(parse_float)
    if "lr" not in table:  # one lr, unless the groups' differ
        lr = table.get("lr_out", pd.Series(np.nan, table.index))
        table["lr"] = lr.where((table.get("lr_in", lr) == lr) & (table.get("lr_hidden", lr) == lr))
    kind = "first" if "log2_first_horizon" in logs else "optima"
    if f"norm/{OUTPUT}" in table:
        kind = "runs" if "step" in table else "points"
    if "loss" not in table:  # opacity in the figures of optima: 1 at the best batch
        table["loss"] = 1 - table.alpha_opacity if "alpha_opacity" in table else np.nan
    order = pd.Series(range(len(table)), table.index) if kind in ("optima", "first") else table.lr
    names = table.bs.astype(str) + "-" + table.get("lr_rank", order).astype(str)
    defaults: dict[str, Any] = {"run": "bs" + names, "model": "proxy_69m", "std": 0.0}
    table = table.assign(**{name: value for name, value in defaults.items() if name not in table})
    horizons = horizons or _powers(table, 64)
    return Source(kind, table, "paper", dict(paper.CONDITIONS), paper.INTERCEPT, horizons)


def _ablation(table: pd.DataFrame, path: Path) -> Source:
    *arms, size = [str(name) for name in table][: list(table).index("lr")]
    ended = table.status.isin(["finished", "diverged"])
    rows = table[ended].rename(columns={"cell": "run", "output_norm": f"norm/{OUTPUT}"})
    loss = rows.val_loss.where(rows.status == "finished", np.inf)
    rows = rows.assign(model=size + "=" + rows[size].astype(str), tokens=np.nan, batch=np.nan, loss=loss, std=0.0)
    left = dict(zip(table.cell[~ended], table.status[~ended], strict=True))
    return Source("points", rows, "val", _conditions(table, arms, path), None, excluded=left)


def _runs(path: Path, loss: str | None, where: Sequence[str], horizons: set[int]) -> Source:
    from abovemup.analysis.runs import load_runs, summaries

    runs = summaries(path)
    excluded = dict(runs.attrs["skipped"])
    runs = _where(runs, where, path)
    ended = runs.status.isin(["finished", "diverged"])
    excluded |= dict(zip(runs.run[~ended], runs.status[~ended], strict=True))
    if not (runs := runs[ended]).shape[0]:
        raise RequestError(f"{path}: no run is finished.")
    excluded |= dict.fromkeys(runs.run[runs.status == "diverged"], "diverged")
    conditions = _conditions(runs, CONDITIONS, path)
    plan = runs[["run"]].assign(
        model="w" + runs["model.width"].astype(str) + "-d" + runs["model.depth"].astype(str),
        batch=runs["train.batch_size"] * runs["train.seq_len"],
        lr=runs["optimizer.lr"],
        end=runs["train.tokens"],
        constant=runs["schedule.name"] == "constant",
        diverged=runs.status == "diverged",
    )
    rows = load_runs(path).merge(plan, on="run").assign(std=0.0)
    validated = "val/loss" in rows and rows["val/loss"].notna().any()
    loss = loss or ("val" if validated else "window")
    if loss == "val":
        if not validated:
            raise RequestError("--loss val: no validation loss was logged. Use --loss window.")
        rows["loss"] = rows["val/loss"]
    horizons = horizons or _powers(rows[rows.constant], 16) | {*plan.end}
    intercept = initial_loss(int(conditions["model.vocab_size"]), int(runs["model.width"].max()))
    return Source("runs", rows, loss, conditions, intercept, horizons, excluded)


def _powers(rows: pd.DataFrame, share: int) -> set[int]:
    """Powers of two in tokens, from 1/share of the most on: the horizons of runs at a constant lr."""
    top = int(rows.tokens.max()) if len(rows) else 0
    return {2**n for n in range(top.bit_length()) if 2**n * share >= top}


def at_horizons(rows: pd.DataFrame, loss: str, horizons: set[int]) -> dict[str, pd.DataFrame]:
    """Rows at exact token counts (PAPER 5.1): "smoothed" as `loss` says, and, unless that is val, "raw" as logged.

    A run whose lr decays counts at its end only; one that diverged has the loss inf at all horizons of its batch size.
    """
    rows = rows.sort_values(["run", "tokens"])
    gone = rows.get("diverged", pd.Series(False, rows.index))
    out: dict[str, list[dict[Any, Any]]] = {"smoothed": [], "raw": []}
    for _, run in rows[~gone].groupby("run"):
        measured = run[run.x.notna() & run.loss.notna()].reset_index(drop=True)
        for position in np.flatnonzero(measured.tokens.isin(horizons)):
            row = measured.iloc[position].to_dict()
            if row.get("constant", True) or row["tokens"] == row["end"]:
                out["raw"].append(row)
                out["smoothed"].append(row | _smoothed(run, measured, int(position), loss))
    floats = {"x": float, "loss": float}
    found = {name: pd.DataFrame(each, columns=rows.columns).astype(floats) for name, each in out.items()}
    lost = rows[gone].drop_duplicates("run").drop(columns=["tokens"])
    for name, frame in found.items():
        lost = lost.assign(x=np.nan, loss=np.inf, std=0.0)
        grid = frame[["model", "batch", "tokens"]].drop_duplicates()
        found[name] = pd.concat([frame, lost.merge(grid, on=["model", "batch"])], ignore_index=True)
    return {"smoothed": found["smoothed"]} if loss == "val" else found


def _smoothed(run: pd.DataFrame, measured: pd.DataFrame, position: int, loss: str) -> dict[str, Any]:
    tokens, batch = measured.tokens[position], int(measured.batch[position])
    if loss == "window":
        return {"loss": run.loss[(run.tokens <= tokens) & (run.tokens > tokens * (1 - 1 / _WINDOW))].mean()}
    if loss == "paper" and tokens >= _SMOOTHED[0] and batch in _SMOOTHED[1]:
        near = measured.iloc[max(0, position - 1) : position + 2]
        return {"loss": near.loss.mean(), "std": near.loss.std(ddof=0), "x": near.x.mean()}
    return {}
