"""What was read from a file, kept beside the prepared data: the next fit does not parse the file again."""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from abovemup.config.errors import RequestError
from abovemup.config.site import cache_folder

SETTLED = 2.0  # seconds: a younger file may change once more without a new time


def cached(path: Path, what: str, read: Callable[[], bytes]) -> bytes:
    """`read()`, or what it gave for `what` when `path` had its size and time of now; a damaged entry is no entry.

    An entry has the digest of all it depends on and holds. Where nothing can be written it is read each time.
    """
    stat = path.stat()
    name = f"{os.path.abspath(path)}\n{what}"
    key = hashlib.sha256(f"{name}\n{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}".encode()).digest()
    entry = None
    with suppress(OSError, RequestError):
        entry = cache_folder() / "read" / hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
        found = entry.read_bytes()
        if found[:32] == _seal(key, found[32:]):
            return found[32:]
    data = read()
    after = path.stat()
    same = (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    if entry and same and abs(time.time() - stat.st_mtime) > SETTLED:
        with suppress(OSError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            aside = entry.with_suffix(f".{os.getpid()}")
            aside.write_bytes(_seal(key, data) + data)
            os.replace(aside, entry)
    return data


def _seal(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=32).digest()
