"""Files to documents. A document is the UTF-8 bytes of one text; .txt and .py keep their bytes as they are.

Records of a JSON-lines file end at ``\\n`` and nowhere else (an optional ``\\r`` before it): web text holds
U+2028, U+2029 and U+0085, at which ``str.splitlines`` would cut. A bad record is refused with its file and
number, or counted and left out (``data.skip_bad=true``).
"""

import io
import json
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from abovemup.config.errors import RequestError

TEXT = (".txt",)
# A plain .json beside the data is seldom lines of text; a packed one is (C4).
JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd", ".json.gz", ".json.zst", ".json.zstd")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON + PARQUET

BOM = b"\xef\xbb\xbf"
ROWS = 256  # parquet rows held at once


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


def read_documents(path: Path, column: str, bad: BadRecords) -> Iterator[bytes]:
    """The documents of one file, in its order; empty ones too. Raises RequestError that names file and line."""
    name = path.name.lower()
    try:
        if name.endswith(JSON):
            yield from _json_lines(path, column, bad)
        elif name.endswith(PARQUET):
            yield from _parquet(path, column, bad)
        else:
            yield path.read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error


def _json_lines(path: Path, column: str, bad: BadRecords) -> Iterator[bytes]:
    import pyarrow

    packing = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}.get(path.suffix.lower())
    number = 0
    with path.open("rb") as file:
        lines = io.BufferedReader(pyarrow.CompressedInputStream(file, packing)) if packing else file
        try:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    try:
                        document = _text(line, column)
                    except ValueError as error:
                        bad(f"{path}:{number}", str(error))
                    else:
                        yield document
        except OSError as error:
            if error.errno is not None:
                raise
            bad(f"{path}:{number + 1}", f"the {packing} file is damaged ({error})")


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
    if column not in record:
        raise ValueError(f"no column '{column}'; it has {_names(record)} (choose with data.column=)")
    text = record[column]
    if not isinstance(text, str | None):
        raise ValueError(f"column '{column}' holds {type(text).__name__}, not text")
    return encode_text(text or "")


def _parquet(path: Path, column: str, bad: BadRecords) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise RequestError(f"{path}: no column '{column}'; it has {_names(names)} (choose with data.column=)")
            for batch in file.iter_batches(ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str | None):
                        holds = f"column '{column}' holds {type(text).__name__}"
                        raise RequestError(f"{path}: {holds}, not text (choose with data.column=)")
                    yield encode_text(text or "")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        bad(f"{path}:{row + 1}", f"the parquet file is damaged or cut short ({str(error).splitlines()[0]})")


def encode_text(text: str) -> bytes:
    """UTF-8 of a text; a lone surrogate, which JSON can hold and UTF-8 cannot, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _names(columns: Iterable[str]) -> str:
    return ", ".join(columns) or "none"
