"""Files to documents: records end at \\n only, bad ones are named, nothing is lost without a word."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from abovemup.config.errors import RequestError
from abovemup.data.readers import CHUNK, BadRecords, encode_text, read_documents

UNESCAPED = ["a\u2028b", "a\u2029b", "a\x85b", "e\u0301", "שלום", "🦙"]  # may stand in JSON as they are
AWKWARD = [*UNESCAPED, "a\x0bb", "a\x0cb", "a\x1cb\x1db\x1eb", "a\r\nb", "nul\x00"]


def raw(path: Path, bad: BadRecords, column: str = "text", start: int = 0) -> list[bytes]:
    return [document for _, document in read_documents(path, column, bad, start)]


def read(path: Path, column: str = "text", skip: bool = False) -> list[str]:
    return [document.decode() for document in raw(path, BadRecords(skip), column)]


def raw_lines(texts: list[str], end: str = "\n") -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + end for text in texts).encode()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_unicode_line_separators_do_not_split_a_record(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw_lines(UNESCAPED, end))
    assert read(path) == UNESCAPED


def test_escaped_control_characters_survive(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw_lines(AWKWARD))
    assert read(path) == AWKWARD


def test_no_final_newline_bom_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + raw_lines(["one"]) + b"\n  \r\n" + raw_lines(["two"])[:-1])
    assert read(path) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff"}', "UTF-8"),
        (b'{"text": "cut', "not JSON"),
        (b'["text"]', "JSON list"),
        (b'{"body": "x", "id": 1}', "no column 'text'; it has body, id"),
        (b'{"text": 7}', "holds int"),
        (b"[" * 200_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw_lines(["one", "two"]) + line + b"\n" + raw_lines(["three"]))
    with pytest.raises(RequestError, match=r"a\.jsonl:3: ") as caught:
        read(path)
    assert reason in str(caught.value)
    bad = BadRecords(skip=True)
    assert raw(path, bad) == [b"one", b"two", b"three"]
    assert bad.count == 1
    assert f"{path}:3" in bad.first


def test_null_and_empty_texts_are_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": null}\n{"text": ""}\n{"text": "x"}\n')
    assert read(path) == ["", "", "x"]


def test_lone_surrogates_become_the_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rb'{"text": "a\ud800b\udc80c\ud83e\udd99"}' + b"\n")
    assert read(path) == ["a\ufffdb\ufffdc🦙"]


def test_txt_is_one_document_with_its_bytes_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = b"\xef\xbb\xbfline\r\n\x00\xff\xfe\n"
    path.write_bytes(data)
    assert raw(path, BadRecords(False)) == [data]


TEXTS = [f"document {i} " + "x" * 100 * i for i in range(60)]


def pack(kind: str, data: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(data)
    return zstandard.compress(data)


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "jsonl.zstd", "json.gz", "JSONL.ZST"])
def test_packed_files_of_one_and_many_frames(tmp_path: Path, suffix: str) -> None:
    kind = "gz" if suffix.endswith("gz") else "zst"
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(pack(kind, raw_lines(TEXTS)))
    assert read(path) == TEXTS
    path.write_bytes(b"".join(pack(kind, raw_lines([text])) for text in TEXTS))
    assert read(path) == TEXTS


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "cut in frame 2", "garbage", "not packed"])
def test_a_damaged_packed_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    first, second = pack(kind, raw_lines(TEXTS[:30])), pack(kind, raw_lines(TEXTS[30:]))
    path.write_bytes(
        {
            "cut": first[: len(first) // 2],
            "cut in frame 2": first + second[: len(second) // 2],
            "garbage": first[:-20] + b"\x00\x01garbage" * 3,
            "not packed": raw_lines(TEXTS),
        }[damage]
    )
    reason = "" if damage == "garbage" else "the .(gz|zst) file is damaged"  # garbage may unpack to a bad line
    with pytest.raises(RequestError, match=rf"a\.jsonl\.{kind}:\d+: {reason}"):
        read(path)
    kept = read(path, skip=True)
    assert kept == TEXTS[: len(kept)]
    assert len(kept) < len(TEXTS)
    if damage == "cut in frame 2":
        assert len(kept) >= 30  # all that came before the cut


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_cut_loses_nothing_before_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    frames = [pack(kind, raw_lines([text])) for text in TEXTS]
    whole = b"".join(frames)
    ends = [len(b"".join(frames[:i])) for i in range(len(frames) + 1)]
    for cut in range(41, len(whole), 41):
        path.write_bytes(whole[:cut])
        bad = BadRecords(skip=True)
        before = sum(end <= cut for end in ends[1:])
        kept = [document.decode() for document in raw(path, bad)]
        # A gzip frame holds its text before its checksum: the cut document may have come out whole.
        assert kept in (TEXTS[:before], TEXTS[: before + 1])[: 1 if kind == "zst" else 2]
        assert bad.count == (cut not in ends)


def test_garbage_loses_no_frame_before_it(tmp_path: Path) -> None:
    for kind in ("gz", "zst"):
        path = tmp_path / f"a.jsonl.{kind}"
        path.write_bytes(b"".join(pack(kind, raw_lines([text])) for text in TEXTS) + b"garbage" * 9)
        assert read(path, skip=True) == TEXTS
        with pytest.raises(RequestError, match=rf"a\.jsonl\.{kind}:\d+: the .(gz|zst) file is damaged"):
            read(path)


def test_a_document_of_50_megabytes(tmp_path: Path) -> None:
    text = "long document. " * 3_500_000
    (tmp_path / "a.jsonl.zst").write_bytes(pack("zst", raw_lines(["before", text, "after"])))
    assert read(tmp_path / "a.jsonl.zst") == ["before", text, "after"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_reading_goes_on_after_any_record(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        parquet(path, text=TEXTS)
    else:
        data = raw_lines(TEXTS[:30]) + b"\n{broken\n" + raw_lines(TEXTS[30:])
        path.write_bytes(data if suffix in ("jsonl", "txt") else pack(suffix.split(".")[1], data))
    whole = list(read_documents(path, "text", BadRecords(True)))
    assert len(whole) == (1 if suffix == "txt" else 60)
    for i, (number, _) in enumerate(whole):
        bad = BadRecords(True)
        assert list(read_documents(path, "text", bad, number)) == whole[i + 1 :]
        assert bad.count == ("json" in suffix and number <= 30)  # a bad record is counted by the reading that meets it


def test_a_packed_file_of_nothing_has_no_documents_and_one_without_a_byte_is_damaged(tmp_path: Path) -> None:
    """A download that failed often leaves such a file."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert read(tmp_path / "a.jsonl") == []
    for kind in ("gz", "zst"):
        path = tmp_path / f"a.jsonl.{kind}"
        path.write_bytes(pack(kind, b""))
        assert read(path) == []
        path.write_bytes(b"")
        with pytest.raises(RequestError, match=rf"a\.jsonl\.{kind}:1: .*empty: fetch it again"):
            read(path)
        bad = BadRecords(skip=True)
        assert raw(path, bad) == []
        assert bad.count == 1


