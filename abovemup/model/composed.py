"""Bounds of the halves of a block and of the whole model, from both sides: composed of their layers, and found."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.geometry import stability as theory
from abovemup.geometry.stability import Affine, Metric
from abovemup.model.layers import rope_angles
from abovemup.model.llama import NORM_SITES, Attention, Block, FeedForward, Llama

Layers = Mapping[str, Affine]  # every layer by name, as `abovemup.model.stability.effective` gives them


# ---- from above ----


def bounds(model: Llama, layers: Layers) -> dict[str, Tensor]:
    """RMS of the output of each half for inputs of RMS 1, of the stream behind each block, and of the head's input."""
    sites = NORM_SITES[model.cfg.norm_placement]
    stream = theory.embedding(layers["embedding"].weight).value
    found: dict[str, Tensor] = {}
    for i, block in enumerate(cast("list[Block]", list(model.layers))):
        for half in f"layers.{i}.attention", f"layers.{i}.feed_forward":
            one = torch.ones_like(stream)
            arriving = torch.stack((one, one if "residual" in sites else stream))
            found[half], branch = half_bound(model, layers, half, arriving)
            stream = abs(block.alpha) * stream + abs(block.beta) * branch
        found[f"layers.{i}"] = stream
    found["final_norm"] = torch.ones_like(stream) if "output" in sites else stream
    return found


def last_matrix(model: Llama, half: str) -> tuple[str, bool]:
    """Of one half of a block, and whether a norm stands in front of it."""
    name, site = (f"{half}.wo", "vo") if half.endswith("attention") else (f"{half}.w2", "mlp")
    return name, site in NORM_SITES[model.cfg.norm_placement]


def middle_bound(model: Llama, layers: Layers, half: str, rms: Tensor) -> Tensor:
    """RMS of what enters the last matrix of one half, for inputs of RMS `rms` (n)."""
    last, normed = last_matrix(model, half)
    if normed:
        return torch.ones_like(rms)
    if last.endswith("wo"):  # attention mixes the values of each head in convex combinations
        return theory.chain(rms[:, None], heads(model, layers[f"{half}.wv"])).amax(-1)
    gate = theory.peaks(layers[f"{half}.w1"], rms[:, None]).amax(-1)
    return F.silu(gate) * theory.chain(rms, layers[f"{half}.w3"])  # `theory.swiglu`, for other inputs than of RMS 1


def half_bound(model: Llama, layers: Layers, half: str, rms: Tensor) -> Tensor:
    return theory.chain(middle_bound(model, layers, half, rms), layers[last_matrix(model, half)[0]])


def half_change(model: Llama, then: Layers, now: Layers, change: Layers, half: str) -> Tensor:
    """A bound on the change of the output of one half at inputs of RMS 1: W'm' - Wm = dW m + W'(m' - m).

    Behind a norm m' - m has no bound but 2, because what is normed may vanish: the half then has no better one than
    F + F', which any two outputs keep.
    """
    one = torch.ones_like(then["embedding"].weight[:1, 0])
    last, normed = last_matrix(model, half)
    apart = half_bound(model, then, half, one) + half_bound(model, now, half, one)
    if normed:
        return apart[0]
    if last.endswith("wo"):
        moved = mixed_change(model, then, now, change, half)
    else:
        gate, up = f"{half}.w1", f"{half}.w3"
        moved = theory.swiglu_change(then[gate], now[up], change[gate], change[up]).value
    step = theory.chain(middle_bound(model, then, half, one), change[last])
    return torch.minimum(apart, step + moved * now[last].slope.forward.value)[0]


def mixed_change(model: Llama, then: Layers, now: Layers, change: Layers, name: str) -> Tensor:
    """Of the mixed values of a head: p'v' - pv = p'(v' - v) + (p' - p) v.

    Logits that change by at most c move a row of softmax by at most 2 tanh(c/2) in the 1-norm: the shares of any set of
    positions change the most when its logits rise by c and the others fall by c, from exp(-c) : 1 to 1 : exp(-c).
    """
    scale = cast(Attention, model.get_submodule(name)).scale
    c = logit_change(model, then, now, change, name, scale)
    step, size = (heads(model, layers[f"{name}.wv"]).forward.value.amax() for layers in (change, then))
    return step + 2 * torch.tanh(c / 2) * size


def heads(model: Llama, layer: Affine) -> Affine:
    """(heads, head_dim, d) and (heads, head_dim)."""
    shape = (-1, model.cfg.head_dim)
    bias = None if layer.bias is None else layer.bias.unflatten(-1, shape)
    return Affine(layer.weight.unflatten(-2, shape), bias)


