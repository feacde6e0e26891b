"""`abovemup train`: from overrides to a finished run directory."""

import errno
import itertools
import math
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from abovemup.config import io
from abovemup.config.cadence import due
from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.schema import Experiment, Run
from abovemup.data.corpus import open_corpus
from abovemup.data.recipe import keep_files
from abovemup.data.split import Amount
from abovemup.tracking import jsonl
from abovemup.tracking.records import Record, output_norm
from abovemup.tracking.summary import environment, write_summary
from abovemup.tracking.terminal import Terminal
from abovemup.tracking.wandb import WandbSink
from abovemup.training import checkpoint, lineage
from abovemup.training.checkpoint import State
from abovemup.training.device import placed
from abovemup.training.evaluate import Interrupted
from abovemup.training.generate import write
from abovemup.training.ranks import Ranks, Silent, join, report
from abovemup.training.signals import Stop
from abovemup.training.trainer import Diverged, Trainer, out_of_memory


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `exit_code`: 0 finished, 3 diverged, 130/143 interrupted."""

    status: str
    dir: Path
    summary: dict[str, Any]
    exit_code: int


def train(
    overrides: list[str],
    *,
    config_file: Path | None = None,
    config_dir: Path | None = None,
    resume: str | None = None,
    branch: str | None = None,
    json_output: bool = False,
) -> Outcome:
    """Run what the overrides say, or continue (`resume`) or branch off (`branch`) an earlier run.

    Raises RequestError before anything is written, RunFailed for trouble on the way (the run directory then says
    `failed`), KeyboardInterrupt or SystemExit(143) for a signal before there was anything to keep. Under torchrun every
    rank calls this, one of them raises, and the others raise Silent.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        ranks = stack.enter_context(join())
        stop.agree = ranks.signalled
        start = lineage.start(overrides, config_file, config_dir, resume, branch)
        exp, source = ranks.settle(start.experiment, overrides), start.source
        folder = start.origin if resume is not None else None  # None: a new one
        if folder is None and not any(o.lstrip("+").startswith("run.") for o in overrides):
            exp = replace(exp, run=Run(name=None, dir=None))  # a repeated run gets a folder of its own
        if ranks.first and folder is None:
            free_folder(exp)
        elif ranks.first and folder is not None:
            stack.callback(lock(folder).release)
        console = Console(stderr=json_output, quiet=not ranks.first)
        terminal = Terminal(console, title(exp), exp.train.steps, exp.train.batch_size * exp.train.seq_len)
        if folder is not None:
            source = lineage.resumed_checkpoint(folder, start, lambda text: terminal.note(f"warning: {text}"))
            if source is None:
                terminal.note(f"{folder} was ended before its first checkpoint: it starts again from step 0")
        trainer = build(exp, stop, terminal, lineage.amount(start.summary), ranks)
        last_row: int | None = None
        if start.origin is not None and source is not None:
            lineage.check_origin(start, trainer.corpus.manifest, terminal.note)
            state = checkpoint.load(source)
            if state.step > exp.train.steps:
                raise RequestError(f"{source} is at step {state.step}, beyond train.steps={exp.train.steps}.")
            if branch is not None:
                state = replace(state, last_row=None, pending=None)  # its rows are the parent's
            trainer.load(state, source)
            last_row = state.last_row
        stop.graceful()  # from here on there is something to keep
        if folder is None and ranks.first:
            folder = new_folder(exp)
            stack.callback(lock(folder).release)
        if folder is not None and trainer.corpus.folder is not None:  # on the first rank
            keep_files(trainer.corpus.folder, folder)
        folder = Path(ranks.same(str(folder)))
        if branch is not None:  # a run directory is complete in itself, from its first point on
            checkpoint.save(folder / "checkpoints", trainer.state(None), ranks.saving)
        parent = branch if resume is None else start.summary.get("branched_from")
        return Leg(trainer, folder, stop, terminal, parent).run(last_row)


def title(exp: Experiment) -> str:
    model, optimizer = exp.model, exp.optimizer
    size = f"{model.name} (width {model.width}, {model.depth} blocks)"
    return f"{size}, {exp.parameterization.name}, {optimizer.name} lr {optimizer.lr:g}, data {exp.data.name}"


def build(exp: Experiment, stop: Stop, terminal: Terminal, amount: Amount | None, ranks: Ranks) -> Trainer:
    """Data (of a remote source `amount`, or what the run needs), model and optimizer, as initialised."""
    # Written down, so that a run that goes on where there is a GPU does not move to it by itself.
    exp = placed(exp)
    ranks.occupy(exp.train)
    for sentence in exp.cannot_match:
        terminal.note(f"{exp.experiment} cannot match: {sentence}")
    corpus = ranks.after_first(lambda: open_corpus(exp, terminal.note, amount))
    corpus.require(exp.train.steps * exp.train.batch_size)
    if (used := corpus.coder.size) < (rows := exp.model.vocab_size):
        terminal.note(f"vocabulary: {used:,} ids in {rows:,} rows; the others take no part")
    trainer = Trainer(exp, corpus, stop, ranks)
    if exp.train.micro_batch == "auto":
        trainer.fit_micro_batch()
    return trainer


