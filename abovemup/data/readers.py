"""Files to documents. A document is the UTF-8 bytes of one text; .txt and .py keep their bytes as they are.

Records of a JSON-lines file end at ``\\n`` and nowhere else (an optional ``\\r`` before it): web text holds
U+2028, U+2029 and U+0085, at which ``str.splitlines`` would cut. A bad record is refused with its file and
number, or counted and left out (``data.skip_bad=true``). Documents come with their number in the file, lines and
rows from 1, so that reading can go on after any of them.
"""

import itertools
import json
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError

TEXT = (".txt",)
# A plain .json beside the data is seldom lines of text; a packed one is (C4).
JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd", ".json.gz", ".json.zst", ".json.zstd")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON + PARQUET

BOM = b"\xef\xbb\xbf"
ROWS = 64  # parquet rows held at once
CHUNK = 2**13  # bytes of a packed file unpacked at once: what is lost before a damage
TEXT_TYPES = ("string", "large_string", "string_view", "null")

Numbered = Iterator[tuple[int, bytes]]


class BadRecords:
    """The rule for a bad record: an error that names it, or, when skipping, one more in `count`."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first = ""

    def __call__(self, where: str, reason: str) -> None:
        """`where` is file:line. Raises RequestError unless bad records are skipped."""
        if not self.skip:
            raise RequestError(f"{where}: {reason}\ndata.skip_bad=true leaves bad records out and counts them")
        self.count += 1
        self.first = self.first or f"{where}: {reason}"


def existing(key: str, value: str | Path) -> Path:
    """The file or folder that a setting names. Raises RequestError for none, and for a pipe, which would hang."""
    try:
        path = Path(value).expanduser()
        mode = path.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: ~name of nobody
        raise RequestError(f"{key}={value}: {getattr(error, 'strerror', None) or error}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RequestError(f"{key}={value} is neither a regular file nor a folder")
    return path


def read_documents(path: Path, column: str, bad: BadRecords, start: int = 0) -> Numbered:
    """The documents of one file after number `start`; empty ones too. Raises RequestError that names file and line."""
    name = path.name.lower()
    try:
        if name.endswith(JSON):
            with path.open("rb") as file:
                chunks = iter(lambda: file.read(CHUNK), b"")
                yield from json_lines(chunks, path.suffix, str(path), column, bad, start)
        elif name.endswith(PARQUET):
            yield from _parquet(path, column, bad, start)
        elif start == 0:
            yield 1, path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error


def json_lines(
    chunks: Iterable[bytes], suffix: str, where: str, column: str, bad: BadRecords, start: int = 0
) -> Numbered:
    """The documents of JSON lines after line `start`. `chunks` are the bytes of the file that errors call `where`."""
    import zstandard

    number = 0
    try:
        for number, line in enumerate(_lines(_unpacked(chunks, suffix.lower())), start=1):
            line = line.removeprefix(BOM) if number == 1 else line
            if number > start and line.strip():
                try:
                    yield number, _text(line, column)
                except ValueError as error:
                    bad(f"{where}:{number}", str(error))
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        bad(f"{where}:{number + 1}", f"the {suffix} file is damaged ({error})")


def _unpacked(chunks: Iterable[bytes], suffix: str) -> Iterator[bytes]:
    """The contents of all frames of a packed file. Raises the library's error at damage and EOFError at a cut."""
    import zstandard

    zstd = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
    frames: dict[str, Callable[[], Any]] = {".gz": lambda: zlib.decompressobj(wbits=31), ".zst": zstd, ".zstd": zstd}
    if suffix not in frames:
        yield from chunks
        return
    frame, ended = None, False
    for chunk in chunks:
        # What is behind a member and zero is padding, as to Python's gzip.
        while chunk := chunk.lstrip(b"\0") if ended and suffix == ".gz" else chunk:
            frame = frames[suffix]() if ended or frame is None else frame
            yield frame.decompress(chunk)
            chunk, ended = frame.unused_data, frame.eof
    if not ended:
        raise EOFError("it ends in the middle" if frame else "it is empty: fetch it again")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends. A line of many chunks is joined once."""
    parts: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]
    yield b"".join(parts)


def _text(line: bytes, column: str) -> bytes:
    """The text of one JSON line. Raises ValueError that says what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object with the text in a field")
    return text_of(record, column)


def text_of(record: dict[str, Any], column: str) -> bytes:
    """The text in a field of a record. Raises ValueError when there is none, or something else in it."""
    if column not in record:
        raise ValueError(no_column(column, record))
    text = record[column]
    if not isinstance(text, str | None):
        raise ValueError(f"column '{column}' holds {type(text).__name__}, not text")
    return encode_text(text or "")


def _parquet(path: Path, column: str, bad: BadRecords, start: int) -> Numbered:
    """Whole row groups before row `start` are passed over, not read."""
    import pyarrow
    import pyarrow.parquet

    number = start
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            kind = file.schema_arrow.field(column).type if column in names else None
            if str(kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind) not in TEXT_TYPES:
                holds = f"column '{column}' holds {kind}, not text (choose with data.column=)"
                bad(f"{path}:1", no_column(column, names) if kind is None else holds)
                return
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            ends = list(itertools.accumulate(sizes))
            groups = [group for group, end in enumerate(ends) if end > start]
            number = sum(sizes[: len(sizes) - len(groups)])
            for batch in file.iter_batches(ROWS, row_groups=groups, columns=[column]):
                for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    number += 1
                    if number > start:
                        yield number, text or b""
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        bad(f"{path}:{number + 1}", f"the parquet file is damaged or cut short ({str(error).splitlines()[0]})")


def encode_text(text: str) -> bytes:
    """UTF-8 of a text; a lone surrogate, which JSON can hold and UTF-8 cannot, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def no_column(column: str, columns: Iterable[str]) -> str:
    return f"no column '{column}'; it has {', '.join(columns) or 'none'} (choose with data.column=)"
