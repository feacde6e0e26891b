"""A cell is one run of a study, addressed by what it *is*, up to a horizon.

Cells that resolve to the same run are one cell, and under a constant schedule a run serves every horizon up to its end.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from abovemup.config.cadence import due
from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.geometry.parameterization import attention_scale, residual_multipliers
from abovemup.optim.routing import Route
from abovemup.tracking import jsonl
from abovemup.tracking.records import output_norm
from abovemup.training.routes import sizes, table

# What does not change a result: names, where things are kept and sent, how the config was composed.
_COSMETIC = ("experiment", "cannot_match", "checkpoint", "tracking", "run", "choices", "derived")
_WHOLE = ("stdlib", "python", "synthetic", "text", "shards")  # data that is the same however much of it a run reads
_WATCHED = ("norm", "base")  # of a route: what is measured of it, and what its multipliers came from


@dataclass(frozen=True)
class Cell:
    name: str  # of its folder: a readable part, and a hash of what the run is
    overrides: tuple[str, ...]
    steps: int
    threads: int
    tokens: int
    parameters: int
    kept: int  # bytes of weights and optimizer state that it leaves on the disk
    passed: bool  # a longer run measures its loss and norms on the way
    trunk: str = ""  # NAME@TOKENS of the constant run to whose bits this one comes, up to there; "": there is none

    @property
    def id(self) -> tuple[str, int]:
        return self.name, self.steps

    @property
    def cost(self) -> float:
        """What its time grows with."""
        return float(self.parameters) * self.tokens


@dataclass(frozen=True)
class Result:
    """`status`: finished, diverged, failed, unfinished, damaged or missing. A run that diverged has the loss inf."""

    status: str
    loss: float = math.nan
    output_norm: float = math.nan
    batch_loss: float = math.nan  # of its last step, as the rows of a run that goes on have it
    error: str = ""  # the last that its log says

    @property
    def done(self) -> bool:
        return self.status in ("finished", "diverged")


def cell(e: Experiment, overrides: list[str]) -> Cell:
    """Raises RequestError for a routing table that does not exist."""
    routes = table(e)
    size, batch = sizes(routes), e.train.batch_size * e.train.seq_len
    # About as many checkpoints as there will be: the newest, and with pow2 those at powers of two.
    powers = e.train.steps.bit_length() if e.checkpoint.every == "pow2" else 0
    checkpoints = e.checkpoint.keep + powers if e.checkpoint.every else 1
    trunk = ""
    if e.schedule.name == "wsd" and e.data.name in _WHOLE:
        constant = replace(e, schedule=replace(e.schedule, name="constant", decay=0, final=1.0))
        trunk = f"{_name(constant, routes)}@{(e.train.steps - e.schedule.decay) * batch}"
    return Cell(
        name=_name(e, routes),
        overrides=tuple(overrides),
        steps=e.train.steps,
        threads=e.train.threads,
        tokens=e.train.tokens,
        parameters=size["parameters"],
        kept=checkpoints * (size["weights"] + (size["state"] or 0)),
        passed=all(due(every, e.train.steps, batch) for every in (e.eval.every, e.norms.every)),
        trunk=trunk,
    )


def _name(e: Experiment, routes: list[Route]) -> str:
    """A readable part, and a hash of what the run is."""
    effect = {
        # Not its name but what it does: at the base, and often elsewhere, several do the same.
        "routes": [{k: v for k, v in _set(route).items() if k not in _WATCHED} for route in routes],
        "attention": attention_scale(e.parameterization.name, e.model.head_dim, e.parameterization.base_head_dim),
        "residual": residual_multipliers(e.model.residual, e.model.depth, e.parameterization.base_depth),
    }
    tree = {k: v for k, v in _set(e).items() if k not in (*_COSMETIC, "parameterization")}
    tree["model"] = {k: v for k, v in tree["model"].items() if k not in ("name", "base")}
    if e.schedule.name == "constant" and e.data.name in _WHOLE:  # a warm-up is in steps here, also one that was a share
        tree["train"] = {k: v for k, v in tree["train"].items() if k not in ("steps", "tokens")}
    digest = hashlib.sha256(json.dumps([tree, effect], sort_keys=True).encode()).hexdigest()[:12]
    shape = f"w{e.model.width}-d{e.model.depth}"
    return f"{shape}-{e.optimizer.name}-lr{e.optimizer.lr:.4g}-s{e.train.seed}-{digest}"


def _set(value: Any) -> Any:
    """As plain types, without what is at its dataclass's default: a setting added later leaves old cells valid."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return {f.name: _set(v) for f, v in fields if f.default is dataclasses.MISSING or v != f.default}


def place(study: Path, cell: Cell) -> Path:
    return standing(study, cell)[0]


def standing(study: Path, cell: Cell) -> tuple[Path, Result]:
    """The cell's run directory (its name's, or where that run went past the horizon unmeasured, one of its own), and
    how the run in it stands."""
    folder = study / "runs" / cell.name
    aside = folder.with_name(f"{cell.name}-at{cell.steps}")
    found = result(folder, cell.steps)
    if found.status not in ("unfinished", "failed"):
        return folder, found
    past = (rows := _rows(folder)) and rows[-1]["step"] > cell.steps
    return (aside, result(aside, cell.steps)) if past or aside.is_dir() else (folder, found)


def result(folder: Path, steps: int) -> Result:
    """How the run in `folder` stands at step `steps`, where a run that serves several horizons need not end.

    It is finished when its results are present and whole, not when it says so; what is damaged, a missing summary.json
    too, is run again from its beginning.
    """
    if not (folder / "config.yaml").is_file():
        return Result("missing")
    try:
        summary = json.loads((folder / "summary.json").read_text())
        status, reached = summary["status"], int(summary["steps"])
        rows = _rows(folder)
        last = rows[-1]["step"] if rows else -1
        row = next((row for row in rows if row["step"] == steps and "val/loss" in row), None)
        if row is not None and (last > steps or status == "finished"):
            norm, batch_loss = output_norm(row), row.get("loss", math.nan)
            return Result("finished", float(row["val/loss"]), math.nan if norm is None else norm, batch_loss)
        if status == "diverged" and reached <= steps:
            return Result(status, math.inf)
        if status == "finished" and not last == reached != steps:
            return Result("damaged")
    except (OSError, ValueError, LookupError, TypeError, RequestError):
        return Result("damaged")
    return Result("failed" if status == "failed" else "unfinished")


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, which a run that has just begun lacks."""
    path = folder / "metrics.jsonl"
    return jsonl.read(path) if path.is_file() else []
