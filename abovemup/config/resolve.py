"""Closes open values: what was left to follow from something else now does."""

import json
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from abovemup.config.cadence import token_count
from abovemup.config.errors import RequestError
from abovemup.config.values import ratio

Tree = dict[str, Any]
FFN = Fraction(11, 4)  # the paper's 2.75, exact
EVAL_TOKENS, EVAL_DOCUMENTS = 2**17, 200
_SMALL = 256  # width below which one thread is faster than several


def resolve(tree: Tree) -> None:
    """Closes every open value of a coerced tree, in place."""
    _tokenizer(tree["tokenizer"])
    written = dict(tree["model"])
    _model(tree["model"], ids(tree["data"], tree["tokenizer"]))
    _base(tree["parameterization"], tree["model"], written)
    _train(tree["train"], tree["model"]["width"])
    _schedule(tree["schedule"], tree["train"])
    if tree["eval"]["tokens"] is None:
        tree["eval"]["tokens"] = max(EVAL_TOKENS, EVAL_DOCUMENTS * tree["train"]["seq_len"])


def ids(data: Tree, tokenizer: Tree) -> int:
    """How many ids the data hold, end of text included: the tokenizer's, or the synthetic source's own."""
    return int(data["states"] + 1 if data["name"] == "synthetic" else tokenizer["vocab_size"])


def _model(model: Tree, vocab: int) -> None:
    width = model["width"]
    if model["head_dim"] is None and model["heads"] is None:
        raise RequestError("model.heads and model.head_dim are both open: set one.")
    if model["head_dim"] is None:
        model["head_dim"] = _split(width, "model.heads", model["heads"])
    if model["heads"] is None:
        model["heads"] = _split(width, "model.head_dim", model["head_dim"])
    model["kv_heads"] = _kv_heads(model["kv_heads"], model["heads"])
    model["ffn"] = _ffn(model["ffn"], width)
    if model["vocab_size"] is None:
        model["vocab_size"] = vocab


def _base(base: Tree, model: Tree, written: Tree) -> None:
    """The base's shape where it is open. What was written as a number is the same there, what was open follows from
    the base's width: heads as many as fit it (at least one), kv heads and ffn by the same ratio of it. RequestError."""
    for name, value in model["base"].items():
        if base[f"base_{name}"] is None:
            base[f"base_{name}"] = value
    queries = Fraction(model["heads"] * model["head_dim"], model["width"]) * base["base_width"]
    heads = max(1, round(queries / base["base_head_dim"]))
    if base["base_kv_heads"] is None:
        base["base_kv_heads"] = min(heads, _kv_heads(written["kv_heads"], heads))
    elif base["base_kv_heads"] > heads:
        raise RequestError(f"parameterization.base_kv_heads={base['base_kv_heads']}: the base has {heads} heads.")
    if base["base_ffn"] is None:
        base["base_ffn"] = _ffn(written["ffn"], base["base_width"])


def _split(width: int, key: str, value: int) -> int:
    """width / value: heads from head_dim or head_dim from heads, where head_dim is even (RoPE turns pairs)."""
    unit = 2 * value if key == "model.heads" else value
    if unit % 2 == 0 and width % unit == 0:
        return width // value
    half = [d for d in range(1, width // 2 + 1) if width % (2 * d) == 0]
    near = {key: _around(value, half if key == "model.heads" else [2 * d for d in half])}
    if unit % 2 == 0:
        near["model.width"] = _around(width, range(unit, width + unit + 1, unit))
    hints = [f"{k}={' or '.join(map(str, numbers))}" for k, numbers in near.items() if numbers]
    raise RequestError(
        f"{key}={value} does not split model.width={width} into heads of an even head_dim: use {', or '.join(hints)}."
    )


def nearest_divisors(number: int, near: int) -> list[int]:
    """The divisors of `number` next to `near`: the one below and the one above, where they are."""
    return _around(near, [d for d in range(1, number + 1) if number % d == 0])


def _around(value: int, fits: Sequence[int]) -> list[int]:
    below, above = [n for n in fits if n <= value][-1:], [n for n in fits if n >= value][:1]
    return sorted({*below, *above})


def _kv_heads(value: Any, heads: int) -> int:
    """As many as heads, or the largest number not above a ratio of them that divides them."""
    share = ratio(value)
    if value is None:
        return heads
    if share is None:
        return int(value)
    most = min(heads, max(1, int(share * heads)))
    return nearest_divisors(heads, most)[0]


def _ffn(value: Any, width: int) -> int:
    """A ratio of the width, or a number."""
    share = FFN if value is None else ratio(value)
    # Not an integer when the width is no multiple of the denominator: the nearest one (half a unit goes up).
    return int(value) if share is None else max(1, int(share * width + Fraction(1, 2)))


def _tokenizer(tokenizer: Tree) -> None:
    if tokenizer["vocab_size"] is not None:
        return
    if tokenizer["name"] != "hf":
        raise RequestError("tokenizer.vocab_size is open: set it.")
    if tokenizer["path"] is None:
        raise RequestError("tokenizer=hf reads a tokenizer.json: set tokenizer.path.")
    tokenizer["vocab_size"] = _hf_vocab_size(Path(tokenizer["path"]).expanduser())


def _hf_vocab_size(path: Path) -> int:
    """One more than the largest id in a tokenizer.json, added tokens included."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return 1 + max(int(i) for i in [*ids, *(token["id"] for token in content.get("added_tokens") or [])])
    except OSError as error:
        raise RequestError(f"tokenizer.path={path}: {file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"tokenizer.path={path}: {file} is not a tokenizer.json.") from error


def _train(train: Tree, width: int) -> None:
    batch = train["batch_size"] * train["seq_len"]
    if train["steps"] is None and train["tokens"] is None:
        raise RequestError("train.steps and train.tokens are both open: set one.")
    if train["tokens"] is None:
        train["tokens"] = train["steps"] * batch
    if train["tokens"] % batch:
        below = train["tokens"] // batch * batch
        near = " or ".join(str(n) for n in (below, below + batch) if n)
        sizes = f"{train['batch_size']} x {train['seq_len']} = {batch} tokens"
        raise RequestError(f"train.tokens={train['tokens']} is not a whole number of steps of {sizes}: use {near}.")
    steps = train["tokens"] // batch
    if train["steps"] not in (None, steps):
        both = f"train.steps={train['steps']} and train.tokens={train['tokens']} ({steps} steps)"
        raise RequestError(f"{both} differ: set one of them to null.")
    train["steps"] = steps
    if train["micro_batch"] is None:
        train["micro_batch"] = train["batch_size"]
    if train["threads"] is None:
        train["threads"] = 1 if width < _SMALL else cores()


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _schedule(schedule: Tree, train: Tree) -> None:
    steps, batch = train["steps"], train["batch_size"] * train["seq_len"]
    for name in ("warmup", "decay"):
        length = schedule[name]
        tokens = token_count(length)
        if tokens is not None:
            schedule[name] = -(-tokens // batch)  # a step is whole: up
        elif isinstance(length, float):
            schedule[name] = round(length * steps)
    if schedule["decay"] is None:
        schedule["decay"] = max(0, steps - schedule["warmup"]) if schedule["name"] == "cosine" else 0
