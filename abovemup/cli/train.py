"""`abovemup train`."""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from abovemup.cli.options import Config, ConfigDir, Json, Overrides

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
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, metavar="N", help="Processes on this machine (parallel=ddp, or as set)."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and build nothing.")] = False,
    json: Json = False,
) -> None:
    """Train a model: abovemup train model=pocket optimizer.lr=2^-5 train.tokens=2^21"""
    typed = list(overrides or [])
    if dry_run:
        from abovemup.data.sources import find_source
        from abovemup.training import lineage
        from abovemup.training.ranks import Ranks

        start = lineage.start(typed, config, config_dir, resume, branch)
        if start.experiment.data.name not in ("synthetic", "shards"):  # whose manifest has been read
            find_source(start.experiment.data)
        if resume is not None and start.origin is not None:
            lineage.resumed_checkpoint(start.origin, start.step, lambda text: typer.echo(f"warning: {text}", err=True))
        print_plan(Ranks(world=nproc or 1).settle(start.experiment, typed), nproc or 1, json)
        return
    if nproc is not None and "TORCHELASTIC_RUN_ID" not in os.environ:  # the processes themselves read on
        from abovemup.training.launch import launch

        raise typer.Exit(launch(nproc, sys.argv[1:]))
    from abovemup.cli.output import print_json
    from abovemup.training.ranks import Silent
    from abovemup.training.run import train as run

    try:
        outcome = run(typed, config_file=config, config_dir=config_dir, resume=resume, branch=branch, json_output=json)
    except Silent as end:
        raise typer.Exit(end.code) from None
    if json and outcome.summary:
        print_json({"dir": str(outcome.dir), **outcome.summary})
    raise typer.Exit(outcome.exit_code)


def print_plan(e: "Experiment", processes: int, json: bool) -> None:
    """Of a dry run the essentials: parameters, tokens, steps, and what a step takes.

    How long it takes is said where there is a GPU, or there may be: train.device=cuda, or several processes and no CPU.
    """
    from rich.filesize import decimal

    from abovemup.cli.output import print_json, print_table
    from abovemup.cli.routes import vocabulary
    from abovemup.training.estimate import ASSUMED, Estimate
    from abovemup.training.routes import table

    t, m, o, s, d = e.train, e.model, e.optimizer, e.schedule, e.data
    estimate, batch = Estimate(e, table(e), processes), t.batch_size * t.seq_len
    count, memory, flops, sent = estimate.parameters, estimate.memory(), estimate.flops(), estimate.sent()
    timed = t.device == "cuda" or (t.device == "auto" and processes > 1)
    if json:
        found = {"parameters": count, **memory, "flops": flops, "sent": sent}
        found |= {"seconds": estimate.seconds(), "assumed": ASSUMED} if timed else {}
        print_json({"config": asdict(e), "processes": processes, **found})
        return
    for sentence in e.cannot_match:
        print(f"{e.experiment} cannot match: {sentence}")

    def listed(sizes: dict[str, Any]) -> str:
        whole = decimal(round(sum(filter(None, sizes.values())))) + (
            " each process, about" if processes > 1 else ", about"
        )
        known = {name: "not known" if n is None else decimal(round(n)) for name, n in sizes.items() if n != 0}
        return f"{whole}: {', '.join(f'{name} {text}' for name, text in known.items())}"

    plan = {
        "experiment": e.experiment,
        "model": f"{m.name}: {count:,} parameters, width {m.width}, depth {m.depth}, vocabulary {vocabulary(e)}",
        "optimizer": f"{o.name} under {e.parameterization.name}: lr {o.lr:g}, momentum {o.momentum:g}",
        "schedule": f"{s.name}: warmup {s.warmup}, decay {s.decay} steps",
        "data": d.name if d.path is None else f"{d.name}: {d.path}",
        "batch": f"{t.batch_size} x {t.seq_len} = {batch:,} tokens",
        "steps": f"{t.steps:,}",
        "tokens": f"{t.tokens:,}",
        "processes": f"{processes}, parallel={e.parallel.name}",
        "memory": listed(memory),
        "FLOPs of a step": f"{flops['model']:.3g}, and {flops['msign'] / flops['model']:.2%} more for msign",
    }
    if processes > 1:
        plan["sent in a step"] = listed(sent)
    if timed:
        least, most = estimate.seconds()
        plan["time of a step"] = f"{least:.3g} to {most:.3g} s: {batch / most:,.0f} to {batch / least:,.0f} tokens/s"
        plan["assumed"] = ASSUMED
    print_table(["", ""], plan.items())