@pytest.mark.parametrize("padding", [1, 512, 3 * CHUNK])
def test_zeros_behind_a_gzip_member_are_padding(tmp_path: Path, padding: int) -> None:
    """As gzip(1) and Python's gzip read what was written to blocks."""
    path = tmp_path / "a.jsonl.gz"
    members = [gzip.compress(raw_lines(part)) + bytes(padding) for part in (TEXTS[:30], TEXTS[30:])]
    path.write_bytes(b"".join(members))
    assert gzip.decompress(path.read_bytes()) == raw_lines(TEXTS)
    assert read(path) == TEXTS
    path.write_bytes(bytes(padding))  # nothing but zeros is no gzip
    with pytest.raises(RequestError, match=r"a\.jsonl\.gz:1: the \.gz file is damaged"):
        read(path)


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return path


def test_parquet_reads_its_column_over_row_groups(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", id=list(range(len(AWKWARD) + 1)), text=[*AWKWARD, None])
    assert read(path) == [*AWKWARD, ""]
    coded = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": pa.array(AWKWARD).dictionary_encode()}), coded)
    assert read(coded) == AWKWARD


def test_parquet_refusals_name_the_file(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", body=["x"], score=[1.0])
    with pytest.raises(RequestError, match=r"a\.parquet:1: no column 'text'; it has body, score"):
        read(path)
    with pytest.raises(RequestError, match=r"a\.parquet:1: column 'score' holds double"):
        read(path, column="score")
    for kind in (pa.list_(pa.string()), pa.list_(pa.string(), 1), pa.dictionary(pa.int8(), pa.binary())):
        of_lists = parquet(tmp_path / "d.parquet", text=pa.array([None], kind))
        with pytest.raises(RequestError, match=r"d\.parquet:1: column 'text' holds .*, not text"):
            read(of_lists)
    assert read(path, skip=True) == []
    whole = parquet(tmp_path / "b.parquet", text=TEXTS).read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"PAR1" + b"x" * 50):
        (tmp_path / "c.parquet").write_bytes(data)
        with pytest.raises(RequestError, match=r"c\.parquet.*damaged or cut short"):
            read(tmp_path / "c.parquet")


def test_parquet_passes_over_row_groups_unread(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS)
    data = bytearray(path.read_bytes())
    data[10:200] = b"\xff" * 190  # in the first row group, of 7
    path.write_bytes(data)
    with pytest.raises(RequestError, match=r"a\.parquet:1: the parquet file is damaged"):
        read(path)
    found = raw(path, BadRecords(False), start=10)
    assert [document.decode() for document in found] == TEXTS[10:]


def test_parquet_that_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    cells = [b"one", b"\xed\xa0\x80", b"two"]
    path = parquet(tmp_path / "a.parquet", text=pa.array(cells, pa.binary()).view(pa.string()))
    assert raw(path, BadRecords(False)) == cells


@given(st.lists(st.text(), max_size=8))
def test_json_lines_give_back_any_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    assert raw(path, BadRecords(False)) == [encode_text(text) for text in texts]
