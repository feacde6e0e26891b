"""`abovemup train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from abovemup.cli.options import Config, ConfigDir, Debug, Json, Overrides

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment


class TrainCommand(TyperCommand):
    """A command whose help lists the groups, their choices, and the keys."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from abovemup.cli.reference import print_reference

        print_reference()


def train(
    overrides: Overrides = None,
    config: Config = None,
    config_dir: ConfigDir = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN[@STEP]", help="Continue a run from its newest checkpoint, or from STEP."),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option("--branch", metavar="RUN@TOKENS", help="A new run from another's checkpoint: a decay tail."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and build nothing.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model: abovemup train model=pocket optimizer.lr=2^-5 train.tokens=2^21"""
    typed = list(overrides or [])
    if dry_run:
        from abovemup.cli.dry_run import print_plan

        print_plan(_experiment(typed, config, config_dir, resume, branch), json)
        return
    from abovemup.training.run import train as run

    outcome = run(typed, config_file=config, config_dir=config_dir, resume=resume, branch=branch, json_output=json)
    if json:
        from abovemup.cli.output import print_json

        print_json({"dir": str(outcome.dir), **outcome.summary})
    raise typer.Exit(outcome.exit_code)


def _experiment(
    overrides: list[str], config: Path | None, config_dir: Path | None, resume: str | None, branch: str | None
) -> "Experiment":
    from abovemup.training import lineage

    start = lineage.start(overrides, config, config_dir, resume, branch)
    if resume is not None and start.origin is not None:
        lineage.resumed_checkpoint(start.origin, start.step, lambda text: typer.echo(f"warning: {text}", err=True))
    return start.experiment
