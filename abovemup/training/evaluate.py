"""Loss in nats per token: weighted by tokens, the same for every batch size."""

from collections.abc import Callable

import torch
from torch import Tensor

from abovemup.model.loss import IGNORE
from abovemup.training.ranks import ALONE, Ranks


class Interrupted(Exception):
    """A stop was asked for in the middle of a step or an evaluation; nothing has been changed by it."""


def scored(targets: Tensor) -> int:
    return int((targets != IGNORE).sum())


def inputs(windows: Tensor) -> Tensor:
    """Of windows (b, seq_len + 1) what is read: a token that is not scored is any token."""
    return windows[:, :-1].clamp_min(0)


@torch.no_grad()
def evaluate(
    loss: Callable[[Tensor, Tensor], Tensor],
    windows: Tensor,
    batch: int,
    device: torch.device,
    autocast: Callable[[], torch.autocast],
    stop: Callable[[], object] = lambda: None,
    ranks: Ranks = ALONE,
) -> float:
    """Mean loss (nats per token) over `windows` (n, seq_len + 1) int64, in float64 over per-batch sums, each
    `loss(inputs, targets)`; every rank takes its share of them.

    Touches neither gradients nor random state. Raises Interrupted as soon as `stop()` is true.
    """
    total, count = 0.0, 0
    first, n = ranks.span(len(windows))
    for part in ranks.parts(windows[first : first + n], batch, len(windows)):
        if stop():
            raise Interrupted
        part = part.to(device)
        with autocast():
            total += loss(inputs(part), part[:, 1:]).item()
        count += scored(part[:, 1:])
    total, count = (sum(values) for values in zip(*ranks.gather([total, count]), strict=True))
    return total / count if count else float("nan")
