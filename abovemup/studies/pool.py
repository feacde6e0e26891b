"""A pool of cells: as many at once as asked for, each trained by one study only, wherever it is that they run."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from abovemup.config.errors import RequestError
from abovemup.studies.board import look
from abovemup.studies.cells import Cell, place
from abovemup.studies.local import Child, Local
from abovemup.studies.slurm import Slurm, Submitted
from abovemup.training.run import lock
from abovemup.training.signals import Stop

_PAUSE = 0.1  # seconds between two looks


@dataclass
class Job:
    cell: Cell
    claim: FileLock
    number: int
    handle: Child | Submitted
    started: float


def ends(cells: list[Cell]) -> list[Cell]:
    """Those that must end a run: not the horizons that a longer run of the same name measures on its way."""
    longest: dict[str, int] = {}
    for cell in cells:
        longest[cell.name] = max(cell.steps, longest.get(cell.name, 0))
    each = {cell.id: cell for cell in cells}.values()
    return [cell for cell in each if not (cell.passed and cell.steps < longest[cell.name])]


@dataclass
class Pool:
    """`folder`/runs has a run directory a cell, `folder`/logs what each printed and the lock of who trains it.

    Several pools on one folder share its cells. A pool tries each cell once, and what has failed or diverged before
    only when that is in `retry`. `show` is called again and again meanwhile.
    """

    folder: Path
    jobs: int
    launcher: Local | Slurm
    say: Callable[[str, bool], None]  # told when a cell has ended, and whether it failed
    retry: Collection[str] = ()
    show: Callable[[str], None] = lambda text: None
    running: list[Job] = field(default_factory=list)
    seconds: dict[float, float] = field(default_factory=dict)  # cost of a cell -> what such cells took at most

    def train(self, cells: list[Cell]) -> int:
        """Train, in their order, the cells that have no result. Returns 0, or 128 + the signal that ended it.

        After a signal the processes here get SIGTERM and keep a checkpoint; jobs elsewhere go on.
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
                    job.handle.stop()
                for job in self.running:
                    job.handle.wait()
                    job.claim.release()
            return stop.exit_code if stop() else 0

    def due(self, cell: Cell) -> bool:
        status = look(self.folder, cell).status
        return status in self.retry or status not in ("finished", "diverged", "failed")

    def start_one(self, waiting: list[Cell]) -> bool:
        """Start the first cell that nobody else trains; forget those that somebody else has finished."""
        number = min({*range(self.jobs)} - {job.number for job in self.running})
        for cell in list(waiting):
            # Its shorter horizons end, and are measured, first; so does the run that it branches from.
            before = [other.name for other in waiting if other.name != cell.name or other.steps < cell.steps]
            before += [job.cell.name for job in self.running]
            if cell.name in before or cell.trunk.partition("@")[0] in before:
                continue
            claim = FileLock(self.folder / "logs" / f"{cell.name}.lock", blocking=False)
            try:
                claim.acquire()
                handle = self.launcher.find(cell)
                if handle is None and (run := place(self.folder, cell)).is_dir():
                    lock(run).release()  # a process may outlive a study that was killed, for a moment
            except (Timeout, RequestError):
                claim.release()
                continue
            waiting.remove(cell)
            if handle or self.due(cell):
                handle = handle or self.launcher.start(cell, number)
                self.running.append(Job(cell, claim, number, handle, time.time()))
                return True
            claim.release()
        return False

    def collect(self, total: int, waiting: list[Cell]) -> None:
        """Take leave of those that have ended, with a line for each."""
        for job in list(self.running):
            if (ended := job.handle.poll()) is None:
                continue
            self.running.remove(job)
            job.claim.release()
            took = time.time() - job.started
            found = look(self.folder, job.cell)
            if not found.done:
                # Longer ones of that name would go past its horizon unmeasured; the next start trains them after it.
                left = [cell for cell in waiting if cell.name != job.cell.name]
                more = f", and {n} longer ones wait for the next start" if (n := len(waiting) - len(left)) else ""
                why, waiting[:] = found.error or ended, left
                self.say(f"{job.cell.name} failed: {why} (its log: {self.folder}/logs/{job.cell.name}.log){more}", True)
                continue
            # The longest: one that went on from a checkpoint took less than it costs.
            self.seconds[job.cell.cost] = max(took, self.seconds.get(job.cell.cost, 0))
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
