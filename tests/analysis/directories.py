"""Run directories written by hand, as training leaves them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from abovemup.config import io
from abovemup.config.compose import compose
from abovemup.tracking.jsonl import JsonlSink
from abovemup.tracking.records import Record, dumps


def rows(steps: int, batch: int = 2048, norms: int = 2) -> list[Record]:
    """Steps 0 to `steps`: a falling loss, norms every `norms` steps, a validation loss at both ends."""
    found: list[Record] = []
    for step in range(steps + 1):
        row: Record = {"step": step, "tokens": step * batch}
        if step:
            row |= {"loss": 7.0 - step / 7, "lr/embedding": 0.5, "lr/hidden": 0.5, "lr/head": 0.5}
        if step % norms == 0 or step == steps:
            names = ("embedding/one_to_rms", "layers.0.attention.wq/rms_to_rms", "layers.1.attention.wq/rms_to_rms")
            row |= {f"norm/{name}": 1 + step / 3 + place for place, name in enumerate(names)}
            row |= {"norm/head/rms_to_inf": 1.0 + step}
        if step in (0, steps):
            row |= {"val/loss": 7.1 - step / 7}
        found.append(row)
    return found


def write(
    folder: Path, overrides: Sequence[str] = (), logged: list[Record] | None = None, **summary: Any
) -> list[Record]:
    """A finished run of 6 steps, or what `summary` says; returns its rows."""
    experiment = compose(["tracking=local", "train.steps=6", *overrides])
    tokens = experiment.train.batch_size * experiment.train.seq_len
    logged = rows(6, tokens) if logged is None else logged
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    io.save(experiment, folder / "config.yaml")
    sink = JsonlSink(folder / "metrics.jsonl")
    for row in logged:
        sink.log(row)
    sink.close({})
    last: dict[str, Any] = {}
    for row in logged:
        last |= row
    told = {"status": "finished", "steps": last.get("step", 0), "tokens": last.get("tokens", 0)}
    told |= {
        "loss": last.get("loss"),
        "val_loss": last.get("val/loss"),
        "output_norm": last.get("norm/head/rms_to_inf"),
    }
    told |= {"best_val_loss": last.get("val/loss"), "repeats": 0, "dir": "elsewhere", "data": {"source": {"name": "x"}}}
    told |= {"versions": {"torch": "2.13"}, "command": ["abovemup", "train", "train.steps=6"]}
    (folder / "summary.json").write_text(dumps(told | summary, indent=2))
    return logged


def checkpoint(folder: Path, step: int) -> None:
    inside = folder / "checkpoints" / f"step_{step:08d}"
    inside.mkdir(parents=True)
    (inside / "manifest.json").write_text(json.dumps({"step": step, "tokens": step * 2048, "files": {}}))
