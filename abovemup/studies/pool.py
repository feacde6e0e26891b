"""Our own pool: as many cells at once as asked for, each a process of its own, each trained by one study only."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from abovemup.config.errors import RequestError
from abovemup.studies.cells import Cell, result
from abovemup.training.run import lock
from abovemup.training.signals import Stop

_PAUSE = 0.1  # seconds between two looks


@dataclass
class Job:
    cell: Cell
    claim: FileLock
    process: subprocess.Popen[bytes]
    started: float


class Pool:
    """`folder`/runs has a run directory a cell, `folder`/logs what each printed and the lock of who trains it.

    Several pools on one folder share its cells. A pool tries each cell once: what fails is tried again by the next.
    """

    def __init__(
        self, folder: Path, jobs: int, config_dir: Path | None, say: Callable[[str], None], fail: Callable[[str], None]
    ) -> None:
        self.folder, self.jobs, self.config_dir, self.say, self.fail = folder, jobs, config_dir, say, fail
        self.running: list[Job] = []
        self.seconds: dict[float, float] = {}  # cost of a cell -> what the last such cell took

    def train(self, cells: list[Cell]) -> int:
        """Train, in their order, the cells that have no result. Returns 0, or 128 + the signal that ended it.

        After a signal the children get SIGTERM and keep a checkpoint.
        """
        for name in ("runs", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        waiting = [cell for cell in cells if not result(self.run_dir(cell), cell.steps).done]
        with Stop() as stop:
            stop.graceful()
            try:
                while (waiting or self.running) and not stop():
                    self.collect(len(cells), waiting)
                    while len(self.running) < self.jobs and self.start_one(waiting):
                        pass
                    time.sleep(_PAUSE)
            finally:
                for job in self.running:
                    job.process.terminate()
                for job in self.running:
                    job.process.wait()
                    job.claim.release()
            return stop.exit_code if stop() else 0

    def run_dir(self, cell: Cell) -> Path:
        return self.folder / "runs" / cell.name

    def start_one(self, waiting: list[Cell]) -> bool:
        """Start the first cell that nobody else trains; forget those that somebody else has finished."""
        for cell in list(waiting):
            claim = FileLock(self.folder / "logs" / f"{cell.name}.lock", blocking=False)
            run = self.run_dir(cell)
            try:
                claim.acquire()
                if run.is_dir():
                    lock(run).release()  # a child may outlive a study that was killed
            except (Timeout, RequestError):
                claim.release()
                continue
            waiting.remove(cell)
            if not result(run, cell.steps).done:
                self.running.append(Job(cell, claim, self.start(cell, run), time.time()))
                return True
            claim.release()
        return False

    def start(self, cell: Cell, run: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "abovemup", "train"]
        if self.config_dir is not None:
            command.append(f"--config-dir={self.config_dir}")
        if result(run, cell.steps).status in ("unfinished", "failed"):
            command.append(f"--resume={run}")
        else:
            shutil.rmtree(run, ignore_errors=True)  # damaged, or ended before its first line
            command += [*cell.overrides, f"run.dir={run}"]
        with open(self.folder / "logs" / f"{cell.name}.log", "ab") as log:
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
            found = result(self.run_dir(job.cell), job.cell.steps)
            told = f"loss {found.loss:.4f}" if found.status == "finished" else found.status
            if found.done:
                self.seconds[job.cell.cost] = took
            else:
                log = self.folder / "logs" / f"{job.cell.name}.log"
                said = log.read_text(errors="replace").rpartition("\nabovemup: ")[2].strip().split("\n")
                self.fail(f"{job.cell.name} failed: {' '.join(said[:2])} (its log: {log})")
                continue
            done = total - len(waiting) - len(self.running)
            left = self.estimate([*waiting, *(other.cell for other in self.running)]) / 60
            self.say(f"{done}/{total}  {job.cell.name}  {told}  {took:.0f} s  about {left:.0f} min left")

    def estimate(self, cells: list[Cell]) -> float:
        """Seconds: each as long as the nearest size that has been timed, larger ones in proportion."""
        if not self.seconds:
            return float("nan")
        nearest = {cell.cost: min(self.seconds, key=lambda cost: abs(cost - cell.cost)) for cell in cells}
        each = (self.seconds[nearest[c.cost]] * max(1, c.cost / nearest[c.cost]) for c in cells)
        return sum(each) / self.jobs
