"""Our own pool: as many cells at once as asked for, each a process of its own, each trained by one study only."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from abovemup.config.errors import RequestError
from abovemup.studies.board import look
from abovemup.studies.cells import Cell, place
from abovemup.training.run import lock
from abovemup.training.signals import Stop

_PAUSE = 0.1  # seconds between two looks


@dataclass
class Job:
    cell: Cell
    claim: FileLock
    process: subprocess.Popen[bytes]
    started: float


def ends(cells: list[Cell]) -> list[Cell]:
    """Those that must end a run: not the horizons that a longer run of the same name measures on its way."""
    longest: dict[str, int] = {}
    for cell in cells:
        longest[cell.name] = max(cell.steps, longest.get(cell.name, 0))
    return [cell for cell in cells if not (cell.passed and cell.steps < longest[cell.name])]


@dataclass
class Pool:
    """`folder`/runs has a run directory a cell, `folder`/logs what each printed and the lock of who trains it.

    Several pools on one folder share its cells. A pool tries each cell once, and what has failed or diverged before
    only when that is in `retry`. `show` is called again and again meanwhile.
    """

    folder: Path
    jobs: int
    config_dir: Path | None
    say: Callable[[str, bool], None]  # told when a cell has ended, and whether it failed
    retry: Collection[str] = ()
    show: Callable[[str], None] = lambda text: None
    running: list[Job] = field(default_factory=list)
    seconds: dict[float, float] = field(default_factory=dict)  # cost of a cell -> what the last such cell took

    def train(self, cells: list[Cell]) -> int:
        """Train, in their order, the cells that have no result. Returns 0, or 128 + the signal that ended it.

        After a signal the children get SIGTERM and keep a checkpoint.
        """
        for name in ("runs", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        runs = ends(cells)
        waiting = [cell for cell in runs if self.due(cell)]
        with Stop() as stop:
            stop.graceful()
            try:
                while (waiting or self.running) and not stop():
                    self.collect(len(runs), waiting)
                    while len(self.running) < self.jobs and self.start_one(waiting):
                        pass
                    self.show(self.progress(len(runs), waiting))
                    time.sleep(_PAUSE)
            finally:
                for job in self.running:
                    job.process.terminate()
                for job in self.running:
                    job.process.wait()
                    job.claim.release()
            return stop.exit_code if stop() else 0

    def due(self, cell: Cell) -> bool:
        status = look(self.folder, cell).status
        return status in self.retry or status not in ("finished", "diverged", "failed")

    def start_one(self, waiting: list[Cell]) -> bool:
        """Start the first cell that nobody else trains; forget those that somebody else has finished."""
        for cell in list(waiting):
            if any(other.name == cell.name and other.steps < cell.steps for other in waiting):
                continue  # its shorter horizons end, and are measured, first
            claim = FileLock(self.folder / "logs" / f"{cell.name}.lock", blocking=False)
            try:
                claim.acquire()
                run = place(self.folder, cell)
                if run.is_dir():
                    lock(run).release()  # a child may outlive a study that was killed, for a moment
            except (Timeout, RequestError):
                claim.release()
                continue
            waiting.remove(cell)
            if self.due(cell):
                self.running.append(Job(cell, claim, self.start(cell, run), time.time()))
                return True
            claim.release()
        return False

    def start(self, cell: Cell, run: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "abovemup.studies.child", str(os.getpid()), "train"]
        if self.config_dir is not None:
            command.append(f"--config-dir={self.config_dir}")
        if (run / "config.yaml").is_file() and look(self.folder, cell).status in ("unfinished", "failed"):
            command += [f"--resume={run}", f"train.tokens={cell.tokens}"]
        else:
            shutil.rmtree(run, ignore_errors=True)  # damaged, diverged, or ended before its first line
            command += [*cell.overrides, f"run.dir={run}"]
        with open(self.folder / "logs" / f"{cell.name}.log", "ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            # In a process group of its own: Ctrl-C reaches it through this process, once.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": str(cell.threads)},
            )

    def collect(self, total: int, waiting: list[Cell]) -> None:
        """Take leave of the children that have ended, with a line for each."""
        for job in [job for job in self.running if job.process.poll() is not None]:
            self.running.remove(job)
            job.claim.release()
            took = time.time() - job.started
            found = look(self.folder, job.cell)
            if not found.done:
                why = found.error or f"exit code {job.process.returncode}"
                self.say(f"{job.cell.name} failed: {why} (its log: {self.folder}/logs/{job.cell.name}.log)", True)
                continue
            self.seconds[job.cell.cost] = took
            told = f"loss {found.loss:.4f}" if found.status == "finished" else found.status
            self.say(self.progress(total, waiting, job.cell.name, told, f"{took:.0f} s"), False)

    def progress(self, total: int, waiting: list[Cell], *told: str) -> str:
        done = total - len(waiting) - len(self.running)
        left = self.estimate([*waiting, *(job.cell for job in self.running)]) / 60
        return "  ".join((f"{done}/{total}", *told, *([f"about {left:.0f} min left"] if self.seconds else [])))

    def estimate(self, cells: list[Cell]) -> float:
        """Seconds, between those of the costs that have been timed, and beyond the largest in proportion to it."""
        if not self.seconds:
            return float("nan")
        known, costs = sorted(self.seconds), np.array([cell.cost for cell in cells])
        each = np.interp(costs, known, [self.seconds[cost] for cost in known]) * np.maximum(1, costs / known[-1])
        return float(each.sum()) / self.jobs
