"""The three stability metrics of every layer of a Llama, and bounds of its blocks and of the whole from both sides."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from abovemup.geometry import stability as theory
from abovemup.geometry.msign import wide
from abovemup.geometry.stability import Affine, Metric
from abovemup.model.layers import Linear, rope_angles
from abovemup.model.llama import NORM_SITES, Attention, Block, FeedForward, Llama
from abovemup.model.roles import Tagged

IN_NORMS = {  # linear layer -> the norm in front of it, and the site of that norm in NORM_SITES
    **dict.fromkeys(("wq", "wk", "wv"), ("layers.{}.attention_norm", "residual")),
    **dict.fromkeys(("w1", "w3"), ("layers.{}.feed_forward_norm", "residual")),
    "wo": ("layers.{}.attention.o_norm", "vo"),
    "w2": ("layers.{}.feed_forward.norm", "mlp"),
    "head": ("final_norm", "output"),
}
Kind = Literal["forward", "dependency", "update"]


@dataclass(frozen=True)
class Row:
    layer: str
    metric: Kind
    value: float  # in RMS units; head and model: the largest difference of two logits; logits: |scale q.k|
    exact: bool  # else an upper bound
    in_norm: bool  # a norm (or that its inputs are ids) makes the maximum exist; else it is conditional on RMS(x) = 1
    input_rms: float | None  # the largest one measured, where the value is conditional


def effective(model: Llama, weights: Mapping[str, Tensor]) -> dict[str, Affine]:
    """Layer -> (weight, bias) as an input of RMS 1 meets them: multiplier and the norm's gain are in the weight."""
    layers: dict[str, Affine] = {}
    for name, module in model.named_modules():
        tied = weights["embedding.weight"] if name == "head" else None
        weight, bias, gain = weights.get(f"{name}.weight", tied), weights.get(f"{name}.bias"), None
        if isinstance(module, Linear):
            path = name.split(".")
            gain = weights.get(IN_NORMS[path[-1]][0].format(*path[1:2]) + ".weight")
        if weight is not None:
            weight = wide(weight) * cast(float, getattr(module, "multiplier", 1.0))
            layers[name] = weight if gain is None else weight * wide(gain), None if bias is None else wide(bias)
    return layers


def measure(role: str, layer: Affine) -> Metric:
    """F of a parameter's layer, or U when it is given the change."""
    vectors = {"embedding": theory.embedding, "head": theory.head_pair, "gain": theory.gain}
    return vectors[role](layer[0]) if role in vectors else theory.linear(*layer)


@torch.no_grad()
def report(
    model: Llama, before: Mapping[str, Tensor] | None = None, inputs: Mapping[str, float] | None = None
) -> list[Row]:
    """Forward and dependency of every layer; given the weights `before` a step, by name, also the step's update.

    `inputs` is the largest input RMS measured, by linear layer. Blocks and the whole have an upper bound of the forward
    metric, composed of their layers': `layers.i.residual` is the stream behind block i, for any tokens, and the loss is
    at most ln V + the value of `model`.
    """
    sites = NORM_SITES[model.cfg.norm_placement]
    now = effective(model, dict(model.named_parameters()))
    then = effective(model, before) if before is not None else {}
    change = {n: (now[n][0] - W, None if b is None else cast(Tensor, now[n][1]) - b) for n, (W, b) in then.items()}
    rows: list[Row] = []

    def add(layer: str, metric: Kind, m: Metric, linear: str | None = None) -> None:
        """A row; `linear` is the layer whose in norm decides, if one does."""
        stands = linear is None or IN_NORMS[linear.rpartition(".")[2]][1] in sites
        measured = None if linear is None or stands else (inputs or {}).get(linear)
        rows.append(Row(layer, metric, float(m.value), m.exact, stands, measured))

    for name, layer in now.items():
        module = cast(Tagged, model.get_submodule(name))
        role, linear = module.tags["weight"].role, name if isinstance(module, Linear) else None
        forward = measure(role, layer)  # the last one is the head's
        add(name, "forward", forward, linear)
        if role != "embedding":
            d = forward if layer[1] is None else measure(role, (layer[0], None))
            add(name, "dependency", Metric(d.value, d.exact and role != "head"), linear)
        if change:
            add(name, "update", measure(role, change[name]), linear)

    stream = theory.embedding(now["embedding"][0]).value
    for i, block in enumerate(cast("list[Block]", list(model.layers))):
        attention, ffn = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        query, gate, up = f"{attention}.wq", f"{ffn}.w1", f"{ffn}.w3"
        logits = logit_bound(model, now, attention, block.attention.scale)
        add(f"{attention}.logits", "forward", logits, None if "qk" in sites else query)
        add(f"{ffn}.middle", "forward", theory.swiglu(now[gate], now[up]), gate)
        slopes = (now[gate][0], None), (now[up][0], None)
        add(f"{ffn}.middle", "dependency", theory.swiglu_change(now[gate], now[up], *slopes), gate)
        if change:
            moved = theory.swiglu_change(now[gate], then[up], change[gate], change[up])
            add(f"{ffn}.middle", "update", moved, gate)
        for half, first in (attention, query), (ffn, gate):
            branch = half_bound(model, now, half, torch.ones_like(stream))
            add(f"{half}.output", "forward", Metric(branch, False), first)
            if "residual" not in sites:
                branch = half_bound(model, now, half, stream) if stream < 1e18 else stream + math.inf  # it squares
            stream = theory.residual(stream, branch, block.alpha, block.beta)
        add(f"layers.{i}.residual", "forward", Metric(stream, False))
    add("model", "forward", Metric(forward.value * (1.0 if "output" in sites else stream), False))
    return rows


