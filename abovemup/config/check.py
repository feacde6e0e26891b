"""What a run may be: ranges of single keys, and keys that must fit together. Refused before anything is built."""

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from abovemup.config.errors import RequestError
from abovemup.config.resolve import cores, ids, nearest_divisors
from abovemup.config.schema import ROLES, Experiment
from abovemup.config.values import RATIOS, is_open, ratio

Tree = dict[str, Any]
_ABOVE_0 = sys.float_info.min
# Least, most, keys; * is each role. No sane run is near the most: beyond it something would overflow, or never end.
_RANGES: list[tuple[float, float, str]] = [
    (1, 2**20, "model.width model.heads model.kv_heads model.head_dim model.base.width model.base.head_dim"),
    (1, 2**20, "parameterization.base_width parameterization.base_head_dim train.batch_size train.micro_batch"),
    (1, 2**20, "parameterization.base_kv_heads eval.batch checkpoint.keep data.branching"),
    (2, 2**20, "data.states"),
    (1, 10_000, "model.depth model.base.depth parameterization.base_depth"),
    (1, 2**22, "model.vocab_size tokenizer.vocab_size"),
    (1, 2**24, "model.ffn parameterization.base_ffn train.seq_len"),
    (1, 2**30, "eval.tokens"),
    (1, 2**40, "train.steps tracking.every"),
    (1, 2**60, "train.tokens"),
    (1, 1024, "train.threads"),
    (1, 1000, "optimizer.msign.steps"),
    (0, 2**40, "schedule.warmup schedule.decay"),
    (0, 2**63 - 1, "train.seed data.seed"),
    (0, 10**6, "optimizer.weight_decay optimizer.roles.*.weight_decay"),
    (_ABOVE_0, 10**6, "optimizer.lr optimizer.lr_scale.* optimizer.roles.*.scale optimizer.eps model.norm_eps"),
    (_ABOVE_0, 10**12, "model.rope_theta"),
    (_ABOVE_0, math.inf, "optimizer.clip"),
]
_HINTS = {
    "optimizer.lr": " For example 2^-4.",
    "optimizer.eps": " For example 1e-20.",
    "optimizer.clip": " For example 1.0, or null: off.",
    "train.threads": f" This machine has {cores()} cores.",
}


def check_ranges(tree: Tree) -> None:
    """Each key of a coerced tree by itself; open values pass. Raises RequestError with the nearest allowed value."""
    for key, most_ratio in RATIOS.items():
        [(_, value)] = _values(tree, key)
        share = ratio(value)
        if share is not None and not 0 < share <= most_ratio:
            raise RequestError(f"{key}={value}: a ratio is above 0 and at most {most_ratio}.")
    for least, most, keys in _RANGES:
        for key, value in _values(tree, keys):
            if is_open(key, value) or not isinstance(value, int | float) or least <= value <= most:
                continue
            near = least if value < least else most
            need = "above 0" if near == _ABOVE_0 else f"at {'least' if near == least else 'most'} {near}: use {near}"
            shown = f"{value:g}" if isinstance(value, float) else value
            raise RequestError(f"{key}={shown} must be {need}.{_HINTS.get(key, '')}")
    for key, value in _values(tree, "optimizer.momentum optimizer.beta2 optimizer.roles.*.momentum"):
        if value is not None and not 0 <= value < 1:
            near = 0 if value < 0 else 0.99
            raise RequestError(f"{key}={value:g} must be at least 0 and below 1 (0.9 keeps 90 %): use {near}.")
    final = tree["schedule"]["final"]
    if not 0 <= final <= 1:
        raise RequestError(f"schedule.final={final:g} is a fraction of the peak: use {0 if final < 0 else 1}.")


def _values(tree: Tree, keys: str) -> Iterator[tuple[str, Any]]:
    for pattern in keys.split():
        for role in ROLES if "*" in pattern else ROLES[:1]:
            key = pattern.replace("*", role)
            value: Any = tree
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            yield key, value


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
    if not e.tracking.project.strip() or re.search(r"[/\\#?%:]", e.tracking.project):
        raise RequestError(f"tracking.project={e.tracking.project!r} names a W&B project: not empty, none of /\\#?%:")
    target = e.optimizer.target
    if target is not None and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise RequestError(f"optimizer.target={target}: written as my.module:Cls.")
