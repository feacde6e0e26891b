"""Files to documents. A document is the UTF-8 bytes of one text; .txt and .py keep their bytes as they are.

Records of a JSON-lines file end at ``\\n`` and nowhere else (an optional ``\\r`` before it): web text holds
U+2028, U+2029 and U+0085, at which ``str.splitlines`` would cut. A bad record is refused with its file and
number, or counted and left out (``data.skip_bad=true``).
"""

import json
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from abovemup.config.errors import RequestError

TEXT = (".txt",)
# A plain .json beside the data is seldom lines of text; a packed one is (C4).
JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".jsonl.zstd", ".json.gz", ".json.zst", ".json.zstd")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON + PARQUET

BOM = b"\xef\xbb\xbf"
ROWS = 256  # parquet rows held at once
READ = 2**17  # bytes


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
    number = 0
    try:
        for number, line in enumerate(_lines(_unpacked(path)), start=1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.strip():
                try:
                    document = _text(line, column)
                except ValueError as error:
                    bad(f"{path}:{number}", str(error))
                else:
                    yield document
    except DamagedError as error:
        bad(f"{path}:{number + 1}", str(error))


class DamagedError(Exception):
    """A packed file is cut short or no such file at all."""


def _unpacked(path: Path) -> Iterator[bytes]:
    """The bytes of a plain, gzip or zstd file, all its frames. Raises DamagedError at the end of a cut-off frame."""
    name = path.name.lower()
    gz, zst = name.endswith(".gz"), name.endswith((".zst", ".zstd"))
    with path.open("rb") as file:
        frame = None
        while data := file.read(READ):
            if not gz and not zst:
                yield data
                continue
            try:
                while data := data if frame else data.lstrip(b"\0"):  # some tools pad with zeros between frames
                    frame = frame or (zlib.decompressobj(31) if gz else zstandard.ZstdDecompressor().decompressobj())
                    yield frame.decompress(data)
                    data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
            except (zlib.error, zstandard.ZstdError) as error:
                raise DamagedError(f"the {'gzip' if gz else 'zstd'} file is damaged ({error})") from error
        if frame is not None:
            raise DamagedError(f"the {'gzip' if gz else 'zstd'} file is damaged: cut short")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines as they end at \\n; a last one without it too. A line may be longer than many chunks."""
    pending: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending.append(first)
        if others:
            yield b"".join(pending)
            yield from others[:-1]
            pending = [others[-1]]
    yield b"".join(pending)


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
            schema = file.schema_arrow
            if column not in schema.names:
                raise RequestError(
                    f"{path}: no column '{column}'; it has {_names(schema.names)} (choose with data.column=)"
                )
            kind = schema.field(column).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise RequestError(f"{path}: column '{column}' holds {kind}, not text (choose with data.column=)")
            for batch in file.iter_batches(ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
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
