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
from abovemup.data.readers import BadRecords, encode_text, read_documents

UNESCAPED = ["a\u2028b", "a\u2029b", "a\x85b", "e\u0301", "שלום", "🦙"]  # may stand in JSON as they are
AWKWARD = [*UNESCAPED, "a\x0bb", "a\x0cb", "a\x1cb\x1db\x1eb", "a\r\nb", "nul\x00"]


def read(path: Path, column: str = "text", skip: bool = False) -> list[str]:
    return [document.decode() for document in read_documents(path, column, BadRecords(skip))]


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
    assert list(read_documents(path, "text", bad)) == [b"one", b"two", b"three"]
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
    assert list(read_documents(path, "text", BadRecords(False))) == [data]


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
    reason = "" if damage == "garbage" else "the (gzip|zstd) file is damaged"  # garbage may unpack to a bad line
    with pytest.raises(RequestError, match=rf"a\.jsonl\.{kind}:\d+: {reason}"):
        read(path)
    kept = read(path, skip=True)
    assert kept == TEXTS[: len(kept)]
    assert len(kept) < len(TEXTS)
    if damage == "cut in frame 2":
        assert len(kept) >= 25  # the last few kB before the cut go with it


def test_an_empty_packed_file_has_no_documents(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"")
        assert read(tmp_path / name) == []


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
    with pytest.raises(RequestError, match=r"a\.parquet: no column 'text'; it has body, score"):
        read(path)
    with pytest.raises(RequestError, match="column 'score' holds float"):
        read(path, column="score")
    whole = parquet(tmp_path / "b.parquet", text=TEXTS).read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"PAR1" + b"x" * 50):
        (tmp_path / "c.parquet").write_bytes(data)
        with pytest.raises(RequestError, match=r"c\.parquet.*damaged or cut short"):
            read(tmp_path / "c.parquet")


@given(st.lists(st.text(), max_size=8))
def test_json_lines_give_back_any_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    assert list(read_documents(path, "text", BadRecords(False))) == [encode_text(text) for text in texts]
