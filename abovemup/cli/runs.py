"""`abovemup runs`: what to do with run directories."""

import typer

from abovemup.cli.options import Debug, RunDir

app = typer.Typer(no_args_is_help=True)


@app.command("push")
def push(run: RunDir, debug: Debug = False) -> None:
    """Upload a whole run to W&B, from its first step to its last."""
    from abovemup.tracking.wandb import push as upload
    from abovemup.training.lineage import run_folder

    print(upload(run_folder(run)))
