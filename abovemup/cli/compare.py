"""`abovemup compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from abovemup.cli.options import ConfigDir, Json
from abovemup.cli.study import CellsPerGpu, DryRun, Jobs, Kind, Launcher, Nproc, Retry


def compare(
    asked: Annotated[
        list[str],
        typer.Argument(metavar="OPTIMIZER... [KEY=VALUE...]", help="Two or more optimizers; then what all share."),
    ],
    budget: Annotated[str, typer.Option("--budget", help="smoke, pocket, proxy, paper, or your own.")] = "pocket",
    config_dir: ConfigDir = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where its runs lie; studies/compare-...")] = None,
    jobs: Jobs = None,
    launcher: Launcher = Kind.local,
    cells_per_gpu: CellsPerGpu = None,
    nproc: Nproc = 1,
    dry_run: DryRun = False,
    retry: Retry = None,
    json: Json = False,
) -> None:
    """Tune each optimizer by as many trials, repeat its best on fresh seeds: abovemup compare adam scion

    lr and batch size first, then momentum, warmup, rates and a decay. What has a result is not run again.
    """
    from abovemup.cli.output import print_json
    from abovemup.cli.study import Way, apart, conduct, exit_code, warm

    warm(launcher, dry_run)
    from abovemup.config.errors import RunFailed
    from abovemup.studies import compare as study
    from abovemup.studies.board import alone, look
    from abovemup.studies.budget import load
    from abovemup.studies.cells import Result

    arms = [word for word in asked if "=" not in word]
    overrides, launching = apart([word for word in asked if "=" in word])
    comparison = study.ask(arms, overrides, load(budget, config_dir), config_dir)
    folder = folder or Path("studies") / "-".join(["compare", *arms, budget])
    for key, value in study.shared(comparison).items():
        typer.echo(f"{key}: {value}", err=json)
    way = Way(jobs, config_dir, retry, dry_run, json, launcher, launching, cells_per_gpu, nproc)
    found: dict[tuple[str, int], Result] = {}
    ahead = study.foreseen(comparison) if dry_run or comparison.budget.verdicts else None
    for trials in study.stages(comparison, lambda trial: found[trial.cell.id].loss):
        cells = ahead if ahead and dry_run else list({trial.cell.id: trial.cell for trial in trials}.values())
        if code := conduct(folder, cells, way, ahead):
            raise typer.Exit(code)
        ahead = None
        found.update({cell.id: look(folder, cell) for cell in cells})
        if lacking := sum(not result.done for result in found.values()):
            raise RunFailed(f"{lacking} of {len(cells)} cells failed, and what follows needs them: --retry failed.")
    with alone(folder):
        report = study.report(comparison, trials, folder)
    print_json(report) if json else print_report(report, folder)
    raise typer.Exit(exit_code(result.status for result in found.values()))


def print_report(report: dict[str, Any], folder: Path) -> None:
    from abovemup.cli.output import print_table

    arms, pairs = report["arms"], report["pairs"]
    keys = [key for row in arms.values() for key, value in row.items() if not isinstance(value, list)]
    print_table(["", *arms], [[key, *(row.get(key, "") for row in arms.values())] for key in dict.fromkeys(keys)])
    print()
    print_table(list(pairs[0]), [pair.values() for pair in pairs])
    print("speedup: in tokens at equal tuned loss; crossing: of the best runs; both at constant lr, on the tuning seed")
    print(f"\n{report['verdict']}\npoints.csv, result.json and figure.png are in {folder}")
