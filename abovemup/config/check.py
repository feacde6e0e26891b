"""Keys that must fit together, and names that must name something. Refused before anything is built."""

import re

from abovemup.config.errors import RequestError
from abovemup.config.resolve import ids, nearest_divisors
from abovemup.config.schema import Experiment


def check_relations(experiment: Experiment) -> None:
    """Keys against each other. Raises RequestError with both values and what would fit."""
    _model(experiment)
    _tokenizer(experiment)
    _train(experiment)
    _schedule(experiment)
    _names(experiment)


def _model(e: Experiment) -> None:
    m = e.model
    if m.heads % m.kv_heads:
        near = " or ".join(map(str, nearest_divisors(m.heads, m.kv_heads)))
        raise RequestError(f"model.kv_heads={m.kv_heads} does not divide model.heads={m.heads}: use {near}.")
    if m.head_dim % 2:
        near = " or ".join(str(n) for n in (m.head_dim - 1, m.head_dim + 1) if n)
        raise RequestError(
            f"model.head_dim={m.head_dim} (model.width={m.width}, model.heads={m.heads}) is odd, and RoPE turns pairs: "
            f"use {near}."
        )
    if m.tie_embeddings and e.parameterization.name == "standard":
        raise RequestError(
            "model.tie_embeddings=true has no standard parameterization (embedding and head start at different sizes): "
            "use model.tie_embeddings=false, or parameterization=above_mup."
        )


def _tokenizer(e: Experiment) -> None:
    t, vocab = e.tokenizer, e.model.vocab_size
    if t.name == "byte" and t.vocab_size != 257:
        raise RequestError(f"tokenizer.vocab_size={t.vocab_size}: tokenizer=byte has 257. To pad: model.vocab_size.")
    if t.name == "bpe" and t.vocab_size < 257:
        raise RequestError(f"tokenizer.vocab_size={t.vocab_size}: a byte-level BPE has at least 257 ids: use 257.")
    least = ids(vars(e.data), vars(t))
    if vocab < least:
        whose = "data.states + 1 =" if e.data.name == "synthetic" else "the tokenizer's"
        raise RequestError(f"model.vocab_size={vocab} is below {whose} {least}: use {least} or more.")
    if e.data.branching > e.data.states:
        most = f"data.states={e.data.states}"
        raise RequestError(f"data.branching={e.data.branching} must be at most {most}: use {e.data.states}.")
    for group, reader, name, path in (("data", "text", e.data.name, e.data.path), ("tokenizer", "hf", t.name, t.path)):
        if name == reader and path is None:
            raise RequestError(f"{group}={reader} reads a file or a folder: set {group}.path.")
        if name != reader and path is not None:
            whose = f"is for {group}={reader}, not {group}={name}"
            raise RequestError(f"{group}.path={path} {whose}: add {group}={reader}.")


def _train(e: Experiment) -> None:
    t = e.train
    if isinstance(t.micro_batch, int) and t.batch_size % t.micro_batch:
        near = " or ".join(map(str, nearest_divisors(t.batch_size, min(t.micro_batch, t.batch_size))))
        batch = f"train.batch_size={t.batch_size}"
        raise RequestError(f"train.micro_batch={t.micro_batch} does not divide {batch}: use {near}.")
    if e.eval.tokens < t.seq_len:
        window = f"one window of train.seq_len={t.seq_len}"
        raise RequestError(f"eval.tokens={e.eval.tokens} is less than {window}: use {t.seq_len}.")


def _schedule(e: Experiment) -> None:
    s, steps = e.schedule, e.train.steps
    if s.name == "constant" and s.decay:
        raise RequestError(f"schedule=constant does not decay, but schedule.decay={s.decay}: use schedule=wsd, or 0.")
    if s.warmup > steps:
        raise RequestError(f"schedule.warmup is {s.warmup} steps and train.steps {steps}: use at most {steps}.")
    if s.name == "wsd" and s.warmup + s.decay > steps:
        raise RequestError(
            f"schedule.warmup and schedule.decay are {s.warmup} + {s.decay} steps and train.steps {steps}: "
            f"use schedule.decay={steps - s.warmup} or less."
        )
    if s.name == "cosine" and s.decay != steps - s.warmup:
        raise RequestError(
            f"schedule=cosine decays over all {steps - s.warmup} steps after the warmup, but schedule.decay={s.decay}: "
            "leave it open (null), or use schedule=wsd."
        )


def _names(e: Experiment) -> None:
    name = e.run.name
    if name is not None and (name.strip() in ("", ".", "..") or re.search(r"[/\\\x00]", name)):
        raise RequestError(f"run.name={name!r} is the name of one folder: no slashes. The whole path is run.dir.")
    if e.run.dir is not None and not e.run.dir.strip():
        raise RequestError("run.dir is empty: give a folder, or null for runs/<run.name>.")
    if not e.tracking.project.strip() or re.search(r"[/\\#?%:]", e.tracking.project):
        raise RequestError(f"tracking.project={e.tracking.project!r} names a W&B project: not empty, none of /\\#?%:")
    target = e.optimizer.target
    if target is not None and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise RequestError(f"optimizer.target={target}: written as my.module:Cls.")
