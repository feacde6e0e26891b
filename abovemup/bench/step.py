"""The batched optimizer step against the same step a matrix at a time, and against torch.optim.Muon."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Muon, Optimizer

from abovemup.bench.ratio import Ratio, in_turns
from abovemup.config.resolve import cores
from abovemup.optim.sharded import Owners
from abovemup.optim.steepest import SteepestDescent

Shape = tuple[int, int]
LR, MOMENTUM = 0.01, 0.95


def blocks(width: int, depth: int, kv: int) -> list[Shape]:
    """The matrices of `depth` blocks; `kv` is what keys and values have of the width."""
    ffn = width * 11 // 4
    return [(width, width), (kv, width), (kv, width), (width, width), (ffn, width), (ffn, width), (width, ffn)] * depth


SIZES = (  # name, shapes, cores, steps, least ratio over single matrices in float32 and over Muon in bfloat16
    ("28 matrices of pocket on all cores", blocks(64, 4, 32), cores(), 100, 2.0, 3.0),
    # What is left where a batch has no second core to go to, as in a run of pocket.
    ("28 matrices of pocket on one core", blocks(64, 4, 32), 1, 100, 1.5, 2.4),
    ("224 matrices of width 256 on one core", blocks(256, 32, 256), 1, 5, 0.9, 0.9),
)


def steps() -> list[Ratio]:
    """A step without decay: momentum, msign of 5 Newton-Schulz steps, Muon's scale."""
    ratios = []
    for name, shapes, threads, count, single_least, muon_least in SIZES:
        torch.set_num_threads(threads)
        singles: Ratio = compare(f"{name}, float32, over single ones", shapes, count, single_least, "float32", single)
        ratios += [singles, compare(f"{name}, bfloat16, over Muon", shapes, count, muon_least, "bfloat16", muon)]
    return ratios


def single(params: list[Parameter]) -> Optimizer:
    """A group, and so a call of msign, for each matrix."""
    return steepest([{"params": [p]} for p in params], "float32")


def muon(params: list[Parameter]) -> Optimizer:
    return Muon(params, lr=LR, momentum=MOMENTUM, nesterov=False, weight_decay=0.0)


def steepest(params: Any, dtype: str, owners: Owners | None = None) -> Optimizer:
    return SteepestDescent(params, lr=LR, norm="keller_jordan", momentum=MOMENTUM, msign_dtype=dtype, owners=owners)


def compare(
    name: str, shapes: list[Shape], count: int, least: float, dtype: str, peer: Callable[[list[Parameter]], Optimizer]
) -> Ratio:
    """Steps a second, in turns, from the same weights along the same gradients: both must end at the same bits."""
    ours, theirs = weights(shapes), weights(shapes)
    # The best, since what else the machine does only adds.
    mine, other = in_turns([steepest(ours, dtype).step, peer(theirs).step], count, min)
    if not all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True)):
        raise AssertionError(f"{name}: the two did not take the same steps")
    return Ratio(f"optimizer step, {name}", 1 / mine, 1 / other, "steps/s", least, at_least=True)


def weights(shapes: list[Shape]) -> list[Parameter]:
    g = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)
    return params
