"""What a study would take, before it starts: a few steps of its smallest and its largest cell are timed, on noise."""

import math
import timeit
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

_START = 0.5  # seconds that a small cell takes before its first step, in a process that was forked for it


def plan(pool: Pool, cells: list[Cell]) -> dict[str, Any]:
    """Counts of cells and of what is left: runs, tokens, minutes, and bytes of checkpoints of all."""
    runs = ends(cells)
    left = [cell for cell in runs if pool.due(cell)]
    # What takes several processes may not fit in this one.
    timed = {min(left, key=lambda c: c.cost), max(left, key=lambda c: c.cost)} if left else set()
    for cell in timed if pool.launcher.nproc == 1 else ():
        pool.seconds[cell.cost] = seconds(compose(list(cell.overrides), config_dir=pool.launcher.config_dir)) + _START
    minutes = pool.estimate(left) / 60 if left else 0
    done = sum(look(pool.folder, cell).done for cell in cells)
    return {
        "cells": len(cells),
        "done": done,
        "runs left": len(left),
        "tokens left": sum(cell.tokens for cell in left),
        "minutes left, about": math.ceil(minutes * 10) / 10 if math.isfinite(minutes) else "not known",
        "disk, about": sum({cell.name: cell.kept for cell in runs}.values()),
    }


def seconds(experiment: Experiment) -> float:
    """What the run takes once it has started: steps, norms and evaluations, each timed."""
    e, trainer = experiment, _warm(experiment)
    batch, windows = e.train.batch_size * e.train.seq_len, max(1, e.eval.tokens // e.train.seq_len)
    evaluation = _timed(trainer.evaluate) * windows / len(trainer.validation)
    norms = _timed(trainer.norms.weights) * 2  # and of the updates
    taken = [often(every, e.train.steps, batch) for every in (e.norms.every, e.eval.every)]
    return _timed(trainer.advance) * e.train.steps + norms * taken[0] + evaluation * taken[1]


def optimizer_share(experiment: Experiment) -> float:
    """Of the time of a step. (Reading the gradients' norm waits for what the step before it started on a GPU.)"""
    trainer = _warm(experiment)
    whole = _timed(trainer.advance, 10)
    return max(0.0, 1 - _timed(lambda: trainer.gradients(1), 10) / whole)


def _warm(experiment: Experiment) -> Trainer:
    """After a first step, on noise; it measures nothing on its way, and has no end."""
    e = placed(experiment)
    torch.set_num_threads(e.train.threads)
    windows = max(1, e.eval.tokens // e.train.seq_len)

    def noise(_: int, n: int) -> torch.Tensor:
        return torch.randint(e.model.vocab_size, (n, e.train.seq_len + 1))

    corpus: Any = SimpleNamespace(batch=noise, bytes_per_token=None, epoch=int, bits_per_byte=lambda _: None)
    corpus.coder = SimpleNamespace(size=e.model.vocab_size, eot=0)
    corpus.validation = noise(0, min(windows, e.eval.batch))
    endless, never = replace(e.train, steps=2**40), replace(e.eval, every=0)
    trainer = Trainer(replace(e, train=endless, eval=never, norms=replace(e.norms, every=0)), corpus)
    trainer.advance()
    return trainer


def often(cadence: Cadence, steps: int, batch: int) -> int:
    """How often `due` is true in so many steps of `batch` tokens, the first row and the last among them; about."""
    if cadence == "pow2":
        return min(steps, (steps * batch).bit_length()) + 1
    every = token_count(cadence) or int(cadence) * batch
    return (min(steps - 1, (steps - 1) * batch // every) if every else 0) + 2


def _timed(act: Callable[[], object], times: int = 3) -> float:
    """Seconds; the fastest of a few."""
    return min(timeit.repeat(act, number=1, repeat=times))
