"""metrics.jsonl: one object a logged step, each step once and in order, also after a resume."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from abovemup.config.errors import RequestError
from abovemup.config.io import write_whole
from abovemup.tracking.records import Record, Summary, dumps, loads


class JsonlSink:
    """Appends rows to `path`.

    A row is handed to the operating system at once (another process sees it, SIGKILL does not lose it); `sync` puts
    all of them on the disk, for a checkpoint. `after` is what `rewind` returned for a resumed run. Without it the file
    is new: raises FileExistsError if it exists.
    """

    def __init__(self, path: Path, after: int | None = None) -> None:
        self._file = open(path, "xb" if after is None else "ab")  # noqa: SIM115
        self.last = after

    def log(self, record: Record) -> None:
        """Raises ValueError for a step that is not later than the last one, OSError for a full disk."""
        if self.last is not None and record["step"] <= self.last:
            raise ValueError(f"row of step {record['step']} after that of step {self.last}")
        self._file.write(dumps(record).encode() + b"\n")
        self._file.flush()
        self.last = int(record["step"])

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, summary: Summary) -> None:
        self.sync()
        self._file.close()


def rewind(path: Path, step: int, warn: Callable[[str], None] = warnings.warn) -> int:
    """Cut the file to the rows up to that of `step`, the last one when the checkpoint was written; returns `step`.

    The new file replaces the old one at once, so a reader has the one or the other. A torn last line is dropped
    with a warning. Raises RequestError when that row is not there, and for rows that are damaged or out of order.
    """
    kept: list[str] = []
    last = None
    for number, record, line in _rows(path, warn):
        if last is not None and record["step"] <= last:
            raise RequestError(f"{path}:{number}: step {record['step']} comes after step {last}; repair the file.")
        if record["step"] > step:
            break
        last = int(record["step"])
        kept.append(line.decode() + "\n")
    if last != step:
        raise RequestError(f"{path} lacks the row of step {step}: resume from an earlier checkpoint.")
    write_whole(path, "".join(kept))
    return step


def read(path: Path) -> list[Record]:
    """All rows, non-finite values as floats; the torn last line of a run that is being written is left out.

    Raises RequestError for a missing file or a damaged line.
    """
    return [record for _, record, _ in _rows(path, lambda text: None)]


def _rows(path: Path, warn: Callable[[str], None]) -> Iterator[tuple[int, Record, bytes]]:
    """Line number, row and bytes of each line; lines end at a newline only."""
    if not path.is_file():
        raise RequestError(f"{path} is missing: {path.parent} is not a whole run.")
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines if lines != [b""] else [], start=1):
        try:
            yield number, loads(line), line
        except ValueError:
            if number < len(lines):
                raise RequestError(f"{path}:{number} is damaged: {line[:60]!r}.") from None
            warn(f"{path}:{number}: the last line is torn and is dropped.")
