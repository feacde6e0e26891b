"""What test_ranks.py starts under torchrun: python -m tests.slow.ranks FOLDER LAYOUT...

Rank 0 also trains the run on its own, as one process, and compares: losses, norms and weights.
"""

import os
import sys
import zlib
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from abovemup.bench import ranks as bench
from abovemup.bench.step import blocks
from abovemup.config.compose import compose
from abovemup.config.schema import Experiment, Parallel
from abovemup.data.corpus import Corpus, open_corpus
from abovemup.geometry.msign import local, whole
from abovemup.model.loss import IGNORE
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import routing_table
from abovemup.optim.sharded import Owners
from abovemup.optim.steepest import SteepestDescent
from abovemup.training import checkpoint
from abovemup.training.estimate import Estimate
from abovemup.training.evaluate import inputs
from abovemup.training.ranks import ALONE, Ranks, join
from abovemup.training.routes import table
from abovemup.training.tensors import Reader
from abovemup.training.trainer import Trainer
from tests.optim.make import Spec, experiment
from tests.training.tiny import TIMED, TINY, read, same_bits

OPTIMIZERS = {  # Adam, of which muon has a part, divides rounding by rounding: its lr is small
    "adam": ["optimizer.lr=1e-3"],
    "muon": ["optimizer.lr=1e-3", "optimizer.lr_scale.hidden=32"],
    "scion": ["optimizer.lr=2^-4"],
    "above_mup": ["optimizer.lr=2^-4"],
}
UNEVEN = [  # 257 rows, a width of 23, an FFN of 1: no number of ranks divides them, some have no rows, and 1 x N, N x 1
    "model.width=23",
    "model.heads=1",
    "model.head_dim=22",
    "model.kv_heads=1",
    "model.ffn=1",
    "model.base.width=23",
    "model.base.head_dim=22",
    "model.norm_placement=standard",
    "model.gains=true",
    "model.biases=true",
    "train.batch_size=5",
    "optimizer.nesterov=true",
    "optimizer.weight_decay=0.1",
]
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "uneven": UNEVEN,
    "accumulated": ["train.batch_size=8", "train.micro_batch=1"],  # and clipped at half the norm
    "tied": ["model.tie_embeddings=true", "optimizer.norm_control=pre_decay", "optimizer.weight_decay=0.5"],
    "small": ["train.batch_size=1"],  # less than one sequence a rank
    # An FFN of 7 and 257 ids are cut in two; heads cannot be.
    "cut": [
        *UNEVEN,
        *("model.heads=2", "model.kv_heads=2", "model.head_dim=10", "model.base.head_dim=10", "model.ffn=7"),
        "model.norm_placement=everywhere",
    ],
    "padded": ["model.vocab_size=300", "train.loss_chunk=7", "train.recompute=true"],
}


def settings(optimizer: str, variant: str) -> tuple[Experiment, Corpus]:
    asked = [
        *TINY,
        "model.depth=2",
        "train.steps=3",
        f"optimizer={optimizer}",
        *OPTIMIZERS[optimizer],
        *VARIANTS[variant],
    ]
    exp = compose([f"{k}={v}" for k, v in dict(o.split("=", 1) for o in asked).items()])
    exp = replace(exp, train=replace(exp.train, device="cpu"))
    corpus = open_corpus(exp, lambda line: None)
    if variant == "accumulated":
        norm = Trainer(exp, corpus).gradients(1)[1]
        exp = replace(exp, optimizer=replace(exp.optimizer, clip=norm / 2))
    return exp, corpus


