"""`abovemup sweep`."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from abovemup.cli.options import ConfigDir, Json
from abovemup.cli.study import CellsPerGpu, DryRun, Jobs, Kind, Launcher, Nproc, Retry


def sweep(
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUES",
            help="A,B  choice(A,B)  range(A,B,STEP)  glob(*)  log2range(A,B,STEP) with its end, or one value.",
        ),
    ],
    config_dir: ConfigDir = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where its runs lie; studies/sweep-HASH.")] = None,
    budget: Annotated[str | None, typer.Option(help="Horizons, model and measuring of smoke, pocket, ...")] = None,
    jobs: Jobs = None,
    launcher: Launcher = Kind.local,
    cells_per_gpu: CellsPerGpu = None,
    nproc: Nproc = 1,
    dry_run: DryRun = False,
    retry: Retry = None,
    json: Json = False,
) -> None:
    """Train every combination of what is given: abovemup sweep optimizer.lr='log2range(-6,-2,1)' model.width=64,128

    What has a result is not run again and what was interrupted goes on; --retry says what else is tried again.
    Several train.tokens under a constant schedule are read from one run.
    """
    from abovemup.cli import study
    from abovemup.cli.output import print_json

    study.warm(launcher, dry_run)
    import pandas as pd

    from abovemup.studies.board import alone, announced, best, rows
    from abovemup.studies.sweep import cells_of

    axes, asked = study.apart(overrides)
    cells = cells_of(axes, config_dir, budget)
    named = repr(sorted([*axes, *([budget] if budget else [])]))
    folder = folder or Path("studies") / f"sweep-{hashlib.sha256(named.encode()).hexdigest()[:8]}"
    way = study.Way(jobs, config_dir, retry, dry_run, json, launcher, asked, cells_per_gpu, nproc)
    code = study.conduct(folder, cells, way)
    table = rows(folder, cells)
    first = best(table)
    with alone(folder):
        points = pd.DataFrame(rows(folder, announced(folder))).drop(columns=["step", "loss", "seconds_left", "error"])
        points.to_csv(folder / "points.csv", index=False)
    if json:
        print_json({"dir": str(folder), "cells": table, "best": first})
    else:
        study.print_rows(table)
        print(f"points.csv and the runs are in {folder}")
    raise typer.Exit(code or study.exit_code(row["status"] for row in table) or (0 if first else 3))
