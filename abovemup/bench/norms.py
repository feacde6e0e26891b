"""What the norms cost on the two proxy models, and how far the spectral ones are from an SVD over real runs."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from abovemup.bench.loop import BLOCK, measure_norms, seconds
from abovemup.bench.ratio import Ratio
from abovemup.config.compose import compose
from abovemup.data.corpus import open_corpus
from abovemup.training.device import device
from abovemup.training.trainer import Trainer

PLAIN = ("data=synthetic", "tracking=local", "eval.every=0")
MODELS = (("pocket", 30), ("proxy_69m", 2))  # and how many steps to time
# Every side of the first has its exact Gram matrix; the second goes by blocks, from one measurement to the next.
WIDE = ("model.width=576", "model.ffn=640", "model.depth=1", "train.batch_size=2", "norms.every=5", "train.steps=40")
RUNS = (("model=tiny", "train.steps=500"), WIDE)


def trainer(overrides: Sequence[str]) -> Trainer:
    exp = compose([*PLAIN, *overrides])
    exp = replace(exp, train=replace(exp.train, device=device(exp.train)))
    torch.set_num_threads(exp.train.threads)
    return Trainer(exp, open_corpus(exp, lambda text: print(text, file=sys.stderr)))


def share(model: str, steps: int) -> Ratio:
    """`norms.which=role` every BLOCK steps, in turns with the steps: its share of their time."""
    ours = trainer([f"model={model}", "norms.every=0", f"train.steps={steps + 3}"])
    step, norms = [], []
    for _ in range(steps + 1):  # the first warms up
        step.append(seconds(ours.device, lambda: advance(ours)))
        norms.append(seconds(ours.device, lambda: measure_norms(ours)))
    name = f"norms every {BLOCK} steps, share of the run, {model} model"
    return Ratio(name, statistics.median(norms[1:]), BLOCK * statistics.median(step[1:]), f"s in {BLOCK} steps", 0.03)


def advance(ours: Trainer) -> None:
    ours.advance()


def error(overrides: Sequence[str]) -> Ratio:
    """The largest relative error of every logged spectral norm, of weights and updates, against a float64 SVD."""
    ours, worst, count = trainer(overrides), 0.0, 0
    for row in rows(ours):
        for i, route in enumerate(ours.norms.routes):
            layer = f"{route.name.removesuffix('.weight')}/rms_to_rms"
            for kind, matrix in (("norm", weight), ("update", update)):
                if f"{kind}/{layer}" in row:
                    true = spectral(matrix(ours, i))
                    worst, count = max(worst, abs(row[f"{kind}/{layer}"] / true - 1)), count + 1
    m = ours.exp.model
    name = f"error of {count} spectral norms against an SVD, {ours.t} steps, width {m.width}"
    return Ratio(name, worst, 1.0, "relative", 1e-3)


def rows(ours: Trainer) -> Iterator[dict[str, float]]:
    yield ours.initial_row()
    while ours.t < ours.exp.train.steps:
        yield ours.advance() or {}


def weight(ours: Trainer, i: int) -> Tensor:
    return ours.norms.tensors()[i]


def update(ours: Trainer, i: int) -> Tensor:
    assert ours.norms.before is not None
    return ours.norms.tensors()[i] - ours.norms.before[i]


def spectral(W: Tensor) -> float:
    """sqrt(d_in / d_out) sigma_max by SVD."""
    return (W.shape[1] / W.shape[0]) ** 0.5 * torch.linalg.svdvals(W.double())[0].item()


def norms() -> list[Ratio]:
    return [*(share(*model) for model in MODELS), *(error(run) for run in RUNS)]
