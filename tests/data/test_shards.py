"""Shards give back what was written, and windows are cut from them as from one stream."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from abovemup.config.errors import RequestError
from abovemup.data import shards
from abovemup.data.shards import (
    ShardWriter,
    TokenWindows,
    find_flaws,
    flaws,
    open_shards,
    read_manifest,
    sealed,
    shard_dtype,
)

EOT = 9
NO_FILE = {"file": ""}  # of a tokenizer


PARTS = [np.append(np.arange(n) % 9, EOT).astype(np.uint32) for n in (3, 0, 10, 1, 25, 7)]


def written(folder: Path, shard_tokens: int, size: int = 10) -> tuple[np.ndarray, list[dict[str, object]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        writer = ShardWriter(folder, "train", size, EOT)
        for part in PARTS:
            writer.write(part, 2 * len(part))
        stream, entries = np.concatenate(PARTS), writer.close()
    assert np.array_equal(writer.counts, np.bincount(stream, minlength=size))
    assert writer.bytes == 2 * len(stream)
    return stream, entries


@pytest.mark.parametrize("shard_tokens", [1, 7, 10, 26, 52, 1000])
@pytest.mark.parametrize(("size", "dtype"), [(10, "uint16"), (100_000, "uint32")])
def test_shards_hold_the_stream(tmp_path: Path, shard_tokens: int, size: int, dtype: str) -> None:
    stream, entries = written(tmp_path, shard_tokens, size)
    opened = open_shards(tmp_path, entries, dtype)
    assert np.array_equal(np.concatenate(opened), stream)
    assert all(len(shard) <= shard_tokens for shard in opened)
    assert sum(int(str(entry["documents"])) for entry in entries) == 6
    for entry in entries:
        assert entry["sha256"] == hashlib.sha256((tmp_path / str(entry["file"])).read_bytes()).hexdigest()
    json.dumps(entries)


@pytest.mark.parametrize("shard_tokens", [1, 7, 26, 1000])
@pytest.mark.parametrize("stop", range(len(PARTS) + 1))
def test_a_writer_goes_on_from_what_it_had_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_tokens: int, stop: int
) -> None:
    (tmp_path / "whole").mkdir()
    _, expected = written(tmp_path / "whole", shard_tokens)
    monkeypatch.setattr(shards, "SHARD_TOKENS", shard_tokens)
    first = ShardWriter(tmp_path, "train", 10, EOT)
    for part in PARTS[:stop]:
        first.write(part, 1)
    state = json.loads(json.dumps(first.sync()))
    for part in PARTS[stop:]:  # is lost, and is on the disk all the same
        first.write(part, 1)
    first.sync()
    second = ShardWriter(tmp_path, "train", 10, EOT, state)
    for part in PARTS[stop:]:
        second.write(part, 1)
    assert second.close() == expected
    assert second.bytes == len(PARTS)
    assert np.array_equal(second.counts, np.bincount(np.concatenate(PARTS)))
    for entry in expected:
        name = str(entry["file"])
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_writer_whose_shard_has_been_cut_refuses_to_go_on(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 10, EOT)
    writer.write(PARTS[2], 1)
    state = writer.sync()
    (tmp_path / "train-00000.bin").write_bytes(b"ab")
    with pytest.raises(RequestError, match=r"train-00000\.bin is not all there"):
        ShardWriter(tmp_path, "train", 10, EOT, state)


@pytest.mark.parametrize("damage", ["missing", "short", "long", "edited", "swapped"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    _, entries = written(tmp_path, 10)
    path = tmp_path / "train-00002.bin"
    if damage == "missing":
        path.unlink()
    elif damage == "edited":
        path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    elif damage == "swapped":
        other = tmp_path / "train-00003.bin"
        path.rename(tmp_path / "x")
        other.rename(path)
        (tmp_path / "x").rename(other)
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "short" else path.read_bytes() + b"\0\0")
    manifest = {"dtype": "uint16", "train": {"shards": entries}, "validation": {"shards": []}, "tokenizer": NO_FILE}
    found = list(find_flaws(tmp_path, manifest))
    assert [line.split()[0] for line in found] == ["train-00002.bin", "train-00003.bin"][: 1 + (damage == "swapped")]


def test_an_edit_in_the_middle_of_a_large_shard_is_found_by_its_checksum(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 10, EOT)
    writer.write(np.full(3 * shards.EDGE, 5, np.uint32), 1)
    entries = writer.close()
    tokenizer = {"file": "tokenizer.json", "hash": hashlib.sha256(b"{}").hexdigest()}
    manifest = {"dtype": "uint16", "train": {"shards": entries}, "validation": {"shards": []}, "tokenizer": tokenizer}
    (tmp_path / "manifest.json").write_text(json.dumps(sealed(manifest)))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert flaws(tmp_path) == []
    path = tmp_path / "train-00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not list(find_flaws(tmp_path, manifest))
    (line,) = flaws(tmp_path)
    assert "train-00000.bin" in line
    path.unlink()
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert flaws(tmp_path) == [
        "train-00000.bin is missing", "tokenizer.json is not the one the tokens were made with"
    ]  # fmt: skip


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(sealed({"a": 1, "b": [2, 3]})))
    assert read_manifest(tmp_path)["b"] == [2, 3]
    (tmp_path / "manifest.json").write_text((tmp_path / "manifest.json").read_text().replace("3", "4", 1))
    with pytest.raises(ValueError, match="edited"):
        read_manifest(tmp_path)
    assert flaws(tmp_path) == ["manifest.json was edited"]
    for nonsense in ("", "null", "[]", '"x"', "5", "{}"):
        (tmp_path / "manifest.json").write_text(nonsense)
        assert flaws(tmp_path) == ["manifest.json was edited"]
    (tmp_path / "manifest.json").unlink()
    assert "data prepare" in flaws(tmp_path)[0]


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
