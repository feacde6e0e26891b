"""The helper process: uploads a run's metrics.jsonl from its first row, following it while the run goes on.

    python -m abovemup.tracking.wandb_helper RUN_DIR MODE ID PID

The run is over when stdin ends or the process PID is gone; what it came to is then in summary.json. The run's URL,
and why the upload was given up, are written to RUN_DIR/wandb/ID.log. Imports no torch.
"""

import json
import os
import re
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from abovemup.config.site import site
from abovemup.geometry.roles import ROLE_NORM
from abovemup.tracking.records import Record, loads

POLL = 1.0  # seconds between two looks at the file
PATIENCE = 300  # seconds that wandb may take over one call: a run that is dead cannot end a helper that hangs
ROLE = {norm: role for role, norm in ROLE_NORM.items()}
OF_LAYER = re.compile(r"(norm|update|grad)/(.+)/(.+)")


def per_role(record: Record) -> Record:
    """The row as W&B gets it: head's and embedding's norms as they are, of other roles min, median and max.

    `norm/hidden/min` is in the role's norm, which is the first of each layer; others are `norm/hidden/<norm>/min`.
    """
    parts = {key: match.groups() for key in record if (match := OF_LAYER.fullmatch(key))}
    # The first of a layer counts, and so comes last here.
    roles = {layer: ROLE.get(norm, "") for kind, layer, norm in reversed(parts.values()) if kind == "norm"}
    row: Record = {}
    groups = defaultdict[str, list[float]](list)
    for key, value in record.items():
        kind, layer, norm = parts.get(key, ("", "", ""))
        role = roles.get(layer)
        if role in ("hidden", "gain", "bias"):
            own = kind == "grad" or norm == ROLE_NORM[role]
            groups[f"{kind}/{role}" if own else f"{kind}/{role}/{norm}"].append(value)
        else:
            row[key] = value
    for name, values in groups.items():
        for of in (np.min, np.median, np.max):  # a NaN among them makes all three NaN
            row[f"{name}/{of.__name__}"] = float(of(values))
    return row


def follow(path: Path, over: Callable[[], bool]) -> Iterator[Record]:
    """Each row of the file once, as it is written, until it is read to its end after `over` was true."""
    with open(path, "rb") as file:  # held open: a resume puts another file in its place
        line, ended = b"", False
        while True:
            line += file.readline()
            if line.endswith(b"\n"):
                yield loads(line)
                line = b""
            elif ended:
                return
            else:
                ended = over()


def upload(run_dir: Path, mode: Any, run_id: str, parent: int, said: IO[str]) -> None:
    import wandb

    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    tracking, leg = config["tracking"], run_id.rpartition("-")[2]
    run = wandb.init(
        mode=mode,
        id=run_id,
        name=run_dir.name if leg == "1" else f"{run_dir.name} ({leg})",
        group=tracking["group"] or run_dir.name,
        project=tracking["project"],
        entity=tracking["entity"] or site().entity,
        tags=tracking["tags"],
        dir=str(run_dir),
        config=config,
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=30,
            x_stats_pid=parent,
        ),
    )
    if run.url:  # None offline
        print(run.url, file=said)
    run.define_metric("tokens")
    run.define_metric("step")
    run.define_metric("*", step_metric="tokens")

    def over() -> bool:
        """Wait for the end of the run, or POLL seconds. A child of a dead run may still hold our stdin open."""
        signal.alarm(PATIENCE)
        return bool(select.select([0], [], [], POLL)[0]) or os.getppid() != parent

    for record in follow(run_dir / "metrics.jsonl", over):
        signal.alarm(PATIENCE)
        run.log(record if tracking["layers"] == "all" else per_role(record), step=int(record["step"]), commit=True)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    run.summary.update(summary)
    run.finish(exit_code=0 if summary["status"] == "finished" else 1)
    wandb.teardown()


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the run decides when this ends
    signal.alarm(PATIENCE)
    run_dir, mode, run_id, parent = sys.argv[1:]
    with open(Path(run_dir, "wandb", f"{run_id}.log"), "w", buffering=1, encoding="utf-8") as said:
        try:
            upload(Path(run_dir), mode, run_id, int(parent), said)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip()}"
            why = why.replace(os.environ.get("WANDB_API_KEY") or "\0", "***")  # an error may quote the key
            print(why.split("\n")[0][:200], file=said)
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