def heads(layer: Affine, head_dim: int) -> Affine:
    """(heads, head_dim, d) and (heads, head_dim)."""
    return layer[0].unflatten(-2, (-1, head_dim)), None if layer[1] is None else layer[1].unflatten(-1, (-1, head_dim))


def logit_bound(model: Llama, now: Mapping[str, Affine], name: str, scale: float) -> Metric:
    """The largest |scale q.k| of any head at any distance; attained with normed q and k, unless wq or wk lost rank."""
    dim, normed = model.cfg.head_dim, "qk" in NORM_SITES[model.cfg.norm_placement]
    if normed:
        q, k = (now.get(f"{name}.{n}_norm", (torch.ones(dim), None))[0].diag()[None] for n in "qk")
        bound = theory.attention_logit_bound((q, None), (k, None), scale)
    else:
        bound = theory.attention_logit_bound(heads(now[f"{name}.wq"], dim), heads(now[f"{name}.wk"], dim), scale)
    return Metric(bound.value.amax(), normed and not model.cfg.gains)


def half_bound(model: Llama, now: Mapping[str, Affine], name: str, rms: Tensor) -> Tensor:
    """Of the output of one half of a block, for inputs of RMS `rms`: of what enters its last matrix, times its F."""
    last, site = ("wo", "vo") if name.endswith("attention") else ("w2", "mlp")
    if site in NORM_SITES[model.cfg.norm_placement]:
        inner = torch.ones_like(rms)
    elif last == "wo":  # attention mixes the values of each head in convex combinations
        inner = theory.chain(rms, *heads(now[f"{name}.wv"], model.cfg.head_dim)).value.amax()
    else:
        (gate, a), (up, b) = now[f"{name}.w1"], now[f"{name}.w3"]
        inner = theory.swiglu((gate * rms, a), (up * rms, b)).value
    return theory.chain(inner, *now[f"{name}.{last}"]).value


def ascend(f: Callable[[Tensor], Tensor], x0: Tensor, steps: int) -> tuple[float, Tensor]:
    """The largest RMS of a vector of f(x) that `steps` of L-BFGS find, and its x: a lower bound of F.

    x0 (starts, ..., d) is ascended start by start; every vector of x is kept at RMS 1.
    """
    best, argument = -1.0, x0[0]

    def loss(z: Tensor) -> Tensor:
        nonlocal best, argument
        x = theory.sphere(z)
        value = f(x).square().mean(-1).amax().sqrt()
        if value > best:
            best, argument = value.item(), x.detach()
        depth = -(value + torch.finfo(value.dtype).tiny).log()  # its slope does not depend on the scale of f
        (z.grad,) = torch.autograd.grad(depth, z)
        return depth

    for start in x0:
        z = theory.sphere(start).requires_grad_()
        climber = torch.optim.LBFGS([z], 1, steps, None, 0, 0, line_search_fn="strong_wolfe")  # no tolerance stops it
        climber.step(cast("Callable[[], float]", partial(loss, z)))
    return best, argument


def lower_bounds(model: Llama, steps: int = 20, starts: int = 2, length: int = 4, seed: int = 0) -> dict[str, float]:
    """What `ascend` reaches of the rows `layers.i.attention.output`, `.feed_forward.output` and `model` of `report`.

    Inputs are streams of `length` positions, for the whole model of the RMS of its longest embedding. On the CPU in
    float64, from seeded Gaussian starts.
    """
    model = copy.deepcopy(model).to("cpu", torch.float64)
    generator, shape = torch.Generator().manual_seed(seed), (starts, length, model.cfg.width)
    x0 = torch.randn(shape, generator=generator, dtype=torch.float64)
    rope = rope_angles(length, model.cfg.head_dim, model.cfg.rope_theta, x0)
    longest = theory.embedding(model.embedding.weight.detach()).value * model.embedding.multiplier

    def spread(x: Tensor) -> Tensor:
        x = longest * x[None]
        for layer in model.layers:
            x = layer(x, *rope)
        logits: Tensor = model.head(model.final_norm(x))
        return (logits.amax(-1) - logits.amin(-1))[..., None]

    def half(module: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, module(norm(x[None]), *(rope if isinstance(module, Attention) else ())))

    found = {"model": ascend(spread, x0, steps)[0]}
    for name, m in model.named_modules():
        if isinstance(m, Attention | FeedForward):
            found[f"{name}.output"] = ascend(partial(half, m, model.get_submodule(f"{name}_norm")), x0, steps)[0]
    return found