def trained(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    records = [trainer.initial_row()] if trainer.t == 0 else []
    while trainer.t < steps:
        record = trainer.advance()
        assert record is not None
        records.append(record)
    return [{k: v for k, v in record.items() if k not in TIMED} for record in records]


def same_rows(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert abs(value - other[key]) <= 1e-5 * max(1.0, abs(value)), (key, value, other[key])


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Whole, which all ranks ask for."""
    return {name: whole(p.detach()) for name, p in trainer.parameters.items()}


def same_tensors(a: dict[str, Any], b: dict[str, Any], where: str = "") -> None:
    assert a.keys() == b.keys(), where
    for name, value in a.items():
        if isinstance(value, dict):
            same_tensors(value, b[name], f"{where} {name}")
        else:
            told = lambda text, n=name: f"{where} {n}: {text}"  # noqa: E731
            torch.testing.assert_close(value, b[name], rtol=1e-5, atol=1e-5, msg=told)


def title(ranks: Ranks, parallel: Parallel) -> str:
    copies, tensor = f"x{parallel.replicate}" * (parallel.replicate > 1), f"t{parallel.tensor}" * (parallel.tensor > 1)
    return f"{parallel.name}{ranks.world}{copies}{tensor}"


def check(exp: Experiment, corpus: Corpus, ranks: Ranks, parallel: Parallel) -> tuple[Trainer, Trainer]:
    """Three steps over the ranks and three of one process are the same run."""
    one, many = Trainer(exp, corpus), Trainer(replace(exp, parallel=parallel), corpus, ranks=ranks)
    held = sum(local(p).numel() for p in many.parameters.values())
    everything = sum(p.numel() for p in one.parameters.values())
    shards = 1 if parallel.name == "ddp" else ranks.world // parallel.replicate
    assert ranks.tensor == parallel.tensor
    assert held <= everything / shards + 1000
    rows, found = trained(many, 3), weights(many)
    if ranks.first:
        same_rows(trained(one, 3), rows)
        same_tensors(found, weights(one))
    return one, many


def check_resumed(exp: Experiment, corpus: Corpus, ranks: Ranks, parallel: Parallel, folder: Path) -> None:
    """After two steps both save the same, and from either both take the third step of a straight run: so a run may move
    from any layout to any other."""
    layouts = {title(ranks, parallel): (replace(exp, parallel=parallel), ranks)}
    if ranks.first:
        layouts["single"] = (exp, ALONE)
    places = [folder / layout / exp.optimizer.name for layout in ("single", title(ranks, parallel))]
    for layout, (e, r) in layouts.items():
        trainer = Trainer(e, corpus, ranks=r)
        trained(trainer, 2)
        state, place = trainer.state(2), folder / layout / exp.optimizer.name
        place.parent.mkdir(parents=True, exist_ok=True)
        copy = state.copied()  # what a thread would write
        trained(trainer, 3)
        checkpoint.save(place, copy, r.saving)
    ranks.same(None)
    paths = [place / "step_00000002" for place in places]
    check_files(paths[1], ranks, parallel)
    states = [read(path) for path in paths]
    same_tensors(states[0].model, states[1].model)
    same_tensors(states[0].optimizer, states[1].optimizer)
    ends = []
    for path in paths:
        for e, r in layouts.values():
            trainer = Trainer(e, corpus, ranks=r)
            trainer.load(checkpoint.load(path), path)
            found = {name: whole(t) for name, t in trainer.state(2).tensors().items()}
            assert same_bits(found, read(path).tensors())
            trained(trainer, 3)
            ends.append(weights(trainer))
    for end in ends[1:]:
        same_tensors(end, ends[0])


def check_files(path: Path, ranks: Ranks, parallel: Parallel) -> None:
    """Each number is in one rank's file, and nothing that is sharded is whole in any."""
    entries = Reader(path).metadata.state_dict_metadata
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(ranks.world)]
    assert len([*path.glob("*.distcp")]) == ranks.world
    numbers = sum(4 * entry.size.numel() for entry in entries.values())
    containers = sum(2000 * len(entry.chunks) for entry in entries.values())
    assert numbers <= sum(sizes) <= numbers + containers
    shards = 1 if parallel.name == "ddp" else ranks.world // parallel.replicate
    for name, entry in entries.items():
        parts = [chunk.sizes for chunk in entry.chunks if chunk.sizes.numel()]
        assert sum(part.numel() for part in parts) == entry.size.numel(), name
        if len(entry.size) > 1 and min(entry.size) >= shards > 1:
            assert entry.size not in parts, name


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def check_sent(ranks: Ranks, parallel: Parallel) -> None:
    """What `model.tensor`, `optim.sharded` and `training.estimate` say of tensor parallelism, counted in elements."""
    exp, corpus = settings("scion", "plain")
    places, halves = 4 * 32, 2 * exp.model.depth
    stream = (halves + 1) * places * exp.model.width
    for recompute in (False, True):
        e = replace(exp, parallel=parallel, train=replace(exp.train, recompute=recompute))
        trainer = Trainer(e, corpus, ranks=ranks)
        forward, backward, step = sent(trainer)
        again = recompute * exp.model.depth
        assert forward == {"all_reduce": stream + halves * places + 3 * places}
        assert backward == {"all_reduce": stream + halves * places + again * places * (exp.model.width + 2)}
        hidden = sum(p.numel() for n, p in trainer.parameters.items() if n not in ("embedding.weight", "head.weight"))
        assert step == {"all_gather_into_tensor": hidden // 2}
        paper = Estimate(e, table(e), ranks.world).sent()  # in an all-reduce of two ranks each sends all of it once
        assert paper["activations"] == 4 * (2 * stream + again * places * exp.model.width)
        assert paper["moments"] == 4 * hidden / 2


def sent(trainer: Trainer) -> list[dict[str, int]]:
    """Elements that go into collectives of DTensors, in a forward pass, a backward pass and an optimizer step."""
    windows = trainer.corpus.batch(0, 4)
    losses: list[Tensor] = []
    works: list[Any] = [
        lambda: losses.append(trainer.spread(inputs(windows), windows[:, 1:])),
        lambda: local(losses[0]).backward(),
        lambda: [trainer.grad_norm(), trainer.optimizer.step()],
    ]
    found = []
    for work in works:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            work()
        counted: dict[str, int] = Counter()
        for event in profiled.events():
            name = event.name.removeprefix("_c10d_functional::")
            if name != event.name and name in COLLECTIVES:
                counted[name] += prod(event.input_shapes[0])
        found.append(dict(counted))
    return found


def hardest(ranks: Ranks, parallel: Parallel) -> str:
    """Of the variants that this layout can divide."""
    return "uneven" if parallel.tensor == 1 else "cut" if ranks.world == parallel.tensor else "plain"


def check_bits(ranks: Ranks, parallel: Parallel) -> None:
    """After 20 steps the weights are the same bits on every rank, and when the run is repeated."""
    for optimizer in ("adam", "scion"):
        exp, corpus = settings(optimizer, hardest(ranks, parallel))
        seldom = {"norms": replace(exp.norms, every=20), "eval": replace(exp.eval, every=20)}
        exp = replace(exp, train=replace(exp.train, steps=20), parallel=parallel, **seldom)
        found = []
        for _ in range(2):
            trainer = Trainer(exp, corpus, ranks=ranks)
            trained(trainer, 20)
            digests = [zlib.crc32(w.contiguous().view(torch.uint8).numpy()) for w in weights(trainer).values()]
            found += ranks.gather(digests)
        assert all(digests == found[0] for digests in found)


def check_masked(ranks: Ranks, parallel: Parallel) -> None:
    """Case 31: micro-batches with 31, 1, 0 and 16 scored tokens weigh what they have. Case 32: any eval.batch."""
    exp, corpus = settings("scion", "accumulated")
    plain = corpus.batch

    def masked(first: int, count: int) -> Tensor:
        windows = plain(first, count).clone()
        for row, sample in enumerate(range(first, first + count)):
            windows[row, 1 + (31, 1, 0, 16)[sample % 4] :] = IGNORE
        return windows

    corpus.batch = masked  # type: ignore[method-assign]
    one, many = check(exp, corpus, ranks, parallel)
    at_once = Trainer(replace(exp, train=replace(exp.train, micro_batch=8)), corpus)
    if ranks.first:
        trained(at_once, 3)
        same_tensors(weights(one), weights(at_once))
    for batch in (1, 3, 4, 10):
        many.exp = replace(many.exp, eval=replace(many.exp.eval, batch=batch))
        loss = many.evaluate()["val/loss"]
        if ranks.first:
            assert abs(loss - one.evaluate()["val/loss"]) < 1e-6


def check_direction(ranks: Ranks, parallel: Parallel) -> None:
    """Case 2: the oracle that was chosen runs. All singular values of a step are one, and it is not the gradient's."""
    for optimizer in ("muon", "scion", "above_mup"):
        exp, corpus = settings(optimizer, "plain")
        msign = replace(exp.optimizer.msign, method="exact")
        exp = replace(exp, optimizer=replace(exp.optimizer, momentum=0.0, msign=msign), parallel=parallel)
        trainer = Trainer(exp, corpus, ranks=ranks)
        trainer.gradients(1)
        p = trainer.parameters["layers.0.attention.wq.weight"]
        before, gradient = whole(p.detach()).clone(), whole(p.grad)
        trainer.optimizer.step()
        step = whole(p.detach()) - before
        sigma = torch.linalg.svdvals(step)
        assert sigma.max() < 1.01 * sigma[sigma > 1e-3 * sigma.max()].min()
        assert abs(torch.nn.functional.cosine_similarity(step.flatten(), -gradient.flatten(), 0)) < 0.99


SHAPES = {
    "row": ("hidden", (1, 13)),
    "column": ("hidden", (13, 1)),
    "prime": ("hidden", (7, 5)),
    "other": ("hidden", (7, 5)),
    "frozen": ("hidden", (7, 5)),
    "idle": ("hidden", (5, 3)),
    "embedding": ("embedding", (11, 3)),
    "gain": ("gain", (2,)),
    "bias": ("bias", (5,)),
    "head": ("head", (11, 3)),
}


def check_absent(ranks: Ranks, parallel: Parallel) -> None:
    """Gradients that only some ranks have, or none: the step of one process, and nobody waits for anybody."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    for rules in ("scion", "above_mup", "muon", "adam"):
        e = experiment(rules, lr=1e-3)
        routes = routing_table([Spec(n, s, r, "") for n, (r, s) in SHAPES.items()], e)
        g = torch.Generator().manual_seed(1)
        values = {n: torch.randn(shape, generator=g) for n, (_, shape) in SHAPES.items()}
        one = {n: Parameter(v.clone()) for n, v in values.items()}
        many: dict[str, Any] = {n: Parameter(v.clone()) for n, v in values.items()}
        if parallel.name == "fsdp":
            many = {n: Parameter(distribute_tensor(v, mesh, [Shard(0)])) for n, v in values.items()}
        single = build_optimizer(one, routes, e)
        shared = build_optimizer(many, routes, e, Owners(None, parallel.name == "fsdp"))
        one["frozen"].requires_grad_(False)
        many["frozen"].requires_grad_(False)
        for _ in range(3):
            for i, name in enumerate(SHAPES):
                grad = torch.randn(SHAPES[name][1], generator=g)
                if name in ("frozen", "idle"):
                    continue
                here = i % 2 == 0 or ranks.first or parallel.name == "ddp"
                if parallel.name == "fsdp":  # what the other ranks do not have is zero
                    rows = local(distribute_tensor(grad, mesh, [Shard(0)])) * float(here)
                    grad = DTensor.from_local(rows, mesh, [Shard(0)], shape=grad.shape, stride=grad.stride())
                    many[name].grad = grad if here else None
                    grad = grad.full_tensor()
                else:
                    many[name].grad = grad.clone()
                one[name].grad = grad
            single.step()
            shared.step()
        for name, p in many.items():
            torch.testing.assert_close(
                whole(p.detach()), one[name].detach(), rtol=1e-5, atol=1e-6, msg=f"{rules} {name}"
            )
        for name in ("frozen", "idle"):
            assert whole(many[name].detach()).equal(values[name])


def check_experts(ranks: Ranks, parallel: Parallel) -> None:
    """Of a mixture of experts (E, d_out, d_in): one matrix each, sharded by expert, of which some ranks have none, or
    all cut in their rows."""
    how, cut = Shard(int(parallel.tensor > 1)), parallel.tensor > 1
    mesh, g = init_device_mesh("cpu", (ranks.world,)), torch.Generator().manual_seed(1)
    for norm in ("rms_to_rms", "one_to_rms", "sign"):
        values = [torch.randn(shape, generator=g) for shape in ((5, 4, 3), (2, 4, 3), (4, 3))]
        spread: Any = (lambda t: distribute_tensor(t, mesh, [how])) if parallel.name == "fsdp" else torch.clone
        one, many = [Parameter(v.clone()) for v in values], [Parameter(spread(v)) for v in values]
        owners = Owners(None, parallel.name == "fsdp" and not cut, cut)
        optimizers = [SteepestDescent(one, 0.1, norm, momentum=0.9)]
        optimizers += [SteepestDescent(many, 0.1, norm, momentum=0.9, owners=owners)]
        for _ in range(3):
            for p, q in zip(one, many, strict=True):
                p.grad = torch.randn(p.shape, generator=g)
                q.grad = spread(p.grad)
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(one, many, strict=True):
            torch.testing.assert_close(whole(q.detach()), p.detach(), rtol=1e-5, atol=1e-6)


def check_half(ranks: Ranks, parallel: Parallel) -> None:
    """What is sent as bfloat16 is another run, though not far from it, and the same on every rank."""
    exp, corpus = settings("scion", "plain")
    full, half = (
        Trainer(replace(exp, parallel=p), corpus, ranks=ranks) for p in (parallel, replace(parallel, dtype="bfloat16"))
    )
    rows, found = trained(full, 3), trained(half, 3)
    assert found[-1]["loss"] != rows[-1]["loss"]
    assert abs(found[-1]["loss"] - rows[-1]["loss"]) < 0.01 * rows[-1]["loss"]
    digests = ranks.gather([zlib.crc32(w.contiguous().view(torch.uint8).numpy()) for w in weights(half).values()])
    assert all(others == digests[0] for others in digests)


def check_all(ranks: Ranks, parallel: Parallel, folder: Path) -> None:
    uneven, mixed = hardest(ranks, parallel), ranks.world > parallel.tensor > 1  # of fsdp and tensor, each seen alone
    for optimizer in ("adam", "scion") if mixed else OPTIMIZERS:
        for variant in (*(["plain"] if ranks.world == 2 else []), uneven, "accumulated"):  # plain is in the others
            exp, corpus = settings(optimizer, variant)
            check(exp, corpus, ranks, parallel)
            if variant == uneven and optimizer in ("adam", "scion"):  # the two kinds of state
                check_resumed(exp, corpus, ranks, parallel, folder)
    if not mixed:
        check_masked(ranks, parallel)
        check_direction(ranks, parallel)
    if ranks.world == 2:
        check_half(ranks, parallel)
    if ranks.world == parallel.tensor:
        check_sent(ranks, parallel)
    for variant in ("tied", "small", "padded"):
        check(*settings("scion", variant), ranks, parallel)
    if parallel.replicate == 1:
        check_experts(ranks, parallel)
    if parallel.replicate == parallel.tensor == 1:
        check_absent(ranks, parallel)


def main(folder: Path, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    with join() as ranks:
        for layout in layouts:
            name, _, tensor = layout.partition("t")
            name, _, replicate = name.partition("x")
            parallel = Parallel(name=name, replicate=int(replicate or 1), tensor=int(tensor or 1))  # type: ignore[arg-type]
            if title(ranks, parallel) != "ddp3":
                check_all(ranks, parallel, folder)
            if ranks.world > 2:
                check_bits(ranks, parallel)
            if layout == "fsdp":  # what the bench compares is comparable; nothing is timed here
                assert bench.step(ranks, blocks(16, 1, 8), 1).value > 0
                small = [o for o in TINY if not o.startswith("train.steps")]
                assert bench.training(ranks, [*small, "train.device=cpu"], 1).value > 0
            if ranks.first:
                print(f"{title(ranks, parallel)}: equal", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # as `abovemup.cli.main.main` does, and why
