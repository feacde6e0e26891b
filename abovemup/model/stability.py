"""The three stability metrics of every layer of a Llama, and bounds of its blocks and of the whole from both sides."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
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
ALL_PAIRS = 2**15  # rows of a head up to which all pairs of them are compared


@dataclass(frozen=True)
class Row:
    layer: str
    metric: str  # forward, dependency or update
    value: float  # in RMS units; head and model: the largest difference of two logits; logits: |scale q.k|
    exact: bool = True  # else an upper bound
    in_norm: bool = (
        True  # a norm (or that inputs are ids) makes the maximum exist; else it is conditional on RMS(x) = 1
    )
    input_rms: float | None = None  # the largest one measured, where the value is conditional


def effective(model: Llama, weights: Mapping[str, Tensor]) -> dict[str, Affine]:
    """Every layer as an input of RMS 1 meets it: multiplier and the norm's gain are in the weight."""
    layers: dict[str, Affine] = {}
    for name, module in model.named_modules():
        weight = weights.get(f"{name}.weight", weights["embedding.weight"] if name == "head" else None)
        if weight is None:
            continue
        if isinstance(module, Linear):
            path = name.split(".")
            gain = weights.get(IN_NORMS[path[-1]][0].format(*path[1:2]) + ".weight")
            weight = wide(weight) * module.multiplier * (1 if gain is None else wide(gain))
        layers[name] = Affine(weight, weights.get(f"{name}.bias"))
    return layers


def measure(role: str, layer: Affine) -> Metric:
    """F of a parameter's layer, or U when it is given the change."""
    if role == "head" and layer.weight.shape[-2] > ALL_PAIRS:
        return Metric(2 * theory.head_centred(layer.weight).value, False)
    vectors = {"embedding": theory.embedding, "head": theory.head_pair, "gain": theory.gain}
    return vectors[role](layer.weight) if role in vectors else layer.forward


@torch.no_grad()
def report(
    model: Llama, before: Mapping[str, Tensor] | None = None, inputs: Mapping[str, float] | None = None
) -> list[Row]:
    """Forward and dependency of every layer; given the weights `before` a step, by name, also the step's update.

    `inputs` is the largest input RMS measured, by linear layer. `head` is the pair metric P, `head.M` and `head.R` are
    its cheap relatives. Blocks and the whole have an upper bound of the forward metric, composed of their layers':
    `layers.i.residual` is the stream behind block i, for any tokens, and the loss is at most ln V + `model`.
    """
    sites = NORM_SITES[model.cfg.norm_placement]
    now = effective(model, dict(model.named_parameters()))
    then = effective(model, before) if before is not None else {}
    change = {name: now[name] - layer for name, layer in then.items()}
    rows: list[Row] = []

    def add(layer: str, metric: str, m: Metric, linear: str | None = None) -> None:
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
            d = forward if layer.bias is None else layer.slope.forward
            add(name, "dependency", Metric(d.value, d.exact and role != "head"), linear)
        if change:
            add(name, "update", measure(role, change[name]), linear)
    add("head.M", "forward", theory.head_logit(now["head"].weight), "head")
    add("head.R", "forward", theory.head_centred(now["head"].weight), "head")

    stream = theory.embedding(now["embedding"].weight).value
    for i, block in enumerate(cast("list[Block]", list(model.layers))):
        attention, ffn = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        query, gate, up = f"{attention}.wq", f"{ffn}.w1", f"{ffn}.w3"
        logit = logits(model, now, attention, block.attention.scale)
        add(f"{attention}.logits", "forward", logit, None if "qk" in sites else query)
        add(f"{ffn}.middle", "forward", theory.swiglu(now[gate], now[up]), gate)
        apart = theory.swiglu_change(now[gate], now[up], now[gate].slope, now[up].slope)
        add(f"{ffn}.middle", "dependency", apart, gate)
        if change:
            add(f"{ffn}.middle", "update", theory.swiglu_change(then[gate], now[up], change[gate], change[up]), gate)
        for half, first in (attention, query), (ffn, gate):
            one = torch.ones_like(stream)
            arriving = torch.stack((one, one if "residual" in sites else stream))
            output, branch = half_bound(model, now, half, arriving)
            add(f"{half}.output", "forward", Metric(output, False), first)
            stream = abs(block.alpha) * stream + abs(block.beta) * branch
        add(f"layers.{i}.residual", "forward", Metric(stream, False))
    add("model", "forward", Metric(forward.value * (1.0 if "output" in sites else stream), False))
    return rows


