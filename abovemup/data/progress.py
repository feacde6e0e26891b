"""The documents of a source to the shards of both splits, with a record of how far it is, from which it goes on."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from abovemup.config.errors import RequestError
from abovemup.config.io import write_whole
from abovemup.config.resolve import cores
from abovemup.data.pool import Encoded, encoded
from abovemup.data.readers import BadRecords
from abovemup.data.recipe import Recipe
from abovemup.data.shards import ShardWriter, read_record, shard_dtype, total
from abovemup.data.sources import Source
from abovemup.data.split import Amount, Split
from abovemup.data.tokenizer import Tokenizer

SAVE = 2.0  # seconds between two records of how far it is
HELD_OUT = 2**18  # tokens of what is read from far away, from which a validation set is chosen; or twice its size
SPLITS = ("train", "validation")

Note = Callable[[str], None]
Watch = Callable[[int, int, int, float | None], None]  # documents, tokens, bytes, and which part of all (None: unknown)


@dataclass(frozen=True)
class Job:
    """What is to be prepared. `amount` None is all of the source; `workers` are threads, None as many as cores."""

    source: Source
    recipe: Recipe
    skip_bad: bool
    amount: Amount | None = None
    out: Path | None = None
    workers: int | None = None


class _Batch(NamedTuple):
    """What stays here while the documents are tokenised: of each its split and size, and how far the source is read."""

    validation: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    place: dict[str, Any]
    bad: tuple[int, str]


class _Corpus:
    """The shards of both splits while they are written, from where an earlier process was (`progress.json`)."""

    def __init__(self, part: Path, job: Job, tokenizer: Tokenizer) -> None:
        self.part, self.local, self.saved = part, job.source.local, read_record(part / "progress.json")
        self.amount = job.amount
        if job.amount and not self.local:
            self.amount = Amount(job.amount.train, max(HELD_OUT, 2 * job.amount.validation))
        self.writers = [ShardWriter(part, s, tokenizer.size, tokenizer.eot, self.saved.get(s)) for s in SPLITS]

    def tokens(self) -> tuple[int, ...]:
        return tuple(total(writer.entries, "tokens") for writer in self.writers)

    def total(self, what: str) -> int:
        return sum(total(writer.entries, what) for writer in self.writers)

    def bytes(self) -> int:
        return sum(writer.bytes for writer in self.writers)

    def enough(self) -> bool:
        return self.amount is not None and all(have >= n for have, n in zip(self.tokens(), self.amount, strict=True))

    def share(self) -> float:
        """How much of an amount is there, by the split that has less of its own."""
        return min(have / n for have, n in zip(self.tokens(), self.amount or (), strict=True))

    def append(self, tokens: Encoded, batch: _Batch) -> None:
        """Of an amount, the documents that begin before it is reached: the same ones, however batches are cut.

        Of what is read from far away those held out are the first ones, however many train tokens were asked for.
        """
        masks = ~batch.validation, batch.validation
        if self.amount:
            owns = [np.where(mask, tokens.lengths, 0) for mask in masks]
            before = [have + np.cumsum(own) - own for have, own in zip(self.tokens(), owns, strict=True)]
            needed = before[0] < self.amount.train
            masks = masks[0] & needed, masks[1] & ((before[1] < self.amount.validation) | (needed & self.local))
        for mask, writer in zip(masks, self.writers, strict=True):
            writer.write(tokens.ids[np.repeat(mask, tokens.lengths)], int(batch.sizes[mask].sum()))

    def save(self, batch: _Batch) -> None:
        state = {writer.split: writer.sync() for writer in self.writers}
        write_whole(self.part / "progress.json", json.dumps(state | {"place": batch.place, "bad": batch.bad}))

    def close(self) -> dict[str, Any]:
        """What the manifest says of the shards, which are finished."""
        counts = self.writers[0].counts
        frequency = counts[counts > 0] / counts.sum()
        return {
            "dtype": shard_dtype(len(counts)),
            **{writer.split: {"bytes": writer.bytes, "shards": writer.close()} for writer in self.writers},
            "unigram_entropy": float(-(frequency * np.log(frequency)).sum()) + 0.0,
        }


def tokenise(part: Path, job: Job, tokenizer: Tokenizer, split: Split, note: Note, watch: Watch) -> dict[str, Any]:
    """Writes the shards into the folder `part`. Returns what the manifest says of them and of the source."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here: the threads are ours
    source, amount = job.source, job.amount
    corpus, bad = _Corpus(part, job, tokenizer), BadRecords(job.skip_bad)
    bad.count, bad.first = seen = corpus.saved.get("bad", (0, ""))
    if corpus.saved:
        note(f"data: goes on where it was stopped, after {corpus.total('tokens'):,} tokens")

    def batches() -> Iterator[tuple[list[bytes], _Batch]]:
        for found, place in source.batches(bad, corpus.saved.get("place")):
            items = list(split.assign(found))
            held, sizes = np.array([v for _, v in items]), np.array([len(d.data) for d, _ in items])
            yield [d.data for d, _ in items], _Batch(held, sizes, place, (bad.count, bad.first))

    with contextlib.closing(encoded(batches(), tokenizer, job.workers or cores())) as stream:
        saved = time.monotonic()
        for tokens, batch in stream:
            corpus.append(tokens, batch)
            seen = batch.bad
            share = corpus.share() if amount else corpus.bytes() / split.bytes if split.bytes else None
            watch(corpus.total("documents"), corpus.total("tokens"), corpus.bytes(), share)
            if corpus.enough():
                break
            if time.monotonic() - saved >= SAVE:
                corpus.save(batch)
                saved = time.monotonic()
        else:
            seen = bad.count, bad.first
    if not all(corpus.tokens()):
        why = f"; the first bad record: {seen[1]}" if seen[0] else ""
        raise RequestError(f"{source.place} holds too little text to hold out a validation split{why}")
    if seen[0]:
        note(f"data: {seen[0]:,} bad records left out (data.skip_bad); the first: {seen[1]}")
    note("data: {:,} train and {:,} validation tokens".format(*corpus.tokens()))
    about = {"name": source.name, "place": source.place, **source.identity(), **source.describe(), "amount": amount,
             "documents": split.documents or corpus.total("documents"), "bytes": split.bytes or corpus.bytes(),
             "bad_records": seen[0], "first_bad": seen[1], "piece": split.piece}  # fmt: skip
    return {"source": about, **corpus.close()}
