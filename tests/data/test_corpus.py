"""What a run reads, from files to batches."""

import gzip
import hashlib
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from abovemup.config.errors import RequestError
from abovemup.data.corpus import Corpus, open_corpus

from .opening import experiment, jsonl, notes, opened, sentences
from .test_prepare import Fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jsonl(tmp_path_factory.mktemp("text") / "a.jsonl", sentences(400)).parent


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return opened(folder)


def test_one_pass_reads_every_window_once(corpus: Corpus) -> None:
    assert corpus.windows > 1000
    rows = corpus.batch(0, corpus.windows)
    stream = rows[:, :-1].numpy()
    again = corpus.batch(corpus.windows, corpus.windows)[:, :-1].numpy()
    assert not np.array_equal(stream, again)
    assert sorted(map(tuple, stream)) == sorted(map(tuple, again))
    assert corpus.epoch(corpus.windows - 1) == 0
    assert corpus.epoch(corpus.windows) == 1


def test_inputs_of_the_windows_tile_the_stream_and_targets_are_one_later(corpus: Corpus, folder: Path) -> None:
    index = corpus._rows(np.arange(corpus.windows))
    assert np.array_equal(index[1:, 0], index[:-1, -1])  # the last target is the next window's first input
    text = corpus.coder.decode(np.append(index[:, :-1].ravel(), index[-1, -1]).tolist())
    documents = text.split("<|endoftext|>")
    assert set(documents[:-1]) <= set(sentences(400))
    assert len(documents) > 300


@pytest.mark.parametrize("cuts", [[1] * 32, [5, 27], [16, 16], [31, 1]])
def test_a_batch_is_the_same_however_it_is_asked_for(corpus: Corpus, cuts: list[int]) -> None:
    first = corpus.windows - 16  # over the end of a pass
    whole = corpus.batch(first, 32)
    assert corpus.batch(first, 0).shape == (0, whole.shape[1])  # of a rank that has no sequence
    assert whole.dtype == torch.int64
    starts = np.cumsum([0, *cuts[:-1]])
    parts = [corpus.batch(first + int(start), count) for start, count in zip(starts, cuts, strict=True)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_seed_orders_the_data_and_nothing_else(folder: Path, corpus: Corpus) -> None:
    other = opened(folder, seed=1)
    assert not torch.equal(other.batch(0, 16), corpus.batch(0, 16))
    assert torch.equal(other.validation, corpus.validation)
    assert torch.equal(opened(folder).batch(0, 16), corpus.batch(0, 16))


def test_validation_is_held_out(folder: Path, corpus: Corpus) -> None:
    assert corpus.validation.shape == (16, 17)
    train = corpus.coder.decode(corpus._rows(np.arange(corpus.windows))[:, :-1].ravel().tolist())
    held_out = opened_documents(opened(folder, eval_tokens=10**6))
    assert len(held_out) > 40
    assert not any(document in train for document in held_out)


def opened_documents(corpus: Corpus) -> list[str]:
    """Whole documents of the validation windows."""
    text = corpus.coder.decode(corpus.validation[:, :-1].ravel().tolist())
    return [document for document in text.split("<|endoftext|>")[1:-1] if document in set(sentences(400))]


def test_the_tokenizer_has_seen_no_validation_text(tmp_path: Path) -> None:
    letters = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
    words = [hashlib.sha256(bytes([i])).hexdigest()[:12].translate(letters) for i in range(60)]
    corpus = opened(jsonl(tmp_path / "a.jsonl", (f"{word} " * 40 for word in words)), tokenizer="bpe", vocab_size=3000)
    train = corpus.coder.decode(corpus._rows(np.arange(corpus.windows)).ravel().tolist())
    assert 0 < sum(word not in train for word in words) < 30
    for word in words:
        assert (len(corpus.coder.encode(f" {word}")) == 1) == (word in train)


def test_yardsticks(corpus: Corpus, folder: Path) -> None:
    m = corpus.manifest
    tokens = sum(shard["tokens"] for shard in m["validation"]["shards"])
    documents = sum(shard["documents"] for shard in m["validation"]["shards"])
    assert m["validation"]["bytes"] == tokens - documents  # bytes: one token each, and end of text has none
    targets = corpus.validation[:, 1:]
    assert corpus.bytes_per_token == (targets != corpus.coder.eot).double().mean().item()
    pairs = opened(folder, seq_len=1, eval_tokens=16)
    rows = pairs._rows(np.arange(pairs.windows))
    counts = np.bincount(np.append(rows[:, 0], rows[-1, 1]))  # every train token
    p = counts[counts > 0] / counts.sum()
    assert corpus.unigram_entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)


