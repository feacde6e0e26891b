"""Optimizer steps over several ranks: each computes the steps of its own share of the matrices, whole.

Row by row, entry by entry: such norms need no rank but the one that holds the rows. What a spectral norm, or that of
a vector, needs whole goes to an owner. With every weight on every rank (DDP) the owners' steps are gathered: one
all-gather a step. With weights sharded by rows (FSDP2) the shards go to the owners, and the steps back: two
all-to-alls a step, over all matrices. With N elements in matrices and n ranks a rank sends N / n elements to each
other one in the first case (its own steps), and N / n^2, twice, in the second. Weights that tensor parallelism cuts are
completed first, each by an all-gather over the ranks that cut it, and steps come as in the first case and are sliced.
`parallel.dtype` is what is sent of gradients and steps.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from abovemup.geometry.norms import SPECTRAL, VECTOR, NormBall

Shape = Sequence[int]
Owned = list[list[int]]  # of each rank, the indices of what it owns
Direct = Callable[[list[int], list[Tensor]], list[Tensor]]


def like(tensor: Any, full: Tensor) -> Tensor:
    """`full`, which every rank has, sharded as `tensor` is."""
    if not hasattr(tensor, "placements"):
        return full
    from torch.distributed.tensor import distribute_tensor

    place = full.to(tensor.device)
    return distribute_tensor(place, tensor.device_mesh, tensor.placements, src_data_rank=None)


def completed(tensor: Any, part: Tensor) -> Tensor:
    """All of what is spread as `tensor` is and of which `part` is here. All its ranks have to call this."""
    if not hasattr(tensor, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    how: dict[str, Any] = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, **how).full_tensor()


def rows(count: int, world: int) -> list[int]:
    """Rows of each rank's shard, as FSDP2 cuts them: the last ones may have fewer, or none."""
    most = -(-count // world)
    return [min(most, max(0, count - rank * most)) for rank in range(world)]


def cost(shape: Shape) -> int:
    """What a step of this shape costs: the products of an msign, or a pass over a vector."""
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


@lru_cache(maxsize=64)
def assign(shapes: tuple[tuple[int, ...], ...], world: int) -> Owned:
    """Who owns what: the costliest first, each to the rank that has least so far."""
    owned: Owned = [[] for _ in range(world)]
    load = [0] * world
    for i in sorted(range(len(shapes)), key=lambda i: (-cost(shapes[i]), i)):
        owner = load.index(min(load))
        owned[owner].append(i)
        load[owner] += cost(shapes[i])
    return owned


class Owners:
    """The ranks of `group` (None: all), and how they hold the weights: each its rows (`sharded`), each what tensor
    parallelism has cut out for it (`cut`), or each all. `dtype`: what steps are sent in."""

    def __init__(
        self, group: dist.ProcessGroup | None, sharded: bool, cut: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self.group, self.sharded, self.cut, self.dtype = group, sharded, cut, dtype
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def needs(self, ball: NormBall, p: Any) -> bool:
        """Whether steps in this norm are divided among the ranks; a vector that all have costs less than sending it,
        and of sharded experts (E, d_out, d_in) each is whole where it is. No norm is one of parts of rows."""
        if ball.geometry is SPECTRAL:
            return not (self.sharded and p.ndim > 2)
        if self.cut:
            return any(getattr(how, "dim", None) == p.ndim - 1 for how in p.placements)
        return self.sharded and ball.geometry is VECTOR

    def steps(self, shapes: Sequence[Shape], parts: list[Tensor], direct: Direct) -> list[Tensor]:
        """Of tensors of these (whole) shapes, of which `parts` are here, the same parts of what `direct` makes of them.

        `direct(indices, tensors)` gets this rank's own, whole. All ranks call it, with the same shapes in one order.
        """
        owned = assign(tuple(map(tuple, shapes)), self.world)
        exchange = self._all_to_all if self.sharded else self._all_gather
        pieces = exchange(shapes, parts, owned, direct)
        found = dict(zip([i for indices in owned for i in indices], pieces, strict=True))
        return [found[i].view(part.shape) for i, part in enumerate(parts)]

    def _all_gather(self, shapes: Sequence[Shape], parts: list[Tensor], owned: Owned, direct: Direct) -> list[Tensor]:
        sizes, mine = [[prod(shapes[i]) for i in indices] for indices in owned], owned[self.rank]
        sent = parts[0].new_zeros(max(map(sum, sizes)), dtype=self.dtype)  # all send as much as the one that has most
        if mine:
            torch.cat([d.flatten() for d in direct(mine, [parts[i] for i in mine])], out=sent[: sum(sizes[self.rank])])
        got = sent.new_empty(self.world * len(sent))
        dist.all_gather_single(got, sent, group=self.group)
        chunks = zip(got.to(parts[0].dtype).view(self.world, -1), sizes, strict=True)
        return [piece for chunk, of in chunks for piece in chunk[: sum(of)].split(of)]

    def _all_to_all(self, shapes: Sequence[Shape], parts: list[Tensor], owned: Owned, direct: Direct) -> list[Tensor]:
        """Both ways a message is in the order of the ranks, and for each in the order of `owned`."""
        sizes = [[n * prod(shape[1:]) for n in rows(shape[0], self.world)] for shape in shapes]
        mine, order = owned[self.rank], [i for indices in owned for i in indices]
        with_owners = [sum(sizes[i][self.rank] for i in indices) for indices in owned]
        with_shards = [sum(sizes[i][rank] for i in mine) for rank in range(self.world)]
        got = self._swap([parts[i] for i in order], with_owners, with_shards)
        pieces = got.split([sizes[i][rank] for rank in range(self.world) for i in mine])
        full = [torch.cat(pieces[k :: len(mine)]).view(shapes[i]) for k, i in enumerate(mine)]
        cut = [d.flatten().split(sizes[i]) for i, d in zip(mine, direct(mine, full), strict=True)]
        back = [c[rank] for rank in range(self.world) for c in cut]
        return list(self._swap(back or [got], with_shards, with_owners).split([sizes[i][self.rank] for i in order]))

    def _swap(self, tensors: list[Tensor], sent: list[int], got: list[int]) -> Tensor:
        """One all-to-all: so many elements to each rank, and so many from each."""
        flat = torch.cat([t.flatten() for t in tensors])
        received = flat.new_empty(sum(got), dtype=self.dtype)
        dist.all_to_all_single(received, flat.to(self.dtype), got, sent, group=self.group)
        return received.to(flat.dtype)


def complete(optimizer: Optimizer, *_: Any) -> None:
    """Before a step: a parameter that has a gradient on some rank has one, of zeros, on those where it had none.

    So all ranks step the same parameters, and none waits for another that skips one.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for p, somewhere in zip(params, found.tolist(), strict=True):
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)
