"""What a step takes, on paper and counted: what autograd keeps, logits that live at once, and what ranks send."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from abovemup.config.compose import compose
from abovemup.config.schema import Experiment
from abovemup.data.corpus import open_corpus
from abovemup.geometry.msign import msign
from abovemup.model.llama import NORM_SITES, Llama
from abovemup.model.roles import specs
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import routing_table
from abovemup.optim.sharded import Owners
from abovemup.training.estimate import PEAKS, Estimate, msign_flops
from abovemup.training.ranks import Ranks
from abovemup.training.routes import table
from abovemup.training.trainer import Trainer
from tests.slow.process import tiny as overrides

ROPE = 2 * 32 * 4 * 4  # bytes of cosines and sines, which the paper leaves out: length, half of head_dim, float32


@pytest.fixture(scope="module")
def tiny() -> Experiment:
    return compose(overrides("model.vocab_size=264", "model.kv_heads=2"))


def built(e: Experiment) -> tuple[Llama, torch.Tensor]:
    net = Llama(e.model, e.parameterization)
    net.init_weights(0)
    return net, torch.arange(4 * 32).view(4, 32) % 64


def loss(net: Any, e: Experiment, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=e.train.dtype == "bfloat16"):
        found: torch.Tensor = net(tokens, tokens)
    return found


@pytest.mark.parametrize(("dtype", "gains"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_what_autograd_keeps(tiny: Experiment, dtype: Any, gains: bool) -> None:
    """To the byte, in distinct storages of floats, for every placement of norms. (With gains and bfloat16 a CPU keeps
    less: there its rms_norm, unlike a GPU's, is not one of the operations that autocast puts into float32.)"""
    for placement in NORM_SITES:
        model = replace(tiny.model, norm_placement=placement, gains=gains)
        e = replace(tiny, model=model, train=replace(tiny.train, dtype=dtype))
        net, tokens = built(e)
        whole = {p.untyped_storage().data_ptr() for p in net.parameters()}
        kept: dict[int, tuple[int, torch.Tensor]] = {}

        def keep(t: torch.Tensor, kept: Any = kept, whole: Any = whole) -> torch.Tensor:
            storage = t.untyped_storage()
            if t.is_floating_point() and t.ndim and storage.data_ptr() not in whole:
                kept[storage.data_ptr()] = storage.nbytes(), t
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            end = loss(net, e, tokens)
        found = Estimate(e, table(e), 1).memory()
        paper = found["activations"] + found["logits"] / 3 + found["casts"]
        assert end.grad_fn is not None
        assert sum(n for n, _ in kept.values()) - ROPE == paper, placement


class Live(TorchDispatchMode):
    """The storages that operations have made and that are still there: their sizes, and how many of each at most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most: Counter[int] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(found):
            if isinstance(t, torch.Tensor) and id(storage := t.untyped_storage()) not in self.sizes:
                self.sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, id(storage))
        self.most |= Counter(self.sizes.values())
        return found


@pytest.mark.parametrize(("dtype", "chunk"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 24)])
def test_three_of_the_logits_live_at_once(tiny: Experiment, dtype: Any, chunk: int) -> None:
    e = replace(tiny, train=replace(tiny.train, dtype=dtype, loss_chunk=chunk))
    net, tokens = built(e)
    net.loss_chunk = chunk
    with Live() as live:
        loss(net, e, tokens).backward()
    size = 4 * (chunk or 4 * 32) * e.model.vocab_size
    assert live.most[size] * size == Estimate(e, table(e), 1).memory()["logits"]


def test_a_block_that_is_computed_again_keeps_its_input(tiny: Experiment) -> None:
    kept, paper = [], []
    for depth in (2, 3):
        model = replace(tiny.model, depth=depth)
        e = replace(tiny, model=model, train=replace(tiny.train, recompute=True))
        net, tokens = built(e)
        net.recompute = True
        with Live() as live:
            end = loss(net, e, tokens)
            kept.append(sum(live.sizes.values()))
        assert end.grad_fn is not None
        found = Estimate(e, table(e), 1).memory()
        paper.append(found["activations"] + found["weights"])  # of which there are views
    assert kept[1] - kept[0] == paper[1] - paper[0]


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank sends: in rings, and in all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if name.startswith("c10d.") and (t := torch.utils._pytree.tree_leaves(args)[0]).dtype == torch.float32:
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            n = dist.ProcessGroup.unbox(group).size()
            if "allgather" in name:
                sent = t.numel() * (n - 1) / n
            elif "reduce_scatter" in name:
                sent = t.numel() * (n - 1)
            elif "allreduce" in name:
                sent = t.numel() * 2 * (n - 1) / n
            else:
                splits = args[-2]
                sent = sum(splits) - splits[dist.ProcessGroup.unbox(group).rank()]
            self.sent[name] = self.sent.get(name, 0) + 4 * sent
        return op(*args, **(kwargs or {}))


@contextmanager
def alone_of(world: int, rank: int) -> Iterator[Ranks]:
    """One rank whose messages reach nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield Ranks(rank, world, FakeStore())
    finally:
        dist.destroy_process_group()


SHARDED = {"weights": "_allgather_base_", "gradients": "_reduce_scatter_base_", "steps": "alltoall_base_"}


@pytest.mark.parametrize(
    ("parallel", "names"),
    [
        (["parallel=ddp"], {"steps": "_allgather_base_"}),  # the gradients are sent where no mode of Python looks
        (["parallel=fsdp"], SHARDED),
        (["parallel=fsdp", "parallel.replicate=2"], SHARDED | {"replicas": "allreduce_"}),
    ],
)
def test_what_is_sent(parallel: list[str], names: dict[str, str]) -> None:
    e = compose(overrides("model.vocab_size=264", "train.micro_batch=1", "train.batch_size=8", *parallel))
    most: dict[str, float] = {}
    for rank in range(4):
        with alone_of(4, rank) as ranks:
            net, tokens = built(e)
            ddp = net, Owners(None, sharded=False)
            spread, owners = ddp if e.parallel.name == "ddp" else ranks.spread(net, e.parallel)
            optimizer = build_optimizer(dict(net.named_parameters()), routing_table(specs(net), e), e, owners)
            with Wire() as wire:
                for left in (1, 0):
                    if e.parallel.name == "ddp":
                        spread.require_backward_grad_sync = not left  # type: ignore[assignment]
                    loss(spread, e, tokens[:1]).backward()
                optimizer.step()
        most = {k: max(wire.sent.get(k, 0), most.get(k, 0)) for k in wire.sent | most}
    expected = Estimate(e, table(e), 4).sent()
    for name, op in names.items():
        assert sum(n for k, n in most.items() if op in k) == pytest.approx(expected[name]), name


def test_the_flops_of_an_msign() -> None:
    for shape in ((24, 8), (8, 24), (16, 16)):
        with FlopCounterMode(display=False) as counter:
            msign(torch.randn(shape), steps=5)
        assert counter.get_total_flops() == msign_flops(shape, 5)


def test_utilisation_is_of_the_peak_where_that_is_known(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = compose(overrides("train.device=cpu"))
    corpus = open_corpus(e)
    row = Trainer(e, corpus).advance()
    assert row is not None
    assert "mfu" not in row
    monkeypatch.setitem(PEAKS, "a CPU", {"float32": 1e12})
    row = Trainer(e, corpus, ranks=Ranks(0, 2)).advance()
    assert row is not None
    steps = row["tokens_per_second"] / (4 * 32)
    assert row["mfu"] == pytest.approx(steps * Estimate(e, table(e), 2).flops()["model"] / 2e12)


def test_flops_are_those_of_a_forward_and_backward_pass(tiny: Experiment) -> None:
    """All products, but for those of the embedding; of attention twice the forward ones, as PaLM counts them, and not
    the one more that flash attention makes."""
    net, tokens = built(tiny)
    with FlopCounterMode(display=False) as counter:
        loss(net, tiny, tokens).backward()
    attention = 12 * 2 * 4 * 8 * 32 * tokens.numel()
    paper = Estimate(tiny, table(tiny), 1).flops()["model"]
    products = {str(op): n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)}
    assert sum(products.values()) == paper - attention
