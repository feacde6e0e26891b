"""Token shards: flat files of uint16 or uint32, end of text after every document, and windows cut from them."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

SHARD_TOKENS = 100_000_000
AT_ONCE = 2**20


def shard_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


class ShardWriter:
    """Appends documents to `<split>-00000.bin`, `<split>-00001.bin`, ... in a folder; `close` returns their entries.

    Ids are below `size`, which decides the dtype.
    """

    def __init__(self, folder: Path, split: str, size: int, eot: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.split, self.eot, self.shard_tokens = folder, split, eot, shard_tokens
        self.dtype = np.dtype(shard_dtype(size)).newbyteorder("<")
        self.counts = np.zeros(size, np.int64)  # of each id
        self.entries: list[dict[str, Any]] = []
        self.file: BinaryIO | None = None

    def write(self, tokens: NDArray[np.uint32]) -> None:
        """Whole documents, each with its end of text; a shard may end inside of one."""
        start = 0
        while start < len(tokens):
            if self.file is None:
                self._open()
            room = min(AT_ONCE, self.shard_tokens - self.entries[-1]["tokens"])
            self._append(tokens[start : start + room])
            start += room
            if self.entries[-1]["tokens"] == self.shard_tokens:
                self._finish()

    def close(self) -> list[dict[str, Any]]:
        """Flushes to the disk. One entry a shard: file, tokens, documents (that end in it) and sha256."""
        if self.file is not None:
            self._finish()
        return self.entries

    def _open(self) -> None:
        name = f"{self.split}-{len(self.entries):05d}.bin"
        self.file = (self.folder / name).open("wb")
        self.digest = hashlib.sha256()
        self.entries.append({"file": name, "tokens": 0, "documents": 0})

    def _append(self, tokens: NDArray[np.uint32]) -> None:
        assert self.file is not None
        data = tokens.astype(self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.entries[-1]["tokens"] += len(tokens)
        counts = np.bincount(tokens, minlength=len(self.counts))
        self.counts += counts
        self.entries[-1]["documents"] += int(counts[self.eot])

    def _finish(self) -> None:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None
        self.entries[-1]["sha256"] = self.digest.hexdigest()


def open_shards(folder: Path, entries: list[dict[str, Any]], dtype: str) -> list[NDArray[Any]]:
    """Memory-maps the shards of one split. Raises ValueError that names a shard of the wrong size."""
    kind = np.dtype(dtype).newbyteorder("<")
    shards: list[NDArray[Any]] = []
    for entry in entries:
        path = folder / entry["file"]
        size = path.stat().st_size if path.exists() else -1
        if size != entry["tokens"] * kind.itemsize:
            what = "is missing" if size < 0 else f"has {size} bytes, not {entry['tokens'] * kind.itemsize}"
            raise ValueError(f"{path.name} {what}")
        shards.append(np.memmap(path, kind, "r"))
    return shards


class TokenWindows:
    """The windows of a token stream: window w is tokens w*seq_len to w*seq_len + seq_len, the last one its last target.

    A stream shorter than one window is read in a circle to fill it, and has no whole window (`windows` is 0).
    """

    def __init__(self, shards: Sequence[NDArray[Any]], seq_len: int) -> None:
        self.shards, self.seq_len = shards, seq_len
        self.starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self.tokens = int(self.starts[-1])
        self.windows = max(0, (self.tokens - 1) // seq_len)

    def rows(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows of the given numbers: (n, seq_len + 1). Copies whole windows, never token by token."""
        length = self.seq_len + 1
        if not self.windows:
            return np.tile(np.resize(self._stretch(0, self.tokens), length), (len(index), 1))
        return np.stack([self._stretch(w * self.seq_len, length) for w in index.tolist()])

    def _stretch(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens start to start + length - 1, over as many shards as they lie in."""
        parts = []
        shard = int(np.searchsorted(self.starts, start, "right")) - 1
        while length:
            begin = start - int(self.starts[shard])
            part = self.shards[shard][begin : begin + length]
            parts.append(part)
            start, length, shard = start + len(part), length - len(part), shard + 1
        return np.concatenate(parts).astype(np.int64)
