"""The standard library and torch as text, and a hash that no edit escapes."""

import gzip
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from abovemup.config.errors import RequestError
from abovemup.data import sources
from abovemup.data.readers import BadRecords
from abovemup.data.recipe import Recipe
from abovemup.data.sources import content_hash, find_source, hash64, listing

from .opening import experiment, jsonl, notes, opened, sentences


def test_stdlib_is_source_code_in_a_fixed_order() -> None:
    source = find_source(experiment(name="stdlib").data)
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    left_out = {"site-packages", "test", "tests", "encodings", "pydoc_data", "idlelib", "lib2to3", "__pycache__"}
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert 5e6 < sum(file.path.stat().st_size for file in source.files) < 2e7


def test_stdlib_documents_are_split_by_their_names() -> None:
    source = find_source(experiment(name="stdlib").data)
    keys = {document.key for batch, _ in source.batches(BadRecords(False)) for document in batch}
    assert keys <= {hash64(file.name.encode()) for file in source.files}


def test_python_adds_torch_without_importing_it(tmp_path: Path) -> None:
    library = find_source(experiment(name="stdlib").data)
    both = find_source(experiment(name="python").data)
    added = [file for file in both.files if file.name.startswith("torch/")]
    assert both.files == library.files + added
    assert sum(file.path.stat().st_size for file in added) > 3e7


def test_stdlib_as_a_corpus() -> None:
    """The default: 2^16 validation tokens of many files, with a line that says so."""
    arguments = {"tokenizer": "byte", "name": "stdlib", "seq_len": 128, "eval_tokens": 2**17, "vocab_size": 257}
    corpus = opened(**arguments)
    assert corpus.validation[:, 1:].numel() == 2**16
    assert corpus.windows * 128 > 2**22
    assert corpus.manifest["python"] == sys.version.split()[0]
    (line,) = [line for line in notes(**arguments) if "validation is" in line]
    assert "65,536 tokens (eval.tokens=131,072)" in line
    assert "none more than 2.0 %" in line or "none more than 1." in line


def remembering(path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    files = find_source(experiment(path).data).files
    later = time.time() + 10
    with monkeypatch.context() as patch:
        patch.setattr(sources.time, "time", lambda: later)
        return content_hash(files, listing(files), memory)


def test_the_hash_sees_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, memory = tmp_path / "text", tmp_path / "memory"
    folder.mkdir()
    jsonl(folder / "a.jsonl", sentences(20))
    seen = [remembering(folder, memory, monkeypatch)]
    assert remembering(folder, memory, monkeypatch) == seen[0]
    assert len(list(memory.iterdir())) == 1

    before = (folder / "a.jsonl").stat()
    time.sleep(0.02)  # a tick of the file system's clock
    text = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(text.replace("Document 3", "Document 4"))
    os.utime(folder / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time of change
    seen.append(remembering(folder, memory, monkeypatch))
    jsonl(folder / "b.jsonl", sentences(1))
    seen.append(remembering(folder, memory, monkeypatch))
    (folder / "b.jsonl").rename(folder / "c.jsonl")
    seen.append(remembering(folder, memory, monkeypatch))
    assert len(set(seen)) == 4


def test_a_file_just_written_is_hashed_again(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", sentences(20))
    files = find_source(experiment(path).data).files
    content_hash(files, listing(files), tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


def test_a_copied_folder_has_the_same_hash(tmp_path: Path) -> None:
    hashes = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "a.jsonl", sentences(20))
        files = find_source(experiment(tmp_path / name).data).files
        hashes.add(content_hash(files, listing(files), tmp_path / "memory"))
    assert len(hashes) == 1


def test_an_edited_file_gives_new_tokens(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", sentences(30))
    one = opened(path)
    jsonl(path, sentences(30, start=30))
    two = opened(path)
    assert one.manifest["source"]["content_hash"] != two.manifest["source"]["content_hash"]
    assert "Document 4" in two.coder.decode(two.batch(0, two.windows).ravel().tolist())
    assert "Document 4" not in one.coder.decode(one.batch(0, one.windows).ravel().tolist()).replace("Document 4 ", "")


def mixed(folder: Path) -> list[str]:
    """One folder of all kinds of files, in several languages; blank documents are in it, and not in the list."""
    folder.mkdir()
    russian, thai, hebrew = "Все люди рождаются свободными", "มนุษย์ทั้งหลายเกิดมามีอิสระ", "שלום עולם"
    parts = [[f"{word} {i} \u2028\x85 é" for i in range(9)] for word in ("English", russian, thai, hebrew, "🦙")]
    pq.write_table(
        pa.table({"text": [*parts[0], None, " \n"], "id": range(11)}), folder / "a.parquet", row_group_size=4
    )
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in [*part, ""]).encode() for part in parts]
    (folder / "b.jsonl").write_bytes(lines[1])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines[2]))
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(lines[3][:100]) + zstandard.compress(lines[3][100:]))
    (folder / "e.txt").write_text(parts[4][0], encoding="utf-8")
    (folder / "f.txt").write_text("\n")
    pq.write_table(pa.table({"text": ["last"]}), folder / "g.parquet")  # other columns than a.parquet
    (folder / "h.bin").write_bytes(b"not text")
    return [*parts[0], *parts[1], *parts[2], *parts[3], parts[4][0], "last"]


