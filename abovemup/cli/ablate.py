"""`abovemup ablate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from abovemup.cli.options import ConfigDir, Debug, Json
from abovemup.cli.study import DryRun, Jobs, Retry


def ablate(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="An ablation; --list prints them.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE[,VALUE]", help="Another axis (model.width=64,128), or a key of every cell."),
    ] = None,
    config_dir: ConfigDir = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where its runs lie; studies/NAME.")] = None,
    jobs: Jobs = None,
    dry_run: DryRun = False,
    retry: Retry = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the ablations and their questions.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a grid of runs, or what is missing of it, and print what it says: abovemup ablate parameterization

    What has a result is not run again and what was interrupted goes on; --retry says what else is tried again.
    """
    from abovemup.cli import study as shared
    from abovemup.cli.output import print_json, print_table
    from abovemup.studies import ablate as study
    from abovemup.studies.board import alone

    if listed or name is None:
        rows = [(stem, study.load(stem, [], config_dir).question) for stem in study.files(config_dir)]
        print_json(dict(rows)) if json else print_table(["ablation", "question"], rows)
        return
    ablation = study.load(name, list(overrides or []), config_dir)
    points = list(study.points(ablation, config_dir))
    cells = list({point.cell.id: point.cell for point in points}.values())
    folder = folder or Path("studies") / name
    code = shared.conduct(folder, cells, jobs, config_dir, retry or (), dry_run, json)
    with alone(folder):
        report = study.report(ablation, points, folder)
    if json:
        print_json(report)
    else:
        print_report(report, [*ablation.arms, ablation.size])
        print(f"points.csv, result.json and figure.png are in {folder}")
    raise typer.Exit(code or shared.exit_code(report["cells"]))


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
