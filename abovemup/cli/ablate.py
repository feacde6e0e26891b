"""`abovemup ablate`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from abovemup.cli.options import ConfigDir, Json
from abovemup.cli.study import CellsPerGpu, DryRun, Jobs, Kind, Launcher, Nproc, Retry


def ablate(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An ablation; --list prints them.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE[,VALUE]", help="Another axis (model.width=64,128), or a key of every cell."),
    ] = None,
    config_dir: ConfigDir = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where its runs lie; studies/NAME.")] = None,
    budget: Annotated[str, typer.Option(help="What it may cost: smoke, pocket, proxy, paper or your own.")] = "pocket",
    jobs: Jobs = None,
    launcher: Launcher = Kind.local,
    cells_per_gpu: CellsPerGpu = None,
    nproc: Nproc = 1,
    dry_run: DryRun = False,
    retry: Retry = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the ablations and their questions.")] = False,
    json: Json = False,
) -> None:
    """Train a grid of runs, or what is missing of it, and print what it says: abovemup ablate horizon

    What has a result is not run again and what was interrupted goes on; --retry says what else is tried again. Only a
    longest horizon is trained: the others are read from its run.
    """
    from abovemup.cli import study as shared
    from abovemup.cli.output import print_json, print_table

    if name is not None and not listed:
        shared.warm(launcher, dry_run)
    from abovemup.config.conf import files
    from abovemup.studies import ablate as study
    from abovemup.studies import findings
    from abovemup.studies.board import alone
    from abovemup.studies.budget import load as load_budget

    if listed or name is None:
        load_budget(budget, config_dir)  # one that there is not is not said of each
        rows = [(stem, _question(stem, config_dir, budget)) for stem in files("ablation", config_dir)]
        print_json(dict(rows)) if json else print_table(["ablation", "question"], rows)
        return
    axes, asked = shared.apart(list(overrides or []))
    ablation = study.load(name, axes, config_dir, budget)
    points = list(study.points(ablation, config_dir))
    cells = list({point.cell.id: point.cell for point in points}.values())
    folder = folder or Path("studies") / (name if budget == "pocket" else f"{name}-{budget}")
    way = shared.Way(jobs, config_dir, retry, dry_run, json, launcher, asked, cells_per_gpu, nproc)
    code = shared.conduct(folder, cells, way, cells if ablation.verdicts else None)
    with alone(folder):
        report = findings.report(ablation, points, folder)
    print_json(report) if json else print_report(report, ablation.arms, folder)
    raise typer.Exit(code or shared.exit_code(report["cells"]))


def _question(name: str, config_dir: Path | None, budget: str) -> str:
    """Of an ablation, or what is wrong with its file, which is no reason to hide the others."""
    from abovemup.config.errors import RequestError
    from abovemup.studies import ablate as study

    try:
        return study.load(name, [], config_dir, budget).question
    except RequestError as error:
        return f"broken: {error}"


def print_report(report: dict[str, Any], arms: list[str], folder: Path) -> None:
    from abovemup.cli.output import print_table

    columns = [*arms, "at", "batch", "best lr", "loss", f"log2 {report['fit']}", "interval", "octaves within 1 %", ""]
    print_table(columns, [[*row["arm"], row["group"], *_best(row), _note(row)] for row in report["table"]])
    for row in report["verdicts"]:
        if "drift" in row:
            moved = f"moves by {row['drift']:+.2f} octaves ({_between(row)})"
            print(f"{row['name']}: its best lr {moved} to {row['to']}; the first's loses {row['regret']:.4f} there")
        for of, (spread, low, high, regret) in row.get("spreads", {}).items():
            far = f"{spread:.3f} ({_between({'interval': (low, high)})}), which costs {regret:.4f} nats"
            print(f"{row['name']}: spread of log2 {of} {far}")
    print(f"\n{report['question']}\n{report['verdict']}\nThe paper: {report['paper']}.\n{report['conditions']}")
    print(f"cells: {', '.join(f'{count} {status}' for status, count in report['cells'].items())}")
    print(f"points.csv, result.json and figure.png are in {folder}")


def _best(r: dict[str, Any]) -> list[str]:
    if "lr" not in r:
        return [""] * 6
    numbers = [str(r["batch"] or ""), f"2^{r['lr']:g}", f"{r['lowest']:.4f}", f"{r['x']:.2f}"]
    return [*numbers, "" if r["reason"] else _between(r), f"{r['sensitivity']:.1f}"]


def _note(r: dict[str, Any]) -> str:
    notes = [f"{r['reason'].replace('_', ' ')}: no claim"] if r.get("reason") else []
    notes += [f"{r['missing']} missing"] if r["missing"] else []
    notes += [f"the runs of {' '.join(r['same_runs_as'])}"] if r["same_runs_as"] else []
    return "; ".join(notes)


def _between(r: dict[str, Any]) -> str:
    return "" if math.isnan(r["interval"][0]) else "{:.2f} .. {:.2f}".format(*r["interval"])
