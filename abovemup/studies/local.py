"""Cells as processes of this machine, forked from one that has imported what they need: they begin at once."""

import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abovemup.config.errors import RequestError
from abovemup.config.resolve import cores

if TYPE_CHECKING:  # `warm` is for a process that has not imported torch yet
    from abovemup.studies.cells import Cell

# What a run imports on its way; nothing that starts a thread or asks for a GPU.
IMPORTED = ["abovemup.cli.main", "abovemup.studies.child", "hydra", "pydantic", "torch._dynamo"]
IMPORTED += ["torch.distributed.checkpoint"]


@cache
def warm() -> Any:
    """The context whose server begins to import now. Python starts it again when it was killed."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)  # of a stream that was closed: what else got its number a cell would close
    os.close(file)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    kept, os.environ["OMP_NUM_THREADS"] = os.environ.copy(), "1"  # with a second thread it is not forked safely
    with no_main():
        forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(kept)
    return context


@contextmanager
def no_main() -> Iterator[None]:
    """Python would run the script that started the study in each child."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    yield
    sys.modules["__main__"] = main


class Local:
    def __init__(
        self, study: Path, config_dir: Path | None, nproc: int, cells: "list[Cell]", per_gpu: int | None
    ) -> None:
        """A cell is `nproc` processes; `per_gpu` cells share a GPU. Raises RequestError for that without one."""
        import torch

        self.study, self.config_dir, self.nproc = study, config_dir, nproc
        on_gpu = any("train.device=cpu" not in cell.overrides for cell in cells)
        gpus = [str(i) for i in range(torch.cuda.device_count())] if on_gpu else []
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = named.split(",")[: len(gpus)] if named else gpus
        if per_gpu and not gpus:
            raise RequestError("--cells-per-gpu: these cells have no GPU here. Leave it out.")
        if gpus and nproc > len(gpus):
            raise RequestError(f"--nproc {nproc}: each process takes a GPU, of {len(gpus)}: use fewer.")
        free = len(gpus) * (per_gpu or 1) or cores() // max(cell.threads for cell in cells)
        self.jobs = max(1, free // nproc)

    def find(self, cell: "Cell") -> "Child | None":
        return None  # a child does not outlive the study that started it

    def start(self, cell: "Cell", number: int) -> "Child":
        """Start a cell. Those that run at once have numbers from 0 on, and share the GPUs in turn."""
        from abovemup.studies.child import begin

        environment = {**os.environ, "OMP_NUM_THREADS": str(cell.threads)}
        if self.gpus:
            turn = range(number * self.nproc, (number + 1) * self.nproc)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[i % len(self.gpus)] for i in turn)
        process = warm().Process(target=begin, args=(environment, self.study, cell, self.config_dir, self.nproc))
        with no_main():
            process.start()
        return Child(process)


@dataclass
class Child:
    process: BaseProcess

    def poll(self) -> str | None:
        """How it ended, in words; None while it lives."""
        code = self.process.exitcode
        return None if code is None else f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def stop(self) -> None:
        """Ask it to end, with a checkpoint."""
        self.process.terminate()

    def wait(self) -> None:
        self.process.join()
