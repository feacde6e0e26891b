"""What a fit reads: our runs and studies, CSV files of the paper's public toolkit, and projects on W&B."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from abovemup.analysis import paper, wandb_runs
from abovemup.analysis.export import TOOLKIT
from abovemup.analysis.norm_fit import initial_loss
from abovemup.analysis.runs import Damaged, final_norms, plain, records, trajectory
from abovemup.analysis.select import columns, known_key, select
from abovemup.config.errors import RequestError
from abovemup.config.values import shown

OUTPUT = "head/rms_to_inf"
CONDITIONS = (*paper.CONDITIONS, "model.init", "parameterization.base_depth", "tokenizer.name")
_FIXED = ("optimizer.", "parameterization.", "model.", "data.", "tokenizer.")  # whatever of it differs is no seed
_ENDED = ("finished", "diverged")
_SHAPE = ("name", "width", "depth", "heads", "kv_heads", "head_dim", "ffn")
_VARIED = {"optimizer.lr", "data.seed", *(f"model.{name}" for name in _SHAPE)}
ROLES = {"lr_in": "embedding", "lr_hidden": "hidden", "lr_out": "head"}
_SMOOTHED = (2**33, 8 * paper.SEQUENCE, 128 * paper.SEQUENCE)  # horizons from, batches from, to: the paper's windows
_WINDOW = 1 / 16  # loss=window: the mean over this last part of the tokens
# Columns of the toolkit, raw, preprocessed, and with seeds aggregated -> ours.
PAPER = {
    **TOOLKIT,
    **dict.fromkeys(("output_norm", "output_norm_mean"), f"norm/{OUTPUT}"),
    **{f"track_param_{name}/output": f"norm/{OUTPUT}" for name in ("rms_to_l1", "rms_to_inf")},
    "track_param_rms_to_inf/model_part_0/output": f"norm/{OUTPUT}",
    **{"train_loss": "loss", "train_loss_mean": "loss", "train_loss_std": "std", "run_name": "run"},
}


@dataclass
class Source:
    """Rows {run, model, batch, lr, tokens, loss, std, norm/<layer>/<norm>}; batch and tokens in tokens, loss in nats.

    Of runs a row is a logged step, and has {end, constant, diverged, lr_in, lr_hidden, lr_out} of its run, and lr is
    nan where the roles' rates differ; without `horizons` it is a point of a scan. A run that diverged has the loss inf.
    `intercept` is the loss before training, of each model.
    """

    rows: pd.DataFrame
    loss: str
    conditions: dict[str, Any]
    excluded: dict[str, str]  # run -> why
    intercept: dict[str, float] | None = None
    horizons: frozenset[int] = frozenset()
    runs: pd.DataFrame = field(default_factory=pd.DataFrame)  # a row a run of ours, as of `runs.records`

    def curves(self, norm: str = OUTPUT) -> pd.DataFrame:
        """The rows with x = log2(norm), nan where it was not measured. Raises RequestError for an unknown norm."""
        values = self.rows[known_key(f"norm/{norm}", [dict.fromkeys(map(str, self.rows))])].astype(float)
        return self.rows.assign(x=np.log2(values.where(values > 0)))

    def fixed(self, norm: str = OUTPUT) -> dict[str, float] | None:
        """The intercept for this norm: that of norm 1, if that is what it was before training."""
        curves = self.curves(norm)
        start = curves.x[(curves.tokens == 0) & curves.x.notna()].abs()
        adam = str(self.conditions.get("optimizer.name")).startswith("adam")  # its steps have no norm: free, as there
        return self.intercept if not adam and (start.max() < 0.01 if len(start) else norm == OUTPUT) else None

    def points(self, norm: str = OUTPUT) -> dict[str, pd.DataFrame]:
        """At the exact horizons: "smoothed", and "raw" of single steps where that is another."""
        rows = self.curves(norm)
        found = at_horizons(rows, self.loss, self.horizons) if self.horizons else {"smoothed": rows}
        for name, frame in found.items():
            worst = frame.model.map(self.intercept or {}).astype(float).fillna(np.inf)
            bad = np.isfinite(frame.loss) & (frame.loss >= worst)
            self.excluded |= dict.fromkeys(frame.run[bad].astype(str), "at a horizon no better than untrained")
            found[name] = frame.assign(loss=frame.loss.mask(bad, np.inf))
        if found["smoothed"].empty:
            raise RequestError("no run has this loss and norm at 2^n tokens or its end (only there, if its lr decays).")
        return found


def open_source(path: Path, loss: str | None = None, where: Sequence[str] = (), norm: str | None = OUTPUT) -> Source:
    """Reads `path`, or wandb:entity/project, of runs only `norm`, or all.

    loss: paper, val or window; None is val, else window, for our runs. Raises RequestError, also for runs that differ
    in more than size, lr, batch size and seeds: one fit over them would be none. RunFailed where W&B is not reached.
    """
    return open_arms(path, loss, where, norm, split=False)[""]


def open_arms(
    path: Path, loss: str | None = None, where: Sequence[str] = (), norm: str | None = OUTPUT, split: bool = True
) -> dict[str, Source]:
    """A source for each "key=value ..." in which the runs differ beyond those; "" if they do not. Layouts of lr are
    no arms: there lr is nan. As `open_source`."""
    if loss not in (None, "paper", "val", "window"):
        raise RequestError(f"--loss {loss}: choose paper, val or window.")
    if not path.is_file() and not str(path).startswith("wandb:"):
        rows, excluded = records([path])
        rows = _chosen(rows, where, path)
        ended = [row for row in rows if row["status"] in _ENDED]
        if not any(row["status"] == "finished" for row in ended):
            raise RequestError(f"{path}: no run is finished: {len(rows)} {', '.join({row['status'] for row in rows})}.")
        keys = [*CONDITIONS, *(key for key in columns(ended) if key.startswith(_FIXED) and key not in _VARIED)]
        table = pd.DataFrame([plain(row | _command(row)) for row in rows])
        arms = _arms(table, keys, path, split, table.status.isin(_ENDED))
        arms = {name: arm for name, arm in arms.items() if arm.status.isin(_ENDED).any()}
        return {name: _runs(arm, path, loss, norm, dict(excluded), split) for name, arm in arms.items()}
    if str(path).startswith("wandb:"):
        table, where = wandb_runs.history(str(path), where)
    else:
        try:
            table = pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise RequestError(f"{path} is no folder of runs and no CSV file: {error}.") from error
    keys = ["optimizer.momentum", "optimizer.name", "schedule.name"]
    return {name: _toolkit(arm) for name, arm in _arms(_layout(table, path, where), keys, path, split).items()}


def _command(row: dict[str, Any]) -> dict[str, str]:
    return {"command": shlex.join(["abovemup", *row["command"][1:]])} if row.get("command") else {}


def _chosen(rows: Sequence[dict[Any, Any]], where: Sequence[str], path: Path) -> list[dict[Any, Any]]:
    if not (kept := select(rows, where)):
        raise RequestError(f"{path} has no run{f' with {chr(32).join(where)}' if where else ''}.")
    return kept


def _arms(
    table: pd.DataFrame, keys: Sequence[str], path: Path, split: bool, counted: Any = slice(None)
) -> dict[str, pd.DataFrame]:
    """By what those `counted` among the rows differ in."""
    mixed = {key: table[counted][key].dropna().unique().tolist() for key in dict.fromkeys(keys) if key in table}
    mixed = {key: found for key, found in mixed.items() if len(found) > 1}
    if mixed and not split:
        key, found = next(iter(mixed.items()))
        raise RequestError(f"{path} mixes {key}: {', '.join(map(str, found))}. Choose: --where {key}={found[0]}.")
    if not (keys := [key for key in mixed if not key.startswith("optimizer.lr_scale.")]):
        return {"": table}
    groups = table.groupby(keys, sort=False, dropna=False)
    return {" ".join(f"{k}={shown(v)}" for k, v in zip(keys, at, strict=True)): arm for at, arm in groups}


def _shared(table: pd.DataFrame, keys: Sequence[str]) -> dict[str, Any]:
    found = {key: table[key].dropna().tolist() for key in keys if key in table}
    return {key: values[0] for key, values in found.items() if values}


def _layout(table: pd.DataFrame, path: Path, where: Sequence[str]) -> pd.DataFrame:
    """Rows of the toolkit under our names. Raises RequestError."""
    for theirs in [name for name in PAPER if name in table]:  # runs of several ages name one thing differently
        values, ours = table.pop(theirs), PAPER[theirs]
        table[ours] = table[ours].fillna(values) if ours in table else values
    table = table.drop_duplicates()
    if missing := sorted({"bs", "step", "loss", f"norm/{OUTPUT}", *ROLES} - {*table}):
        raise RequestError(f"{path} lacks {', '.join(missing)}: it has not the layout of the paper's toolkit.")
    table["lr"] = table.lr_out.where(table[[*ROLES]].min(axis=1) == table[[*ROLES]].max(axis=1))
    table["batch"] = table.bs * paper.SEQUENCE
    table["tokens"] = table.batch * table.step
    if "run" not in table:
        table["run"] = table[["bs", *ROLES, *table.columns.intersection(["seed"])]].astype(str).agg("-".join, axis=1)
    alpha = table.get("momentum", pd.Series(1.0, table.index))  # 1 - ours; 0 is its sign for Adam without moments
    table["optimizer.momentum"] = (1 - alpha.mask(alpha == 0, 1.0)).round(12)
    table["optimizer.name"] = np.where(alpha == 0, "adam", "scion")
    table["constant"] = ~table.run.str.contains("decayed")
    table["schedule.name"] = np.where(table.constant, "constant", "decayed")
    table["end"] = table.groupby("run").tokens.transform("max")
    table = table.assign(model="proxy_69m", diverged=False, std=table.get("std", np.nan))
    table = table[~table.run.str.contains("test")]
    return pd.DataFrame(_chosen(table.to_dict("records"), where, path)) if where else table


def _toolkit(table: pd.DataFrame) -> Source:
    conditions = _shared(table, ["optimizer.momentum", "optimizer.name", "schedule.name"])
    horizons = _horizons(table[table.constant], 64, table.end[~table.constant])
    return Source(table, "paper", paper.CONDITIONS | conditions, {}, {"proxy_69m": paper.INTERCEPT}, horizons)


def _runs(
    runs: pd.DataFrame, path: Path, loss: str | None, norm: str | None, excluded: dict[str, str], split: bool
) -> Source:
    excluded |= dict(runs[runs.status != "finished"][["run", "status"]].to_numpy())
    runs, parts = runs[runs.status.isin(_ENDED)], {}
    there: dict[str, Any] = {}
    for run, folder in zip(runs.run, map(Path, runs.dir), strict=True):
        try:
            there = there or final_norms(folder)
            norms = [key for key in there if key.startswith("norm/")] if norm is None else [f"norm/{norm}"]
            parts[run] = trajectory(folder, ["loss", "val/loss", *norms])
        except Damaged as error:
            excluded[run] = str(error)
    if not parts:
        raise RequestError(f"{path}: no run is finished and whole.")
    plan = runs[["run"]].assign(model="w" + runs["model.width"].astype(str) + "-d" + runs["model.depth"].astype(str))
    plan["batch"] = runs["train.batch_size"] * runs["train.seq_len"]
    plan["lr"], plan["end"] = runs["optimizer.lr"], runs["train.tokens"]
    plan["constant"], plan["diverged"] = runs["schedule.name"] == "constant", runs.status == "diverged"
    scales = [f"optimizer.lr_scale.{role}" for role in ROLES.values()]
    if {*scales} <= {*runs}:
        plan[[*ROLES]] = runs[scales].mul(plan.lr, axis=0)
        if len(runs[scales].drop_duplicates()) > 1:
            plan["lr"] = plan.lr_out.where(plan[[*ROLES]].nunique(axis=1) == 1)
    rows: pd.DataFrame = pd.concat(parts, names=["run"]).reset_index("run").merge(plan.assign(std=np.nan), on="run")
    if not split and rows[norms].isna().all(axis=None):
        known_key(norms[0] if norms else "norm/", [there or {"": 0}])
    loss = loss or ("val" if rows["val/loss"].notna().any() else "window")
    if loss == "val":
        rows["loss"] = rows["val/loss"]
    conditions, widths = _shared(runs, CONDITIONS), zip(plan.model, runs["model.width"], strict=True)
    intercept = {model: initial_loss(int(conditions["model.vocab_size"]), int(width)) for model, width in widths}
    return Source(rows, loss, conditions, excluded, intercept, _horizons(rows[rows.constant], 16, rows.end), runs=runs)


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
        logs = going[["run", "tokens", "loss"]].groupby("run")
        for run, those in found["smoothed"].groupby("run"):
            every = logs.get_group(run)
            first, last = (every.tokens.searchsorted(those.tokens * part, "right") for part in (1 - _WINDOW, 1))
            means = [every.loss.iloc[a:b].mean() for a, b in zip(first, last, strict=True)]
            found["smoothed"].loc[those.index, "loss"] = means
    lost = rows[rows.diverged].drop_duplicates("run").drop(columns="tokens").assign(x=np.nan, loss=np.inf)
    grid = measured[chosen][["model", "batch", "tokens"]].drop_duplicates()
    lost = lost.merge(grid, on=["model", "batch"])
    return {name: pd.concat([frame, lost], ignore_index=True) for name, frame in found.items()}
