"""What a run may be: ranges of single keys, and keys that must fit together. Refused before anything is built."""

import re
from typing import Any

from abovemup.config.errors import RequestError
from abovemup.config.resolve import ids, nearest_divisors
from abovemup.config.schema import ROLES, Experiment
from abovemup.config.values import is_open

Tree = dict[str, Any]
_AT_LEAST_1 = [
    "model.width",
    "model.depth",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.ffn",
    "model.vocab_size",
    "model.base.width",
    "model.base.depth",
    "model.base.head_dim",
    "parameterization.base_width",
    "parameterization.base_depth",
    "parameterization.base_head_dim",
    "train.batch_size",
    "train.seq_len",
    "train.steps",
    "train.tokens",
    "train.micro_batch",
    "train.threads",
    "eval.tokens",
    "eval.batch",
    "checkpoint.keep",
    "tracking.every",
    "tokenizer.vocab_size",
    "optimizer.msign.steps",
    "data.branching",
]
_AT_LEAST_0 = ["train.seed", "data.seed", "optimizer.weight_decay", "schedule.warmup", "schedule.decay"]
_ABOVE_0 = ["optimizer.lr", "optimizer.eps", "optimizer.clip", "model.rope_theta", "model.norm_eps"]
_BELOW_1 = ["optimizer.momentum", "optimizer.beta2"]


def check_ranges(tree: Tree) -> None:
    """Each key of a coerced tree by itself; open values pass. Raises RequestError with the nearest allowed value."""
    roles = [f"optimizer.roles.{role}" for role in ROLES]
    for key in _AT_LEAST_1:
        _at_least(tree, key, 1)
    _at_least(tree, "data.states", 2)
    for key in (*_AT_LEAST_0, *(f"{role}.weight_decay" for role in roles)):
        _at_least(tree, key, 0)
    scales = [f"optimizer.lr_scale.{role}" for role in ROLES]
    for key in (*_ABOVE_0, *scales, *(f"{role}.scale" for role in roles)):
        value = _get(tree, key)
        if value is not None and value <= 0:
            raise RequestError(f"{key}={value:g} must be above 0.{_say_default(key)}")
    for key in (*_BELOW_1, *(f"{role}.momentum" for role in roles)):
        value = _get(tree, key)
        if value is not None and not 0 <= value < 1:
            near = 0 if value < 0 else 0.99
            raise RequestError(f"{key}={value:g} must be at least 0 and below 1 (0.9 keeps 90 %): use {near}.")
    final = tree["schedule"]["final"]
    if not 0 <= final <= 1:
        raise RequestError(f"schedule.final={final:g} is a fraction of the peak: use {0 if final < 0 else 1}.")


def _at_least(tree: Tree, key: str, least: int) -> None:
    value = _get(tree, key)
    if not is_open(key, value) and isinstance(value, int | float) and value < least:
        raise RequestError(f"{key}={value} must be at least {least}: use {least}.")


def _get(tree: Tree, key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _say_default(key: str) -> str:
    examples = {"optimizer.lr": "2^-4", "optimizer.eps": "1e-20", "optimizer.clip": "1.0, or null: off"}
    return f" For example {examples[key]}." if key in examples else ""


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
    if t.name == "hf" and t.path is None:
        raise RequestError("tokenizer=hf reads a tokenizer.json: set tokenizer.path.")
    if t.name != "hf" and t.path is not None:
        raise RequestError(f"tokenizer.path={t.path} is for tokenizer=hf, not tokenizer={t.name}: add tokenizer=hf.")
    least = ids(vars(e.data), vars(t))
    if vocab < least:
        whose = "data.states + 1 =" if e.data.name == "synthetic" else "the tokenizer's"
        raise RequestError(f"model.vocab_size={vocab} is below {whose} {least}: use {least} or more.")
    if not 2 <= e.data.branching <= e.data.states:
        between = f"from 2 to data.states={e.data.states}"
        near = min(max(2, e.data.branching), e.data.states)
        raise RequestError(f"data.branching={e.data.branching} must be {between}: use {near}.")
    if e.data.name == "text" and e.data.path is None:
        raise RequestError("data=text reads a file or a folder: set data.path.")
    if e.data.name != "text" and e.data.path is not None:
        raise RequestError(f"data.path={e.data.path} is read by data=text, not by data={e.data.name}: add data=text.")


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
    target = e.optimizer.target
    if target is not None and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise RequestError(f"optimizer.target={target}: written as my.module:Cls.")
