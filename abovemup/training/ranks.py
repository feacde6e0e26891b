"""The processes of a run: which one this is, what it has of the work, what all agree on, and how they end together."""

import json
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.resolve import cores
from abovemup.config.schema import Experiment, Parallel, Train
from abovemup.model.llama import Llama
from abovemup.model.loss import IGNORE
from abovemup.optim.sharded import Owners

TIMEOUT = 600.0  # seconds that a rank waits for another in an exchange
PATIENCE = 5.0  # seconds that it waits for the others to say why the run ends

T = TypeVar("T")


class Silent(Exception):
    """This rank ends with `error`, which another one says."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error, self.code = error, report(error)[0]


class Ranks:
    """This process, `rank` of `world`. Without torchrun it is the only one, and all that follows costs nothing.

    What ranks exchange here goes over the CPUs. Every rank has to call the same things in the same order.
    """

    def __init__(self, rank: int = 0, world: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.first = rank == 0  # the one that prints and writes
        self.saving: dist.ProcessGroup | None = None  # for checkpoints: a thread may write one beside the training
        self.tensor = 1  # so many, one after another, have one share of a batch (`spread`)
        self.launcher = os.getppid()
        self.ending = False

    # ---- what they agree on ----

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in their order, as float64."""
        if self.store is None:
            return [list(values)]
        found = torch.empty(self.world * len(values), dtype=torch.float64)
        dist.all_gather_single(found, torch.tensor(values, dtype=torch.float64))
        return found.view(self.world, -1).tolist()

    def largest(self, value: int) -> int:
        return int(max(found for [found] in self.gather([value])))

    def signalled(self, signum: int) -> int:
        """The largest signal of any rank, 0 for none: SIGTERM when the launcher is gone, which no rank outlives."""
        gone = self.store is not None and os.getppid() != self.launcher
        return self.largest(signum or gone * signal.SIGTERM)

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
        place = self.rank // self.tensor
        each, more = divmod(count, self.world // self.tensor)
        return place * each + min(place, more), each + (place < more)

    def parts(self, windows: Tensor, size: int, count: int) -> list[Tensor]:
        """This rank's windows (n, seq_len + 1) of `count`, at most `size` at a time: as many times on every rank, since
        each forward pass is one of all. A rank that has fewer adds windows of which no token is scored."""
        passes = -(-Ranks(0, self.world // self.tensor).span(count)[1] // size)
        parts = [part for part in windows.split(size) if len(part)]
        return parts + [windows.new_full((1, windows.shape[1]), IGNORE)] * (passes - len(parts))

    def settle(self, exp: Experiment, overrides: Sequence[str]) -> Experiment:
        """`exp` over so many ranks, which mean DDP if nothing else was asked for. Raises RequestError."""
        parallel, world = exp.parallel, self.world
        if world > 1 and parallel.name == "single":
            if any(o.lstrip("+").startswith("parallel=") for o in overrides):
                raise RequestError(f"parallel=single is one process, and there are {world}: use parallel=ddp or fsdp.")
            parallel = replace(parallel, name="ddp" if parallel.tensor == 1 else "fsdp")
        if world > 1 and exp.train.micro_batch == "auto":
            raise RequestError(f"train.micro_batch=auto is for one process, and there are {world}: give a number.")
        if parallel.name == "fsdp" and world % parallel.replicate:
            raise RequestError(f"parallel.replicate={parallel.replicate} does not divide {world} processes.")
        if parallel.tensor > 1:
            self.check_tensor(exp, parallel)
        return replace(exp, parallel=parallel, choices=exp.choices | {"parallel": parallel.name})

    def check_tensor(self, exp: Experiment, parallel: Parallel) -> None:
        """Raises RequestError for what tensor parallelism cannot divide. FSDP2 shards no uneven parts further."""
        n, model = parallel.tensor, exp.model
        if self.world == 1:
            raise RequestError(f"parallel.tensor={n} is for several processes: add --nproc {n} or parallel=single.")
        if parallel.name != "fsdp" or parallel.replicate > 1 or exp.train.compile:
            with_it = "parallel=fsdp, parallel.replicate=1 and train.compile=false"
            raise RequestError(f"parallel.tensor={n} goes with {with_it}.")
        sizes = {"the number of processes": self.world, "model.heads": model.heads, "model.kv_heads": model.kv_heads}
        if self.world > n:
            sizes |= {"model.ffn": model.ffn, "model.vocab_size": model.vocab_size}
        if odd := [f"{name}, {size}" for name, size in sizes.items() if size % n]:
            raise RequestError(f"parallel.tensor={n} does not divide {odd[0]}. parallel.tensor=1 divides everything.")

    def occupy(self, train: Train) -> None:
        """Take this rank's threads and GPU. Raises RequestError where there are fewer GPUs than ranks."""
        here = 1 if self.store is None else int(os.environ["LOCAL_WORLD_SIZE"])
        # Threads beside threads on the same cores are many times slower than one each.
        torch.set_num_threads(train.threads if here == 1 else min(train.threads, max(1, cores() // here)))
        if self.store is not None and train.device != "cpu":
            if here > (gpus := torch.cuda.device_count()):
                raise RequestError(f"{here} processes need a GPU each, of {gpus}: use fewer, or train.device=cpu.")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    def spread(self, model: Llama, parallel: Parallel) -> tuple[nn.Module, Owners | None]:
        """Replicate the model over the ranks, or shard it: what to call in its place, and who computes which step.

        The mean of the ranks' gradients is what every rank then has (DDP), or has its rows of (FSDP2).
        """
        if self.store is None or parallel.name == "single":
            return model, None
        self.tensor = parallel.tensor
        dtype: torch.dtype = getattr(torch, parallel.dtype)
        if parallel.name == "ddp":
            replica = nn.parallel.DistributedDataParallel(model)
            if dtype is torch.bfloat16:
                # By its own name DDP takes it between GPUs only.
                replica.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
            return replica, Owners(None, sharded=False, dtype=dtype)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # The logits are a view, which nothing here changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        copies = parallel.replicate
        shape = (copies, self.world // copies // self.tensor, self.tensor)
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        if self.tensor > 1:
            from torch.distributed.tensor.parallel import loss_parallel

            from abovemup.model.tensor import divide

            divide(model, mesh["tensor"])
            loss_parallel().__enter__()  # for good: every loss of this process is one
            # Of two dimensions a tensor is gathered in two steps, which torch would say each time.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        if self.tensor == 1 or self.world > self.tensor:
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh["shard" if copies == 1 else ("replicate", "shard")], mp_policy=policy)
        cut = self.tensor > 1
        return model, Owners(None if cut else mesh["shard"].get_group(), sharded=not cut, cut=cut, dtype=dtype)

    # ---- how they end ----

    def verdict(self, error: BaseException) -> BaseException:
        """What this rank ends with after `error`: one rank says what ended the run, and which rank it was.

        Each writes down what happened to it, and reads what happened to the others. A rank that has failed by itself
        waits for rank 0 alone, which may be waiting for it until it is gone.
        """
        if self.store is None or self.ending:
            return error
        self.ending = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which ends all once one has ended
        code, text = report(error)
        self.store.set(f"end/{self.rank}", json.dumps([code, text]))
        found = self._ends(self.store, 1 if text else self.world)
        told = [rank for rank, (_, said) in found.items() if said]
        ended = [code for code, _ in found.values() if code > 4]  # by signals
        missing = [str(rank) for rank in range(self.world) if rank not in found]
        if told and (told[0] or self.rank):
            code, said = found[told[0]]
            kind = RequestError if code == 2 else RunFailed
            error = kind(f"rank {told[0]}: {said}" if told[0] else said)
        elif missing and not told and (code == 4 or self.first):
            error = RunFailed(f"rank {', '.join(missing)} does not answer: it was killed, or it hangs")
        elif ended and code == 4:
            return Silent(SystemExit(ended[0]))
        another = bool(told) and not told[0] and not self.first  # rank 0 says its own
        return Silent(error) if another or self.store.add("said", 1) > 1 else error

    def _ends(self, store: dist.Store, count: int) -> dict[int, tuple[int, str]]:
        """The reports of all ranks that have ended, once the first `count` have, or after PATIENCE."""
        keys = [f"end/{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + PATIENCE
        while not store.check(keys[:count]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}


def report(error: BaseException) -> tuple[int, str]:
    """The exit code, and what a rank has to say: nothing when another has left it, or a signal ends it."""
    text = " ".join(str(error).split())
    if isinstance(error, RequestError | RunFailed):
        return 2 if isinstance(error, RequestError) else 4, text
    if isinstance(error, KeyboardInterrupt):
        return 130, ""
    if isinstance(error, SystemExit) and error.code in (130, 143):
        return int(error.code), ""
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text):
        return 4, ""
    return 4, f"{type(error).__name__}: {text}"


ALONE = Ranks()


@contextmanager
def join() -> Iterator[Ranks]:
    """The ranks that torchrun started, as long as this lasts: NCCL between GPUs, gloo between CPUs."""
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning: the launcher's, which sends SIGTERM
    timeout = timedelta(seconds=TIMEOUT)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=timeout)
    ranks = Ranks(rank, world, dist.PrefixStore("run", store))
    ranks.saving = dist.new_group(backend="gloo", timeout=timeout)
    try:
        yield ranks
        ranks.same(None)  # who left with an exit code would end those that are still writing
        dist.destroy_process_group()
    except BaseException as error:
        told = ranks.verdict(error)
        if told is error:
            raise
        raise told from error
