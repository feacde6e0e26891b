"""`abovemup study`, and what the verbs that run studies share: their options, the live table, the exit code."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abovemup.cli.options import Json

if TYPE_CHECKING:
    from rich.live import Live

    from abovemup.studies.cells import Cell
    from abovemup.studies.pool import Pool


Again = StrEnum("Again", ["failed", "diverged"])
Kind = StrEnum("Kind", ["local", "slurm"])
Jobs = Annotated[int | None, typer.Option(min=1, help="Cells at once; what cores (at train.threads) or GPUs take.")]
CellsPerGpu = Annotated[int | None, typer.Option(min=1, help="Small cells that share a GPU; 1.")]
Nproc = Annotated[int, typer.Option(min=1, metavar="N", help="Processes of each cell (parallel=ddp, or as set).")]
Launcher = Annotated[
    Kind,
    typer.Option("--launcher", help="slurm: a job a run, as launcher.partition=P launcher.qos=Q ... say."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run, how long it would take and on what disk.")]
Retry = Annotated[
    list[Again] | None,
    typer.Option("--retry", help="Try again what has failed (from its checkpoint), or diverged (from its beginning)."),
]

app = typer.Typer(no_args_is_help=True)


@app.command("status")
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study: studies/NAME.")],
    json: Json = False,
) -> None:
    """How the cells of a study stand, from any terminal that sees its folder."""
    from abovemup.cli.output import print_json
    from abovemup.studies.board import announced, rows

    table = rows(folder, announced(folder))
    print_json({"dir": str(folder), "cells": table}) if json else print_rows(table)


def apart(overrides: list[str]) -> tuple[list[str], dict[str, str]]:
    """What is asked of the cells, and of the launcher (launcher.KEY=VALUE). Raises RequestError for one given twice."""
    from abovemup.studies.axes import typed

    ours = [text for text in overrides if text.startswith("launcher.")]
    asked = {key.removeprefix("launcher."): value for key, value in typed(ours).items()}
    return [text for text in overrides if text not in ours], asked


def warm(launcher: str, dry: bool) -> None:
    """Let the process that cells are forked from import what they need while this one does."""
    if launcher == "local" and not dry:
        from abovemup.studies import local

        local.warm()


@dataclass(frozen=True)
class Way:
    """How the cells are trained: what the verbs that run studies have in common."""

    jobs: int | None
    config_dir: Path | None
    retry: list[Again] | None
    dry: bool  # only say what would run
    json: bool
    launcher: Kind
    asked: dict[str, str]  # of Slurm
    cells_per_gpu: int | None
    nproc: int


def conduct(folder: Path, cells: "list[Cell]", way: Way, ahead: "list[Cell] | None" = None) -> int:
    """Train the cells, seen live on a terminal and line by line elsewhere. Returns the code of a signal, or 0.

    A dry run ends the command with the cells, how they stand, and what is left to do. `ahead`: of these it is said
    first how many there are, and how long they take.
    """
    from rich.console import Console
    from rich.live import Live

    from abovemup.config.compose import compose
    from abovemup.config.errors import RequestError
    from abovemup.studies.board import announce, check_data
    from abovemup.studies.local import Local
    from abovemup.studies.pool import Pool
    from abovemup.studies.slurm import Slurm
    from abovemup.training.ranks import Ranks

    console = Console(stderr=way.json)
    real = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False, transient=True)

    def say(text: str, failed: bool) -> None:
        if failed or not real:
            typer.echo(f"abovemup: {text}" if failed else text, err=failed or way.json)

    local = way.launcher == "local"
    if local and way.asked:
        raise RequestError(f"launcher.{min(way.asked)} is for --launcher slurm.")
    if way.nproc > 1:  # as the first cell will
        first = compose([*cells[0].overrides], config_dir=way.config_dir)
        Ranks(world=way.nproc).settle(first, cells[0].overrides)
    if way.cells_per_gpu and not local:
        raise RequestError("--cells-per-gpu is for --launcher local.")
    where = folder, way.config_dir, way.nproc
    start = Local(*where, cells, way.cells_per_gpu) if local else Slurm(*where, way.asked)
    pool = Pool(folder, way.jobs or start.jobs, start, say, way.retry or ())
    if any(map(pool.due, cells)):
        check_data(folder, cells, way.config_dir)
    if way.dry:
        print_plan(pool, cells, way.json)
        raise typer.Exit(0)
    if ahead:
        from abovemup.studies.plan import plan

        told = plan(pool, ahead)
        minutes = f"minutes, about: {told['minutes left, about']}"
        typer.echo(f"{told['cells']} cells, {told['runs left']} runs left; {minutes}", err=way.json)
    announce(folder, cells)
    if not real:
        return pool.train(cells)
    with live:
        pool.show = shower(folder, cells, live)
        return pool.train(cells)


def print_plan(pool: "Pool", cells: "list[Cell]", json: bool) -> None:
    from rich.filesize import decimal

    from abovemup.cli.output import print_json, print_table
    from abovemup.studies.board import rows
    from abovemup.studies.plan import plan

    table, found = rows(pool.folder, cells), plan(pool, cells)
    if json:
        print_json({**found, "table": table})
        return
    print_rows(table)
    print()
    print_table(["", ""], {**found, "disk, about": decimal(found["disk, about"])}.items())


def exit_code(statuses: Iterable[str]) -> int:
    """Of a study: 0 all cells finished, else 4 if any failed, else 3."""
    left = {*statuses} - {"finished"}
    return 4 if left - {"diverged"} else 3 if left else 0


def print_rows(table: list[dict[str, Any]]) -> None:
    from abovemup.cli.output import print_table

    columns, cells = readable(table)
    print_table(columns, cells)
    print(summary(table))


def summary(table: list[dict[str, Any]]) -> str:
    """How many of each status, and the best so far."""
    from collections import Counter

    from abovemup.studies.board import best

    counts = ", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in table).items())
    first = best(table)
    if first is None:
        return f"cells: {counts}"
    where = " ".join(f"{key}={first[key]}" for key in list(first)[: list(first).index("status")])
    return f"cells: {counts}; best: val loss {first['val_loss']:.4f}, {where or first['cell']}"


def readable(table: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells as texts, without the columns in which nothing stands."""
    texts = [{k: _text(v) for k, v in row.items()} | {"step": f"{row['step']}/{row['steps']}"} for row in table]
    keys = [key for key in texts[0] if key != "steps" and any(text[key] for text in texts)]
    titles = ["ETA" if key == "seconds_left" else key if "." in key else key.replace("_", " ") for key in keys]
    return titles, [[text[key] for key in keys] for text in texts]


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if math.isfinite(value) else "" if math.isnan(value) else str(value)


def shower(folder: Path, cells: "list[Cell]", live: "Live") -> Callable[[str], None]:
    """Draws, at most once a second, as many rows as fit: what runs first, then what went wrong, then the rest."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from abovemup.studies.board import Row, rows

    known: dict[tuple[str, int], Row] = {}
    order = ("running", "failed", "damaged", "diverged", "unfinished", "finished", "missing")
    drawn = -math.inf

    def show(progress: str) -> None:
        nonlocal drawn
        if time.monotonic() < drawn + 1:
            return
        table = rows(folder, cells, known)
        columns, texts = readable(sorted(table, key=lambda row: order.index(row["status"])))
        view = Table(*columns, box=None, pad_edge=False)
        for row in texts[: max(1, live.console.height - 5)]:
            view.add_row(*map(Text, row))
        below = f"{summary(table)}\n{progress}    all: abovemup study status {folder}"
        live.update(Group(view, Text(below)), refresh=True)
        drawn = time.monotonic()

    return show
