"""The three stability metrics of every kind of layer, and inputs that attain them ("Above MuP", parts 1 to 4).

Over inputs of RMS 1, forward F = sup RMS(f(x; W)), dependency D = sup RMS(f(x) - f(y)) / RMS(x - y), update
U = sup RMS(f(x; W + dW) - f(x; W)). A layer that is linear in its weights needs one function for the three: F is
f(W, b), D is f(W) without the bias, U is f(dW, db). Matrices are torch's (..., d_out, d_in), all is batched over the
leading dimensions: the F of each head is `linear(W.unflatten(-2, (heads, -1)))`, of experts `linear` of their stack.
float64 stays float64, lower dtypes give float32. Logits, value path, SwiGLU and residual are derived, not in the posts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.geometry.msign import power_of_two, wide
from abovemup.geometry.norms import NORMS, length, unit
from abovemup.geometry.spectrum import scaled

SILU_SLOPE = 1.0998393202  # sup |silu'|
PAIRS = 2**24  # distances held at once


@dataclass(frozen=True)
class Metric:
    value: Tensor  # (...)
    exact: bool  # the supremum itself, else an upper bound of it
    # Gives an input of RMS 1, or an id, that reaches it, if one is known.
    attained_by: Callable[[], Tensor] | None = None


class Affine:
    """A linear layer with its bias, or the change of one; what costs a decomposition is computed once."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight = wide(weight)  # (..., d_out, d_in)
        self.bias = None if bias is None else wide(bias)  # (..., d_out)

    def __sub__(self, before: "Affine") -> "Affine":
        a, b = self.bias, before.bias
        return Affine(self.weight - before.weight, None if a is None or b is None else a - b)

    @cached_property
    def forward(self) -> Metric:
        return linear(self.weight, self.bias)

    @cached_property
    def slope(self) -> "Affine":
        """Without the bias: what differences of inputs meet."""
        return self if self.bias is None else Affine(self.weight)


def sphere(x: Tensor) -> Tensor:
    """x scaled to RMS 1 over the last dimension; zero, whose direction does not matter, gives ones."""
    return sqrt(x.shape[-1]) * unit(x.where((x != 0).any(-1, keepdim=True), 1.0))