def free_folder(exp: Experiment) -> Path:
    """The folder that the run is to have; a made-up name takes a number when it is taken.

    Raises RequestError for one that is there, or inside another run.
    """
    if exp.run.dir is not None or exp.run.name is not None:
        path = Path(os.path.expanduser(exp.run.dir or f"runs/{exp.run.name}"))
        if os.path.lexists(path):
            hint = f", or continue it: --resume {path}" if (path / "config.yaml").is_file() else ""
            raise RequestError(f"{path} exists already. Choose another run.name or run.dir{hint}.")
    else:
        lr = f"{exp.optimizer.lr:g}"
        name = f"{exp.model.name}-{exp.parameterization.name}-{exp.optimizer.name}-lr{lr}-s{exp.train.seed}"
        names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        path = next(path for name in names if not os.path.lexists(path := Path("runs") / name))
    for parent in path.parents:
        if os.path.lexists(parent) and not parent.is_dir():  # said before the data is prepared
            raise RequestError(f"cannot create {path}: {parent} is not a folder. Choose another run.dir.")
        if (parent / "config.yaml").is_file() and (parent / "metrics.jsonl").is_file():
            raise RequestError(f"{path} would lie inside another run, {parent}. Choose another run.dir.")
    return path


def new_folder(exp: Experiment) -> Path:
    """Create the run's own folder, exclusively: two runs started in the same second get two folders."""
    while True:
        path = free_folder(exp)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir()
                return path
        except OSError as error:
            raise RequestError(f"cannot create {error.filename}: {error.strerror}. Choose another run.dir.") from error


def lock(folder: Path) -> FileLock:
    """Held while a process trains in `folder`; the kernel lets go of it when the process dies."""
    held = FileLock(folder / ".lock", blocking=False)
    try:
        held.acquire()
    except Timeout:
        raise RequestError(f"{folder} is being trained by another process. Wait for it, or end it first.") from None
    return held


