"""The three stability metrics of every layer of a Llama, with the bounds of what is composed of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from abovemup.geometry import stability as theory
from abovemup.geometry.msign import wide
from abovemup.geometry.stability import Affine, Metric
from abovemup.model import composed
from abovemup.model.layers import Linear
from abovemup.model.llama import NORM_SITES, Block, Llama
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
    # A norm (or that inputs are ids) makes the maximum exist; else it is conditional on RMS(x) = 1.
    in_norm: bool = True
    input_rms: float | None = None  # the largest one measured, where the value is conditional


def effective(model: Llama, weights: Mapping[str, Tensor]) -> dict[str, Affine]:
    """Every layer as an input of RMS 1 meets it: multiplier and the norm's gain are in the weight, padded rows not."""
    layers: dict[str, Affine] = {}
    for name, module in model.named_modules():
        weight = weights.get(f"{name}.weight", weights["embedding.weight"] if name == "head" else None)
        if weight is None:
            continue
        if name in ("embedding", "head"):
            weight = weight[: model.ids]
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

    after = composed.bounds(model, now)
    for i, block in enumerate(cast("list[Block]", list(model.layers))):
        attention, ffn = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        query, gate, up = f"{attention}.wq", f"{ffn}.w1", f"{ffn}.w3"
        scale, first_of_logits = block.attention.scale, None if "qk" in sites else query
        add(f"{attention}.logits", "forward", composed.logits(model, now, attention, scale), first_of_logits)
        add(f"{ffn}.middle", "forward", theory.swiglu(now[gate], now[up]), gate)
        apart = theory.swiglu_change(now[gate], now[up], now[gate].slope, now[up].slope)
        add(f"{ffn}.middle", "dependency", apart, gate)
        for half, first in (attention, query), (ffn, gate):
            add(f"{half}.output", "forward", Metric(after[half], False), first)
            if change:
                moved = composed.half_change(model, then, now, change, half)
                add(f"{half}.output", "update", Metric(moved, False), first)
        if change:
            moved = composed.logit_change(model, then, now, change, attention, scale)
            add(f"{attention}.logits", "update", Metric(moved, False), first_of_logits)
            add(f"{ffn}.middle", "update", theory.swiglu_change(then[gate], now[up], change[gate], change[up]), gate)
        add(f"layers.{i}.residual", "forward", Metric(after[f"layers.{i}"], False))
    whole = forward.value * after["final_norm"]
    add("model", "forward", Metric(whole, False))
    if change:  # the layers change each other's inputs, and a norm has no slope for all of them: F + F' is all there is
        earlier = measure("head", then["head"]).value * composed.bounds(model, then)["final_norm"]
        add("model", "update", Metric(whole + earlier, False))
    return rows
