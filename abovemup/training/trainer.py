"""One optimizer step, and what is measured around it."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from abovemup.config.cadence import due
from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.data.corpus import Corpus
from abovemup.geometry.msign import local
from abovemup.model.llama import Llama
from abovemup.model.roles import specs
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import routing_table
from abovemup.optim.schedule import factor
from abovemup.optim.state import make_room, state_by_name
from abovemup.tracking.norms import NormTracker
from abovemup.tracking.records import Record
from abovemup.training.checkpoint import State, fill
from abovemup.training.device import memory
from abovemup.training.estimate import PEAKS, Estimate
from abovemup.training.evaluate import Interrupted, evaluate, inputs, scored
from abovemup.training.ranks import ALONE, Ranks


class Diverged(Exception):
    """The loss or the gradient of this step is not finite: the step was not taken."""

    def __init__(self, record: Record, ranks: list[int]) -> None:
        where = f" (rank {', '.join(map(str, ranks))})" if ranks else ""
        loss, norm = record["loss"], record["grad_norm"]
        super().__init__(f"step {record['step']}: loss {loss:g}{where}, gradient norm {norm:g}")
        self.record = record


class Trainer:
    """Model, optimizer and data of one run, at step `self.t` (0: initialised, nothing trained).

    `stop` is asked between micro-batches and evaluation batches; when it says yes, Interrupted leaves the
    trainer as it was before the step, or with `pending`: a row that only waits for its evaluation.
    With several `ranks` each has its share of every batch and all call the same methods; what they return is of all.
    """

    def __init__(
        self, exp: Experiment, corpus: Corpus, stop: Callable[[], bool] = lambda: False, ranks: Ranks = ALONE
    ) -> None:
        self.exp, self.corpus, self.stop, self.ranks = exp, corpus, stop, ranks
        self.device = device = torch.device(exp.train.device)
        self.t = 0
        self.pending: Record | None = None
        self.batch_tokens = exp.train.batch_size * exp.train.seq_len
        self.model = Llama(exp.model, exp.parameterization)
        self.model.ids = corpus.coder.size
        self.model.eot = corpus.coder.eot if exp.data.pack == "document" else None
        torch.manual_seed(exp.train.seed)  # for a user's own optimizer; nothing of ours draws from it
        self.model.init_weights(exp.train.seed)
        self.model.to(device)
        self.model.loss_chunk, self.model.recompute = exp.train.loss_chunk, exp.train.recompute
        if exp.train.compile:
            for block in self.model.layers:  # one after another the same graph, and names stay the plain ones
                block.compile(dynamic=False)
        self.spread, owners = ranks.spread(self.model, exp.parallel)
        # named_parameters gives a tied tensor once; its name and role are those of `specs`.
        routes = routing_table(specs(self.model), exp)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.parameters = {route.name: parameters[route.name] for route in routes}
        self.optimizer = build_optimizer(self.parameters, routes, exp, owners)
        self.norms = NormTracker(self.parameters, routes, corpus.coder.size, exp.norms.which)
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        self.most: float | None = None  # steps/s at the peak of all GPUs, where that is known
        if gpu in PEAKS:
            flops = Estimate(exp, routes, ranks.world).flops()["model"]
            self.most = ranks.world * PEAKS[gpu][exp.train.dtype] / flops
        self.validation = corpus.validation
        self.clock, self.clock_t = time.perf_counter(), 0  # since when, and which step, throughput is counted

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.exp.train.dtype == "bfloat16")

    # ---- one step ----

    def advance(self) -> Record | None:
        """Take the next step. Returns its row, or None when it is not a logged one.

        Raises Diverged (the step is not taken) and Interrupted.
        """
        t = self.t + 1
        loss, grad_norm = self.gradients(t)
        record: Record = {"step": t, "tokens": t * self.batch_tokens, "loss": loss}
        if (bits := self.corpus.bits_per_byte(loss)) is not None:
            record["bits_per_byte"] = bits
        record |= self.set_lr(t)
        record["grad_norm"] = grad_norm
        if self.exp.data.allow_repeat:
            record["epoch"] = self.corpus.epoch(t * self.exp.train.batch_size - 1)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise Diverged(record, self.bad)
        last = t == self.exp.train.steps
        norms = t == 1 or last or due(self.exp.norms.every, t, self.batch_tokens)
        if norms and self.exp.norms.gradients:
            record |= self.norms.gradients()
        clip = self.exp.optimizer.clip
        if clip is not None and clip < grad_norm:
            torch._foreach_mul_(self.grads(), clip / grad_norm)
        if norms:
            self.norms.before_step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.t = t
        if norms:
            record |= self.norms.weights() | self.norms.updates()
        if last or due(self.exp.eval.every, t, self.batch_tokens):
            self.pending = record
        elif t % self.exp.tracking.every and not norms:
            return None
        return self.finish_row(record)

    def initial_row(self) -> Record:
        """The row before the first step of a run: norms and validation loss of what it starts from."""
        self.pending = {"step": self.t, "tokens": self.t * self.batch_tokens} | self.norms.weights()
        return self.finish_row(self.pending)

    def finish_row(self, record: Record) -> Record:
        """Add what takes time: throughput, memory and, when the row waits for it, the evaluation."""
        if self.t > self.clock_t:
            elapsed = max(time.perf_counter() - self.clock, 1e-9)
            steps = (self.t - self.clock_t) / elapsed
            record["tokens_per_second"] = steps * self.batch_tokens
            if self.most is not None:
                record["mfu"] = steps / self.most
            record["memory"] = self.ranks.largest(memory(self.device))
        if self.pending is not None:
            record |= self.evaluate()
            self.pending = None
        self.clock, self.clock_t = time.perf_counter(), self.t
        return record

    def evaluate(self) -> Record:
        size = self.exp.eval.batch
        loss = evaluate(self.spread, self.validation, size, self.device, self.autocast, self.stop, self.ranks)
        result: Record = {"val/loss": loss}
        if self.corpus.bytes_per_token is not None:
            result["val/bits_per_byte"] = loss / math.log(2) / self.corpus.bytes_per_token
        return result

    def gradients(self, t: int) -> tuple[float, float]:
        """Gradients of the mean loss over the tokens of batch t; returns that loss and their global norm.

        Accumulated micro-batch by micro-batch, each weighted by its tokens.
        """
        batch_size = self.exp.train.batch_size
        first, count = self.ranks.span(batch_size)
        batch = self.corpus.batch((t - 1) * batch_size + first, count)
        total = max(sum(n for [n] in self.ranks.gather([scored(batch[:, 1:])])), 1)
        losses = []
        micro = self.exp.train.micro_batch
        # auto: settled by fit_micro_batch
        parts = self.ranks.parts(batch, batch_size if micro == "auto" else micro, batch_size)
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            if self.stop():
                self.optimizer.zero_grad(set_to_none=True)
                raise Interrupted
            if isinstance(self.spread, DistributedDataParallel):
                self.spread.require_backward_grad_sync = not left
            # The ranks' gradients are averaged.
            losses.append(self.backward(part.to(self.device, non_blocking=True), total / self.ranks.world))
        *sums, norm = torch.stack([*losses, self.grad_norm()]).tolist()  # one synchronisation
        found = self.ranks.gather([sum(sums), norm])
        bad = [rank for rank, (loss, _) in enumerate(found) if not math.isfinite(loss)]
        self.bad = bad if len(bad) < self.ranks.world else []  # what all have is nobody's own
        return sum(loss for loss, _ in found) / total, math.hypot(*(norm for _, norm in found))

    def grad_norm(self) -> Tensor:
        """Of what is here of every gradient: over the square root of how many ranks have it.

        A gradient of which the ranks have parts of a sum is summed first, for good.
        """
        copies: dict[int, list[Tensor]] = {}
        for p in self.parameters.values():
            if p.grad is not None:
                p.grad = reduced(p.grad, p)
                copies.setdefault(self.copies(p), []).append(local(p.grad))
        norms = [torch.nn.utils.get_total_norm(grads) / n**0.5 for n, grads in copies.items()]
        return norms[0] if len(norms) == 1 else torch.stack(norms).norm()

    def copies(self, p: Any) -> int:
        """The number of ranks that have each of its entries."""
        if not hasattr(p, "placements"):
            return self.ranks.world
        placed = zip(p.device_mesh.shape, p.placements, strict=True)
        return math.prod(size for size, how in placed if how.is_replicate())

    def grads(self) -> list[Tensor]:
        """What is here of every gradient."""
        return [local(p.grad) for p in self.parameters.values() if p.grad is not None]

    def backward(self, windows: Tensor, total: float) -> Tensor:
        """Add the gradients of one micro-batch, windows (b, seq_len + 1); returns its summed loss."""
        with self.autocast():
            loss = local(self.spread(inputs(windows), windows[:, 1:]))
        (loss / total).backward()
        return loss.detach()

    def set_lr(self, t: int) -> Record:
        """lr(step) is a pure function of the step and the config: nothing about it is saved or loaded."""
        scale = factor(t, self.exp.schedule, self.exp.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        return {f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups}

    # ---- state ----

    def state(self, last_row: int | None) -> State:
        """What is saved: the tensors themselves, not copies."""
        return State(
            step=self.t,
            tokens=self.t * self.batch_tokens,
            model={name: p.detach() for name, p in self.parameters.items()},
            optimizer=state_by_name(self.optimizer),
            rng=torch.get_rng_state(),
            last_row=last_row,
            pending=self.pending,
            norms=dict(self.norms.blocks),
        )

    def load(self, state: State, source: Path) -> None:
        """Continue from `state`, with the values that are in the checkpoint `source`.

        Raises RequestError naming what is missing, left over or of another shape.
        """
        have, given = ({(name, tuple(p.shape)) for name, p in of.items()} for of in (self.parameters, state.model))
        if have != given:
            odd = ", ".join(sorted(dict(have ^ given))[:5])
            raise RequestError(f"{source} does not hold this model's weights: {odd} differ or are missing.")
        make_room(self.optimizer, state.optimizer)
        fill(source, self.state(None).tensors())
        torch.set_rng_state(state.rng)
        self.t, self.pending, self.norms.blocks = state.step, state.pending, dict(state.norms)
        self.clock, self.clock_t = time.perf_counter(), self.t

    def fit_micro_batch(self) -> None:
        """Settle `train.micro_batch=auto`: the largest divisor of the batch whose forward and backward fit, tried."""
        batch_size = self.exp.train.batch_size
        # Held meanwhile: what the first optimizer step will add (a momentum and a stack of updates).
        reserve = [torch.zeros_like(p) for p in self.parameters.values() for _ in range(2)]
        size = next(n for n in range(batch_size, 0, -1) if batch_size % n == 0 and self._fits(n))
        del reserve
        self.exp = replace(self.exp, train=replace(self.exp.train, micro_batch=size))

    def _fits(self, size: int) -> bool:
        try:
            self.backward(self.corpus.batch(0, size).to(self.device), size)
            return True
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error) or size == 1:
                raise
            return False
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def reduced(grad: Any, p: Any) -> Tensor:
    """A gradient spread as its parameter is, which each rank may have a part of the sum of."""
    if not hasattr(p, "placements") or grad.placements == p.placements:
        return grad
    return grad.redistribute(placements=p.placements)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
