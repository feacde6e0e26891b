"""The training loss: the cross-entropy of a window's tokens, in nats."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a target that is not scored


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -ln p(target) over the scored targets: logits (..., V) float, targets (...) int64 -> scalar float32.

    No scored target gives exactly 0 (with zero gradients), never 0/0: the caller divides by the whole step's count.
    """
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def chunked_loss(head: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, size: int) -> Tensor:
    """`loss_sum(head(x), targets)` with the logits of `size` positions at a time: x (B, T, d), targets (B, T).

    The backward pass computes a chunk's logits once more, so that none of them is kept between the two.
    """

    def part(x: Tensor, targets: Tensor) -> Tensor:
        # The cache would give all chunks one bfloat16 head, in whose precision their gradients would be summed.
        device = x.device.type
        now = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.autocast(device, *now, cache_enabled=False):
            return loss_sum(head(x), targets)

    chunks = zip(x.flatten(0, -2).split(size), targets.flatten().split(size), strict=True)
    losses = [checkpoint(part, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(losses).sum()
