"""`abovemup ablate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from abovemup.cli.options import ConfigDir, Debug, Json


def ablate(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An ablation; --list prints them.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE[,VALUE]", help="Another axis (model.width=64,128), or a key of every cell."),
    ] = None,
    config_dir: ConfigDir = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where its runs lie; studies/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at once; cores over train.threads.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and what has a result.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print the ablations and their questions.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a grid of runs, or what is missing of it, and print what it says: abovemup ablate parameterization

    What has a result is not run again, what was interrupted goes on, what failed is tried again.
    """
    from abovemup.cli.output import print_json, print_table
    from abovemup.config.resolve import cores
    from abovemup.studies import ablate as study
    from abovemup.studies.cells import result
    from abovemup.studies.pool import Pool

    if listed or name is None:
        rows = [(stem, study.load(stem, [], config_dir).question) for stem in study.files(config_dir)]
        print_json(dict(rows)) if json else print_table(["ablation", "question"], rows)
        return
    ablation = study.load(name, list(overrides or []), config_dir)
    points = list(study.points(ablation, config_dir))
    cells = list({point.cell.name: point.cell for point in points}.values())
    folder = folder or Path("studies") / name
    if dry_run:
        done = sum(result(folder / "runs" / cell.name, cell.steps).done for cell in cells)
        plan = {"points": len(points), "cells": len(cells), "done": done, "tokens": sum(cell.tokens for cell in cells)}
        print_json(plan) if json else print_table(["", ""], plan.items())
        return
    jobs = jobs or max(1, cores() // max(cell.threads for cell in cells))
    say, fail = (lambda text: typer.echo(text, err=json)), (lambda text: typer.echo(f"abovemup: {text}", err=True))
    code = Pool(folder, jobs, config_dir, say, fail).train(cells)
    report = study.report(ablation, points, folder)
    if json:
        print_json(report)
    else:
        print_report(report, [*ablation.arms, ablation.size])
        print(f"points.csv, result.json and figure.png are in {folder}")
    states = report["cells"]
    raise typer.Exit(code or (4 if set(states) - {"finished", "diverged"} else 3 if "diverged" in states else 0))


def print_report(report: dict[str, Any], axes: list[str]) -> None:
    from abovemup.cli.output import print_table

    rows = []
    for move in report["transfer"]:
        mine = [r for r in report["table"] if r["arm"] == move["arm"]]
        rows += [[*r["arm"], r["size"], *_best(r), "", "", _note(r)] for r in mine]
        if "drift" in move:
            rows[-1][-3] = f"{move['drift']:+.2f} ({_between(move)})"
        if "regret" in move:
            rows[-1][-2] = f"{move['regret']:.4f}"
    columns = [*axes, "best lr", "log2, fitted", "interval", "loss", "drift, octaves", "lost by the first's lr", ""]
    print_table(columns, rows)
    print(f"\n{report['verdict']}\n{report['conditions']}")
    print(f"cells: {', '.join(f'{count} {status}' for status, count in report['cells'].items())}")


def _best(r: dict[str, Any]) -> list[str]:
    if "best" not in r:
        return [""] * 4
    return [f"2^{r['best']['grid']:g}", f"{r['best']['vertex']:.2f}", _between(r), f"{r['best']['loss']:.4f}"]


def _note(r: dict[str, Any]) -> str:
    notes = ["edge of the grid: no claim"] if "best" in r and r["best"]["edge"] else []
    notes += [f"{r['missing']} missing"] if r["missing"] else []
    notes += [f"the runs of {' '.join(r['same_runs_as'])}"] if r["same_runs_as"] else []
    return "; ".join(notes)


def _between(r: dict[str, Any]) -> str:
    return "one seed" if r["interval"] is None else "{:.2f} .. {:.2f}".format(*r["interval"])
