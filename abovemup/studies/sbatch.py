"""A run of one or several machines as a Slurm job: torchrun on each of them, queued again until the run is over."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError
from abovemup.studies.slurm import settle

_BODY = Path(__file__).with_name("sbatch.sh")
_FLAGS = {"timeout_min": "time={}", "mem_gb": "mem={}G", "signal_delay_s": "signal=B:USR2@{}"}  # the others: as named


def script(
    run: Path, first: Sequence[str], again: Sequence[str], nodes: int, nproc: int, launcher: Mapping[str, Any]
) -> str:
    """The sbatch script of `abovemup train FIRST` in the current folder, and of AGAIN once the folder `run` has begun.

    Raises RequestError for what is asked of the `launcher`.
    """
    asked = {"cpus_per_task": nproc, "signal_delay_s": 180} | settle(launcher, nproc)
    legs, setup, more = asked.pop("max_num_timeout"), asked.pop("setup", []), asked.pop("additional_parameters", {})
    del asked["array_parallelism"]
    own = {"job_name": run.name, "nodes": nodes, "ntasks_per_node": 1, "open_mode": "append", "requeue": True}
    lines = ["#!/bin/bash"]
    for key, value in (own | asked | more).items():
        flag = _FLAGS.get(key, key.replace("_", "-") + ("" if value is True else "={}"))
        lines.append(f"#SBATCH --{flag.format(shlex.quote(str(value)))}")
    lines += [setup] if isinstance(setup, str) else setup
    variables = {"here": Path.cwd(), "run": run, "python": sys.executable, "nproc": nproc, "legs": legs}
    lines += [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    return "\n".join([*lines, f"first=({shlex.join(first)})", f"again=({shlex.join(again)})", _BODY.read_text()])


def submit(script: str) -> str:
    """The number of the job. Raises RequestError for what sbatch refuses, and where there is none."""
    try:
        said = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise RequestError("--launcher slurm: there is no sbatch here. Submit from a login node.") from None
    if said.returncode:
        raise RequestError(f"--launcher slurm: {' '.join(said.stderr.split())} (launcher.*, site file)")
    return said.stdout.strip().split(";")[0]
