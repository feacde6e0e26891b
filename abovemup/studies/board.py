"""How the cells of a study stand, read from its folder alone: by the study itself, and from anywhere else."""

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.io import write_whole
from abovemup.data.sources import find_source
from abovemup.studies.cells import Cell, Result, place, standing
from abovemup.tracking.records import Record, loads

Row = dict[str, Any]

_TAIL = 2**22  # bytes at the end of metrics.jsonl that hold its last row, also with all norms of many layers


def look(study: Path, cell: Cell) -> Result:
    """How a cell stands that nobody trains; failed too where it failed before there was a run."""
    _, found = standing(study, cell)
    if found.done or not (error := _error(study / "logs" / f"{cell.name}.log", until(cell))):
        return found
    return replace(found, status="failed" if found.status == "missing" else found.status, error=error)


def until(cell: Cell) -> str:
    """The end of the first line of an attempt in a log, which cells of several horizons share."""
    return f"  # to step {cell.steps}"


def _error(log: Path, until: str) -> str:
    """What the last attempt at this horizon said at its end, unless it was stopped."""
    with suppress(OSError):
        attempts = log.read_text(errors="replace").split("\n$ ")
        ours = [text for text in attempts if text.partition("\n")[0].endswith(until)]
        _, found, said = ours[-1].rpartition("\nabovemup: ") if ours else ("", "", "")
        if found and said.strip() not in ("interrupted", "terminated"):
            return " ".join(said.strip().split("\n")[:2])
    return ""


def announce(study: Path, cells: list[Cell]) -> None:
    """Write study.json: what all who share the folder asked for. Raises RequestError for no place of a study."""
    with alone(study):
        with suppress(RequestError):
            cells = [*announced(study), *cells]
        both = {cell.id: cell for cell in cells}.values()
        write_whole(study / "study.json", json.dumps({"cells": [asdict(cell) for cell in both]}, indent=1) + "\n")


def check_data(study: Path, cells: list[Cell], config_dir: Path | None) -> None:
    """Raises RequestError where a cell was trained on text that has changed since: a study would mix two corpora."""
    now: dict[tuple[str, ...], str] = {}
    for cell in cells:
        with suppress(OSError, ValueError, LookupError, TypeError):  # not begun, or of a source that is known by name
            then = json.loads((place(study, cell) / "summary.json").read_text())["data"]["source"]["content_hash"]
            asked = tuple(o for o in cell.overrides if o.startswith(("data", "experiment")))
            if asked not in now:
                now[asked] = find_source(compose([*asked], config_dir=config_dir).data).identity()["content_hash"]
            if then != now[asked]:
                said = f"the text of {cell.name} has changed since it was trained: {then[:12]}, now {now[asked][:12]}"
                raise RequestError(f"{said}. Restore it, or choose another --dir.")


def alone(study: Path) -> FileLock:
    """Held to write what several processes of one study write. Raises RequestError for no place of a study."""
    if (study / "config.yaml").exists():
        raise RequestError(f"{study} is a run, not a place for a study. Choose another --dir.")
    try:
        study.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot create {study}: {error.strerror}. Choose another --dir.") from error
    return FileLock(study / ".lock")


def announced(study: Path) -> list[Cell]:
    """The cells of a study. Raises RequestError where there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        cells = json.loads((study / "study.json").read_text())["cells"]
        if found := [Cell(**{**cell, "overrides": tuple(cell["overrides"])}) for cell in cells]:
            return found
    raise RequestError(f"{study} is no study: it has no whole study.json. Studies lie under studies/.")


def settings(cell: Cell) -> dict[str, str]:
    return dict(override.split("=", 1) for override in cell.overrides)


def rows(study: Path, cells: list[Cell], known: dict[tuple[str, int], Row] | None = None) -> list[Row]:
    """A row a cell: what varies, status (running while a process trains it), step of steps, losses, seconds left.

    `known` keeps the rows of those that are done from one call to the next.
    """
    known = {} if known is None else known
    asked = [settings(cell) for cell in cells]
    varying = [key for key in dict.fromkeys(k for s in asked for k in s) if len({s.get(key) for s in asked}) > 1]
    return [
        {key: own.get(key, "") for key in varying} | (known.get(cell.id) or _row(study, cell, known))
        for cell, own in zip(cells, asked, strict=True)
    ]


def _row(study: Path, cell: Cell, known: dict[tuple[str, int], Row]) -> Row:
    last, seen = _last(place(study, cell)), Result("running")
    if not trained(study, cell) or last.get("step", 0) > cell.steps:
        seen = look(study, cell)
    if seen.status == "finished":  # a run that goes on has later rows
        last = {"step": cell.steps, "loss": seen.batch_loss}
    left = (cell.tokens - last.get("tokens", 0)) / last.get("tokens_per_second", math.nan)
    row = {"status": seen.status, "step": last.get("step", 0), "steps": cell.steps, "tokens": cell.tokens}
    row |= {"loss": last.get("loss", math.nan), "val_loss": seen.loss, "output_norm": seen.output_norm}
    row |= {"seconds_left": left if seen.status == "running" else math.nan, "error": seen.error, "cell": cell.name}
    if seen.done:
        known[cell.id] = row
    return row


def best(table: list[Row]) -> Row | None:
    """The finished row of the least validation loss."""
    return min((r for r in table if math.isfinite(r["val_loss"])), key=lambda r: float(r["val_loss"]), default=None)


def trained(study: Path, cell: Cell) -> bool:
    """Whether a study somewhere holds the claim of the cell, or a job without a study its run. (A study that finds it
    held by this look tries again.)"""
    for lock in (study / "logs" / f"{cell.name}.lock", study / "runs" / cell.name / ".lock"):
        try:
            if lock.exists():
                with FileLock(lock, blocking=False):
                    pass
        except Timeout:
            return True
        except OSError:  # somebody else's folder
            pass
    return False


def _last(run: Path) -> Record:
    """The last row of metrics.jsonl, however long that is."""
    with suppress(OSError, ValueError, IndexError), open(run / "metrics.jsonl", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return loads(file.read().split(b"\n")[-2])
    return {}
