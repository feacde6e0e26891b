"""Cells as Slurm jobs: submitted by submitit, known by their names, and queued again when preempted or out of time.

A job outlives the study that submitted it; the study, when it is started again, finds it.
"""

import hashlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean
from abovemup.config.site import site, site_file
from abovemup.studies.cells import Cell
from abovemup.studies.child import train

# Those of Hydra's launcher plugin for submitit, but for several nodes or tasks: a cell is one, of --nproc processes.
# Where there is no default here it is submitit's, or Slurm's.
OPTIONS = [
    "partition", "account", "qos", "constraint", "exclude", "gres", "comment", "setup", "additional_parameters",
    "cpus_per_task", "cpus_per_gpu", "gpus_per_node", "gpus_per_task", "mem_gb", "mem_per_cpu",
    "mem_per_gpu", "timeout_min", "signal_delay_s", "max_num_timeout", "array_parallelism",
]  # fmt: skip
_DEFAULTS = {"timeout_min": 60, "max_num_timeout": 1000, "array_parallelism": 256}
_KINDS = {"array_parallelism": int, "max_num_timeout": int, "additional_parameters": dict}
_ENDED = [
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
    "gone",
]  # fmt: skip
_PAUSE = 2.0  # seconds between two looks at the queue


def options(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What was typed, or is in the site file, as YAML has it. Raises RequestError, after `where`, for no option."""
    if unknown := [key for key in given if key not in OPTIONS]:
        raise RequestError(f"{where}{unknown[0]} is no option of --launcher slurm.{did_you_mean(unknown[0], OPTIONS)}")
    found = {}
    for key, value in given.items():
        try:
            found[key] = yaml.safe_load(value) if isinstance(value, str) else value
        except yaml.YAMLError as error:
            raise RequestError(f"{where}{key}: {' '.join(str(error).split())}.") from error
        if not isinstance(found[key], kind := _KINDS.get(key, object)):
            raise RequestError(f"{where}{key}={value}: expected {'a mapping' if kind is dict else 'a whole number'}.")
    return found


def settle(asked: Mapping[str, Any], nproc: int) -> dict[str, Any]:
    """What is asked over what the site file says over the defaults. Raises RequestError, also for too few GPUs."""
    found = _DEFAULTS | options(site().launcher, f"{site_file()}: launcher.") | options(asked, "launcher.")
    gpus = str(found.get("gpus_per_node") or nproc).rpartition(":")[2]  # Slurm takes a100:4, too
    if gpus.isdecimal() and nproc > int(gpus):
        raise RequestError(f"--nproc {nproc}: each process takes a GPU: launcher.gpus_per_node={gpus} is too few.")
    return found


class Slurm:
    def __init__(self, study: Path, config_dir: Path | None, nproc: int, asked: Mapping[str, Any]) -> None:
        """`asked`: of OPTIONS. Raises RequestError where there is no Slurm."""
        if shutil.which("squeue") is None:
            raise RequestError("--launcher slurm: there is no squeue here. Start the study on a login node.")
        self.study, self.config_dir, self.nproc = study.absolute(), config_dir and config_dir.absolute(), nproc
        self.asked = settle(asked, nproc)
        self.jobs: int = self.asked.pop("array_parallelism")
        self.seen: dict[str, tuple[str, str]] = {}  # job -> its name and state
        self.looked = -_PAUSE

    def find(self, cell: Cell) -> "Submitted | None":
        live = [job for job, (name, state) in self.queue().items() if name == self.name(cell) and state not in _ENDED]
        return Submitted(live[-1], self) if live else None

    def start(self, cell: Cell, number: int) -> "Submitted":
        """Raises RequestError for what submitit or sbatch refuses."""
        from submitit import AutoExecutor

        own = {"cpus_per_task": cell.threads * self.nproc, "job_name": self.name(cell)}
        asked: dict[str, Any] = {f"slurm_{key}": value for key, value in (own | self.asked).items()}
        setup = ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", f"export OMP_NUM_THREADS={cell.threads}"]
        theirs = asked.pop("slurm_setup", [])
        folder, legs = self.study / "logs" / "slurm", asked.pop("slurm_max_num_timeout")
        try:
            executor = AutoExecutor(folder, "slurm", slurm_max_num_timeout=legs)
            executor.update_parameters(**asked, slurm_setup=setup + ([theirs] if isinstance(theirs, str) else theirs))
            job = executor.submit(Task(), self.study, cell, self.config_dir, self.nproc).job_id
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"--launcher slurm: {' '.join(str(error).split())} (launcher.*, site file)") from error
        self.seen[job] = self.name(cell), "PENDING"
        return Submitted(job, self)

    def name(self, cell: Cell) -> str:
        """The job's, in this study and no other."""
        return f"{cell.name}-{hashlib.sha256(f'{self.study.resolve()} {cell.steps}'.encode()).hexdigest()[:8]}"

    def queue(self) -> dict[str, tuple[str, str]]:
        """The user's jobs, the oldest first; as they were seen last where Slurm does not answer."""
        if time.monotonic() > self.looked + _PAUSE:
            command = ["squeue", "--me", "--noheader", "--states=all", "--sort=i", "--format=%i %T %j"]
            said = subprocess.run(command, capture_output=True, text=True)
            if said.returncode == 0:
                lines = [line.split(" ", 2) for line in said.stdout.splitlines()]
                self.seen = {job: (name, state) for job, state, name in lines}
            self.looked = time.monotonic()
        return self.seen


@dataclass
class Submitted:
    id: str
    slurm: Slurm

    def poll(self) -> str | None:
        _, state = self.slurm.queue().get(self.id, ("", "gone"))
        return f"Slurm job {self.id}: {state}" if state in _ENDED else None

    def stop(self) -> None:
        pass  # it goes on without the study

    def wait(self) -> None:
        pass


class Task:
    """What a job does. Slurm's warning (preempted, or out of time) ends it with a checkpoint and queues it again."""

    def __call__(self, *cell: Any) -> None:
        warned = False

        def warn(signum: int, frame: Any) -> None:
            nonlocal warned
            warned = True
            signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # until the run has its own
        requeue: Any = signal.signal(signal.SIGUSR2, warn)  # submitit's, which calls `checkpoint`
        try:
            train(*cell)
        except SystemExit as end:
            signal.signal(signal.SIGUSR2, requeue)
            if end.code and warned:
                requeue(signal.SIGUSR2, None)
            if end.code:
                raise

    def checkpoint(self, *cell: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *cell)
