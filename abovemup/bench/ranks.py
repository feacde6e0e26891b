"""Two processes against one, and the sharded optimizer step against one that gathers everything everywhere."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from abovemup.bench.loop import trainer
from abovemup.bench.ratio import Ratio, in_turns
from abovemup.bench.step import Shape, blocks, steepest, weights
from abovemup.config.schema import Parallel
from abovemup.geometry.msign import whole
from abovemup.optim.sharded import Owners
from abovemup.training.ranks import Ranks, join
from abovemup.training.trainer import Trainer

POCKET = ("model=pocket", "data=synthetic", "train.device=cpu", "train.threads=1", "eval.every=0", "checkpoint.every=0")


def ranks() -> list[Ratio]:
    """Of two processes with a thread each, started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "abovemup.bench.ranks"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return [Ratio(**row) for row in json.loads(said)]


def training(ranks: Ranks, overrides: Sequence[str] = POCKET, count: int = 40) -> Ratio:
    """Tokens/s of the median step of all processes together, over that of one alone."""
    alone = trainer([*overrides, f"train.steps={count + 2}"])
    together = Trainer(replace(alone.exp, parallel=Parallel(name="ddp")), alone.corpus, ranks=ranks)
    many, one = turns(ranks, [together.advance, lambda: alone.advance() if ranks.first else None], count)
    name = f"training {alone.exp.model.name}, {ranks.world} processes over one"
    return Ratio(name, alone.batch_tokens / many, alone.batch_tokens / one, "tokens/s", 1.3, at_least=True)


def step(ranks: Ranks, shapes: list[Shape], count: int = 20) -> Ratio:
    """Steps/s, from the same weights along the same gradients: both must end at the same bits."""
    mesh = init_device_mesh("cpu", (ranks.world,))

    def rows(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    all_of_it = weights(shapes)
    shards = [Parameter(rows(p.detach())) for p in all_of_it]
    for shard, p in zip(shards, all_of_it, strict=True):
        shard.grad = None if p.grad is None else rows(p.grad)
    ours, peer = steepest(shards, "float32", Owners(None, sharded=True)), steepest(all_of_it, "float32")

    def everywhere() -> None:
        for shard, p in zip(shards, all_of_it, strict=True):
            p.grad = whole(shard.grad)
        peer.step()

    mine, other = turns(ranks, [ours.step, everywhere], count)
    if not all(whole(shard.detach()).equal(p) for shard, p in zip(shards, all_of_it, strict=True)):
        raise AssertionError("the two did not take the same steps")
    name = f"sharded optimizer step, {len(shapes)} matrices of width {shapes[0][0]}, over gathering all on each rank"
    return Ratio(name, 1 / mine, 1 / other, "steps/s", 1.2, at_least=True)


def turns(ranks: Ranks, works: Sequence[Callable[[], object]], count: int) -> list[float]:
    """The median seconds of each, which all begin together."""
    return in_turns([step for work in works for step in (lambda: ranks.same(None), work)], count, statistics.median)[
        1::2
    ]


def main() -> None:
    torch.set_num_threads(1)
    with join() as ranks:
        found = [training(ranks), step(ranks, blocks(256, 4, 256))]
        if ranks.first:
            print(json.dumps([asdict(ratio) for ratio in found]), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # as `abovemup.cli.main.main` does, and why
