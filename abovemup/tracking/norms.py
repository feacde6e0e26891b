"""Norms of every layer's weight, of its last update and, if asked, of its gradient; its role's norm always."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from abovemup.config.schema import NormName
from abovemup.geometry import spectrum
from abovemup.geometry.msign import whole, wide
from abovemup.geometry.norms import NORMS, frobenius
from abovemup.geometry.roles import ParameterSpec

BATCH = 2**24  # elements in one batched call: bounds the memory of the stack and its float64 copies
EXACT = 512  # the smaller side up to which a largest singular value is exact, from the Gram matrix
VECTOR = ("max_abs", "frobenius")  # what a gain or a bias has besides its role's norm
# Of a stack W and its operators A, in one pass.
PASS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rms_to_inf": lambda W, A: NORMS["rms_to_inf"].norm(A),
    "one_to_rms": lambda W, A: NORMS["one_to_rms"].norm(A.mT),
    "max_abs": lambda W, A: W.flatten(1).abs().amax(-1),
    "rms": lambda W, A: NORMS["rms"].norm(W),
    "frobenius": lambda W, A: frobenius(W),
}
# Of their singular values besides, rising; those of SPECTRUM need all: the Gram matrix at any size.
SPECTRAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rms_to_rms": lambda W, A, sigma: sigma[:, -1] / NORMS["rms_to_rms"].radius(A.shape),
    "stable_rank": lambda W, A, sigma: spectrum.stable_rank(frobenius(W), sigma[:, -1]),
    "effective_rank": lambda W, A, sigma: spectrum.effective_rank(sigma),
    "condition_number": lambda W, A, sigma: spectrum.condition_number(sigma),
}
SPECTRUM = ("effective_rank", "condition_number")
Which = Literal["role", "all"] | Sequence[NormName]


class NormTracker:
    """Norms of `named` parameters: each in the norm that its route names, then in those of `which`.

    `all` is rms_to_rms, rms_to_inf, one_to_rms, max_abs (largest entry), frobenius, stable_rank (frobenius^2 /
    sigma_max^2), effective_rank and condition_number; a vector has max_abs and frobenius. Norms are those of the
    operator: an embedding (V, d) acts as its transpose. A gradient has the dual of its role's norm.

    Rows of embedding and head from `vocab_size` on are padding and take no part. The norm of a tensor with a NaN is
    nan, of zeros 0, of a sharded one that of the whole, which every process gathers. Weights and random state are left
    as they are; the device is read once per call, and where LAPACK or a residual needs it. Same-shaped tensors are
    measured in one batched call. A largest singular value is exact up to a smaller side of `exact`, beyond that within
    1e-3 (`geometry.spectrum`): a weight's starts from `blocks`, name -> vectors of the measurement before, which belong
    to a checkpoint. Cost: rows and entries one pass; on one core 28 Gram matrices of width 64 take about 4 ms, one of
    width 1024 takes 0.15 s.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        routes: Sequence[ParameterSpec],
        vocab_size: int | None = None,
        which: Which = "role",
    ):
        self.wanted = get_args(NormName) if which == "all" else () if which == "role" else which
        self.routes = routes
        self.parameters = [named[route.name] for route in routes]
        self.rows = [vocab_size if route.role in ("embedding", "head") else None for route in routes]
        self.groups: dict[tuple[str, torch.Size], list[int]] = {}
        for i, (route, tensor) in enumerate(zip(routes, self.tensors(), strict=True)):
            self.groups.setdefault((route.norm, tensor.shape), []).append(i)
        self.exact = EXACT
        self.blocks: dict[str, Tensor] = {}
        self.before: list[Tensor] = []

    def tensors(self) -> list[Tensor]:
        """What is measured: the weights as they are now, without the padding."""
        return [whole(p.detach())[:rows] for p, rows in zip(self.parameters, self.rows, strict=True)]

    def before_step(self) -> None:
        """Keep a copy of the weights, for `updates`."""
        if not self.before:
            self.before = [tensor.clone() for tensor in self.tensors()]
        else:
            torch._foreach_copy_(self.before, self.tensors())

    def weights(self) -> dict[str, float]:
        """`norm/<layer>/<norm>` of every weight W_t. A weight's `blocks` go on from here."""
        tensors = self.tensors()
        return self._values("norm", lambda i: tensors[i], lambda W, batch: self._norms(W, batch, keep=True))

    def updates(self) -> dict[str, float]:
        """`update/<layer>/<norm>` of W_t - W_{t-1}, decay included; W_{t-1} is from the last `before_step`."""
        tensors = self.tensors()
        return self._values("update", lambda i: wide(tensors[i]) - wide(self.before[i]), self._norms)

    def gradients(self) -> dict[str, float]:
        """`grad/<layer>/<norm>_dual` of every gradient as it is now, which has to be finite: what one step of norm 1
        gains to first order. A spectral norm's dual is the sum of all singular values: an SVD in float64."""

        def duals(G: Tensor, batch: list[int]) -> dict[str, Tensor]:
            norm = self.routes[batch[0]].norm
            return {f"{norm}_dual": NORMS[norm].dual_norm(G)}

        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return self._values("grad", lambda i: whole(grads[i].detach())[: self.rows[i]], duals)

    def _values(
        self, kind: str, tensor: Callable[[int], Tensor], measure: Callable[[Tensor, list[int]], dict[str, Tensor]]
    ) -> dict[str, float]:
        """`kind/<layer>/<norm>` for what `measure` says of stacks (n, *shape) of parameters of one norm and shape."""
        found: list[dict[str, Tensor]] = [{} for _ in self.routes]
        for (_, shape), members in self.groups.items():
            count = max(1, BATCH // prod(shape))
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                # One matrix alone is not copied: an embedding can be most of the model.
                stack = tensor(batch[0])[None] if len(batch) == 1 else torch.stack([tensor(i) for i in batch])
                for name, values in measure(stack, batch).items():
                    # Where a device has no float64 the answer comes from the CPU.
                    for i, value in zip(batch, values.to(stack.device, wide(stack[:0]).dtype), strict=True):
                        found[i][name] = value
        layers = [route.name.removesuffix(".weight") for route in self.routes]
        keys = [f"{kind}/{layer}/{name}" for layer, values in zip(layers, found, strict=True) for name in values]
        together = torch.stack([value for values in found for value in values.values()]).tolist()
        return dict(zip(keys, together, strict=True))

    def _norms(self, W: Tensor, batch: list[int], keep: bool = False) -> dict[str, Tensor]:
        """The norms of the members of `batch`, stacked, its role's first; `keep` is for weights, whose blocks go on."""
        W, own = wide(W), self.routes[batch[0]].norm
        names = dict.fromkeys([own, *(name for name in self.wanted if W.ndim > 2 or name in VECTOR)])
        A = W.mT if own == "one_to_rms" else W  # the operator, of a matrix
        values = {name: PASS[name](W, A) for name in names if name in PASS}
        if spectral := [name for name in names if name not in PASS]:
            every = any(name in SPECTRUM for name in spectral)
            sigma = spectrum.singular_values(W) if every else self._largest(W, batch, keep)[:, None]
            values |= {name: SPECTRAL[name](W, A, sigma) for name in spectral}
        return {name: values[name] for name in names}

    def _largest(self, W: Tensor, batch: list[int], keep: bool) -> Tensor:
        side = min(W.shape[-2:])
        if side <= self.exact:
            return spectrum.singular_values(W)[:, -1]
        names = [self.routes[i].name for i in batch]
        starts = torch.stack([cold_block(name, side) for name in names]).to(W.device)
        if keep and names[0] in self.blocks:
            warm = torch.stack([self.blocks[name].to(W.device) for name in names])
            starts = torch.cat([warm, starts[..., warm.shape[-1] :]], -1)  # what is random finds what is new
        sigma, blocks = spectrum.largest_singular_value(W, starts)
        if keep:
            self.blocks |= dict(zip(names, blocks, strict=True))
        return sigma


def cold_block(name: str, side: int) -> Tensor:
    """Random vectors (side, BLOCK) of a parameter's own: the same in every run, and no random state is touched."""
    return torch.randn(side, spectrum.BLOCK, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
