"""Text to ids and back. A special token's string inside a text is text; end of text is only ever appended by us."""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
CHUNK = 2**16  # characters of a piece of a long text
PIECES = 64  # encoded at once


class ByteTokenizer:
    """One id a byte, and 256 for end of text. Any bytes survive, UTF-8 or not."""

    size, eot = 257, 256

    def encode_documents(self, documents: list[bytes]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(document, np.uint8).astype(np.uint32) for document in documents]

    def count_bytes(self, rows: NDArray[np.int64]) -> int:
        return int((rows != self.eot).sum())

    def encode(self, text: str) -> list[int]:
        return _ids(self, text)

    def decode(self, ids: Iterable[int]) -> str:
        """End of text is shown by name; bytes that are no character, and ids of padded rows, as U+FFFD."""
        parts = (END_OF_TEXT.encode() if i == self.eot else b"\xff" if i > self.eot else bytes([i]) for i in ids)
        return b"".join(parts).decode("utf-8", "replace")


class FastTokenizer:
    """A tokenizer.json of the `tokenizers` library. Bytes that are not UTF-8 are read as U+FFFD.

    `trained`: it was trained here. It is a byte-level BPE with GPT-2's pattern, so that a long text may be encoded in
    pieces (`cut_text`) and gives the same ids.
    """

    def __init__(self, inner: "tokenizers.Tokenizer", eot: int, trained: bool) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self.inner = inner
        self.eot = eot
        self.size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.trained = trained

    def encode_documents(self, documents: list[bytes]) -> list[NDArray[np.uint32]]:
        """A few pieces at a time, because the library's encodings take a hundred times the memory of the ids."""
        ids: list[list[NDArray[np.uint32]]] = [[] for _ in documents]
        texts = enumerate(document.decode("utf-8", "replace") for document in documents)
        pieces = ((owner, piece) for owner, text in texts for piece in (cut_text(text) if self.trained else [text]))
        while some := list(itertools.islice(pieces, PIECES)):
            encoded = self.inner.encode_batch_fast([piece for _, piece in some], add_special_tokens=False)
            for (owner, _), encoding in zip(some, encoded, strict=True):
                ids[owner].append(np.array(encoding.ids, np.uint32))
        return [np.concatenate(parts) for parts in ids]

    def count_bytes(self, rows: NDArray[np.int64]) -> int:
        """Exact for a BPE of ours; for a tokenizer.json a character that is cut at a row's end counts as U+FFFD."""
        if self.trained:  # byte-level: each character of a token's name is a byte
            counts = enumerate(np.bincount(rows.ravel()).tolist())
            return sum(count * len(self.inner.id_to_token(i) or "") for i, count in counts if count and i != self.eot)
        return sum(len(self.decode(i for i in row if i != self.eot).encode()) for row in rows.tolist())

    def encode(self, text: str) -> list[int]:
        return _ids(self, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are shown; ids of padded rows, which stand for nothing, as U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=False)


class TiktokenTokenizer:
    """Ranks of the `tiktoken` library (GPT-2, Llama 3, ours). Bytes that are not UTF-8 are read as U+FFFD."""

    def __init__(self, inner: "tiktoken.Encoding", eot: int) -> None:
        self.inner, self.eot, self.size = inner, eot, inner.n_vocab
        self.lengths = np.array([len(inner.decode_single_token_bytes(i)) for i in range(self.size)])
        self.lengths[eot] = 0

    def encode_documents(self, documents: list[bytes]) -> list[NDArray[np.uint32]]:
        """With no special token allowed and none refused, their strings are text."""
        encode = functools.partial(self.inner.encode_to_numpy, disallowed_special=())
        texts = (document.decode("utf-8", "replace") for document in documents)
        return [np.concatenate([encode(piece) for piece in cut_text(text, longest=2 * CHUNK)]) for text in texts]

    def count_bytes(self, rows: NDArray[np.int64]) -> int:
        return int(self.lengths[rows].sum())

    def encode(self, text: str) -> list[int]:
        return _ids(self, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are shown; ids of padded rows, which stand for nothing, as U+FFFD."""
        parts = (self.inner.decode_single_token_bytes(i) if i < self.size else b"\xff" for i in ids)
        return b"".join(parts).decode("utf-8", "replace")


# `encode_documents` gives the ids of each document, without end of text; `count_bytes` the bytes of the text that rows
# of ids (n, length) stand for, an end of text having none. Ids are below `size`.
Tokenizer = ByteTokenizer | FastTokenizer | TiktokenTokenizer


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode_documents([text.encode("utf-8", "replace")])[0].tolist()
    return ids


def cut_text(text: str, longest: int = 10**12) -> Iterator[str]:
    """A long text in pieces, each cut before a space that follows a non-space: no match of a known pattern is cut.

    Where there is none for `longest` characters it is cut all the same: `tiktoken` cannot read a million spaces.
    """
    start = 0
    border = re.compile(r"(?<=\S)(?= )")
    while len(text) - start > CHUNK:
        found = border.search(text, start + CHUNK, start + longest + 1)
        end = found.start() if found else min(start + longest, len(text))
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]
