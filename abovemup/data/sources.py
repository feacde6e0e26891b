"""Where text comes from: files here (the standard library, the installed torch, a user's), the hub, or the web.

A source is read in batches, each with the `Place` after it: plain JSON, from which reading goes on as if it had
never stopped.
"""

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from abovemup.config.errors import RequestError
from abovemup.config.io import sha256
from abovemup.config.schema import Data
from abovemup.config.site import cache_folder
from abovemup.data.readers import SUFFIXES, BadRecords, Numbered, existing, read_documents

# Tests, tables (a fifth of the bytes) and programs that are not the library.
NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "idlelib", "lib2to3", "__pycache__",
}  # fmt: skip
STDLIB_EVAL_TOKENS = 2**16
BATCH, BATCH_BYTES = 256, 2**20  # a long document may be more
RACY = 2.0  # seconds: a file changed this recently could change again without a new time stamp


class File(NamedTuple):
    path: Path
    name: str  # relative, with slashes: the same on every machine


class Document(NamedTuple):
    data: bytes  # UTF-8, or the bytes of a .txt as they are
    key: int  # 64 bits that decide its split: a hash of the name (source code) or of the text (data.path)


Place = dict[str, Any]
Batches = Iterator[tuple[list[Document], Place]]


class Source(Protocol):
    """Documents that are not blank, in one fixed order."""

    name: str
    title: str
    place: str  # what an error names
    local: bool  # small and at hand: it may be read more than once

    def identity(self) -> dict[str, Any]:
        """JSON: what decides the documents, known without a network."""

    def describe(self) -> dict[str, Any]:
        """JSON: what else was found, once batches were read."""

    def batches(self, bad: BadRecords, start: Place | None = None) -> Batches:
        """From `start`, or the beginning. Raises RequestError that names a bad record, RunFailed without a network."""


@dataclass
class Files:
    """Files of this machine in a fixed order, and how their documents are named to the split."""

    name: str
    title: str
    files: list[File]
    place: str
    key_by_name: bool
    column: str
    local: bool = True

    def identity(self) -> dict[str, Any]:
        contents = content_hash(self.files, listing(self.files), cache_folder() / "contents")
        return {"content_hash": contents, "column": self.column}

    def describe(self) -> dict[str, Any]:
        return {"files": len(self.files)}

    def batches(self, bad: BadRecords, start: Place | None = None) -> Batches:
        def read(file: int, record: int) -> Numbered:
            return read_documents(self.files[file].path, self.column, bad, record)

        names = [file.name.encode() for file in self.files] if self.key_by_name else None
        return numbered_batches(read, len(self.files), start, {}, names)


def numbered_batches(
    read: Callable[[int, int], Numbered],
    files: int,
    start: Place | None,
    about: Place,
    names: list[bytes] | None = None,
) -> Batches:
    """Batches of the documents that are not blank, about BATCH of them or BATCH_BYTES at once.

    `read(file, record)` gives those of a file after a record, `about` is what else a place holds, `names` are hashed in
    place of the texts.
    """
    at = {"file": 0, "record": 0} | about | (start or {})
    batch, size, first = [], 0, at["file"]
    for file in range(first, files):
        for record, data in read(file, at["record"] if file == first else 0):
            at |= {"file": file, "record": record}
            if not data.strip():
                continue
            batch.append(Document(data, hash64(names[file] if names else data)))
            size += len(data)
            if len(batch) == BATCH or size >= BATCH_BYTES:
                yield batch, at.copy()
                batch, size = [], 0
    if batch:
        yield batch, at.copy()


def hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def find_source(data: Data) -> Source:
    """The source that `data` names; the network is not asked. Raises RequestError, as for a path without text."""
    if data.name == "text":
        return _user_files(data)
    if data.name == "nemotron_cc":
        from abovemup.data.web import NemotronCC

        return NemotronCC(data)
    if data.name not in ("stdlib", "python"):
        from abovemup.data.hub import Hub

        return Hub(data)
    title, place = f"the standard library of Python {sys.version.split()[0]}", sysconfig.get_paths()["stdlib"]
    roots = {"": Path(place)}
    if data.name == "python":
        roots["torch/"] = Path(str(distribution("torch").locate_file("torch")))  # without importing it
        title += " and the sources of torch"
    found = ((prefix, root, name) for prefix, root in roots.items() for name in _walk(root, NOT_LIBRARY))
    files = [File(root / name, prefix + name) for prefix, root, name in found if name.endswith(".py")]
    return Files(data.name, title, files, place, key_by_name=True, column="")


def _user_files(data: Data) -> Source:
    root = existing("data.path", data.path or "")
    parent, names = (root.parent, [root.name]) if root.is_file() else (root, _walk(root))
    # Pipes and devices are no text; a link to nothing is refused when it is read.
    names = [name for name in names if os.path.isfile(parent / name) or not os.path.exists(parent / name)]
    files = [File(parent / name, name) for name in names if name.lower().endswith(SUFFIXES)]
    if not files:
        found = ", ".join(sorted({Path(name).suffix or name for name in names})[:8]) or "nothing"
        raise RequestError(f"data.path={data.path} has no file of {', '.join(SUFFIXES)} (it has {found})")
    return Files("text", str(root), files, str(data.path), key_by_name=False, column=data.column)


def _walk(root: Path, without: Collection[str] = ()) -> list[str]:
    """Relative names of all files that are not hidden, sorted; folders named in `without` are not entered."""

    def refuse(error: OSError) -> None:
        raise RequestError(f"cannot read {error.filename}: {error.strerror}") from error

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        below = Path(folder).relative_to(root)
        found += [(below / name).as_posix() for name in names if not name.startswith(".")]
    return sorted(found)


def folder_state(folder: Path) -> str:
    """What changes whenever a file below it is edited."""
    return hashlib.sha256(listing([File(folder / name, name) for name in _walk(folder)]).encode()).hexdigest()


def listing(files: list[File]) -> str:
    """Names, sizes, times and inodes, as JSON: what changes whenever a file is edited. Raises RequestError."""
    try:
        stats = [(file.path.stat(), file) for file in files]
    except OSError as error:
        raise RequestError(f"cannot read {error.filename}: {error.strerror}") from error
    return json.dumps(
        [[str(f.path.absolute()), f.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s, f in stats]
    )


def content_hash(files: list[File], seen: str, memory: Path) -> str:
    """SHA-256 of names and contents. `memory` is a folder that remembers it by listing (`seen`): a start is cheap.

    The listing holds the change time, which an edit cannot keep; one that is only just written is not remembered.
    """
    remembered = memory / hashlib.sha256(seen.encode()).hexdigest()
    if remembered.exists() and len(text := remembered.read_text()) == 64:
        return text
    started = time.time()
    digest = hashlib.sha256()
    for file in files:
        try:
            inner = sha256(file.path)
        except OSError as error:
            raise RequestError(f"cannot read {file.path}: {error.strerror}") from error
        digest.update(f"{file.name}\0{inner}\n".encode("utf-8", "surrogateescape"))
    newest = max(max(mtime, ctime) for _, _, _, mtime, ctime, _ in json.loads(seen)) / 1e9
    if started - newest > RACY and listing(files) == seen:
        with contextlib.suppress(OSError):  # a corpus in a cache that is read only can be read all the same
            memory.mkdir(parents=True, exist_ok=True)
            remembered.write_text(digest.hexdigest())  # a part of it has not 64 characters, and is not believed
    return digest.hexdigest()