def svd(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin SVD in float64; a matrix that is not finite has singular values nan."""
    X, scale = scaled(W.cpu() if W.device.type == "mps" else W)
    U, s, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    return U, s * scale[..., 0], Vh


def linear(W: Tensor, bias: Tensor | None = None) -> Metric:
    """sqrt(d_in/d_out) sigma_max(W), attained at the top right singular vector (part 2); with a bias see `affine`."""
    if bias is None:
        return Metric(NORMS["rms_to_rms"].norm(W), True, lambda: sphere(svd(wide(W))[2][..., 0, :]).to(wide(W[:0])))
    value, x = affine(wide(W), wide(bias))
    return Metric(value, True, lambda: x)


def affine(W: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """max RMS(W x + b) over RMS(x) = 1, and its x (..., d_in): a trust-region problem, solved in the basis of an SVD.

    With c = U^T b the maximum has y_i = s_i c_i / (mu - s_i^2) for y = V^T x, with the mu >= s_1^2 that makes
    |y|^2 = d_in. Newton on 1/|y|, concave in mu, never overshoots from the left. Where c has no part in the top
    direction (b = 0 among them) it may end at mu = s_1^2 with |y| too short: the rest goes into that direction.
    Always sqrt(F^2 + rms(b)^2) <= exact <= F + rms(b), the latter in part 3.
    """
    scale = power_of_two(torch.cat((W, b[..., None]), -1), (-2, -1))  # nothing over- or underflows
    U, s, Vh = svd(W / scale)
    bias, radius = (b / scale[..., 0]).to(U), sqrt(W.shape[-1])
    c = (U.mT @ bias[..., None])[..., 0]
    p, gap = s * c, (s[..., :1] - s) * (s[..., :1] + s)
    delta = (p.abs() / radius - gap).amax(-1, keepdim=True).clamp_min(0)  # mu - s_1^2, where some |y_i| >= radius
    for _ in range(60):  # 10 usually do
        divisor = (delta + gap).where(delta + gap > 0, 1.0)  # 0 only where p is 0
        y = p / divisor
        size = y.norm(dim=-1, keepdim=True)
        step = (size / radius - 1) * size.square() / (y.square() / divisor).sum(-1, keepdim=True)
        delta = torch.where(size > radius, delta + step, delta)
    rest = (radius**2 - y.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
    y = radius * unit(torch.cat((torch.where(delta == 0, rest, y[..., :1]), y[..., 1:]), -1))
    outside = bias - (U @ c[..., None])[..., 0]
    value = torch.cat((s * y + c, outside), -1).norm(dim=-1) / sqrt(W.shape[-2])
    return value.to(W) * scale[..., 0, 0], (y[..., None, :] @ Vh)[..., 0, :].to(W)


def gain(g: Tensor) -> Metric:
    """max |g_i| (..., d), attained at sqrt(d) e_i (part 3). An RMSNorm's dependency on a raw x is this over RMS(x)."""
    d = g.shape[-1]
    return Metric(NORMS["max_abs"].norm(g), True, lambda: sqrt(d) * F.one_hot(g.abs().argmax(-1), d).to(wide(g)))


def embedding(E: Tensor) -> Metric:
    """max_i rms(E[i]), attained by that id (part 3). No dependency metric: ids cannot be subtracted."""
    return Metric(NORMS["one_to_rms"].norm(E), True, lambda: length(wide(E))[..., 0].argmax(-1))


def peaks(layer: Affine, rms: float | Tensor = 1.0) -> Tensor:
    """The largest |entry| (..., d_out) that each output can have, for inputs of RMS `rms` (..., 1)."""
    size = rms * sqrt(layer.weight.shape[-1]) * length(layer.weight)[..., 0]
    return size if layer.bias is None else size + layer.bias.abs()


def head_logit(W: Tensor) -> Metric:
    """M = d max_i rms(W[i]), the largest |logit|: M(W) bounds the pair metric by 2M (part 3)."""
    longest = wide(W).take_along_dim(length(wide(W)).argmax(-2, keepdim=True), -2)[..., 0, :]
    return Metric(NORMS["rms_to_inf"].norm(W), True, lambda: sphere(longest))


def head_centred(W: Tensor) -> Metric:
    """R = M(W - mean row): as cheap as M, and like the loss it ignores a vector added to every row; R <= P <= 2R."""
    return head_logit(wide(W) - wide(W).mean(-2, keepdim=True))


def head_pair(W: Tensor) -> Metric:
    """P = d max_{i,t} rms(W[i] - W[t]): the largest difference of two logits, attained at x ~ W[i] - W[t] (part 3).

    For the cross entropy P <= F <= ln V + P and D <= P, and P(dW) bounds its U. O(V^2 d) time, O(V d) memory.
    """
    scale = power_of_two(wide(W), (-2, -1))
    X = wide(W) / scale
    X = X - X.mean(-2, keepdim=True)  # centred, squares lose no digits of the largest distance
    size, values, pairs = X.square().sum(-1), [], []
    rows = max(1, PAIRS // size.numel())
    for first in range(0, X.shape[-2], rows):
        block, later = X[..., first : first + rows, :], X[..., first:, :]
        squares = size[..., first : first + rows, None] + size[..., None, first:] - 2 * block @ later.mT
        value, index = squares.flatten(-2).max(-1)
        values.append(value)
        pairs.append(first + torch.stack((index // later.shape[-2], index % later.shape[-2]), -1))
    best = torch.stack(values).argmax(0, keepdim=True)
    pair = torch.stack(pairs).take_along_dim(best[..., None], 0)[0]
    difference = torch.sub(*X.take_along_dim(pair[..., None], -2).unbind(-2))
    return Metric(sqrt(X.shape[-1]) * (length(difference) * scale[..., 0])[..., 0], True, lambda: sphere(difference))


def attention_logit(query: Tensor, key: Tensor, scale: float, head_dim: int) -> Metric:
    """scale * d_h * F_q * F_k of each head: no two inputs have a larger |scale * q . k| at any relative position.

    From F of each head of wq (..., heads) and wk (..., kv_heads), or of the gains where q and k are normed.
    """
    return Metric(scale * head_dim * query * key.repeat_interleave(query.shape[-1] // key.shape[-1], -1), False)


def chain(rms: Tensor, layer: Affine) -> Tensor:
    """A bound on the output of a linear layer whose inputs have RMS <= rms (...).

    That is F of what stands before it: `swiglu`; a matrix under a 1-Lipschitz function that keeps 0 (part 2); or
    max_h F_h of the heads' values, since a row of softmax is a convex combination.
    """
    bound = rms * layer.slope.forward.value
    return bound if layer.bias is None else bound + NORMS["rms"].norm(layer.bias)


def swiglu(gate: Affine, up: Affine) -> Metric:
    """F of silu(gate(x)) * up(x): at most silu(max_j |gate_j|) * F(up), which can be sqrt(d_ff) F(gate) F(up).

    Exact, with its input, where the gate's longest row alone carries all of the output.
    """
    peak, j = peaks(gate).max(-1)
    value = F.silu(peak) * up.forward.value
    x = sphere(gate.weight.take_along_dim(j[..., None, None], -2)[..., 0, :])
    a, b = ((f.weight @ x[..., None])[..., 0] + (0 if f.bias is None else f.bias) for f in (gate, up))
    reached = (F.silu(a) * b).square().mean(-1).sqrt()
    exact = bool((reached >= value * (1 - 100 * torch.finfo(value.dtype).eps)).all())
    return Metric(value, exact, (lambda: x) if exact else None)


def swiglu_change(gate: Affine, up: Affine, gate_change: Affine, up_change: Affine) -> Metric:
    """A bound on the change of SwiGLU: U, with `gate` before and `up` after the step; D, with the slopes as changes.

    silu(a')b' - silu(a)b = silu(a)(b' - b) + (silu(a') - silu(a))b', each product with one factor in the largest entry.
    """
    first = F.silu(peaks(gate).amax(-1)) * up_change.forward.value
    narrow = peaks(gate_change).amax(-1) * up.forward.value
    broad = gate_change.forward.value * peaks(up).amax(-1)
    return Metric(first + SILU_SLOPE * torch.minimum(narrow, broad), False)
