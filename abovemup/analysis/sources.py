"""What a fit reads: our runs and studies, and CSV files of the paper's public toolkit."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis import paper
from abovemup.analysis.export import TOOLKIT
from abovemup.analysis.norm_fit import initial_loss
from abovemup.analysis.runs import Damaged, final_norms, plain, records, trajectory
from abovemup.analysis.select import columns, known_key, select
from abovemup.config.errors import RequestError

OUTPUT = "head/rms_to_inf"
CONDITIONS = (*paper.CONDITIONS, "model.init", "parameterization.base_depth", "tokenizer.name")
_FIXED = ("optimizer.", "parameterization.", "model.", "data.", "tokenizer.")  # whatever of it differs is no seed
_SHAPE = ("name", "width", "depth", "heads", "kv_heads", "head_dim", "ffn")
_VARIED = {"optimizer.lr", "data.seed", *(f"model.{name}" for name in _SHAPE)}
_SMOOTHED = (2**33, 8 * paper.SEQUENCE, 128 * paper.SEQUENCE)  # horizons from, batches from, to: the paper's windows
_WINDOW = 1 / 16  # loss=window: the mean over this last part of the tokens
# Columns of the toolkit, raw, preprocessed, and with seeds aggregated -> ours.
_PAPER = {
    **TOOLKIT,
    **dict.fromkeys(("output_norm", "output_norm_mean"), f"norm/{OUTPUT}"),
    **{f"track_param_{name}/output": f"norm/{OUTPUT}" for name in ("rms_to_l1", "rms_to_inf")},
    "track_param_rms_to_inf/model_part_0/output": f"norm/{OUTPUT}",
    **{"train_loss": "loss", "train_loss_mean": "loss", "train_loss_std": "std", "run_name": "run"},
}


@dataclass
class Source:
    """Rows {run, model, batch, lr, tokens, loss, std, norm/<layer>/<norm>}; batch and tokens in tokens, loss in nats.

    Of runs a row is a logged step, and has {end, constant, diverged} of its run; without `horizons` it is a point of a
    scan. A run that diverged has the loss inf.
    """

    rows: pd.DataFrame
    loss: str
    conditions: dict[str, Any]
    excluded: dict[str, str]  # run -> why
    intercept: float | None = None
    horizons: frozenset[int] = frozenset()

    def curves(self, norm: str = OUTPUT) -> pd.DataFrame:
        """The rows with x = log2(norm), nan where it was not measured. Raises RequestError for an unknown norm."""
        values = self.rows[known_key(f"norm/{norm}", [dict.fromkeys(map(str, self.rows))])].astype(float)
        return self.rows.assign(x=np.log2(values.where(values > 0)))

    @property
    def norms(self) -> list[str]:
        return [name.removeprefix("norm/") for name in map(str, self.rows) if name.startswith("norm/")]

    def fixed(self, norm: str = OUTPUT) -> float | None:
        """The intercept for this norm: that of norm 1, if that is what it was before training."""
        curves = self.curves(norm)
        start = curves.x[(curves.tokens == 0) & curves.x.notna()].abs()
        return self.intercept if (start.max() < 0.01 if len(start) else norm == OUTPUT) else None

    def points(self, norm: str = OUTPUT) -> dict[str, pd.DataFrame]:
        """At the exact horizons: "smoothed", and "raw" of single steps where that is another."""
        rows = self.curves(norm)
        found = at_horizons(rows, self.loss, self.horizons) if self.horizons else {"smoothed": rows}
        for name, frame in found.items():
            bad = np.isfinite(frame.loss) & (frame.loss >= (self.intercept or np.inf))
            self.excluded |= dict.fromkeys(frame.run[bad].astype(str), "at a horizon no better than untrained")
            found[name] = frame.assign(loss=frame.loss.mask(bad, np.inf))
        if found["smoothed"].empty:
            raise RequestError("no run has this loss and norm at 2^n tokens or its end (only there, if its lr decays).")
        return found


def open_source(path: Path, loss: str | None = None, where: Sequence[str] = (), norm: str | None = OUTPUT) -> Source:
    """Reads `path`, of runs only `norm`, or all. loss: paper, val or window; None is val, else window, for our runs.

    Raises RequestError.
    """
    if not path.is_file():
        return _runs(path, loss, where, norm)
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is no folder of runs and no CSV file: {error}.") from error
    return _toolkit(table, path, where)


def _chosen(rows: Sequence[dict[Any, Any]], where: Sequence[str], path: Path) -> list[dict[Any, Any]]:
    if not (kept := select(rows, where)):
        raise RequestError(f"{path} has no run{f' with {chr(32).join(where)}' if where else ''}.")
    return kept


def _conditions(table: pd.DataFrame, keys: Sequence[str], path: Path) -> dict[str, Any]:
    """What all the runs share. Raises RequestError when they do not: one fit over several of them would be none."""
    values = {key: table[key].dropna().unique().tolist() for key in keys if key in table}
    for key, found in values.items():
        if len(found) > 1:
            raise RequestError(f"{path} mixes {key}: {', '.join(map(str, found))}. Choose: --where {key}={found[0]}.")
    return {key: found[0] for key, found in values.items() if found}


def _toolkit(table: pd.DataFrame, path: Path, where: Sequence[str]) -> Source:
    table = table.rename(columns=_PAPER).drop_duplicates()
    lrs = ["lr_in", "lr_hidden", "lr_out"]
    if missing := sorted({"bs", "step", "loss", f"norm/{OUTPUT}", *lrs} - {*table}):
        raise RequestError(f"{path} lacks {', '.join(missing)}: it has not the layout of the paper's toolkit.")
    table["lr"] = table.lr_out.where(table[lrs].min(axis=1) == table[lrs].max(axis=1))
    table["batch"] = table.bs * paper.SEQUENCE
    table["tokens"] = table.batch * table.step
    if "run" not in table:
        table["run"] = table[["bs", *lrs, *table.columns.intersection(["seed"])]].astype(str).agg("-".join, axis=1)
    alpha = table.get("momentum", pd.Series(1.0, table.index))  # 1 - ours; 0 is its sign for Adam without moments
    table["optimizer.momentum"] = (1 - alpha.mask(alpha == 0, 1.0)).round(12)
    table["optimizer.name"] = np.where(alpha == 0, "adam", "scion")
    table["constant"] = ~table.run.str.contains("decayed")
    table["schedule.name"] = np.where(table.constant, "constant", "decayed")
    table["end"] = table.groupby("run").tokens.transform("max")
    table = table.assign(model="proxy_69m", diverged=False, std=table.get("std", np.nan))
    table = table[~table.run.str.contains("test")]
    if where:
        table = pd.DataFrame(_chosen(table.to_dict("records"), where, path))
    conditions = _conditions(table, ("optimizer.momentum", "optimizer.name", "schedule.name"), path)
    horizons = _horizons(table[table.constant], 64, table.end[~table.constant])
    return Source(table, "paper", paper.CONDITIONS | conditions, {}, paper.INTERCEPT, horizons)


def _runs(path: Path, loss: str | None, where: Sequence[str], norm: str | None) -> Source:
    found, excluded = records([path])
    found = _chosen(found, where, path)
    excluded |= {row["run"]: row["status"] for row in found if row["status"] != "finished"}
    kept = [row for row in found if row["status"] in ("finished", "diverged")]
    runs = pd.DataFrame([plain(row) for row in kept])
    conditions = _conditions(runs, CONDITIONS, path)
    _conditions(runs, [key for key in columns(kept) if key.startswith(_FIXED) and key not in _VARIED], path)
    parts: dict[str, pd.DataFrame] = {}
    there: dict[str, Any] = {}
    for row in kept:
        try:
            there = there or final_norms(Path(row["dir"]))
            norms = [key for key in there if key.startswith("norm/")] if norm is None else [f"norm/{norm}"]
            parts[row["run"]] = trajectory(Path(row["dir"]), ["loss", "val/loss", *norms])
        except Damaged as error:
            excluded[row["run"]] = str(error)
    if not parts:
        raise RequestError(f"{path}: no run is finished and whole.")
    runs["model"] = "w" + runs["model.width"].astype(str) + "-d" + runs["model.depth"].astype(str)
    runs["batch"] = runs["train.batch_size"] * runs["train.seq_len"]
    runs["constant"], runs["diverged"] = runs["schedule.name"] == "constant", runs.status == "diverged"
    runs = runs.rename(columns={"optimizer.lr": "lr", "train.tokens": "end"})
    plan = runs[["run", "model", "batch", "lr", "end", "constant", "diverged"]].assign(std=np.nan)
    rows: pd.DataFrame = pd.concat(parts, names=["run"]).reset_index("run").merge(plan, on="run")
    if rows[norms].isna().all(axis=None):
        known_key(norms[0] if norms else "norm/", [there or {"": 0}])
    loss = loss or ("val" if rows["val/loss"].notna().any() else "window")
    if loss == "val":
        rows["loss"] = rows["val/loss"]
    intercept = initial_loss(int(conditions["model.vocab_size"]), int(runs["model.width"].max()))
    return Source(rows, loss, conditions, excluded, intercept, _horizons(rows[rows.constant], 16, rows.end))


def _horizons(rows: pd.DataFrame, share: int, ends: "pd.Series[int]") -> frozenset[int]:
    """The ends, and the powers of two in tokens from 1/share of the most in `rows` on, of runs at a constant lr."""
    top = int(rows.tokens.max()) if len(rows) else 0
    return frozenset({2**n for n in range(top.bit_length()) if 2**n * share >= top} | {*ends.unique().tolist()})


def at_horizons(rows: pd.DataFrame, loss: str, horizons: frozenset[int]) -> dict[str, pd.DataFrame]:
    """Rows at exact token counts (PAPER 5.1): "smoothed" as `loss` says, and, unless that is val, "raw" as logged.

    A run whose lr decays counts at its end only; one that diverged has the loss inf at all horizons of its batch size.
    """
    rows = rows.sort_values(["run", "tokens"], ignore_index=True)
    going = rows[~rows.diverged]
    measured = going[going.x.notna() & going.loss.notna()]
    chosen = measured.tokens.isin(horizons) & (measured.constant | (measured.tokens == measured.end))
    found = {name: measured[chosen].copy() for name in ("smoothed", *(["raw"] if loss != "val" else []))}
    if loss == "paper":
        start, low, high = _SMOOTHED
        inside = chosen & (measured.tokens >= start) & measured.batch.between(low, high)
        near = measured.groupby("run")[["loss", "x"]].rolling(3, center=True, min_periods=1)
        smooth = near.mean().droplevel(0)
        smooth["std"] = near["loss"].std(ddof=0).droplevel(0)
        found["smoothed"].update(smooth[inside])
    if loss == "window":
        logs = going.groupby("run")
        for run, those in found["smoothed"].groupby("run"):
            every = logs.get_group(run)
            first, last = (every.tokens.searchsorted(those.tokens * part, "right") for part in (1 - _WINDOW, 1))
            means = [every.loss.iloc[a:b].mean() for a, b in zip(first, last, strict=True)]
            found["smoothed"].loc[those.index, "loss"] = means
    lost = rows[rows.diverged].drop_duplicates("run").drop(columns="tokens").assign(x=np.nan, loss=np.inf)
    grid = measured[chosen][["model", "batch", "tokens"]].drop_duplicates()
    lost = lost.merge(grid, on=["model", "batch"])
    return {name: pd.concat([frame, lost], ignore_index=True) for name, frame in found.items()}
