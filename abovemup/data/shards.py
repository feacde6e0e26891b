"""Token shards: flat files of uint16 or uint32, end of text after every document, and windows cut from them."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abovemup.config.errors import RequestError
from abovemup.config.io import sha256

SHARD_TOKENS = 100_000_000
AT_ONCE = 2**20
NOTHING = hashlib.sha256().hexdigest()
EDGE = 4096  # bytes at either end of a shard that are read at every start

Entry = dict[str, Any]  # of a shard: file, tokens, documents that end in it, sha256, edges


def shard_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


class ShardWriter:
    """Appends documents to `<split>-00000.bin`, `<split>-00001.bin`, ... in a folder; `close` returns their entries.

    Ids are below `size`, which decides the dtype. `before` is what `sync` gave to a writer that was stopped later:
    what it wrote since is cut off. Raises RequestError when there is less.
    """

    def __init__(self, folder: Path, split: str, size: int, eot: int, before: dict[str, Any] | None = None) -> None:
        self.folder, self.split, self.eot = folder, split, eot
        self.dtype = np.dtype(shard_dtype(size)).newbyteorder("<")
        before = before or {"bytes": 0, "shards": [], "counts": [0] * size}
        self.bytes: int = before["bytes"]  # of text
        self.counts = np.array(before["counts"], np.int64)  # of each id
        self.entries: list[Entry] = before["shards"]
        if path := self._unfinished():
            length = self.entries[-1]["tokens"] * self.dtype.itemsize
            if not path.exists() or path.stat().st_size < length:
                raise RequestError(f"{path} is not all there any more: remove {folder} and start again.")
            os.truncate(path, length)

    def write(self, tokens: NDArray[Any], size: int) -> None:
        """Whole documents of `size` bytes, each with its end of text; a shard may end inside of one."""
        self.bytes += size
        start = 0
        while start < len(tokens):
            if not self._unfinished():
                name = f"{self.split}-{len(self.entries):05d}.bin"
                self.entries.append({"file": name, "tokens": 0, "documents": 0})
            room = min(AT_ONCE, SHARD_TOKENS - self.entries[-1]["tokens"])
            self._append(tokens[start : start + room])
            start += room
            if self.entries[-1]["tokens"] == SHARD_TOKENS:
                self.close()

    def sync(self) -> dict[str, Any]:
        """Everything so far on the disk, and the state that goes on from there, as plain JSON values."""
        if path := self._unfinished():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return {"bytes": self.bytes, "shards": self.entries, "counts": self.counts.tolist()}

    def close(self) -> list[Entry]:
        """Flushes to the disk."""
        if path := self._unfinished():
            self.sync()
            self.entries[-1] |= {"sha256": sha256(path), "edges": _edges(path)}
        return self.entries

    def _unfinished(self) -> Path | None:
        """The last shard, if it is to grow."""
        growing = self.entries and "sha256" not in self.entries[-1]
        return self.folder / self.entries[-1]["file"] if growing else None

    def _append(self, tokens: NDArray[Any]) -> None:
        entry = self.entries[-1]
        with (self.folder / entry["file"]).open("ab" if entry["tokens"] else "wb") as file:
            file.write(tokens.astype(self.dtype).tobytes())
        counts = np.bincount(tokens, minlength=len(self.counts))
        self.counts += counts
        entry["tokens"] += len(tokens)
        entry["documents"] += int(counts[self.eot])


def _edges(path: Path) -> str:
    """A checksum of the first and the last page: cheap, and another one for nearly any other shard."""
    with path.open("rb") as file:
        first = file.read(EDGE)
        file.seek(-min(EDGE, path.stat().st_size), os.SEEK_END)
        return hashlib.sha256(first + file.read()).hexdigest()[:16]


def flaws(folder: Path) -> list[str]:
    """Every file that is not what was written, every byte being read; or what is wrong with the manifest."""
    found: list[str] = []
    try:
        found.extend(find_flaws(folder, read_manifest(folder), whole=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        found.append(str(error))
    return found


def find_flaws(folder: Path, manifest: dict[str, Any], whole: bool = False) -> Iterator[str]:
    """What is wrong with shards, by their sizes and edges or all of their bytes (`whole`), and with the tokenizer."""
    for entry in manifest["train"]["shards"] + manifest["validation"]["shards"]:
        path, length = folder / entry["file"], entry["tokens"] * np.dtype(manifest["dtype"]).itemsize
        if not path.is_file():
            yield f"{path.name} is missing"
        elif path.stat().st_size != length:
            yield f"{path.name} has {path.stat().st_size} bytes, not {length}"
        elif _edges(path) != entry["edges"]:
            yield f"{path.name} is another than was written (edited, or of another corpus)"
        elif whole and sha256(path) != entry["sha256"]:
            yield f"{path.name} has another checksum than when it was written"
    made = manifest["tokenizer"]
    there = {made["file"]: made["hash"]} if made["file"] else {}
    there |= {"tokenizer_config.json": made["config"]} if "config" in made else {}
    for name, its_hash in there.items():
        if (sha256(folder / name) if (folder / name).exists() else NOTHING) != its_hash:
            yield f"{name} is not the one the tokens were made with"


def total(entries: list[Entry], what: str) -> int:
    return sum(entry[what] for entry in entries)


def open_shards(folder: Path, entries: list[Entry], dtype: str) -> list[NDArray[Any]]:
    """Memory-maps the shards of one split."""
    kind = np.dtype(dtype).newbyteorder("<")
    return [np.asarray(np.memmap(folder / entry["file"], kind, "r")) for entry in entries]


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a checksum of itself."""
    return {**manifest, "sha256": hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ValueError when there is none, or not the one that was written."""
    if not (folder / "manifest.json").exists():
        raise ValueError("no manifest.json: no folder that `abovemup data prepare` has made to the end")
    manifest = read_record(folder / "manifest.json")
    if sealed({key: value for key, value in manifest.items() if key != "sha256"}) != manifest:
        raise ValueError("manifest.json was edited")
    return manifest


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object that an earlier process has written, or nothing."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


class TokenWindows:
    """The windows of a token stream: window w is tokens w*seq_len to w*seq_len + seq_len, the last one its last target.

    A stream shorter than one window is read in a circle to fill it, and has no whole window (`windows` is 0).
    """

    def __init__(self, shards: Sequence[NDArray[Any]], seq_len: int) -> None:
        self.shards, self.seq_len = shards, seq_len
        self.starts = np.cumsum([0, *(len(shard) for shard in shards)])
        self.tokens = int(self.starts[-1])
        self.windows = max(0, (self.tokens - 1) // seq_len)
        # Of each shard every stretch of a window's length, each as one item, which is copied whole.
        sizes = [(s, max(0, len(s) - seq_len), f"V{(seq_len + 1) * s.itemsize}") for s in shards]
        self.stretches = [np.ndarray(n, void, s if n else b"", 0, s.strides) for s, n, void in sizes]

    def rows(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows of the given numbers: (n, seq_len + 1). All those inside one shard are copied at once."""
        length = self.seq_len + 1
        if not self.windows:
            return np.tile(self._gather(np.arange(length) % self.tokens), (len(index), 1))
        begin = index * self.seq_len
        if len(self.shards) == 1:
            return self._inside(0, begin)
        out = np.empty((len(index), length), np.int64)
        shard = np.searchsorted(self.starts, begin, "right") - 1
        inside = begin + length <= self.starts[shard + 1]
        for s in np.flatnonzero(np.bincount(shard[inside])):
            here = inside & (shard == s)
            out[here] = self._inside(int(s), begin[here])
        if not inside.all():
            out[~inside] = self._gather(begin[~inside, None] + np.arange(length))
        return out

    def _inside(self, shard: int, begin: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = self.stretches[shard][begin - self.starts[shard]]
        return rows.view(self.shards[shard].dtype).reshape(len(begin), self.seq_len + 1).astype(np.int64)

    def _gather(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at any places, one by one."""
        shard, out = np.searchsorted(self.starts, places, "right") - 1, np.empty_like(places)
        for s in np.flatnonzero(np.bincount(shard.ravel())):
            out[shard == s] = self.shards[int(s)][places[shard == s] - self.starts[s]]
        return out