def heads(layer: Affine, head_dim: int) -> Affine:
    """(heads, head_dim, d) and (heads, head_dim)."""
    bias = None if layer.bias is None else layer.bias.unflatten(-1, (-1, head_dim))
    return Affine(layer.weight.unflatten(-2, (-1, head_dim)), bias)


def logits(model: Llama, now: Mapping[str, Affine], name: str, scale: float) -> Metric:
    """The largest |scale q.k| of any head at any distance; attained with normed q and k, unless wq or wk lost rank."""
    dim, gains, normed = model.cfg.head_dim, model.cfg.gains, "qk" in NORM_SITES[model.cfg.norm_placement]
    if normed:
        q, k = (theory.gain(now[f"{name}.{n}_norm"].weight if gains else torch.ones(1)).value[None] for n in "qk")
    else:
        q, k = (heads(now[f"{name}.w{n}"], dim).forward.value for n in "qk")
    return Metric(theory.attention_logit(q, k, scale, dim).value.amax(), normed and not gains)


def half_bound(model: Llama, now: Mapping[str, Affine], name: str, rms: Tensor) -> Tensor:
    """Of the output of one half of a block for inputs of RMS `rms` (n): what enters its last matrix, times its F."""
    last, site = ("wo", "vo") if name.endswith("attention") else ("w2", "mlp")
    if site in NORM_SITES[model.cfg.norm_placement]:
        inner = torch.ones_like(rms)
    elif last == "wo":  # attention mixes the values of each head in convex combinations
        inner = theory.chain(rms[:, None], heads(now[f"{name}.wv"], model.cfg.head_dim)).amax(-1)
    else:  # `theory.swiglu`, for other inputs than of RMS 1
        gate = theory.peaks(now[f"{name}.w1"], rms[:, None]).amax(-1)
        inner = F.silu(gate) * theory.chain(rms, now[f"{name}.w3"])
    return theory.chain(inner, now[f"{name}.{last}"])


def ascend(f: Callable[[Tensor], Tensor], x0: Tensor, steps: int) -> float:
    """The largest RMS of a vector of f(x) that `steps` of L-BFGS find: a lower bound of F.

    x0 (starts, ..., d) is ascended start by start; every vector of x is kept at RMS 1.
    """
    best = -1.0

    def loss(z: Tensor) -> Tensor:
        nonlocal best
        value = f(theory.sphere(z)).square().mean(-1).amax().sqrt()
        best = max(best, value.item())
        depth = -(value + torch.finfo(value.dtype).tiny).log()  # its slope does not depend on the scale of f
        (z.grad,) = torch.autograd.grad(depth, z)
        return depth

    for start in x0:
        z = theory.sphere(start).requires_grad_()
        climber = torch.optim.LBFGS([z], 1, steps, None, 0, 0, line_search_fn="strong_wolfe")  # no tolerance stops it
        climber.step(cast("Callable[[], float]", partial(loss, z)))
    return best


def lower_bounds(model: Llama, steps: int = 20, starts: int = 2, length: int = 4, seed: int = 0) -> dict[str, float]:
    """What `ascend` reaches of the rows `layers.i.attention.output`, `.feed_forward.output` and `model` of `report`.

    Inputs are streams of `length` positions, for the whole model of the RMS of its longest embedding. On the CPU in
    float64, from seeded Gaussian starts.
    """
    model = copy.deepcopy(model).to("cpu", torch.float64)
    generator, shape = torch.Generator().manual_seed(seed), (starts, length, model.cfg.width)
    x0 = torch.randn(shape, generator=generator, dtype=torch.float64)
    rope = rope_angles(length, model.cfg.head_dim, model.cfg.rope_theta, x0)
    longest = theory.embedding(model.embedding.weight.detach()).value

    def spread(x: Tensor) -> Tensor:
        x = longest * x[None]
        for layer in model.layers:
            x = layer(x, *rope)
        logits: Tensor = model.head(model.final_norm(x))
        return (logits.amax(-1) - logits.amin(-1))[..., None]

    def half(module: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, module(norm(x[None]), *(rope if isinstance(module, Attention) else ())))

    found = {"model": ascend(spread, x0, steps)}
    for name, m in model.named_modules():
        if isinstance(m, Attention | FeedForward):
            found[f"{name}.output"] = ascend(partial(half, m, model.get_submodule(f"{name}_norm")), x0, steps)
    return found
