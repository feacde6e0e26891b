"""The helper process: reads a run's metrics.jsonl from its first row, follows it, and tells W&B.

    python -m abovemup.tracking.wandb_helper SPEC

SPEC is the JSON of `wandb.run_spec`. On stdin comes one line, the summary, when the run ends; end of file without
it means that the run died. On stdout go lines of JSON with `note`, `url` or `mode`. Imports no torch.
"""

import contextlib
import json
import math
import os
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from abovemup.geometry.roles import ROLE_NORM
from abovemup.tracking.records import Record, loads

POLL = 1.0  # seconds between two looks at the file
LAST = 60  # seconds to finish in once the run is gone, and nobody is left to end a helper that hangs
ROLE = {norm: role for role, norm in ROLE_NORM.items()}


def per_role(record: Record) -> Record:
    """The row as W&B gets it: head's and embedding's norms as they are, of other roles min, median and max.

    `norm/hidden/min` is in the role's norm, which is the first of each layer; others are `norm/hidden/<norm>/min`.
    """
    row: Record = {}
    groups: dict[str, list[float]] = {}
    roles: dict[str, str] = {}
    for kind, layer, norm in (_parts(key) for key in record):
        if kind == "norm":
            roles.setdefault(layer, ROLE.get(norm, ""))
    for key, value in record.items():
        kind, layer, norm = _parts(key)
        role = roles.get(layer, "")
        if role in ("hidden", "gain", "bias"):
            own = kind == "grad" or norm == ROLE_NORM[role]
            groups.setdefault(f"{kind}/{role}" if own else f"{kind}/{role}/{norm}", []).append(value)
        else:
            row[key] = value
    for name, values in groups.items():
        if any(math.isnan(value) for value in values):
            values = [math.nan]  # an order with a NaN in it means nothing
        row |= {f"{name}/min": min(values), f"{name}/median": statistics.median(values), f"{name}/max": max(values)}
    return row


def _parts(key: str) -> tuple[str, str, str]:
    """(kind, layer, norm) of a key; nothing of one that is about no layer."""
    kind, _, rest = key.partition("/")
    layer, _, norm = rest.rpartition("/")
    return (kind, layer, norm) if kind in ("norm", "update", "grad") else ("", "", "")


def follow(path: Path, over: Iterable[bool]) -> Iterator[Record]:
    """Each row of the file once, as it is written, until `over` is true and the file is read to its end."""
    rest = b""
    file = None
    for end in over:
        if file is None and path.exists():
            file = open(path, "rb")  # noqa: SIM115  # held open: a resume may put another file in its place
        while file and (chunk := file.read(2**20)):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from map(loads, lines)
        if end:
            return


def run_over(spec: dict[str, Any]) -> Iterator[bool]:
    """False every POLL seconds while the run goes on, then True, with its summary in the spec."""
    summary, said = spec["summary"], b""
    while summary is None:
        yield False
        ready = select.select([0], [], [], POLL)[0]
        chunk = os.read(0, 65536) if ready else b""
        said += chunk
        if said.endswith(b"\n"):
            summary = json.loads(said)
        elif (ready and not chunk) or os.getppid() != spec["parent"]:
            summary = {"status": "killed"}
        if summary is not None:
            spec["summary"] = summary
    yield True


def outlive(parent: int, by: float) -> None:
    """Start a thread that ends this process `by` seconds after its parent, whatever else it is stuck in."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        time.sleep(by)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def upload(spec: dict[str, Any], say: Any) -> None:
    import wandb

    run_dir = Path(spec["run_dir"])
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=30 if spec["fall_back"] else 8,  # somebody waits for a push
        x_stats_pid=spec["parent"],
    )
    run = wandb.init(
        **{key: spec[key] for key in ("mode", "id", "name", "group", "project", "entity", "tags")},
        dir=str(run_dir),
        config=config | {"leg": spec["leg"]},
        settings=settings,
    )
    if spec["mode"] == "online":
        say(url=run.url, note=run.url)
    run.define_metric("tokens")
    run.define_metric("step")
    run.define_metric("*", step_metric="tokens")
    for record in follow(run_dir / "metrics.jsonl", run_over(spec)):
        run.log(record if spec["layers"] == "all" else per_role(record), step=int(record["step"]), commit=True)
    run.summary.update(spec["summary"])
    run.finish(exit_code=0 if spec["summary"]["status"] == "finished" else 1)
    wandb.teardown()


def without_secrets(text: str) -> str:
    """The first line of an error without the key."""
    key = os.environ.get("WANDB_API_KEY")
    text = (text.strip().split("\n") or [""])[0][:200]
    return text.replace(key, "***") if key else text


def main() -> None:
    spec = json.loads(sys.argv[1])
    out = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the run decides when this ends
    outlive(spec["parent"], LAST)

    def say(**what: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(out, json.dumps(what).encode() + b"\n")

    try:
        upload(spec, say)
    except Exception as error:
        why = f"{type(error).__name__}: {without_secrets(str(error))}"
        if not spec["fall_back"]:
            say(mode="failed", note=why)
            raise SystemExit(1) from None
        say(mode="offline", note=f"{why}; starting again, offline")
        again = spec | {"mode": "offline", "fall_back": False}
        os.environ.pop("WANDB_SERVICE", None)
        os.dup2(out, 1)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "abovemup.tracking.wandb_helper", json.dumps(again)])


if __name__ == "__main__":
    main()
