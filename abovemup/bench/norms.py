"""What the norms cost on the two proxy models, and how far the spectral ones are from an SVD over a real run."""

import statistics
from collections.abc import Sequence

import torch

from abovemup.bench.loop import BLOCK, trainer
from abovemup.bench.ratio import Ratio, in_turns
from abovemup.training.trainer import Trainer

PLAIN = ("data=synthetic", "tracking=local", "eval.every=0")
MODELS = (("pocket", 30), ("proxy_69m", 2))  # and how many steps to time
RUN = ("model=tiny", "train.steps=500")


def norms() -> list[Ratio]:
    return [*(share(*model) for model in MODELS), error(RUN), error(RUN, exact=16)]


def share(model: str, steps: int) -> Ratio:
    """`norms.which=role` every BLOCK steps, in turns with the steps: its share of their time."""
    ours = trainer([*PLAIN, f"model={model}", "norms.every=0", f"train.steps={steps + 3}"])
    step, cost = in_turns([ours.advance, lambda: measure_norms(ours)], steps, statistics.median, ours.device)
    name = f"norms every {BLOCK} steps, share of the run, {model} model"
    return Ratio(name, cost, BLOCK * step, f"s in {BLOCK} steps", 0.03)


def measure_norms(trainer: Trainer) -> None:
    """What a step does for its norms."""
    trainer.norms.before_step()
    trainer.norms.weights()
    trainer.norms.updates()


def error(overrides: Sequence[str], exact: int | None = None) -> Ratio:
    """The largest relative error of every logged spectral norm, of weights and updates, against a float64 SVD.

    `exact`: matrices with a larger smaller side go by warm-started blocks, as those above 512 do in a run.
    """
    ours, worst, count = trainer([*PLAIN, *overrides]), 0.0, 0
    ours.norms.exact = exact or ours.norms.exact
    while ours.t < ours.exp.train.steps:
        row = ours.advance() or {}
        for i, route in enumerate(ours.norms.routes):
            layer = f"{route.name.removesuffix('.weight')}/rms_to_rms"
            if f"norm/{layer}" in row and ours.norms.before:
                W, before = ours.norms.tensors()[i].double(), ours.norms.before[i].double()
                for kind, matrix in (("norm", W), ("update", W - before)):
                    true = (W.shape[1] / W.shape[0]) ** 0.5 * torch.linalg.svdvals(matrix)[0].item()
                    worst, count = max(worst, abs(row[f"{kind}/{layer}"] / true - 1)), count + 1
    way = "Gram matrices" if exact is None else "blocks"
    name = f"error of {count} spectral norms against an SVD, {ours.t} steps, {way}"
    return Ratio(name, worst, 1.0, "relative", 1e-3)
