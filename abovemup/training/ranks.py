"""The processes of a run: which one this is, what it has of the work, what all agree on, and how they end together."""

import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.schema import Parallel
from abovemup.model.llama import Llama
from abovemup.optim.sharded import Owners

IGNORE = -100  # a target that is not scored
TIMEOUT = 600.0  # seconds that a rank waits for another in an exchange
PATIENCE = 5.0  # seconds that it waits for the others to say why the run ends

T = TypeVar("T")


class Silent(Exception):
    """This rank ends with `code`, and another one says why."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Ranks:
    """This process, `rank` of `world`. Without torchrun it is the only one, and all that follows costs nothing.

    What ranks exchange here goes over the CPUs. Every rank has to call the same things in the same order.
    """

    def __init__(self, rank: int = 0, world: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.ending = False

    @property
    def first(self) -> bool:
        """Whether this is rank 0: the one that prints and writes."""
        return self.rank == 0

    # ---- what they agree on ----

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in their order, as float64."""
        if self.store is None:
            return [list(values)]
        found = torch.empty(self.world * len(values), dtype=torch.float64)
        dist.all_gather_single(found, torch.tensor(values, dtype=torch.float64))
        rows: list[list[float]] = found.view(self.world, -1).tolist()
        return rows

    def largest(self, value: int) -> int:
        return int(max(found for [found] in self.gather([value])))

    def same(self, value: T) -> T:
        """Rank 0's value, once all are here."""
        if self.store is None:
            return value
        found: list[T] = [value] * self.world
        dist.all_gather_object(found, value)
        return found[0]

    def after_first(self, make: Callable[[], T]) -> T:
        """`make()`, by rank 0 alone, however long that takes, and then by all others."""
        if self.store is not None and not self.first:
            while not self.store.check(["made"]):
                if self.store.check(["end/0"]):
                    raise dist.DistError("rank 0 has ended")
                time.sleep(0.1)
        made = make()
        if self.store is not None and self.first:
            self.store.set("made", "")
        return made

    # ---- what each has of the work ----

    def span(self, count: int) -> tuple[int, int]:
        """The first of `count` items that are this rank's, and how many: the first ranks may have one more."""
        each, more = divmod(count, self.world)
        return self.rank * each + min(self.rank, more), each + (self.rank < more)

    def parts(self, windows: Tensor, size: int, count: int) -> list[Tensor]:
        """This rank's windows (n, seq_len + 1) of `count`, at most `size` at a time: as many times on every rank, since
        each forward pass is one of all. A rank that has fewer adds windows of which no token is scored."""
        passes = -(-Ranks(0, self.world).span(count)[1] // size)
        parts = [part for part in windows.split(size) if len(part)]
        return parts + [windows.new_full((1, windows.shape[1]), IGNORE)] * (passes - len(parts))

    def spread(self, model: Llama, parallel: Parallel) -> tuple[nn.Module, Owners | None]:
        """Replicate the model over the ranks, or shard it: what to call in its place, and who computes which step.

        The mean of the ranks' gradients is what every rank then has (DDP), or has its rows of (FSDP2).
        """
        if self.store is None or parallel.name == "single":
            return model, None
        if parallel.name == "ddp":
            return nn.parallel.DistributedDataParallel(model), Owners(None, sharded=False)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # The logits are a view, which nothing here changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        shape = (parallel.replicate, self.world // parallel.replicate)
        mesh = init_device_mesh(next(model.parameters()).device.type, shape, mesh_dim_names=("replicate", "shard"))
        shards = mesh["shard"]
        for module in (*model.layers, model):
            fully_shard(module, mesh=shards if parallel.replicate == 1 else mesh)
        return model, Owners(shards.get_group(), sharded=True)

    # ---- how they end ----

    def verdict(self, error: BaseException) -> BaseException:
        """What this rank ends with after `error`: one rank says what ended the run, and which rank it was.

        Each writes down what happened to it, and reads what happened to the others.
        """
        if self.store is None or self.ending:
            return error
        self.ending = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which ends all once one has ended
        code, text = report(error)
        self.store.set(f"end/{self.rank}", json.dumps([code, text]))
        return error if text and self.first else self._blame(self.store, error)

    def _blame(self, store: dist.Store, error: BaseException) -> BaseException:
        code, text = report(error)
        keys = {rank: f"end/{rank}" for rank in range(self.world)}
        deadline = time.monotonic() + PATIENCE
        while not store.check([keys[0]] if text else [*keys.values()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        told = {rank: said for rank, (_, said) in found.items() if said}
        if text or 0 in told or self.rank != min(found.keys() - told.keys()):
            return Silent(found[min(told)][0] if told else code)
        if told:
            rank, said = min(told.items())
            return (RequestError if found[rank][0] == 2 else RunFailed)(f"rank {rank}: {said}")
        if missing := [str(rank) for rank in range(self.world) if rank not in found]:
            return RunFailed(f"rank {', '.join(missing)} does not answer: it was killed, or it hangs")
        return error


def report(error: BaseException) -> tuple[int, str]:
    """The exit code, and what a rank has to say: nothing when another has left it, or a signal ends it."""
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == 143):
        return 143 if isinstance(error, SystemExit) else 130, ""
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return 4, ""
    text = " ".join(str(error).split())
    if isinstance(error, RequestError | RunFailed):
        return 2 if isinstance(error, RequestError) else 4, text
    return 4, f"{type(error).__name__}: {text}"


ALONE = Ranks()


@contextmanager
def join() -> Iterator[Ranks]:
    """The ranks that torchrun started, as long as this lasts: NCCL between GPUs, gloo between CPUs."""
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    timeout, gpus = timedelta(seconds=TIMEOUT), torch.cuda.is_available()
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=timeout)
    ranks = Ranks(rank, world, dist.PrefixStore("run", store))
    try:
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        yield ranks
        ranks.same(None)  # who left with an exit code would end those that are still writing
        dist.destroy_process_group()
    except BaseException as error:
        told = ranks.verdict(error)
        if told is error:
            raise
        raise told from error
