"""A cell is one run of a study, addressed by what it *is*: cells that resolve to the same run are one cell."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.geometry.parameterization import attention_scale, residual_multipliers
from abovemup.tracking import jsonl
from abovemup.training.routes import sizes, table

# What does not change a result: names, where things are kept and sent, how the config was composed.
_COSMETIC = ("experiment", "cannot_match", "checkpoint", "tracking", "run", "choices", "derived")
_WATCHED = ("norm", "base")  # of a route: what is measured of it, and what its multipliers came from


@dataclass(frozen=True)
class Cell:
    name: str  # of its folder: a readable part, and a hash of what the run is
    overrides: tuple[str, ...]
    steps: int
    threads: int
    tokens: int
    parameters: int

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

    @property
    def done(self) -> bool:
        return self.status in ("finished", "diverged")


def cell(experiment: Experiment, overrides: list[str]) -> Cell:
    """Raises RequestError for a routing table that does not exist."""
    e = experiment
    routes = table(e)
    effect = {
        # Not its name but what it does: at the base, and often elsewhere, several do the same.
        "routes": [{k: v for k, v in _set(route).items() if k not in _WATCHED} for route in routes],
        "attention": attention_scale(e.parameterization.name, e.model.head_dim, e.parameterization.base_head_dim),
        "residual": residual_multipliers(e.model.residual, e.model.depth, e.parameterization.base_depth),
    }
    tree = {k: v for k, v in _set(e).items() if k not in (*_COSMETIC, "parameterization")}
    tree["model"] = {k: v for k, v in tree["model"].items() if k not in ("name", "base")}
    digest = hashlib.sha256(json.dumps([tree, effect], sort_keys=True).encode()).hexdigest()[:12]
    shape = f"w{e.model.width}-d{e.model.depth}"
    return Cell(
        name=f"{shape}-{e.optimizer.name}-lr{e.optimizer.lr:.4g}-s{e.train.seed}-{digest}",
        overrides=tuple(overrides),
        steps=e.train.steps,
        threads=e.train.threads,
        tokens=e.train.tokens,
        parameters=sizes(routes)["parameters"],
    )


def _set(value: Any) -> Any:
    """As plain types, without what is at its dataclass's default: a setting added later leaves old cells valid."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return {f.name: _set(v) for f, v in fields if f.default is dataclasses.MISSING or v != f.default}


def result(folder: Path, steps: int) -> Result:
    """How the run in `folder` stands. It is finished when its results are present and whole, not when it says so;
    what is damaged, a missing summary.json too, is run again from its beginning."""
    if not (folder / "config.yaml").is_file():
        return Result("missing")
    try:
        summary = json.loads((folder / "summary.json").read_text())
        status = summary["status"]
        if status == "diverged":
            return Result(status, math.inf)
        if status == "finished" and jsonl.read(folder / "metrics.jsonl")[-1]["step"] == steps:
            return Result(status, float(summary["val_loss"]), float(summary["output_norm"] or "nan"))
    except (OSError, ValueError, LookupError, TypeError, RequestError):
        return Result("damaged")
    return Result({"finished": "damaged", "failed": "failed"}.get(status, "unfinished"))
