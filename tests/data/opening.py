"""Corpora for tests: small files, and experiments that read them."""

import functools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from abovemup.config.compose import compose
from abovemup.config.schema import Experiment
from abovemup.data.corpus import Corpus, open_corpus


@functools.cache
def default() -> Experiment:
    return compose([])


def experiment(
    path: Path | None = None,
    tokenizer: str = "byte",
    seq_len: int = 16,
    eval_tokens: int = 256,
    vocab_size: int = 257,
    tokenizer_path: Path | None = None,
    **data: Any,
) -> Experiment:
    """data=text of a path, read as bytes, unless said otherwise."""
    base = default()
    data = {"name": "text", "path": None if path is None else str(path), **data}
    where = None if tokenizer_path is None else str(tokenizer_path)
    return replace(
        base,
        data=replace(base.data, **data),
        tokenizer=replace(base.tokenizer, name=tokenizer, vocab_size=vocab_size, path=where),
        model=replace(base.model, vocab_size=vocab_size),
        train=replace(base.train, seq_len=seq_len),
        eval=replace(base.eval, tokens=eval_tokens),
    )


def opened(*args: Any, **kwargs: Any) -> Corpus:
    return open_corpus(experiment(*args, **kwargs), note=lambda line: None)


def notes(*args: Any, **kwargs: Any) -> list[str]:
    lines: list[str] = []
    open_corpus(experiment(*args, **kwargs), note=lines.append)
    return lines


def jsonl(path: Path, texts: Iterable[Any], column: str = "text") -> Path:
    path.write_bytes(b"".join(json.dumps({column: text}).encode() + b"\n" for text in texts))
    return path


def sentences(count: int, start: int = 0) -> list[str]:
    """Different texts of about 60 characters."""
    return [
        f"Document {i} says that {i * i} is the square of {i}, and {i + 1} comes next.\n"
        for i in range(start, start + count)
    ]