class Leg:
    """One process's share of a run: from where it starts to where it ends or is stopped.

    Every rank goes through it; rank 0 is the one that writes.
    """

    def __init__(self, trainer: Trainer, folder: Path, stop: Stop, terminal: Terminal, parent: str | None) -> None:
        self.trainer, self.folder, self.stop, self.terminal, self.parent = trainer, folder, stop, terminal, parent
        self.ranks = trainer.ranks
        self.exp = replace(trainer.exp, run=Run(name=folder.name, dir=trainer.exp.run.dir))
        self.started = time.time()
        self.last: Record = {}  # of each key the newest value, over all legs
        self.best_val = math.inf
        self.checkpointed: int | None = None  # the step of the newest checkpoint of this leg
        self.writing: Future[None] = Future()  # the checkpoint that a thread writes
        self.writing.set_result(None)

    def run(self, last_row: int | None) -> Outcome:
        """Train to the end, to a stop or to a divergence; leave the run directory whole in each case."""
        self.last_row = last_row  # of metrics.jsonl
        if self.ranks.first:
            self.open(last_row)
        try:
            status = self.loop()
            self.writing.result()
        except BaseException as raised:
            if report(raised)[1]:  # else another rank has left, when it had written what it could
                wait([self.writing])
            told = self.ranks.verdict(raised)
            error = told.error if isinstance(told, Silent) else told
            with suppress(OSError):  # the disk may be what failed
                self.end("failed", error)
            if told is error and (advice := self.advice(error)) is not None:
                raise RunFailed(advice) from error
            if told is raised:
                raise
            raise told from raised
        return self.end(status)

    def open(self, last_row: int | None) -> None:
        """Make the run directory what it was when `last_row` was its last row, and open what is written."""
        metrics = self.folder / "metrics.jsonl"
        checkpoint.forget_after(self.folder / "checkpoints", self.trainer.t)
        if last_row is None:
            metrics.unlink(missing_ok=True)
        else:
            jsonl.rewind(metrics, last_row, warn=self.terminal.note)
            for row in jsonl.read(metrics):
                self.tally(row)
        io.save(self.exp, self.folder / "config.yaml")
        self.summarise("running")
        self.jsonl = jsonl.JsonlSink(metrics, last_row)
        self.wandb = WandbSink(self.folder, self.exp, self.terminal.note)

    def loop(self) -> str:
        trainer = self.trainer
        try:
            if trainer.pending is not None:
                self.log(trainer.finish_row(trainer.pending))
            elif self.last_row is None:
                self.log(trainer.initial_row())
            while trainer.t < self.exp.train.steps:
                if self.stop():
                    raise Interrupted
                self.log(trainer.advance())
                if due(self.exp.checkpoint.every, trainer.t, trainer.batch_tokens) and not self.checkpoint():
                    return "diverged"
        except Interrupted:
            return "interrupted" if self.checkpoint() else "diverged"
        except Diverged as diverged:
            self.checkpoint()
            self.log(diverged.record)
            self.terminal.note(f"diverged: {diverged}. The step was not taken.")
            return "diverged"
        return "finished" if self.checkpoint() else "diverged"

    def advice(self, error: BaseException) -> str | None:
        """What to do about memory or a disk that ran out; None for anything else."""
        go_on = f"continue with --resume {self.folder}"
        if isinstance(error, RunFailed):
            return f"{error}: {go_on}"
        if out_of_memory(error) and self.trainer.pending is not None:
            return f"out of memory in an evaluation with eval.batch={self.exp.eval.batch}: make it smaller."
        if out_of_memory(error):
            now = f"train.micro_batch={self.exp.train.micro_batch}"
            return f"out of memory with {now}: train.micro_batch=auto finds what fits, train.recompute=true needs less."
        if isinstance(error, SystemExit):  # not ours, and its code must not become the command's
            return f"something in the run called sys.exit({error.code}): {go_on}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{error.strerror} in {self.folder}: free some space, then {go_on}"
        return None

    def log(self, record: Record | None) -> None:
        if record is not None:
            self.last_row = int(record["step"])
        if record is not None and self.ranks.first:
            self.tally(record)
            for sink in (self.jsonl, self.terminal, self.wandb):
                sink.log(record)

    def tally(self, record: Record) -> None:
        self.last |= record
        self.best_val = min(self.best_val, record.get("val/loss", math.inf))  # a NaN never wins: it is not smaller

    def checkpoint(self) -> bool:
        """Keep this step, unless it is kept already. False, and nothing written, when a weight is not finite."""
        trainer, start = self.trainer, time.perf_counter()
        if trainer.t == self.checkpointed:
            return True
        state = trainer.state(self.last_row)
        if self.ranks.largest(not state.finite()):
            self.terminal.note(f"diverged: a weight or a momentum is not finite after step {trainer.t}.")
            return False
        self.writing.result()  # one after the other; raises what the thread has raised
        if self.ranks.first:
            self.jsonl.sync()
        if self.exp.checkpoint.asynchronous:
            self.writing = ThreadPoolExecutor(1).submit(self.save, state.copied())
        else:
            self.save(state)
        self.checkpointed = trainer.t
        trainer.clock += time.perf_counter() - start  # no time of training
        return True

    def save(self, state: State) -> None:
        folder = checkpoint.save(self.folder / "checkpoints", state, self.ranks.saving).parent
        if self.ranks.first:  # powers of two are points to branch from
            checkpoint.prune(folder, self.exp.checkpoint.keep, lambda s: due("pow2", s, self.trainer.batch_tokens))

    def end(self, status: str, error: BaseException | None = None) -> Outcome:
        summary = self.summarise(status, error) if self.ranks.first else {}
        if status == "finished":
            model, coder = self.trainer.model, self.trainer.corpus.coder
            summary["sample"] = write(model, coder, "", 64, 0.8, self.exp.train.seed, self.exp.train.seq_len)
        if self.ranks.first:
            self.jsonl.close(summary)
            self.wandb.close(summary)
            summary["wandb"] = self.wandb.where
            self.terminal.close(summary)
        code = {"finished": 0, "diverged": 3, "interrupted": self.stop.exit_code}.get(status, 4)
        return Outcome(status, self.folder, summary if self.ranks.first else {}, code)

    def summarise(self, status: str, error: BaseException | None = None) -> dict[str, Any]:
        """Write summary.json: how the run stands, its final and best numbers, and what made it."""
        trainer, last = self.trainer, self.last
        count = sum(p.numel() for p in trainer.parameters.values())
        vocabulary = sum(p.numel() for n, p in trainer.parameters.items() if n in ("embedding.weight", "head.weight"))
        summary = {
            "status": status,
            "steps": trainer.t,
            "tokens": trainer.t * trainer.batch_tokens,
            "loss": last.get("loss"),
            "val_loss": last.get("val/loss"),
            "bits_per_byte": last.get("val/bits_per_byte"),
            "best_val_loss": self.best_val if math.isfinite(self.best_val) else None,
            "unigram_entropy": trainer.corpus.unigram_entropy,
            "entropy_rate": trainer.corpus.entropy_rate,
            "repeats": trainer.corpus.epoch(max(0, trainer.t * trainer.exp.train.batch_size - 1)),  # of a token
            "output_norm": output_norm(last),
            "tokens_per_second": last.get("tokens_per_second"),
            "parameters": count,
            "parameters_without_vocabulary": count - vocabulary,
            "dir": str(self.folder),
            "branched_from": self.parent,
            "reason": None if error is None else f"{type(error).__name__}: {error}",
            "seconds": round(time.time() - self.started, 3),
            "device": str(trainer.device),
            "processes": self.ranks.world,
            "data": trainer.corpus.manifest,
            **environment(),
        }
        write_summary(self.folder / "summary.json", summary)
        return summary
