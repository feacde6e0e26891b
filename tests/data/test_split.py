"""Every document is in one split, by a hash, and both splits hold something."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abovemup.config.errors import RequestError
from abovemup.data.readers import BadRecords
from abovemup.data.sources import Document, Source, find_source, hash64
from abovemup.data.split import PIECE, cut, documents, make_split

from .opening import experiment, jsonl, sentences


def source_of(path: Path) -> Source:
    return find_source(experiment(path).data)


def halves(source: Source) -> tuple[list[bytes], list[bytes]]:
    """Train and validation documents."""
    split = make_split(source, BadRecords(False))
    items = list(split.assign(documents(source, BadRecords(False))))
    return [d.data for d, v in items if not v], [d.data for d, v in items if v]


@pytest.mark.parametrize("count", [2, 3, 5, 20, 100, 3000])
def test_both_splits_hold_something_and_nothing_is_in_both(tmp_path: Path, count: int) -> None:
    texts = sentences(count)
    train, validation = halves(source_of(jsonl(tmp_path / "a.jsonl", texts)))
    assert train
    assert validation
    assert sorted(train + validation) == sorted(text.encode() for text in texts)


def test_the_share_is_what_200_documents_need(tmp_path: Path) -> None:
    for count, low, high in [(500, 60, 140), (3000, 200, 320)]:
        texts = [text * 5 for text in sentences(count)]
        _, validation = halves(source_of(jsonl(tmp_path / "a.jsonl", [text * 40 for text in texts])))
        assert low < len(validation) < high


def test_equal_texts_fall_on_the_same_side(tmp_path: Path) -> None:
    train, validation = halves(source_of(jsonl(tmp_path / "a.jsonl", sentences(300) * 2)))
    assert not set(train) & set(validation)


def test_the_split_does_not_depend_on_the_order_or_the_files(tmp_path: Path) -> None:
    texts = sentences(300)
    one = halves(source_of(jsonl(tmp_path / "a.jsonl", texts)))
    (tmp_path / "b").mkdir()
    jsonl(tmp_path / "b" / "x.jsonl", texts[200:])
    jsonl(tmp_path / "b" / "y.jsonl", texts[:200])
    two = halves(source_of(tmp_path / "b"))
    assert [sorted(side) for side in one] == [sorted(side) for side in two]


def test_one_text_again_and_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a\.jsonl holds only one text"):
        halves(source_of(jsonl(tmp_path / "a.jsonl", ["hello world"] * 3)))


def test_one_long_text_is_cut_and_one_short_text_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(sentences(2000)))
    train, validation = halves(source_of(path))
    assert len(train) + len(validation) > 5
    assert max(map(len, train)) <= 2 * PIECE
    assert b"".join(d.data for d in cut(documents(source_of(path), BadRecords(False)), PIECE)) == path.read_bytes()
    assert all(piece.endswith(b"next.\n") for piece in train + validation)
    path.write_text("a short line\n")
    with pytest.raises(RequestError, match=r"a\.txt holds only one text"):
        halves(source_of(path))


def test_many_documents_are_never_cut(tmp_path: Path) -> None:
    texts = [text + "x" * 3 * PIECE for text in sentences(50)]
    train, validation = halves(source_of(jsonl(tmp_path / "a.jsonl", texts)))
    assert sorted(train + validation) == sorted(text.encode() for text in texts)


@given(st.text(st.characters(codec="utf-8"), max_size=200), st.integers(4, 40))
def test_pieces_are_the_text_cut_between_characters(text: str, piece: int) -> None:
    parts = [d.data for d in cut([Document(text.encode(), 0)], piece)]
    assert "".join(part.decode() for part in parts) == text
    assert len(parts) == 1 or all(piece <= len(part) <= 2 * piece for part in parts[:-1])
    assert parts[-1] or not text


def test_a_line_end_at_the_very_end_leaves_no_empty_piece() -> None:
    assert [d.data for d in cut([Document(b"xxxxxxx\n", 0)], 4)] == [b"xxxx", b"xxx\n"]


def test_hash64_is_fixed() -> None:
    """Another hash would move documents between the splits of everybody's corpora."""
    assert hash64(b"abovemup") == 10088461172365418126
