"""What a run reads: batches that depend on (data.seed, sample) only, a fixed validation set, and the yardsticks."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.keys import differences
from abovemup.config.schema import Data, Experiment
from abovemup.config.values import shown
from abovemup.data.order import ordered
from abovemup.data.prepare import FORMAT, Prepared, folder_of, key_of, open_prepared, prepared
from abovemup.data.progress import SPLITS, Job, Note
from abovemup.data.recipe import Recipe, reopen
from abovemup.data.shards import TokenWindows, total
from abovemup.data.sources import STDLIB_EVAL_TOKENS, find_source
from abovemup.data.split import Amount
from abovemup.data.synthetic import ENDLESS, MarkovSource
from abovemup.data.tokenizer import Tokenizer
from abovemup.data.validation import DOCUMENTS, SHARE, Choice, choose_windows

Coder = Tokenizer | MarkovSource
TRAIN, VALIDATION = 0, 1  # streams of the synthetic source


@dataclass
class Corpus:
    """Token windows of `seq_len` inputs and their targets, one token later.

    `windows` in one pass (2**62 for the endless source); `validation` the fixed windows, (n, seq_len + 1) int64, the
    same for every seed; `unigram_entropy` of the train split in nats/token, the loss of a model that knows only how
    frequent each token is; `bytes_per_token` of the validation targets, None without text: bits per byte is loss / ln 2
    / bytes_per_token; `entropy_rate` in nats/token where it is known.
    """

    data: Data
    seq_len: int
    coder: Coder
    manifest: dict[str, Any]
    windows: int
    unigram_entropy: float
    _rows: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    validation: Tensor
    folder: Path | None = None  # of its shards and tokenizer
    bytes_per_token: float | None = None
    entropy_rate: float | None = None

    def batch(self, first: int, count: int) -> Tensor:
        """Global samples first .. first + count - 1 as (count, seq_len + 1) int64.

        Every pass reads each window once, in an order of its own.
        """
        if self.windows == ENDLESS:
            return torch.from_numpy(self._rows(np.arange(first, first + count, dtype=np.int64)))
        size, stop, index = max(1, self.windows), first + count, [np.empty(0, np.int64)]
        while first < stop:
            epoch, place = divmod(first, size)
            end = min(size, place + stop - first)
            index.append(ordered(place, end, size, self.data.seed, epoch))
            first += end - place
        return torch.from_numpy(self._rows(np.concatenate(index)))

    def epoch(self, sample: int) -> int:
        """The pass that a global sample belongs to, from 0."""
        return sample // max(1, self.windows)

    def bits_per_byte(self, loss: float) -> float | None:
        """Of a train loss (nats/token), by the split's mean; None without text."""
        split = self.manifest.get("train")
        return split and loss / math.log(2) * total(split["shards"], "tokens") / split["bytes"]

    def require(self, samples: int) -> None:
        """Raises RequestError if a run of so many samples would read a token twice and may not."""
        if samples <= self.windows or self.data.allow_repeat:
            return
        raise RequestError(
            f"the run reads {samples * self.seq_len:,} tokens ({samples:,} windows of {self.seq_len}) and one pass "
            f"over the data has {self.windows * self.seq_len:,} ({self.windows:,} windows):\n"
            "set fewer train.steps, or start a new run with more data or data.allow_repeat=true"
        )


def open_coder(experiment: Experiment, run: Path) -> Coder:
    """The tokenizer of a run, without its data. Raises RequestError when it is gone."""
    if experiment.data.name == "synthetic":
        return MarkovSource(experiment.data.states, experiment.data.branching)
    return reopen(experiment.tokenizer.name, run)