def test_stopped_anywhere_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mixed(tmp_path / "text")
    source = find_source(experiment(tmp_path / "text").data)
    for limit, least in (("BATCH", 3), ("BATCH_BYTES", 150)):
        with monkeypatch.context() as patch:
            patch.setattr(sources, limit, least)
            whole = list(source.batches(BadRecords(False)))
            assert [document.data.decode() for batch, _ in whole for document in batch] == made
            assert all(document.key == hash64(document.data) for batch, _ in whole for document in batch)
            for i, (_, place) in enumerate(whole, start=1):
                assert list(source.batches(BadRecords(False), json.loads(json.dumps(place)))) == whole[i:]
            assert len(whole) > 8


def test_bad_records_are_counted_up_to_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the count was when a batch came belongs to its place: no reading counts a record that is after it."""
    monkeypatch.setattr(sources, "BATCH", 2)
    lines = [json.dumps({"text": str(i)}) if i % 3 else "{broken" for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")  # the schema changes
    jsonl(tmp_path / "c.jsonl", ["last"])
    source = find_source(experiment(tmp_path).data)
    bad = BadRecords(True)
    seen = [(place, bad.count) for _, place in source.batches(bad)]
    assert bad.count == 11
    for place, count in seen:
        again = BadRecords(True)
        again.count = count
        list(source.batches(again, place))
        assert again.count == 11
    with pytest.raises(RequestError, match=r"a\.jsonl:1: not JSON"):
        list(source.batches(BadRecords(False)))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(RequestError, match=r"b\.parquet:1: no column 'text'; it has body"):
        list(source.batches(BadRecords(False)))


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", sentences(3))
    jsonl(tmp_path / ".b.jsonl", sentences(3))
    (tmp_path / ".git").mkdir()
    jsonl(tmp_path / ".git" / "c.jsonl", sentences(3))
    assert [file.name for file in find_source(experiment(tmp_path).data).files] == ["a.jsonl"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer would be read for ever."""
    jsonl(tmp_path / "a.jsonl", sentences(20))
    os.mkfifo(tmp_path / "b.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "c.txt"))
    (tmp_path / "d.txt").symlink_to("/dev/zero")
    assert [file.name for file in find_source(experiment(tmp_path).data).files] == ["a.jsonl"]
    for name in ("b.jsonl", "c.txt", "d.txt"):
        with pytest.raises(RequestError, match="neither a regular file nor a folder"):
            opened(tmp_path / name)
    with pytest.raises(RequestError, match="neither a regular file nor a folder"):
        Recipe(experiment(tokenizer="hf", tokenizer_path=tmp_path / "b.jsonl").tokenizer)
    (tmp_path / "e.txt").symlink_to("gone")
    with pytest.raises(RequestError, match=r"cannot read .*e\.txt"):
        opened(tmp_path)


@pytest.mark.parametrize("path", ["gone", "~nobody_of_this_name/x", "x" * 300, "a\0b", "/dev/null/x"])
def test_a_path_that_cannot_be_is_named(path: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"data.path={path}: ")):
        opened(Path(path))
    with pytest.raises(RequestError, match=re.escape(f"tokenizer.path={path}: ")):
        Recipe(experiment(tokenizer="hf", tokenizer_path=Path(path)).tokenizer)
