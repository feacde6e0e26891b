"""`abovemup train`."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from abovemup.cli.options import Config, ConfigDir, Json, Overrides
from abovemup.cli.study import Kind, Launcher, apart
from abovemup.config.errors import RequestError

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
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, metavar="N", help="Machines of --nproc processes each (--launcher slurm).")
    ] = 1,
    launcher: Launcher = Kind.local,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and build nothing.")] = False,
    json: Json = False,
) -> None:
    """Train a model: abovemup train model=pocket optimizer.lr=2^-5 train.tokens=2^21"""
    slurm, world = launcher == "slurm", nodes * (nproc or 1)
    typed, asked = apart(overrides or []) if slurm else (list(overrides or []), {})
    if dry_run or slurm:
        exp, origin = settled(typed, config, config_dir, resume, branch, world)
        if not slurm:
            print_plan(exp, world, json)
            return
        from abovemup.studies.sbatch import script, submit
        from abovemup.training.run import free_folder

        if origin is None and not any(o.lstrip("+").startswith(("run.name=", "run.dir=")) for o in typed):
            raise RequestError("--launcher slurm: a job that starts again looks for its run: say run.name=NAME.")
        folder = origin or free_folder(exp)
        given = {"config": config, "config-dir": config_dir, "resume": resume, "branch": branch}
        first = [*(f"--{name}={value}" for name, value in given.items() if value is not None), *typed]
        again = [f"--resume={folder}", *(text for text in first if origin and text != f"--resume={resume}")]
        text = script(folder, first, again, nodes, nproc or 1, asked)
        print(text if dry_run else submit(text), end="" if dry_run else "\n")
        return
    if nodes > 1:
        raise RequestError(f"--nodes {nodes}: that is for --launcher slurm, or a --dry-run.")
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


def settled(
    typed: list[str], config: Path | None, config_dir: Path | None, resume: str | None, branch: str | None, world: int
) -> "tuple[Experiment, Path | None]":
    """What would run over so many processes, and the run that `resume` goes on with. Raises RequestError."""
    from abovemup.data.sources import find_source
    from abovemup.training import lineage
    from abovemup.training.ranks import Ranks

    start = lineage.start(typed, config, config_dir, resume, branch)
    if start.experiment.data.name not in ("synthetic", "shards"):  # whose manifest has been read
        find_source(start.experiment.data)
    origin = start.origin if resume is not None else None
    if origin is not None:
        lineage.resumed_checkpoint(origin, start, lambda text: typer.echo(f"warning: {text}", err=True))
    return Ranks(world=world).settle(start.experiment, typed), origin


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
    paper, batch, every = Estimate(e, table(e), processes), t.batch_size * t.seq_len, " each process" * (processes > 1)
    memory, flops, sent, (least, most) = paper.memory(), paper.flops(), paper.sent(), paper.seconds()
    if json:
        found = {"parameters": paper.count, **memory, "flops": flops, "sent": sent, "seconds": [least, most]}
        print_json({"config": asdict(e), "processes": processes, **found, "assumed": ASSUMED})
        return
    for sentence in e.cannot_match:
        print(f"{e.experiment} cannot match: {sentence}")

    def listed(sizes: dict[str, Any], saved: float = 0.0) -> str:
        known = [f"{name} {'not known' if n is None else decimal(round(n))}" for name, n in sizes.items() if n != 0]
        total = sum(filter(None, sizes.values())) - saved
        return f"about {decimal(round(total))}{every}: {', '.join(known)}"

    passed = sum(memory[name] for name in ("activations", "logits", "casts"))  # gone when the step is taken

    plan = {
        "experiment": e.experiment,
        "model": f"{m.name}: {paper.count:,} parameters, width {m.width}, depth {m.depth}, vocabulary {vocabulary(e)}",
        "optimizer": f"{o.name} under {e.parameterization.name}: lr {o.lr:g}, momentum {o.momentum:g}",
        "schedule": f"{s.name}: warmup {s.warmup}, decay {s.decay} steps",
        "data": d.name if d.path is None else f"{d.name}: {d.path}",
        "batch": f"{t.batch_size} x {t.seq_len} = {batch:,} tokens",
        "steps": f"{t.steps:,}",
        "tokens": f"{t.tokens:,}",
        "processes": f"{processes}, parallel={e.parallel.name}" + f", tensor={paper.tensor}" * (paper.tensor > 1),
        "memory": listed(memory, min(passed, memory["step"])),
        "FLOPs of a step": f"{flops['model']:.3g}, and {flops['msign'] / flops['model']:.2%} more for msign",
    }
    if processes > 1:
        plan["sent in a step"] = listed(sent)
    if t.device == "cuda" or (t.device == "auto" and processes > 1):
        plan["time of a step"] = f"{least:.3g} s with communication hidden, {most:.3g} s with none of it"
        plan["tokens/s"] = f"{batch / most:,.0f} to {batch / least:,.0f}"
        plan["assumed"] = ASSUMED
    print_table(["", ""], plan.items())
