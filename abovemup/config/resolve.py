"""Closes open values: what was left to follow from something else now does. What must fit together is checked here."""

import os
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from abovemup.config.cadence import token_count
from abovemup.config.errors import RequestError
from abovemup.config.tokenizer_file import vocab_size
from abovemup.config.values import Values, ratio, shown

FFN = "11/4"  # the paper's 2.75, exact
EVAL_TOKENS, EVAL_DOCUMENTS = 2**17, 200
_HUB = ("hub", "fineweb", "fineweb_edu", "fineweb2_rus", "fineweb2_tha", "nemotron_cc_v2")
_OF_SOURCE = {  # key of data -> the sources that read it
    "path": ("text", "shards"),
    "repo": _HUB,
    "revision": _HUB,
    "subset": (*_HUB, "nemotron_cc"),
    "url": ("nemotron_cc",),
}
_IDS = {"byte": 257, "gpt2": 50257, "llama3": 128256}  # what a tokenizer has
_SMALL = 256  # width below which one thread is faster than several


def resolve(c: Values) -> None:
    """Closes every open one of coerced values, in place. Raises RequestError with both values and what would fit."""
    _names(c)
    _data(c)
    _tokenizer(c)
    _heads(c)
    _base(c)
    _sizes(c)
    _train(c)
    _schedule(c)


def _close(c: Values, key: str, value: Any) -> None:
    if c[key] is None:
        c[key] = value


def _names(c: Values) -> None:
    name, folder, project, target = (c[k] for k in ("run.name", "run.dir", "tracking.project", "optimizer.target"))
    if name is not None and (name.strip() in ("", ".", "..") or re.search(r"[/\\]", name)):
        raise RequestError(f"run.name={name!r} is the name of one folder: no slashes. The whole path is run.dir.")
    if folder is not None and not folder.strip():
        raise RequestError("run.dir is empty: give a folder, or null for runs/<run.name>.")
    if not project.strip() or re.search(r"[/\\#?%:]", project):
        raise RequestError(f"tracking.project={project!r} names a W&B project: not empty, none of /\\#?%:")
    if target is not None and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise RequestError(f"optimizer.target={target}: written as my.module:Cls.")


def _data(c: Values) -> None:
    data = c["data.name"]
    for key, sources in _OF_SOURCE.items():
        value = c.get(f"data.{key}")
        if not value and data in sources and key in ("path", "repo"):
            what = "a file or a folder" if key == "path" else "a data set of the hub"
            raise RequestError(f"data={data} reads {what}: set data.{key}.")
        if value is not None and data not in sources:
            raise RequestError(f"data.{key}={value} is for data={sources[0]}, not data={data}: add data={sources[0]}.")
    if c["data.branching"] > (states := c["data.states"]):
        raise RequestError(f"data.branching={c['data.branching']} must be at most data.states={states}: use {states}.")


def _tokenizer(c: Values) -> None:
    name, path = c["tokenizer.name"], c["tokenizer.path"]
    if name in ("bpe", "byte") and path is not None:
        whose = f"is for tokenizer=hf, llama3 or gpt2, not tokenizer={name}"
        raise RequestError(f"tokenizer.path={path} {whose}: add tokenizer=hf.")
    if name == "hf" and None in (path, c["tokenizer.vocab_size"]):
        c["tokenizer.vocab_size"] = vocab_size(path)  # refuses no path
    size = c["tokenizer.vocab_size"]
    if size is None:
        raise RequestError("tokenizer.vocab_size is open: set it.")
    if size != (has := _IDS.get(name, size)):
        raise RequestError(f"tokenizer.vocab_size={size}: tokenizer={name} has {has}. To pad: model.vocab_size.")
    if name == "bpe" and size < 257:
        raise RequestError(f"tokenizer.vocab_size={size}: a byte-level BPE has at least 257 ids: use 257.")
    # How many ids the data hold, end of text included: the tokenizer's, or the synthetic source's own.
    synthetic = c["data.name"] == "synthetic"
    whose, least = ("data.states + 1 =", c["data.states"] + 1) if synthetic else ("the tokenizer's", size)
    _close(c, "model.vocab_size", least)
    if c["model.vocab_size"] < least:
        raise RequestError(f"model.vocab_size={c['model.vocab_size']} is below {whose} {least}: use {least} or more.")


def _heads(c: Values) -> None:
    if c["model.head_dim"] is None:
        c["model.head_dim"] = _split(c, "model.heads")
    if c["model.heads"] is None:
        c["model.heads"] = _split(c, "model.head_dim")
    if (head_dim := c["model.head_dim"]) % 2:
        shape = f"model.width={c['model.width']}, model.heads={c['model.heads']}"
        near = " or ".join(str(n) for n in (head_dim - 1, head_dim + 1) if n)
        raise RequestError(f"model.head_dim={head_dim} ({shape}) is odd, and RoPE turns pairs: use {near}.")


