"""Where text comes from: the standard library, the installed torch, or the files of a user."""

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from abovemup.config.errors import RequestError
from abovemup.config.schema import Data
from abovemup.data.readers import SUFFIXES, BadRecords, existing, read_documents

# Tests, tables (a fifth of the bytes) and programs that are not the library.
NOT_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "idlelib", "lib2to3", "__pycache__",
}  # fmt: skip
STDLIB_EVAL_TOKENS = 2**16
RACY = 2.0  # seconds: a file changed this recently could change again without a new time stamp


@dataclass(frozen=True)
class File:
    path: Path
    name: str  # relative, with slashes: the same on every machine


@dataclass(frozen=True)
class Document:
    data: bytes  # UTF-8, or the bytes of a .txt as they are
    key: int  # 64 bits that decide its split: a hash of the name (source code) or of the text (data.path)


@dataclass(frozen=True)
class Source:
    """Files in a fixed order, and how their documents are named to the split."""

    name: str
    title: str
    files: list[File]
    place: str  # what an error names
    key_by_name: bool
    column: str

    def documents(self, bad: BadRecords) -> Iterator[Document]:
        """Every document that is not blank, in the fixed order."""
        for file in self.files:
            for data in read_documents(file.path, self.column, bad):
                if data.strip():
                    yield Document(data, hash64(file.name.encode() if self.key_by_name else data))


def hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def find_source(data: Data) -> Source:
    """The source that `data` names. Raises RequestError for a path without readable text files."""
    if data.name == "text":
        return _user_files(data)
    files = _python_files(Path(sysconfig.get_paths()["stdlib"]), "")
    title = f"the standard library of Python {sys.version.split()[0]}"
    if data.name == "python":
        files += _torch_files()
        title += " and the sources of torch"
    place = sysconfig.get_paths()["stdlib"]
    return Source(data.name, title, files, place, key_by_name=True, column="")


def _python_files(root: Path, prefix: str) -> list[File]:
    names = [name for name in _walk(root, NOT_LIBRARY) if name.endswith(".py")]
    return [File(root / name, prefix + name) for name in names]


def _torch_files() -> list[File]:
    spec = importlib.util.find_spec("torch")  # finds the folder without importing torch
    if spec is None or spec.origin is None:
        raise RequestError("data=python reads the sources of the installed torch, and torch is not installed")
    return _python_files(Path(spec.origin).parent, "torch/")


def _user_files(data: Data) -> Source:
    if not data.path:
        raise RequestError("data=text needs data.path=: a file or a folder of " + ", ".join(SUFFIXES))
    root = existing("data.path", data.path)
    names = [root.name] if root.is_file() else _walk(root)
    parent = root.parent if root.is_file() else root
    # Pipes and devices are no text; a link to nothing is refused when it is read.
    names = [name for name in names if os.path.isfile(parent / name) or not os.path.exists(parent / name)]
    files = [File(parent / name, name) for name in names if name.lower().endswith(SUFFIXES)]
    if not files:
        found = ", ".join(sorted({Path(name).suffix or name for name in names})[:8]) or "nothing"
        raise RequestError(f"data.path={data.path} has no file of {', '.join(SUFFIXES)} (it has {found})")
    return Source("text", str(root), files, data.path, key_by_name=False, column=data.column)


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
            with file.path.open("rb") as opened:
                inner = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise RequestError(f"cannot read {file.path}: {error.strerror}") from error
        digest.update(f"{file.name}\0{inner}\n".encode("utf-8", "surrogateescape"))
    newest = max(max(mtime, ctime) for _, _, _, mtime, ctime, _ in json.loads(seen)) / 1e9
    if started - newest > RACY and listing(files) == seen:
        with contextlib.suppress(OSError):  # a corpus in a cache that is read only can be read all the same
            memory.mkdir(parents=True, exist_ok=True)
            remembered.write_text(digest.hexdigest())  # a part of it has not 64 characters, and is not believed
    return digest.hexdigest()
