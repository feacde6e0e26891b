"""Tensor parallelism: each rank of a mesh has some of the heads, of the FFN's middle and of the vocabulary.

The matrices that widen (wq, wk, wv, w1, w3, the head) are cut by rows, those that narrow (wo, w2) by columns, the
embedding by rows. What a half of a block gives is summed over the ranks behind wo or w2, the gradient of its input on
the way back, and the embedding's rows; the loss sums three numbers a position, a norm in front of wo or w2 one. The
residual stream is whole on every rank.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from abovemup.geometry.msign import local, wide
from abovemup.model.layers import Embedding, RMSNorm
from abovemup.model.llama import Llama

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
# By the last part of a module's name: how its parameters are cut, how its input is (None: as it comes, which is as
# DTensor), and whether its output is summed over the ranks, and a plain tensor again. All others' parameters are whole.
PLAN: dict[str, tuple[Placement, Placement | None, bool]] = {
    "embedding": (ROWS, None, True),
    **dict.fromkeys(("attention_norm", "feed_forward_norm", "final_norm"), (WHOLE, WHOLE, True)),
    **dict.fromkeys(("attention", "feed_forward"), (WHOLE, WHOLE, False)),
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), (ROWS, None, False)),
    **dict.fromkeys(("o_norm", "norm"), (ROWS, Shard(-1), False)),
    **dict.fromkeys(("wo", "w2"), (COLUMNS, Shard(-1), True)),
    "head": (ROWS, WHOLE, False),
}


def divide(model: Llama, mesh: DeviceMesh) -> None:
    """Cut the weights of an initialised model over the ranks of a mesh of one dimension; all become DTensors.

    Heads are not cut: their numbers have to be divisible. The loss needs torch's `loss_parallel`, on its way back too.
    """
    for name, module in model.named_modules():
        weights, enters, summed = PLAN.get(name.rpartition(".")[2], (WHOLE, None, False))
        cut(module, mesh, weights)
        if enters is not None:
            module.register_forward_pre_hook(partial(shared, mesh, enters))
        if summed:
            module.register_forward_hook(total)
        if weights is ROWS and isinstance(module, RMSNorm):
            module.forward = partial(norm_of_parts, module)  # type: ignore[method-assign]
    model.embedding.forward = partial(embed_own_rows, model.embedding, mesh)  # type: ignore[method-assign]
    model.tie()
    if model.ids is not None:  # no logits: a slice would have to be of all ranks' parts
        unused = torch.zeros(model.cfg.vocab_size, device=model.head.weight.device)
        unused[model.ids :], model.ids = -torch.inf, None
        blank = distribute_tensor(unused, mesh, [ROWS], src_data_rank=None)
        model.head.register_forward_hook(lambda module, inputs, logits: logits + blank)


def cut(module: nn.Module, mesh: DeviceMesh, how: Placement) -> None:
    """Its own parameters become DTensors; a bias has no columns to cut."""
    for name, p in list(module.named_parameters(recurse=False)):
        place = WHOLE if p.ndim == 1 and how is COLUMNS else how
        module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [place], src_data_rank=None)))


def shared(mesh: DeviceMesh, how: Placement, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first input, of which each rank has all or its part, as one DTensor."""
    x, *others = inputs
    return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [how], run_check=False), *others)


def total(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
    """The sum over the ranks, on each."""
    return output.redistribute(placements=[WHOLE]).to_local()


def embed_own_rows(embedding: Embedding, mesh: DeviceMesh, tokens: Tensor) -> DTensor:
    """Zeros for tokens whose row another rank has. (torch's own way back makes a gradient of all rows on each rank.)"""
    rows, W = len(embedding.weight), local(embedding.weight)
    place = tokens - mesh.get_local_rank() * -(-rows // mesh.size())
    elsewhere = (place < 0) | (place >= len(W))
    x = F.embedding(place.masked_fill(elsewhere, 0), W).masked_fill(elsewhere[..., None], 0)
    return DTensor.from_local(x, mesh, [Partial()], run_check=False)


def norm_of_parts(norm: RMSNorm, x: DTensor) -> Tensor:
    """`RMSNorm.forward` of what is cut along its last dimension: only the sums of squares travel, both ways."""
    part, mesh = wide(local(x)), x.device_mesh
    square = all_reduce(part.square().sum(-1, keepdim=True), "sum", mesh)
    y = (part * (square / norm.shape[0] + norm.eps).rsqrt()).to(x.dtype)
    whole = DTensor.from_local(y, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    return whole if norm.weight is None else (whole * norm.weight).type_as(x)