def _split(c: Values, key: str) -> int:
    """Heads from head_dim, or head_dim from heads, where head_dim is even (RoPE turns pairs)."""
    width, value = c["model.width"], c[key]
    if value is None:
        raise RequestError("model.heads and model.head_dim are both open: set one.")

    def fits(width: int, value: int) -> bool:
        return width % value == 0 and (width // value if key == "model.heads" else value) % 2 == 0

    if fits(width, value):
        return int(width // value)
    values = _around(value, (n for n in range(1, width + 1) if fits(width, n)))
    widths = _around(width, (n for n in range(1, width + 2 * value + 1) if fits(n, value)))
    hints = [f"{k}={near}" for k, near in ((key, values), ("model.width", widths)) if near]
    heads = "into heads of an even head_dim"
    raise RequestError(f"{key}={value} does not split model.width={width} {heads}: use {', or '.join(hints)}.")


def _around(value: int, fits: Iterable[int]) -> str:
    """Of rising numbers that fit, the one below the value and the one above, where they are."""
    numbers = list(fits)
    near = {*[n for n in numbers if n <= value][-1:], *[n for n in numbers if n >= value][:1]}
    return " or ".join(map(str, sorted(near)))


def _base(c: Values) -> None:
    """The base's shape where it is open. What was written as a number is the same there, what was open follows from
    the base's width: heads as many as fit it (at least one), kv heads and ffn by the same ratio of it."""
    for name in ("width", "depth", "head_dim"):
        _close(c, f"parameterization.base_{name}", c[f"model.base.{name}"])
    width, head_dim = c["parameterization.base_width"], c["parameterization.base_head_dim"]
    queries = Fraction(c["model.heads"] * c["model.head_dim"], c["model.width"]) * width
    heads = max(1, round(queries / head_dim))
    _close(c, "parameterization.base_kv_heads", min(heads, _kv_heads(c["model.kv_heads"], heads)))
    _close(c, "parameterization.base_ffn", _ffn(c["model.ffn"], width))
    if (kv_heads := c["parameterization.base_kv_heads"]) > heads:
        raise RequestError(f"parameterization.base_kv_heads={kv_heads}: the base has {heads} heads.")
    if c["model.tie_embeddings"] and c["parameterization.name"] == "standard":
        raise RequestError(
            "model.tie_embeddings=true has no standard parameterization (embedding and head start at different sizes): "
            "use model.tie_embeddings=false, or parameterization=above_mup."
        )


def _sizes(c: Values) -> None:
    c["model.kv_heads"] = _kv_heads(c["model.kv_heads"], c["model.heads"])
    c["model.ffn"] = _ffn(c["model.ffn"], c["model.width"])
    _divides(c, "model.kv_heads", "model.heads")


def _kv_heads(value: Any, heads: int) -> int:
    """As many as heads, or the largest number not above a ratio of them that divides them."""
    share = Fraction(1) if value is None else ratio(value)
    if share is None:
        return int(value)
    return max(n for n in range(1, max(1, int(share * heads)) + 1) if heads % n == 0)


def _ffn(value: Any, width: int) -> int:
    """A ratio of the width, or a number."""
    share = ratio(FFN if value is None else value)
    # Not an integer when the width is no multiple of the denominator: the nearest one (half a unit goes up).
    return int(value) if share is None else max(1, int(share * width + Fraction(1, 2)))


def _divides(c: Values, part: str, whole: str) -> None:
    if c[whole] % c[part]:
        near = _around(c[part], (n for n in range(1, c[whole] + 1) if c[whole] % n == 0))
        raise RequestError(f"{part}={c[part]} does not divide {whole}={c[whole]}: use {near}.")


def _train(c: Values) -> None:
    size, seq_len, steps, tokens = (c[f"train.{name}"] for name in ("batch_size", "seq_len", "steps", "tokens"))
    if (steps is None) == (tokens is None):
        both = "open: set one" if steps is None else "given: keep one"
        raise RequestError(f"train.steps={shown(steps)} and train.tokens={shown(tokens)} are both {both}.")
    batch = size * seq_len
    if tokens is None:
        tokens = steps * batch
    if tokens % batch:
        below = tokens // batch * batch
        near = " or ".join(str(n) for n in (below, below + batch) if n)
        sizes = f"{size} x {seq_len} = {batch} tokens"
        raise RequestError(f"train.tokens={tokens} is not a whole number of steps of {sizes}: use {near}.")
    c.update({"train.steps": tokens // batch, "train.tokens": tokens})
    _close(c, "train.micro_batch", size)
    if c["train.micro_batch"] != "auto":
        _divides(c, "train.micro_batch", "train.batch_size")
    _close(c, "train.threads", 1 if c["model.width"] < _SMALL else cores())
    _close(c, "eval.tokens", max(EVAL_TOKENS, EVAL_DOCUMENTS * seq_len))
    if c["eval.tokens"] < seq_len:
        window = f"one window of train.seq_len={seq_len}"
        raise RequestError(f"eval.tokens={c['eval.tokens']} is less than {window}: use {seq_len}.")


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _schedule(c: Values) -> None:
    name, steps, batch = c["schedule.name"], c["train.steps"], c["train.batch_size"] * c["train.seq_len"]
    for key in ("schedule.warmup", "schedule.decay"):
        if (tokens := token_count(c[key])) is not None:
            c[key] = -(-tokens // batch)  # a step is whole: up
        elif isinstance(c[key], float):
            c[key] = round(c[key] * steps)
    warmup = c["schedule.warmup"]
    if warmup > steps:
        raise RequestError(f"schedule.warmup is {warmup} steps and train.steps {steps}: use at most {steps}.")
    left = steps - warmup
    _close(c, "schedule.decay", left if name == "cosine" else 0)
    decay = c["schedule.decay"]
    if name == "constant" and decay:
        raise RequestError(f"schedule=constant does not decay, but schedule.decay={decay}: use schedule=wsd, or 0.")
    if name == "wsd" and decay > left:
        lengths = f"schedule.warmup and schedule.decay are {warmup} + {decay} steps and train.steps {steps}"
        raise RequestError(f"{lengths}: use schedule.decay={left} or less.")
    if name == "cosine" and decay != left:
        needs = f"schedule=cosine decays over all {left} steps after the warmup, but schedule.decay={decay}"
        raise RequestError(f"{needs}: leave it open (null), or use schedule=wsd.")
