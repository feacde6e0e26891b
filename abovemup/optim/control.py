"""Pre Decay and Post Clip around the step of any optimizer ("Above MuP", part 4), in the norm of each role.

With lam the group's weight decay: Pre Decay clips W to (1 - lr lam) norm(W) before the step, Post Clip clips it to
tau = (norm of the largest step of lr 1) / lam after the step. Both are projections (`geometry.control`) and both keep
norm(W_t) <= max(norm(W_0), tau) whatever the gradients are, as far as no step is longer than its rule says. Two are:
five Newton-Schulz steps of msign by up to 20 %, Adam's by up to (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), which is
1.165 at b1 = 0.9 and b2 = 0.95. That factor is then on Pre Decay's tau; Post Clip's stays.

The `_top1` forms cut one singular value of a hidden matrix a step (other roles exactly) and keep no bound: against
an adversary Pre Decay was seen at 4.6 tau and Post Clip at 1.2 tau (24 x 24, lr 0.05, lam 0.2). In ordinary runs they
hardly act either, since a step of msign moves all singular values at once: at 5.4 and 5.0 tau after 30 steps of
optimizer=above_mup with lr 1/4 and lam 0.8.

Decay, the third way, is Pre Decay in the norm RMS(W): every entry times 1 - lr lam.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from abovemup.geometry.control import Limit, clip
from abovemup.geometry.msign import whole
from abovemup.geometry.norms import NORMS
from abovemup.geometry.parameterization import largest_step
from abovemup.optim.routing import Route
from abovemup.optim.sharded import like
from abovemup.optim.steepest import stack, stacks, step_shape


def attach(optimizer: Optimizer) -> None:
    """Control the groups whose `control` is a Route, from the next step on; a parameter without a gradient is left
    alone. (A closure, which nothing here passes, would be called after Pre Decay.)"""
    optimizer.register_step_pre_hook(partial(_control, "pre_decay"))
    optimizer.register_step_post_hook(partial(_control, "post_clip"))


@torch.no_grad()
def _control(kind: str, optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        route: Route | None = group.get("control")
        if route is None or not route.norm_control.startswith(kind):
            continue
        ball, top1 = NORMS[route.norm], route.norm_control.endswith("top1")
        params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        for members in stacks(params):
            first = params[members[0]]
            W = stack([whole(params[i]) for i in members], step_shape(first.shape, ball))
            clipped = clip(ball, W, _limit(route, group["lr"], first.shape), top1)
            for i, w in zip(members, clipped, strict=True):
                params[i].copy_(like(params[i], w.view(params[i].shape)))


def _limit(route: Route, lr: float, shape: Sequence[int]) -> Limit:
    """From norms to what they may be. The route's weight decay is over lr_mult, which `lr` has in it."""
    if route.norm_control.startswith("pre_decay"):
        return lambda norm: max(0.0, 1 - lr * route.weight_decay) * norm
    tau = route.scale * largest_step(route.rule, route.role, shape) / route.weight_decay
    return lambda norm: torch.full_like(norm, tau)
