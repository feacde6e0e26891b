"""Shards give back what was written, and windows are cut from them as from one stream."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from abovemup.data.shards import ShardWriter, TokenWindows, open_shards, shard_dtype

EOT = 9


def written(folder: Path, shard_tokens: int, size: int = 10) -> tuple[np.ndarray, list[dict[str, object]]]:
    writer = ShardWriter(folder, "train", size, EOT, shard_tokens)
    parts = [np.append(np.arange(n) % 9, EOT).astype(np.uint32) for n in (3, 0, 10, 1, 25, 7)]
    for part in parts:
        writer.write(part)
    stream, entries = np.concatenate(parts), writer.close()
    assert np.array_equal(writer.counts, np.bincount(stream, minlength=size))
    return stream, entries


@pytest.mark.parametrize("shard_tokens", [1, 7, 10, 26, 52, 1000])
@pytest.mark.parametrize(("size", "dtype"), [(10, "uint16"), (100_000, "uint32")])
def test_shards_hold_the_stream(tmp_path: Path, shard_tokens: int, size: int, dtype: str) -> None:
    stream, entries = written(tmp_path, shard_tokens, size)
    shards = open_shards(tmp_path, entries, dtype)
    assert np.array_equal(np.concatenate(shards), stream)
    assert all(len(shard) <= shard_tokens for shard in shards)
    assert sum(int(str(entry["documents"])) for entry in entries) == 6
    for entry in entries:
        assert entry["sha256"] == hashlib.sha256((tmp_path / str(entry["file"])).read_bytes()).hexdigest()
    json.dumps(entries)


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    _, entries = written(tmp_path, 10)
    path = tmp_path / "train-00002.bin"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "short" else path.read_bytes() + b"\0\0")
    with pytest.raises(ValueError, match=r"train-00002\.bin"):
        open_shards(tmp_path, entries, "uint16")


def test_dtype_by_vocabulary() -> None:
    assert [shard_dtype(size) for size in (257, 65_536, 65_537, 128_256)] == ["uint16", "uint16", "uint32", "uint32"]


@pytest.mark.parametrize("shard_tokens", [1, 5, 8, 9, 13, 52, 1000])
@pytest.mark.parametrize("seq_len", [1, 4, 8, 51])
def test_windows_of_many_shards_are_those_of_one_stream(tmp_path: Path, shard_tokens: int, seq_len: int) -> None:
    stream, entries = written(tmp_path, shard_tokens)
    windows = TokenWindows(open_shards(tmp_path, entries, "uint16"), seq_len)
    assert len(stream) == windows.tokens == 52
    assert windows.windows == 51 // seq_len
    index = np.arange(windows.windows)[::-1].copy()
    expected = np.stack([stream[w * seq_len : w * seq_len + seq_len + 1] for w in index])
    rows = windows.rows(index)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, expected)


def test_a_stream_shorter_than_a_window_is_read_in_a_circle(tmp_path: Path) -> None:
    stream, entries = written(tmp_path, 10)
    windows = TokenWindows(open_shards(tmp_path, entries, "uint16"), 52)
    assert windows.windows == 0
    assert np.array_equal(windows.rows(np.array([0, 0])), np.tile(np.append(stream, stream[0]), (2, 1)))
