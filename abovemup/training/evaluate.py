"""Loss in nats per token: weighted by tokens, the same for every batch size."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that is not scored


class Interrupted(Exception):
    """A stop was asked for in the middle of a step or an evaluation; nothing has been changed by it."""


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -ln p(target) over the scored targets: logits (B, T, V) float, targets (B, T) int64 -> scalar float32.

    No scored target gives exactly 0 (with zero gradients), never 0/0: the caller divides by the whole step's count.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def scored(targets: Tensor) -> int:
    return int((targets != IGNORE).sum())


@torch.no_grad()
def evaluate(
    model: Callable[[Tensor], Tensor],
    windows: Tensor,
    batch: int,
    device: torch.device,
    autocast: Callable[[], torch.autocast],
    stop: Callable[[], object] = lambda: None,
) -> float:
    """Mean loss (nats per token) over `windows` (n, seq_len + 1) int64, in float64 over per-batch sums.

    Touches neither gradients nor random state. Raises Interrupted as soon as `stop()` is true.
    """
    total, count = 0.0, 0
    for part in windows.split(batch):
        if stop():
            raise Interrupted
        part = part.to(device)
        with autocast():
            logits = model(part[:, :-1])
        total += loss_sum(logits, part[:, 1:]).item()
        count += scored(part[:, 1:])
    return total / count if count else float("nan")
