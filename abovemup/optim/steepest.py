"""One optimizer for Scion, Muon, SignSGD and "Above MuP": steepest descent in the norm of each group's table row."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from abovemup.geometry.msign import local, msign
from abovemup.geometry.norms import NORMS, NormBall
from abovemup.optim.sharded import Owners, completed, like

# Matrices of one shape go through msign together, up to this many elements: a stack is a copy.
STACK = 2**24
# On a CPU fewer, so that a stack stays in its cache from one product to the next: 224 matrices of width 256 take 0.7
# times as long as in one stack.
CACHED = 2**18

Group = dict[str, Any]


class SteepestDescent(torch.optim.Optimizer):
    """W <- (1 - lr * weight_decay) W - lr * scale * dual(M), with M the gradient or its running average.

    Options, each of which a param group may set for itself:
    lr, scale       the step has norm lr * scale in the group's `norm`, a name in `geometry.NORMS`.
                    weight_decay = 1 is the constrained form (Frank-Wolfe): the norm never exceeds `scale`, its radius.
    momentum        the coefficient mu of M <- mu M + (1 - mu) G; 0 keeps no buffer. With `nesterov` the step is
                    along mu M + (1 - mu) G, after M has been updated.
    eps             added to the lengths that rows and vectors are divided by (not to matrices: msign is scale-free).
    msign_method, msign_steps, msign_dtype ("float32", "bfloat16", "float64")   see `geometry.msign`.
    absent_rows_rest   rows whose gradient is exactly zero are not moved, while their momentum fades: for embeddings.
                    A token that was not in the batch has no gradient, but its faded momentum still has a direction,
                    and a step of fixed length would repeat it at full size for hundreds of steps. (Without momentum
                    zero rows get no step anyway; a tied embedding has a gradient in every row.) Decay goes on.

    A parameter without a gradient is left alone, state included; one whose gradient is zero decays and follows its
    momentum. `step` raises ValueError for a norm of matrices on a vector.

    With `owners` the ranks divide the steps that need whole matrices among them (`optim.sharded`).

    "Above MuP" part 3 (the dual of each role), Scion (arXiv 2502.07529), Muon (Keller Jordan).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        norm: str = "rms_to_rms",
        scale: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        eps: float = 1e-20,
        msign_method: str = "newton_schulz",
        msign_steps: int = 5,
        msign_dtype: str = "float32",
        absent_rows_rest: bool = False,
        owners: Owners | None = None,
    ):
        options: Group = {"lr": lr, "norm": norm, "scale": scale, "momentum": momentum, "nesterov": nesterov}
        options |= {"weight_decay": weight_decay, "eps": eps, "absent_rows_rest": absent_rows_rest}
        options |= {"msign_method": msign_method, "msign_steps": msign_steps, "msign_dtype": msign_dtype}
        super().__init__(params, options)
        self.owners = owners

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of every parameter that has a gradient. Returns what `closure`, when given, returns."""
        loss = torch.enable_grad()(closure)() if closure else None
        shared: list[tuple[Group, Tensor, Tensor]] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            weights, moments = [local(p) for p in params], self._moments(group, params)
            if group["weight_decay"] != 0:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            ball, owners = NORMS[group["norm"]], self.owners
            apart = [owners is not None and owners.needs(ball, p) for p in params]
            shared += [(group, p, m) for p, m, needs in zip(params, moments, apart, strict=True) if needs]
            here = [i for i, needs in enumerate(apart) if not needs]
            self._step_group(group, [weights[i] for i in here], [moments[i] for i in here])
        if self.owners is not None and shared:
            self._step_shared(self.owners, shared)
        return loss

    def _step_group(self, group: Group, weights: list[Tensor], moments: list[Tensor]) -> None:
        for members, shape, directions in stacked(group, moments):
            own = [weights[i] for i in members]
            moved = directions.view(len(own), *own[0].shape).unbind()
            torch._foreach_add_(own, moved, alpha=-step_size(group, shape))

    def _step_shared(self, owners: Owners, shared: list[tuple[Group, Tensor, Tensor]]) -> None:
        """Of all groups together, since each exchange has a price of its own."""
        groups, params, moments = zip(*shared, strict=True)

        def direct(mine: list[int], tensors: list[Tensor]) -> list[Tensor]:
            found: dict[int, Tensor] = {}
            for group in self.param_groups:
                own = [k for k, i in enumerate(mine) if groups[i] is group]
                for members, _, directions in stacked(group, [tensors[k] for k in own]):
                    found |= zip([own[m] for m in members], directions, strict=True)
            return [found[k] for k in range(len(mine))]

        parts = [completed(p, m) if owners.cut else m for p, m in zip(params, moments, strict=True)]
        directions = owners.steps([p.shape for p in params], parts, direct)
        for group, p, direction in zip(groups, params, directions, strict=True):
            if owners.cut:
                direction = local(like(p, direction))
            local(p).add_(direction, alpha=-step_size(group, step_shape(p.shape, NORMS[group["norm"]])))

    def _moments(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """What each step is taken along; updates the momentum buffers, which are made at the first gradient."""
        grads = [local(p.grad) for p in params if p.grad is not None]
        mu = group["momentum"]
        if mu == 0:
            return grads
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        moments = [local(self.state[p]["momentum_buffer"]) for p in params]
        torch._foreach_lerp_(moments, grads, 1 - mu)
        if group["nesterov"]:
            moments = list(torch._foreach_lerp(grads, moments, mu))
        if group["absent_rows_rest"]:
            moments = [m * (g != 0).any(-1, keepdim=True) for m, g in zip(moments, grads, strict=True)]
        return moments


def step_size(group: Group, shape: tuple[int, ...]) -> float:
    """With the ball's radius in it: one rounding fewer than in the direction, as torch.optim.Muon does it."""
    return float(group["lr"] * group["scale"] * NORMS[group["norm"]].radius(shape))


