"""Text to ids and back. A special token's string inside a text is text; end of text is only ever appended by us."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from abovemup.config import schema
from abovemup.config.errors import RequestError
from abovemup.data.readers import existing

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call it, base models before chat models.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]")
CHUNK = 2**16  # characters of a piece of a long text
PIECES = 64  # encoded at once


class Coder(Protocol):
    """Text to ids and back, for `generate`; a Tokenizer, or the synthetic source."""

    size: int  # ids are below it
    eot: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class Tokenizer(Coder, Protocol):
    def encode_documents(self, documents: list[bytes]) -> list[NDArray[np.uint32]]:
        """The ids of each document, without end of text."""

    def count_bytes(self, rows: NDArray[np.int64]) -> int:
        """Bytes of the text that rows of ids (n, length) stand for; an end of text has none."""


class ByteTokenizer:
    """One id a byte, and 256 for end of text. Any bytes survive, UTF-8 or not."""

    size, eot = 257, 256

    def encode_documents(self, documents: list[bytes]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(document, np.uint8).astype(np.uint32) for document in documents]

    def count_bytes(self, rows: NDArray[np.int64]) -> int:
        return int((rows != self.eot).sum())

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """End of text is shown by name; bytes that are no character, and ids of padded rows, as U+FFFD."""
        parts = (END_OF_TEXT.encode() if i == self.eot else b"\xff" if i > self.eot else bytes([i]) for i in ids)
        return b"".join(parts).decode("utf-8", "replace")


class FastTokenizer:
    """A tokenizer.json of the `tokenizers` library. Bytes that are not UTF-8 are read as U+FFFD.

    `cuttable` says that encoding the two sides of a line end apart gives the same ids as encoding them together,
    which holds for byte-level BPE with GPT-2's pattern when a non-space stands before the line end.
    """

    def __init__(self, inner: "tokenizers.Tokenizer", eot: int, cuttable: bool) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self.inner = inner
        self.eot = eot
        self.size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.cuttable = cuttable

    def encode_documents(self, documents: list[bytes]) -> list[NDArray[np.uint32]]:
        """A few pieces at a time, because the library's encodings take a hundred times the memory of the ids."""
        ids: list[list[NDArray[np.uint32]]] = [[] for _ in documents]
        texts = enumerate(document.decode("utf-8", "replace") for document in documents)
        pieces = ((owner, piece) for owner, text in texts for piece in (cut_text(text) if self.cuttable else [text]))
        while some := list(itertools.islice(pieces, PIECES)):
            encoded = self.inner.encode_batch_fast([piece for _, piece in some], add_special_tokens=False)
            for (owner, _), encoding in zip(some, encoded, strict=True):
                ids[owner].append(np.array(encoding.ids, np.uint32))
        return [np.concatenate(parts) for parts in ids]

    def count_bytes(self, rows: NDArray[np.int64]) -> int:
        """Exact for a BPE of ours; for a tokenizer.json a character that is cut at a row's end counts as U+FFFD."""
        if self.cuttable:  # byte-level: each character of a token's name is a byte
            counts = enumerate(np.bincount(rows.ravel()).tolist())
            return sum(count * len(self.inner.id_to_token(i) or "") for i, count in counts if count and i != self.eot)
        return sum(len(self.decode(i for i in row if i != self.eot).encode()) for row in rows.tolist())

    def encode(self, text: str) -> list[int]:
        clean = text.encode("utf-8", "replace").decode()
        return list(self.inner.encode(clean, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are shown; ids of padded rows, which stand for nothing, as U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=False)


def cut_text(text: str) -> Iterator[str]:
    """A long text in pieces, each cut before a line end that follows a non-space."""
    start = 0
    border = re.compile(r"(?<=\S)(?=\n)")
    while len(text) - start > CHUNK and (found := border.search(text, start + CHUNK)):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE with GPT-2's pattern as the text of a tokenizer.json: 256 bytes, merges, end of text last.

    The same texts give the same bytes, whatever the number of threads. A small text gives fewer than `vocab_size`
    ids. Raises RequestError below 257.
    """
    if vocab_size < 257:
        raise RequestError(
            f"tokenizer.vocab_size={vocab_size}: a byte-level BPE needs at least 257 (256 bytes, end of text)"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([END_OF_TEXT])
    return str(inner.to_str())


def load_fast(text: str, cuttable: bool, config: str | None = None, place: str = "tokenizer.json") -> FastTokenizer:
    """A tokenizer of the text of its tokenizer.json. Raises RequestError when it is none or has no end of text."""
    from tokenizers import Tokenizer

    try:
        inner = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise RequestError(f"{place} is not a tokenizer.json: {error}") from error
    named = json.loads(config).get("eos_token") if config else None
    named = named.get("content") if isinstance(named, dict) else named
    for name in (*END_NAMES, named):
        if name and (eot := inner.token_to_id(name)) is not None:
            return FastTokenizer(inner, eot, cuttable)
    raise RequestError(
        f"{place} has no end-of-text token ({', '.join(END_NAMES)}): add one of these, "
        "or name its own as eos_token in a tokenizer_config.json beside it"
    )


def read_hf(path: str | None) -> tuple[str, str | None, Path]:
    """The tokenizer.json at or in `path`, the tokenizer_config.json beside it, and where. Raises RequestError."""
    if not path:
        raise RequestError("tokenizer=hf needs tokenizer.path=: a tokenizer.json, or a folder that holds one")
    found = existing("tokenizer.path", path)
    found = existing("tokenizer.path", found / "tokenizer.json") if found.is_dir() else found
    try:
        beside = found.with_name("tokenizer_config.json")
        return found.read_text("utf-8"), beside.read_text("utf-8") if beside.exists() else None, found
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"tokenizer.path={path}: cannot read {found}: {reason}") from error


def keep(tokenizer: object, run: Path) -> None:
    """Put a tokenizer that was trained here into its run's folder: the data it comes from may change or go."""
    if isinstance(tokenizer, FastTokenizer) and tokenizer.cuttable:
        (run / "tokenizer.json").write_text(tokenizer.inner.to_str(), encoding="utf-8")


def reopen(tokenizer: schema.Tokenizer, run: Path) -> Tokenizer:
    """The tokenizer that a run was trained with. Raises RequestError when it is gone."""
    if tokenizer.name == "byte":
        return ByteTokenizer()
    if tokenizer.name == "bpe":
        return load_fast(read_hf(str(run))[0], cuttable=True, place=str(run / "tokenizer.json"))
    text, config, found = read_hf(tokenizer.path)
    return load_fast(text, False, config, str(found))


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
