"""Who computes which step, and what is sent: without processes, each rank is a thread here."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from abovemup.geometry.norms import NORMS
from abovemup.optim.sharded import Owners, assign, cost, rows

SHAPES = [(13, 7), (1, 11), (11, 1), (7, 13), (5,), (1,), (2, 3), (13, 7), (101, 3)]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
def test_the_work_is_divided_evenly(world: int) -> None:
    """Every matrix has one owner; no rank has more than the least one and one matrix of its own."""
    shapes = tuple([(64, 64)] * 7 + [(64, 176), (176, 64)] * 5 + [(1, 64), (8,)])
    owned = assign(shapes, world)
    assert sorted(i for indices in owned for i in indices) == list(range(len(shapes)))
    costs = [[cost(shapes[i]) for i in indices] for indices in owned]
    assert all(sum(own) - min(own) <= min(map(sum, costs)) for own in costs if own)
    assert assign(tuple([(8, 8)] * 12), 3) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]  # one shape: in turn


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_rows_are_those_of_a_chunk(count: int, world: int) -> None:
    """As FSDP2 shards: torch.chunk, with empty shards for the ranks that it leaves out."""
    chunks = [len(chunk) for chunk in torch.arange(count).chunk(world)]
    assert rows(count, world) == chunks + [0] * (world - len(chunks))


class Network:
    """The two collectives between threads, one a rank."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier, self.sent = world, threading.Barrier(world), [torch.empty(0)] * world
        self.splits: list[list[int]] = [[]] * world
        self.here = threading.local()
        self.calls = 0
        self.elements: list[list[int]] = [[] for _ in range(world)]  # of each rank, what it sent to each other one

    def _exchange(self, flat: Tensor, splits: list[int]) -> None:
        self.calls += 1
        rank = self.here.rank
        self.sent[rank], self.splits[rank] = flat, splits
        self.elements[rank] += [n for other, n in enumerate(splits) if other != rank]
        self.barrier.wait()

    def all_gather_single(self, got: Tensor, sent: Tensor, group: None) -> None:
        self._exchange(sent, [len(sent)] * self.world)
        got.copy_(torch.cat(self.sent))
        self.barrier.wait()

    def all_to_all_single(self, got: Tensor, sent: Tensor, want: list[int], splits: list[int], group: None) -> None:
        self._exchange(sent, splits)
        mine = [flat.split(cut)[self.here.rank] for flat, cut in zip(self.sent, self.splits, strict=True)]
        assert [len(piece) for piece in mine] == want
        got.copy_(torch.cat(mine))
        self.barrier.wait()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.world

        def thread(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.world)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return found


def connect(world: int, monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network(world)
    monkeypatch.setattr(dist, "all_gather_single", network.all_gather_single)
    monkeypatch.setattr(dist, "all_to_all_single", network.all_to_all_single)
    monkeypatch.setattr(dist, "get_rank", lambda group: network.here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    return network


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_step_is_made_once_and_comes_back(world: int, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network = connect(world, monkeypatch)
    g = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=g) for shape in SHAPES]
    made: list[int] = []

    def shards(tensor: Tensor) -> list[Tensor]:
        return list(tensor.split(rows(len(tensor), world))) if sharded else [tensor] * world

    def direct(mine: list[int], tensors: list[Tensor]) -> list[Tensor]:
        assert all(t.equal(wholes[i]) for i, t in zip(mine, tensors, strict=True)), "an owner gets it whole"
        made.extend(mine)
        return [3 * t for t in tensors]

    def work(rank: int) -> list[Tensor]:
        return Owners(None, sharded).steps(SHAPES, [shards(t)[rank] for t in wholes], direct)

    for rank, found in enumerate(network.run(work)):
        assert all(part.equal(3 * shards(t)[rank]) for part, t in zip(found, wholes, strict=True))
    assert sorted(made) == list(range(len(SHAPES)))
    assert network.calls == world * (2 if sharded else 1)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_sent_is_what_the_docstring_says(world: int, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network, shapes = connect(world, monkeypatch), [(12, 5)] * 12
    parts = [torch.zeros(12 // world if sharded else 12, 5)] * 12
    network.run(lambda rank: Owners(None, sharded).steps(shapes, parts, lambda mine, tensors: tensors))
    each = [12 * 60 // world**2] * 2 if sharded else [12 * 60 // world]
    assert network.elements == [[n for n in each for _ in range(world - 1)]] * world


@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_sent_may_be_half_as_much(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network, g = connect(2, monkeypatch), torch.Generator().manual_seed(0)
    wholes = [torch.randn(4, 3, generator=g) for _ in range(3)]

    def work(rank: int) -> list[Tensor]:
        parts = [t[2 * rank : 2 * rank + 2] if sharded else t for t in wholes]
        return Owners(None, sharded, dtype=torch.bfloat16).steps([(4, 3)] * 3, parts, lambda mine, tensors: tensors)

    for rank, found in enumerate(network.run(work)):
        for part, t in zip(found, wholes, strict=True):
            assert part.dtype == torch.float32
            assert part.equal((t[2 * rank : 2 * rank + 2] if sharded else t).bfloat16().float())


def test_experts_that_are_sharded_stay_where_they_are() -> None:
    owners, matrix = object.__new__(Owners), torch.zeros(8, 4)
    owners.cut = False
    for owners.sharded in (False, True):
        assert owners.needs(NORMS["rms_to_rms"], matrix)
        assert owners.needs(NORMS["rms_to_rms"], matrix.expand(6, 8, 4)) is not owners.sharded
        assert owners.needs(NORMS["rms"], matrix[0]) is owners.sharded
        assert not owners.needs(NORMS["one_to_rms"], matrix)
    assert cost((6, 8, 4)) == 6 * cost((8, 4))
