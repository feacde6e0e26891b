"""Loss in nats per token: weighted by tokens, the same for every batch size."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.training.ranks import ALONE, IGNORE, Ranks


class Interrupted(Exception):
    """A stop was asked for in the middle of a step or an evaluation; nothing has been changed by it."""


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -ln p(target) over the scored targets: logits (B, T, V) float, targets (B, T) int64 -> scalar float32.

    No scored target gives exactly 0 (with zero gradients), never 0/0: the caller divides by the whole step's count.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def scored(targets: Tensor) -> int:
    return int((targets != IGNORE).sum())


def inputs(windows: Tensor) -> Tensor:
    """Of windows (b, seq_len + 1) what is read: a token that is not scored is any token."""
    return windows[:, :-1].clamp_min(0)


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor], Tensor],
    windows: Tensor,
    batch: int,
    device: torch.device,
    autocast: Callable[[], torch.autocast],
    stop: Callable[[], object] = lambda: None,
    ranks: Ranks = ALONE,
) -> float:
    """Mean loss (nats per token) over `windows` (n, seq_len + 1) int64, in float64 over per-batch sums; every rank
    takes its share of them.

    Touches neither gradients nor random state. Raises Interrupted as soon as `stop()` is true.
    """
    total, count = 0.0, 0
    first, n = ranks.span(len(windows))
    for part in ranks.parts(windows[first : first + n], batch, len(windows)):
        if stop():
            raise Interrupted
        part = part.to(device)
        with autocast():
            logits = model(inputs(part))
        total += loss_sum(logits, part[:, 1:]).item()
        count += scored(part[:, 1:])
    total, count = (sum(values) for values in zip(*ranks.gather([total, count]), strict=True))
    return total / count if count else float("nan")