def stacked(group: Group, moments: list[Tensor]) -> Iterator[tuple[list[int], tuple[int, ...], Tensor]]:
    """Stack by stack the indices of its members, the shape in which the norm sees them, and their directions."""
    ball = NORMS[group["norm"]]
    method, steps, dtype = group["msign_method"], group["msign_steps"], getattr(torch, group["msign_dtype"])

    def sign(G: Tensor) -> Tensor:
        return msign(G, method, steps, dtype)

    for members in stacks(moments):
        shape = step_shape(moments[members[0]].shape, ball)
        yield members, shape, ball.direction(stack([moments[i] for i in members], shape), sign, group["eps"])


def stacks(params: list[Tensor]) -> Iterator[list[int]]:
    """The indices of parameters of one shape, at most `STACK` elements at a time, on a CPU `CACHED`."""
    shapes: dict[torch.Size, list[int]] = {}
    for i, p in enumerate(params):
        shapes.setdefault(p.shape, []).append(i)
    for shape, members in shapes.items():
        most = CACHED if params[members[0]].device.type == "cpu" else STACK
        count = max(1, most // max(1, shape.numel()))
        for first in range(0, len(members), count):
            yield members[first : first + count]


def step_shape(shape: Sequence[int], ball: NormBall) -> tuple[int, ...]:
    """The shape in which a ball sees a parameter: a norm of vectors sees all its entries in a row.

    Raises ValueError for a vector in a norm of matrices, to which several of them in a stack would look like one.
    """
    if len(shape) < ball.ndim:
        raise ValueError(f"a norm of matrices, and a parameter of shape {tuple(shape)}")
    return tuple(shape) if ball.ndim == 2 else (prod(shape),)


def stack(tensors: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Tensors as one batch (n, *shape); a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0].reshape(1, *shape)
    return torch.stack(tensors).view(len(tensors), *shape)