def test_manifest_says_what_was_made(corpus: Corpus, folder: Path) -> None:
    m = corpus.manifest
    assert m["source"]["documents"] == 400
    assert m["source"]["bytes"] == sum(map(len, sentences(400)))
    assert len(m["source"]["content_hash"]) == 64
    assert m["tokenizer"] | {"name": "byte", "size": 257, "eot": 256} == m["tokenizer"]
    assert m["dtype"] == "uint16"
    assert {"python", "packages", "unigram_entropy"} <= m.keys()
    assert sum(shard["documents"] for split in ("train", "validation") for shard in m[split]["shards"]) == 400


def test_a_run_longer_than_the_data_is_refused_with_both_numbers(folder: Path, corpus: Corpus) -> None:
    corpus.require(corpus.windows)
    with pytest.raises(RequestError) as caught:
        corpus.require(corpus.windows + 1)
    for number in (corpus.windows, corpus.windows + 1, corpus.windows * 16, corpus.windows * 16 + 16):
        assert f"{number:,}" in str(caught.value)
    assert "data.allow_repeat=true" in str(caught.value)
    opened(folder, allow_repeat=True).require(10**9)


def test_three_documents_of_ten_tokens(tmp_path: Path) -> None:
    """Case 51: refused at start, and with allow_repeat every batch comes."""
    path = jsonl(tmp_path / "a.jsonl", ["0123456789", "abcdefghij", "klmnopqrst"])
    corpus = opened(path, seq_len=32)
    with pytest.raises(RequestError, match=r"2,560 tokens.*80 windows"):
        corpus.require(80)
    corpus = opened(path, seq_len=32, allow_repeat=True)
    corpus.require(80)
    assert corpus.batch(76, 4).shape == (4, 33)
    assert corpus.batch(76, 0).shape == (0, 33)
    assert corpus.epoch(79) > 0
    assert corpus.validation.shape[1] == 33
    assert any("in a circle" in line for line in notes(path, seq_len=32))


@pytest.mark.parametrize("kind", ["empty folder", "other files", "empty files", "empty documents", "blank", "missing"])
def test_nothing_to_read_is_refused_naming_the_path(tmp_path: Path, kind: str) -> None:
    """Case 51."""
    folder = tmp_path / "corpus"
    if kind != "missing":
        folder.mkdir()
    if kind == "other files":
        (folder / "README.md").write_text("text")
    elif kind == "empty files":
        for name in ("a.txt", "b.jsonl"):
            (folder / name).touch()
        (folder / "c.jsonl.gz").write_bytes(gzip.compress(b""))
    elif kind == "empty documents":
        jsonl(folder / "a.jsonl", ["", None, "", ""])
    elif kind == "blank":
        (folder / "a.txt").write_text(" \n\n\t\n")
    with pytest.raises(RequestError, match="corpus"):
        opened(folder)


