"""Pre Decay and Post Clip around the step of any optimizer ("Above MuP", part 4), in the norm of each role.

With lam the group's weight decay: Pre Decay clips W to (1 - lr lam) norm(W) before the step, Post Clip clips it to
tau = (norm of a step of lr 1) / lam after the step. Both are projections (`geometry.control`) and both keep
norm(W_t) <= max(norm(W_0), tau) whatever the gradients are, as far as no step is longer than its nominal norm: five
Newton-Schulz steps of msign are up to 20 % longer, which adds as much to Pre Decay's bound and nothing to Post Clip's.
The `_top1` forms cut one singular value of a hidden matrix a step (other roles exactly) and keep no bound: against
an adversary Pre Decay was seen at 4.6 tau and Post Clip at 1.2 tau (24 x 24, lr 0.05, lam 0.2).

Decay, the third way, is Pre Decay in the norm RMS(W): every entry times 1 - lr lam.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from abovemup.geometry.control import clip
from abovemup.geometry.norms import NORMS
from abovemup.geometry.parameterization import step_norm
from abovemup.optim.routing import Route
from abovemup.optim.steepest import stack, stacks, step_shape

Group = dict[str, Any]


def control_options(routes: list[Route]) -> Group:
    """What a param group of `routes` that step alike needs; nothing where weight decay is all there is."""
    first = routes[0]
    if first.norm_control == "decay" or first.weight_decay == 0:
        return {}
    steps = [route.scale * step_norm(route.rule, route.role, route.shape) for route in routes]
    return {
        "norm_control": first.norm_control,
        "control_norm": first.norm,
        "control_decay": first.weight_decay,  # over lr_mult: times the group's lr it is lr * weight_decay
        "control_limits": [step / first.weight_decay for step in steps],
    }


def attach(optimizer: Optimizer) -> None:
    """Control the groups that ask for it, from the next step on; a parameter without a gradient is left alone."""
    optimizer.register_step_pre_hook(_before)
    optimizer.register_step_post_hook(_after)


def _before(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("norm_control", "").startswith("pre_decay"):
            factor = max(0.0, 1 - group["lr"] * group["control_decay"])
            _clip(group, [factor] * len(group["params"]), proportional=True)


def _after(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("norm_control", "").startswith("post_clip"):
            _clip(group, group["control_limits"], proportional=False)


@torch.no_grad()
def _clip(group: Group, limits: list[float], proportional: bool) -> None:
    ball, top1 = NORMS[group["control_norm"]], group["norm_control"].endswith("top1")
    moved = [i for i, p in enumerate(group["params"]) if p.grad is not None]
    params: list[Tensor] = [group["params"][i] for i in moved]
    for members in stacks(params):
        W = stack([params[i] for i in members], step_shape(params[members[0]], ball))
        most = torch.tensor([limits[moved[i]] for i in members], dtype=W.dtype, device=W.device)
        clipped = clip(ball, W, most.mul if proportional else most.expand_as, top1)
        for i, w in zip(members, clipped, strict=True):
            params[i].copy_(w.view_as(params[i]))
