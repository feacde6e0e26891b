"""Data sets of the Hugging Face hub, streamed by `datasets`; a folder with the same layout is read the same way."""

import contextlib
import itertools
import logging.handlers
import os
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.schema import Data
from abovemup.data.readers import TEXT_TYPES, BadRecords, encode_text, no_column
from abovemup.data.sources import Batches, Document, Place, batched, folder_state, hash64

TRIES = 6
TIMEOUT = 10.0  # seconds for the hub's first answer
AGAIN = "Run the same again: it goes on where it was."
COPY = "set data.repo= to a folder with its files and README.md"


class Hub:
    """One column of one split. The newest revision is looked up when reading begins, and read to its end."""

    local = False

    def __init__(self, data: Data) -> None:
        if not data.repo:
            raise RequestError("data=hub needs data.repo=: owner/name of a data set of the hub, or a folder like one")
        folder = os.path.expanduser(data.repo)
        self.folder = Path(folder).absolute() if os.path.isdir(folder) else None
        self.name: str = data.name
        self.column, self.subset, self.split = data.column, data.subset, data.split
        self.place = str(self.folder or data.repo)
        self.title = " ".join(filter(None, (self.place, self.subset)))
        self.revision = None if self.folder else data.revision
        self.commit: str | None = None

    def identity(self) -> dict[str, Any]:
        about = {key: getattr(self, key) for key in ("place", "subset", "split", "revision", "column")}
        return about | ({"folder": folder_state(self.folder)} if self.folder else {})

    def describe(self) -> dict[str, Any]:
        return {"commit": self.commit}

    def batches(self, bad: BadRecords, start: Place | None = None) -> Batches:
        with self._errors():
            if not self.folder:  # a missing network is noticed here, where nothing is tried again and again
                self.commit = self._commit(start["commit"] if start else self.revision)
            stream = self._stream()
            if start:
                stream.load_state_dict(start["stream"])

            def documents() -> Iterator[Document]:
                for row in stream:
                    data = encode_text(row[self.column] or "")
                    yield Document(data, hash64(data))

            yield from batched(documents(), lambda: {"commit": self.commit, "stream": stream.state_dict()})

    def _commit(self, revision: str | None) -> str | None:
        """That of a revision. A hub that is busy is asked again, as the library does for everything after this."""
        from huggingface_hub import HfApi, errors

        for tries in itertools.count(1):
            try:
                return HfApi().dataset_info(self.place, revision=revision, timeout=TIMEOUT).sha
            except errors.HfHubHTTPError as error:
                if tries == TRIES or error.response.status_code not in (429, 503):
                    raise
                asked = error.response.headers.get("Retry-After", "")
            time.sleep(float(asked) if asked.isdecimal() else 2.0**tries)
        raise AssertionError

    def _stream(self) -> Any:
        import datasets

        where = {"path": self.place, "name": self.subset, "split": self.split, "revision": self.commit}
        whole = datasets.load_dataset(**where, streaming=True)
        types = whole.features or dict.fromkeys(next(iter(whole), {}))
        if self.column not in types:
            raise RequestError(f"{self.title}: {no_column(self.column, types)}")
        if (kind := getattr(types[self.column], "dtype", "string")) not in TEXT_TYPES:
            raise RequestError(f"{self.title}: column '{self.column}' holds {kind} (choose with data.column=)")
        try:  # the others may differ from file to file, and are not fetched
            return datasets.load_dataset(**where, streaming=True, columns=[self.column])
        except (TypeError, ValueError):  # a format that cannot: JSON lines
            return whole.select_columns([self.column])

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What the libraries raise in one or two lines; what they would print is kept for them."""
        import datasets
        import huggingface_hub

        logged = logging.handlers.BufferingHandler(1000)
        logged.setLevel(logging.ERROR)
        for name in ("datasets", "huggingface_hub"):
            logging.getLogger(name).handlers = [logged]
            logging.getLogger(name).propagate = False
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
        try:
            yield
        except (RequestError, RunFailed):
            raise
        except Exception as error:  # what was logged names the file
            said = logged.buffer[-1].getMessage() if logged.buffer else str(error) or repr(error)
            raise self._explained(error, textwrap.shorten(said, 800)) from error

    def _explained(self, error: Exception, said: str) -> Exception:
        from huggingface_hub import constants, errors

        repo, hub = f"data.repo={self.place}", constants.ENDPOINT
        page = f"{hub}/datasets/{self.place}"
        for kind, reason in (
            (errors.OfflineModeIsEnabled, f"is on the hub, and HF_HUB_OFFLINE is set: unset it, or {COPY}"),
            (errors.GatedRepoError, f"is gated: accept its terms at {page}\nand set HF_TOKEN to a token of yours"),
            (errors.RevisionNotFoundError, f"has no branch, tag or commit data.revision={self.revision}"),
            (errors.RepositoryNotFoundError, f"is no folder, and no data set on {hub} (a private one needs HF_TOKEN)"),
        ):
            if isinstance(error, kind) or (kind is errors.GatedRepoError and "gated dataset" in said):
                return RequestError(f"{repo} {reason}")
        if any(getattr(getattr(e, "response", None), "status_code", 0) == 429 for e in (error, error.__cause__)):
            return RunFailed(f"{hub} refuses for now: too many requests (HF_TOKEN raises the limit). {AGAIN}")
        if isinstance(error, (errors.HTTPError, ConnectionError, TimeoutError)) and not self.folder:
            return RunFailed(f"{repo}: no connection to {hub} ({said})\n{AGAIN} Without a network, {COPY}")
        return RequestError(f"{repo}: {said}")
