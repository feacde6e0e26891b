"""Data sets of the Hugging Face hub, streamed by `datasets`; a folder with the same layout is read the same way."""

import functools
import os
import textwrap
import time
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.schema import Data
from abovemup.data.readers import TEXT_TYPES, BadRecords, Numbered, no_column, text_of
from abovemup.data.sources import Batches, Place, folder_state, numbered_batches

TRIES = 6
TIMEOUT = 10.0  # seconds for the hub's first answer
AGAIN = "Run the same again: it goes on where it was."
COPY = "set data.repo= to a folder with its files and README.md"


class Hub:
    """One column of one split. The newest revision is looked up when reading begins, and read to its end."""

    local = False

    def __init__(self, data: Data) -> None:
        folder = os.path.expanduser(data.repo or "")
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
        _quieten()
        try:
            if not self.folder:  # a missing network is noticed here, where nothing is tried again and again
                self.commit = self._commit(start["commit"] if start else self.revision)
            stream, names = self._stream()
            read = functools.partial(self._read, stream, names, bad)
            yield from numbered_batches(read, len(names), start, {"commit": self.commit})
        except (RequestError, RunFailed):
            raise
        except Exception as error:
            raise self._explained(error) or RequestError(f"data.repo={self.place}: {_short(error)}") from error

    def _read(self, stream: Any, names: list[str], bad: BadRecords, file: int, record: int) -> Numbered:
        try:
            rows = stream.shard(len(names), file)
            if bad.skip:  # one row group after the other: those before a damage are then the same at every reading
                rows = rows.reshard()
            for row in rows.skip(record):
                record += 1
                try:
                    yield record, text_of(row, self.column)
                except ValueError as error:
                    bad(f"{names[file]}:{record}", str(error))
        except RequestError:
            raise
        except Exception as error:  # of any library that unpacks or parses
            if self._explained(error) or getattr(error, "errno", None) is not None:
                raise
            bad(f"{names[file]}:{record + 1}", f"the file is damaged ({_short(error)})")

    def _commit(self, revision: str | None, tries: int = 1) -> str | None:
        """That of a revision. A hub that is busy is asked again, as the library does for everything after this."""
        from huggingface_hub import HfApi, errors

        try:
            return HfApi().dataset_info(self.place, revision=revision, timeout=TIMEOUT).sha
        except errors.HfHubHTTPError as error:
            if tries == TRIES or error.response.status_code not in (429, 503):
                raise
            asked = error.response.headers.get("Retry-After", "")
        time.sleep(float(asked) if asked.isdecimal() else 2.0**tries)
        return self._commit(revision, tries + 1)

    def _stream(self) -> tuple[Any, list[str]]:
        """Rows with the column, and the names of the files that they come from."""
        import datasets
        from datasets.packaged_modules.parquet.parquet import Parquet

        builder = datasets.load_dataset_builder(self.place, self.subset, revision=self.commit)
        config, parquet = builder.config, isinstance(builder, Parquet)
        if parquet:
            config.on_bad_files = "skip"  # the schema is that of the first file that has one
        stream = builder.as_streaming_dataset(self.split)
        if (types := stream.features) is not None:
            if self.column not in types:
                raise RequestError(f"{self.title}: {no_column(self.column, types)}")
            if (kind := getattr(types[self.column], "dtype", types[self.column])) not in TEXT_TYPES:
                raise RequestError(
                    f"{self.title}: column '{self.column}' holds {kind}, not text (choose with data.column=)"
                )
        if parquet:  # the other columns may differ from file to file, and are not fetched
            config.on_bad_files, config.columns = "error", [self.column]
            stream = builder.as_streaming_dataset(self.split)
        files = config.data_files.get(self.split, [])
        return stream, files if len(files) == stream.num_shards else [self.title] * stream.num_shards

    def _explained(self, error: Exception) -> Exception | None:
        """What a user can do about an error of the hub or the network; None for any other."""
        from huggingface_hub import constants, errors

        repo, hub, said = f"data.repo={self.place}", constants.ENDPOINT, _short(error)
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
        return None


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error) or repr(error), 800)


def _quieten() -> None:
    """What the libraries log is in the errors that they raise."""
    import datasets
    import huggingface_hub

    for library in (datasets, huggingface_hub):
        library.utils.logging.set_verbosity(100)
        library.utils.disable_progress_bars()