def logits(model: Llama, now: Layers, name: str, scale: float) -> Metric:
    """The largest |scale q.k| of any head at any distance; attained with normed q and k, unless wq or wk lost rank."""
    gains, normed = model.cfg.gains, "qk" in NORM_SITES[model.cfg.norm_placement]
    if normed:
        q, k = (theory.gain(now[f"{name}.{n}_norm"].weight if gains else torch.ones(1)).value[None] for n in "qk")
    else:
        q, k = (heads(model, now[f"{name}.w{n}"]).forward.value for n in "qk")
    return Metric(theory.attention_logit(q, k, scale, model.cfg.head_dim).value.amax(), normed and not gains)


def logit_change(model: Llama, then: Layers, now: Layers, change: Layers, name: str, scale: float) -> Tensor:
    """A bound on the change of a logit: q'k' - qk = (q' - q) k' + q (k' - k), and never more than both together."""
    apart = logits(model, then, name, scale).value + logits(model, now, name, scale).value
    if "qk" in NORM_SITES[model.cfg.norm_placement]:  # no slope where the normed query vanishes
        return apart
    (q, dq), (dk, k) = ([heads(model, w[f"{name}.w{n}"]).forward.value for w in ws] for n, ws in
                        (("q", (then, change)), ("k", (change, now))))  # fmt: skip
    parts = (theory.attention_logit(a, b, scale, model.cfg.head_dim).value for a, b in ((dq, k), (q, dk)))
    return torch.minimum(apart, torch.stack(list(parts)).sum(0).amax())


# ---- from below ----


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def spread(x: Tensor) -> Tensor:
    """(..., V) -> (...): the largest difference of two."""
    return x.amax(-1) - x.amin(-1)


def ascend(f: Callable[[Tensor], Tensor], x0: Tensor, steps: int, size: Callable[[Tensor], Tensor] = rms) -> float:
    """The largest `size` of a vector of f(x) that `steps` of L-BFGS find: a lower bound of F.

    x0 (starts, ..., d) is ascended start by start; every vector of x is kept at RMS 1.
    """
    best = -1.0

    def loss(z: Tensor) -> Tensor:
        nonlocal best
        value = size(f(theory.sphere(z))).amax()
        best = max(best, value.item())
        depth = -(value + torch.finfo(value.dtype).tiny).log()  # its slope does not depend on the scale of f
        (z.grad,) = torch.autograd.grad(depth, z)
        return depth

    for start in x0:
        z = theory.sphere(start).requires_grad_()
        climber = torch.optim.LBFGS(  # no tolerance stops it
            [z], max_iter=steps, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )
        climber.step(cast("Callable[[], float]", partial(loss, z)))
    return best


def lower_bounds(
    model: Llama, before: Mapping[str, Tensor] | None = None, steps: int = 20, starts: int = 2, length: int = 4
) -> dict[tuple[str, str], float]:
    """What `ascend` reaches, by (layer, metric): of each half's output, and of the differences of two logits (`model`).

    Metrics are `forward` and, given the weights `before` a step, `update`: of the same stream through both. Inputs are
    streams of `length` positions, for the whole model of the RMS of its longest embedding (of the shorter of the two,
    so that both have it). On the CPU in float64, from seeded Gaussian starts.
    """
    now, then = (copy.deepcopy(model).to("cpu", torch.float64) for _ in range(2))
    then.load_state_dict(dict(before or {}), strict=False)
    x0 = torch.randn(starts, length, model.cfg.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rope = rope_angles(length, model.cfg.head_dim, model.cfg.rope_theta, x0)
    longest = min(theory.embedding(net.embedding.weight.detach()).value for net in (now, then))

    def whole(net: Llama, x: Tensor) -> Tensor:
        return net.decode(longest * x[None])

    def half(name: str, net: Llama, x: Tensor) -> Tensor:
        module, normed = net.get_submodule(name), net.get_submodule(f"{name}_norm")(x[None])
        return module(normed, *rope) if isinstance(module, Attention) else module(normed)

    outputs: dict[str, Callable[[Llama, Tensor], Tensor]] = {"model": whole}
    for name, m in model.named_modules():
        if isinstance(m, Attention | FeedForward):
            outputs[f"{name}.output"] = partial(half, name)
    found = {}
    for layer, f in outputs.items():
        size = spread if layer == "model" else rms
        found[layer, "forward"] = ascend(partial(f, now), x0, steps, size)
        if before is not None:
            found[layer, "update"] = ascend(partial(difference, f, now, then), x0, steps, size)
    return found


def difference(f: Callable[[Llama, Tensor], Tensor], now: Llama, then: Llama, x: Tensor) -> Tensor:
    return f(now, x) - f(then, x)
