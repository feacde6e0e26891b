"""Nemotron-CC, the first release: packed JSON lines on Common Crawl, by quality/kind/kind2, and their list."""

import fnmatch
import hashlib
import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.schema import Data
from abovemup.data.readers import CHUNK, BadRecords, Numbered, existing, json_lines, read_documents
from abovemup.data.sources import Batches, Place, folder_state, hash64, numbered_batches

if TYPE_CHECKING:
    import httpx

LIST = "contrib/Nemotron/Nemotron-CC/data-jsonl.paths.gz"
PARTS = [
    *(f"{quality}/actual/actual" for quality in ("high", "medium-high", "medium", "medium-low", "low")),
    *(f"high/synthetic/{kind2}" for kind2 in ("distill", "diverse_qa_pairs", "extract_knowledge", "knowledge_list")),
    *(f"{quality}/synthetic/wrap_medium" for quality in ("high", "low")),
]
BUSY = (429, 500, 502, 503, 504)
TRIES = 8  # in a row without a byte
LONGEST = 60.0  # seconds between two tries, unless the server says
TIMEOUT = 30.0  # seconds without an answer or a byte


class NemotronCC:
    """The chosen files in an order by hash: the first of them are a fair sample of all parts and years.

    Raises RequestError for a subset that is not one, and for a folder that is not there.
    """

    name, title, local = "nemotron_cc", "Nemotron-CC", False

    def __init__(self, data: Data) -> None:
        chosen: set[str] = set()
        for asked in (data.subset or "*").replace(" ", "").split(","):
            if not (parts := fnmatch.filter(PARTS, asked)):
                raise RequestError(f"data.subset={asked} is no part of Nemotron-CC; it has {', '.join(PARTS)}")
            chosen.update(parts)
        self.parts, self.column, url = sorted(chosen), data.column, data.url or ""
        self.folder = None if url.startswith(("http://", "https://")) else existing("data.url", url)
        self.place = str(self.folder or f"{url.rstrip('/')}/")
        self.found: dict[str, Any] = {}

    def identity(self) -> dict[str, Any]:
        about = {"place": self.place, "parts": self.parts, "column": self.column}
        return about | ({"folder": folder_state(self.folder)} if self.folder else {})

    def describe(self) -> dict[str, Any]:
        return self.found

    def batches(self, bad: BadRecords, start: Place | None = None) -> Batches:
        import httpx

        with httpx.Client(follow_redirects=True, timeout=TIMEOUT) as client:
            packed = self._list(client)
            version = hashlib.sha256(packed).hexdigest()
            if start and start["list"] != version:
                raise RequestError(f"{self.place}: the list of paths has changed since the reading began: prepare anew")
            paths = self._chosen(packed)
            self.found = {"list": version, "files": len(paths)}

            def read(file: int, record: int) -> Numbered:
                if self.folder:
                    return read_documents(self.folder / paths[file], self.column, bad, record)
                chunks = download(client, self.place + paths[file])
                return json_lines(chunks, ".zstd", self.place + paths[file], self.column, bad, record)

            yield from numbered_batches(read, len(paths), start, {"list": version})

    def _list(self, client: "httpx.Client") -> bytes:
        import httpx

        if self.folder:
            return existing("data.url", self.folder / LIST).read_bytes()
        try:
            client.head(self.place)
        except httpx.TransportError as error:
            fix = "connect, or set data.url= to a folder that holds its files"
            raise RunFailed(f"cannot reach {self.place} ({error}): {fix}") from error
        return b"".join(download(client, self.place + LIST))

    def _chosen(self, packed: bytes) -> list[str]:
        try:
            paths = zlib.decompress(packed, wbits=31).decode().split()
        except (zlib.error, UnicodeDecodeError) as error:
            raise RequestError(f"{self.place}: {LIST} is not a packed list of paths ({error})") from error
        marks = ["/quality={}/kind={}/kind2={}/".format(*part.split("/")) for part in self.parts]
        chosen = [path for path in paths if any(mark in path for mark in marks)]
        if not chosen:
            raise RequestError(f"{self.place}: {LIST} has no file of {', '.join(self.parts)}")
        return sorted(chosen, key=lambda path: hash64(path.encode()))


def download(client: "httpx.Client", url: str) -> Iterator[bytes]:
    """The bytes of `url`; where a connection breaks, it goes on from there. Raises RunFailed if it cannot."""
    import httpx

    at, tag, failed = 0, "", 0
    while True:
        asked = ""
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {})
        try:
            with client.stream("GET", url, headers=headers) as answer:
                if answer.status_code in BUSY:
                    reason = f"HTTP {answer.status_code}"
                    asked = answer.headers.get("Retry-After", "")
                elif answer.status_code not in (200, 206 if at else 200):
                    raise RequestError(f"{url}: HTTP {answer.status_code} {answer.reason_phrase}; see data.url")
                elif at and (answer.headers.get("ETag", "") != tag or (answer.status_code == 200 and not tag)):
                    raise RunFailed(f"{url} was changed while it was read: start again")
                else:
                    tag = answer.headers.get("ETag", "")
                    here = at if answer.status_code == 206 else 0  # a server without ranges gives all of it again
                    for chunk in answer.iter_raw(CHUNK):
                        here += len(chunk)
                        if here > at:
                            yield chunk[at - here :]
                            at, failed = here, 0
                    return
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        failed += 1
        if failed == TRIES:
            raise RunFailed(f"{url}: {reason}, {TRIES} times in a row.\nRun the same again: it goes on where it was.")
        time.sleep(float(asked) if asked.isdecimal() else min(2.0 ** (failed - 1), LONGEST))