def test_wrong_column_and_suffix_and_no_path(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", sentences(3), column="body")
    with pytest.raises(RequestError, match="no column 'text'; it has body"):
        opened(path)
    with pytest.raises(RequestError, match="no column 'text'; it has body"):
        opened(path, skip_bad=True)
    assert opened(path, column="body").windows
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(RequestError, match=r"\.parquet.*\.csv"):
        opened(tmp_path / "a.csv")


def test_bad_records_are_refused_or_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", sentences(30))
    path.write_bytes(path.read_bytes() + b"{broken\n")
    with pytest.raises(RequestError, match=r"a\.jsonl:31: not JSON"):
        opened(path)
    assert any("1 bad records left out" in line for line in notes(path, skip_bad=True))
    assert opened(path, skip_bad=True).manifest["source"]["bad_records"] == 1
    with pytest.raises(RequestError, match=r"a\.jsonl:31: not JSON"):
        opened(path)  # also after it was prepared with skip_bad


def test_any_bytes_of_a_txt_reach_the_model(tmp_path: Path) -> None:
    for i, text in enumerate(sentences(10)):
        (tmp_path / f"{i}.txt").write_bytes(text.encode() + bytes([0xFF, 0x00, 0xC3, 0x28, i]))
    corpus = opened(tmp_path, seq_len=4)
    stream = corpus._rows(np.arange(corpus.windows))[:, :-1].ravel().tolist()
    assert stream.count(0xFF) >= 7


def test_a_model_smaller_than_the_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"257.*100.*model\.vocab_size=257"):
        opened(folder, vocab_size=100)


def test_bpe_is_smaller_than_bytes_and_lossless(folder: Path) -> None:
    corpus = opened(folder, tokenizer="bpe", vocab_size=320, seq_len=16)
    assert corpus.bytes_per_token is not None
    assert corpus.bytes_per_token > 1.5
    texts = [corpus.coder.decode(row.tolist()).replace("<|endoftext|>", "") for row in corpus.validation[:, 1:]]
    assert corpus.bytes_per_token == sum(map(len, texts)) / corpus.validation[:, 1:].numel()  # every text is ASCII
    rows = corpus._rows(np.arange(corpus.windows))
    assert rows.max() == corpus.coder.eot == 319
    documents = corpus.coder.decode(rows[:, :-1].ravel().tolist()).split("<|endoftext|>")
    assert set(documents[:-1]) <= set(sentences(400))
    assert corpus.coder.decode(corpus.coder.encode("é\u2028🦙")) == "é\u2028🦙"


@pytest.mark.slow
def test_a_document_of_50_mb(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*sentences(60), "long words of one document\n" * 1_900_000])
    corpus = opened(path, tokenizer="bpe", vocab_size=300)
    assert corpus.manifest["source"]["documents"] == 61
    assert corpus.manifest["source"]["bytes"] > 50_000_000


def test_a_run_prepares_what_it_reads_of_a_source_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABOVEMUP_CACHE", str(tmp_path))
    source = Fake([text * 3 for text in sentences(3000)])
    monkeypatch.setattr("abovemup.data.corpus.find_source", lambda data: source)
    exp = experiment(name="fineweb", eval_tokens=512)
    exp = replace(exp, train=replace(exp.train, tokens=64 * 16 * 10, steps=10, batch_size=64))
    lines: list[str] = []
    corpus = open_corpus(exp, lines.append)
    corpus.require(640)
    assert 640 <= corpus.windows < 640 + 20
    assert corpus.validation.shape == (32, 17)
    (line,) = [line for line in lines if "abovemup data prepare" in line]
    words = shlex.split(line[line.index("abovemup data prepare") :])
    assert words[3:6] == ["fineweb", "--tokens", str(640 * 16 + 16)]
    assert {"tokenizer=byte", "eval.tokens=512"} <= set(words)
    longer = replace(exp, train=replace(exp.train, tokens=2 * exp.train.tokens, steps=20))
    assert torch.equal(open_corpus(longer, lines.append).validation, corpus.validation)
    source.fail_at = 0  # no network any more
    lines.clear()
    again = open_corpus(exp, lines.append)
    assert torch.equal(again.batch(0, 64), corpus.batch(0, 64))
    assert not any("prepare" in line for line in lines)
    source.fail_at = None
    source.texts = [text[:40] for text in source.texts[:200] if text]
    with pytest.raises(RequestError, match=r"10,240 tokens .640 windows"):
        open_corpus(exp, lines.append).require(640)
