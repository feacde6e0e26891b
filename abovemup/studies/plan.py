"""What a study would take, before it starts: a few steps of its smallest and its largest cell are timed, on noise."""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from abovemup.config.cadence import token_count
from abovemup.config.compose import compose
from abovemup.config.schema import Cadence, Experiment
from abovemup.studies.board import look
from abovemup.studies.cells import Cell
from abovemup.studies.pool import Pool, ends
from abovemup.training.device import placed
from abovemup.training.trainer import Trainer

_IMPORTS = "import hydra, abovemup.training.run"  # nearly all that a process does before it trains


def plan(pool: Pool, cells: list[Cell]) -> dict[str, Any]:
    """Counts of cells and of what is left: runs, tokens, minutes, and bytes of checkpoints of all."""
    runs = ends(cells)
    left = [cell for cell in runs if pool.due(cell)]
    start = _timed(lambda: subprocess.run([sys.executable, "-c", _IMPORTS], check=True), 1) if left else 0
    for cell in {min(left, key=lambda c: c.cost), max(left, key=lambda c: c.cost)} if left else ():
        pool.seconds[cell.cost] = seconds(compose(list(cell.overrides), config_dir=pool.config_dir)) + start
    done = sum(look(pool.folder, cell).done for cell in cells)
    return {
        "cells": len(cells),
        "done": done,
        "runs left": len(left),
        "tokens left": sum(cell.tokens for cell in left),
        "minutes left, about": math.ceil(pool.estimate(left) / 6) / 10 if left else 0,
        "disk, about": sum({cell.name: cell.kept for cell in runs}.values()),
    }


def seconds(experiment: Experiment) -> float:
    """What the run takes once it has started: steps, norms and evaluations, each timed."""
    e = placed(experiment)
    torch.set_num_threads(e.train.threads)
    batch, windows = e.train.batch_size * e.train.seq_len, max(1, e.eval.tokens // e.train.seq_len)

    def noise(_: int, n: int) -> torch.Tensor:
        return torch.randint(e.model.vocab_size, (n, e.train.seq_len + 1))

    corpus: Any = SimpleNamespace(batch=noise, bytes_per_token=None, epoch=int, bits_per_byte=lambda _: None)
    corpus.coder = SimpleNamespace(size=e.model.vocab_size, eot=0)
    corpus.validation = lambda: noise(0, min(windows, e.eval.batch))
    # Steps in which nothing is measured, none of which is the last.
    endless, never = replace(e.train, steps=2**40), replace(e.eval, every=0)
    trainer = Trainer(replace(e, train=endless, eval=never, norms=replace(e.norms, every=0)), corpus)
    trainer.advance()
    evaluation = _timed(trainer.evaluate) * windows / len(trainer.validation)
    norms = _timed(trainer.norms.weights) * 2  # and of the updates
    taken = [often(every, e.train.steps, batch) for every in (e.norms.every, e.eval.every)]
    return _timed(trainer.advance) * e.train.steps + norms * taken[0] + evaluation * taken[1]


def often(cadence: Cadence, steps: int, batch: int) -> int:
    """How often `due` is true in so many steps of `batch` tokens, the first row and the last among them; about."""
    if cadence == "pow2":
        return min(steps, (steps * batch).bit_length()) + 1
    every = token_count(cadence) or int(cadence) * batch
    return (min(steps - 1, (steps - 1) * batch // every) if every else 0) + 2


def _timed(act: Callable[[], object], times: int = 3) -> float:
    """Seconds; the fastest of a few."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        took.append(time.perf_counter() - start)
    return min(took)
