"""The runs of a W&B project, with the metric names of the paper's logs, in the raw layout of its public toolkit."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from abovemup.config.errors import RequestError, RunFailed

_LRS = {"lr_hidden": "lr/opt_0/group_0", "lr_in": "lr/opt_0/group_1", "lr_out": "lr/opt_0/group_2"}
_LOSS = "loss_metrics/global_avg_loss"


def history(source: str, where: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """A row for each step with a loss and norms, and of `where` what is left: group=G and name=REGEX choose at W&B.

    Finished runs only. Raises RequestError: no such project, no login, runs of another form. RunFailed: not reached.
    """
    import wandb

    path, rest = source.removeprefix("wandb:"), []
    filters: dict[str, Any] = {"state": "finished"}
    for condition in where:
        key, _, value = condition.partition("=")
        filters |= {"group": value} if key == "group" else {}
        filters |= {"display_name": {"$regex": value}} if key == "name" else {}
        rest += [] if key in ("group", "name") else [condition]
    try:
        parts = [_rows(run) for run in wandb.Api(timeout=30).runs(path, filters=filters)]
    except wandb.errors.UsageError as error:
        raise RequestError(f"{source}: {_line(error)} Log in: wandb login, or set WANDB_API_KEY.") from error
    except ValueError as error:  # what its API raises for a project that is not there
        raise RequestError(f"{source}: {_line(error)} Write wandb:entity/project.") from error
    except (wandb.errors.CommError, OSError) as error:
        raise RunFailed(f"{source} was not reached, or it refuses the key: {_line(error)}") from error
    if not (parts := [part for part in parts if part is not None]):
        raise RequestError(f"{source}: no finished run has the paper's metrics, such as {_LOSS} and {_LRS['lr_out']}.")
    return pd.concat(parts, ignore_index=True), rest


def _rows(run: Any) -> pd.DataFrame | None:
    from abovemup.analysis.sources import PAPER

    keys = [key for key in run.summary if key in PAPER]
    if not {_LOSS, *_LRS.values()} <= {*keys}:
        return None
    table = pd.DataFrame(run.scan_history(keys=["_step", *(key for key in keys if key != "_step")]))
    said = dict(re.findall(r"(bs|seed|momentum)-(\d+(?:\.\d+)?)", run.name))
    args = re.findall(r"--(?:training|optimizer)\.(\w+)[= ](\S+)", " ".join((run.metadata or {}).get("args", [])))
    said |= {{"global_batch_size": "bs"}.get(key, key): value for key, value in args}
    if "bs" not in said or table.empty:
        return None
    table = table.assign(run_name=run.name, bs=int(said["bs"]), seed=int(said.get("seed", 0)))
    table["momentum"] = float(said.get("momentum", 1.0))
    return table.assign(**{name: table[key].max() for name, key in _LRS.items()})  # a schedule's rate is its highest


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") + "."