def open_corpus(experiment: Experiment, note: Note = print, amount: Amount | None = None) -> Corpus:
    """The corpus of an experiment; prepares it in the cache at first use, and says so line by line through `note`.

    `amount` is what a run that is continued, or branched from, has of a remote source: a horizon does not change data.
    Raises RequestError for data that is missing, empty, damaged or too small, and for a model whose vocabulary is
    smaller than the tokenizer's.
    """
    if experiment.data.name == "synthetic":
        return _synthetic(experiment)
    data, seq_len = experiment.data, experiment.train.seq_len
    folder, manifest, tokenizer, shards = _prepared(experiment, note, amount)
    train, held_out = (TokenWindows(shards[split], seq_len) for split in SPLITS)
    tokens = min(experiment.eval.tokens, STDLIB_EVAL_TOKENS) if data.name == "stdlib" else experiment.eval.tokens
    choice = choose_windows(held_out, tokenizer.eot, tokens)
    rows = held_out.rows(choice.windows)
    if (line := _shortfall(choice, held_out, experiment.eval.tokens)) is not None:
        note(line)
    if not train.windows:
        note(f"data: {train.tokens:,} train tokens are less than one window of {seq_len + 1}: read in a circle")
    # Of the targets themselves, not of the split: windows of other documents hold up to a few percent more or less.
    size = tokenizer.count_bytes(rows[:, 1:]) / rows[:, 1:].size
    validation, entropy = torch.from_numpy(rows), manifest["unigram_entropy"]
    return Corpus(
        data, seq_len, tokenizer, manifest, train.windows, entropy, train.rows, validation, folder, size or None
    )


def _prepared(experiment: Experiment, note: Note, amount: Amount | None) -> Prepared:
    """A local source whole, of a remote one what the run needs, or a folder that `abovemup data prepare` made."""
    data, ids = experiment.data, experiment.model.vocab_size
    if data.name == "shards":
        return open_prepared(Path(data.path or "").expanduser())
    made_by = Recipe(experiment.tokenizer)
    if (size := made_by.size) > ids:
        raise RequestError(f"the tokenizer has {size:,} ids and the model {ids:,}: set model.vocab_size={size} or more")
    if amount and experiment.train.tokens > amount.train and not data.allow_repeat:
        more = by_hand(experiment, experiment.train.tokens + experiment.train.seq_len)
        raise RequestError(
            f"the order of the run's data is a permutation of the {amount.train:,} tokens it began with: it cannot be "
            f"made longer.\nStart a new run of that length, or one on data=shards of: {more}"
        )
    source = find_source(data)
    amount = amount or Amount(experiment.train.tokens + experiment.train.seq_len, experiment.eval.tokens + 1)
    job = Job(source, made_by, data.skip_bad, None if source.local else amount)
    if not source.local and not folder_of(job, key_of(job)).exists():
        note(f"data: this run's tokens are prepared first, as by: {by_hand(experiment, amount.train)}")
    return prepared(job, note)


def by_hand(experiment: Experiment, tokens: int) -> str:
    """The command that prepares so many tokens as the experiment would."""
    e = experiment
    needed = {"data.repo": e.data.repo, "tokenizer.path": e.tokenizer.path}
    given = [f"tokenizer={e.tokenizer.name}", *(f"{key}={value}" for key, value in needed.items() if value is not None)]
    for key, _, now in differences(compose([f"data={e.data.name}", *given]), e):
        if key.startswith(("data.", "tokenizer.", "eval.tokens")) and key != "data.seed":
            given.append(f"{key}={shown(now)}")
    return shlex.join(["abovemup", "data", "prepare", e.data.name, "--tokens", str(tokens), *given])


def _shortfall(choice: Choice, held_out: TokenWindows, asked: int) -> str | None:
    """A line if the validation set is not what was asked for, or rests on too few documents."""
    have = len(choice.windows) * held_out.seq_len
    if have + held_out.seq_len > asked and choice.documents >= DOCUMENTS and choice.largest <= SHARE:
        return None
    return (
        f"data: validation is {have:,} tokens (eval.tokens={asked:,}) of {choice.documents:,} documents, "
        f"none more than {100 * choice.largest:.1f} % of it"
    )


def _synthetic(experiment: Experiment) -> Corpus:
    data, seq_len = experiment.data, experiment.train.seq_len
    source = MarkovSource(data.states, data.branching)
    manifest = {
        "format": FORMAT,
        "source": {"name": "synthetic", "states": data.states, "branching": data.branching},
        "tokenizer": {"name": "numbers", "size": source.size, "eot": source.eot},
        "unigram_entropy": source.unigram_entropy,
        "entropy_rate": source.entropy_rate,
    }
    windows = np.arange(max(1, experiment.eval.tokens // seq_len), dtype=np.int64)
    held_out = torch.from_numpy(source.rows(windows, seq_len + 1, VALIDATION))

    def rows(samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return source.rows(samples, seq_len + 1, TRAIN, data.seed)

    entropy = source.unigram_entropy
    return Corpus(data, seq_len, source, manifest, ENDLESS, entropy, rows, held_out, entropy_rate=source.entropy_rate)
