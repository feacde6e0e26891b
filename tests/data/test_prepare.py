"""The cache: filled once, never half, the same bits however often it was stopped."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abovemup.config.errors import RequestError, RunFailed
from abovemup.data import pool, prepare, progress, shards, sources
from abovemup.data.prepare import Prepared, key_of, prepared
from abovemup.data.progress import Job
from abovemup.data.readers import BadRecords
from abovemup.data.recipe import Recipe
from abovemup.data.sources import Batches, Document, Place, hash64
from abovemup.data.split import Amount, blind_split
from abovemup.data.tokenizer import ByteTokenizer

from .opening import experiment, jsonl, notes, opened, sentences


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ABOVEMUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "a.jsonl", sentences(200))


def corpora(cache: Path) -> list[Path]:
    return [path for path in (cache / "corpora").iterdir() if path.is_dir()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_prepared_once(cache: Path, text: Path) -> None:
    assert notes(text)
    (folder,) = corpora(cache)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not [line for line in notes(text, eval_tokens=256) if "train and" in line]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert set(before) == {"manifest.json", "train-00000.bin", "validation-00000.bin"}


# From the code before there were parts, processes and amounts: README's numbers rest on such shards.
PINNED = {
    ("many", "bpe"): (
        "36212acc1d4ebc80ca5022ad32a57c79d9ecc2b62e8a9659d1cacb3e225172a2",
        "cfe532617ccb242ca848165be8cc11ef644f981b1574fe65105d72fae34d1502",
        3.3858220327365327,
    ),
    ("folder", "byte"): (
        "b27320a8255e15fbbbf8c8fbac09b638743359e5140205f4f7450575f871c64c",
        "4eb909d3585fc405db814f3840dbf3b57512b672f866e81853b43c87ea5027bb",
        3.1196556788270318,
    ),
    ("few", "bpe"): (
        "14f608c3709fa9ad61540b221bf4b2fc4179f20c07bf1f71b3612f1299bee8e7",
        "cc3313ad73c4aa52395840172bdbdf06775108681a819d19136f0d7ef01df27a",
        3.392225682567169,
    ),
}


@pytest.mark.parametrize(("name", "tokenizer"), list(PINNED))
def test_the_tokens_of_files_are_what_they_always_were(cache: Path, tmp_path: Path, name: str, tokenizer: str) -> None:
    path = tmp_path / "pinned"
    (path / "b").mkdir(parents=True)
    texts = [text * (1 + i % 7) for i, text in enumerate(sentences(300))]
    if name == "few":
        (path / "x.txt").write_text("".join(sentences(900)))
        (path / "y.txt").write_text("".join(sentences(300, 5000)))
    else:
        jsonl(path / "a.jsonl", texts[:150])
        if name == "folder":
            jsonl(path / "b" / "c.jsonl", texts[150:])
        else:
            path = path / "a.jsonl"
    manifest = opened(path, tokenizer=tokenizer, vocab_size=300 if tokenizer == "bpe" else 257).manifest
    sums = [manifest[split]["shards"][0]["sha256"] for split in ("train", "validation")]
    assert (*sums, manifest["unigram_entropy"]) == PINNED[name, tokenizer]


@dataclass
class Fake:
    """A source of the documents `texts`; None is a bad record. `batch` documents at once; read once if not `local`."""

    texts: list[str | None]
    batch: int = 7
    local: bool = False
    fail_at: int | None = None  # the batch before which the network goes
    name, title, place = "fake", "a fake", "fake://"
    starts: list[Place | None] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        return {"texts": hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()}

    def describe(self) -> dict[str, Any]:
        return {"commit": "abc"}

    def batches(self, bad: BadRecords, start: Place | None) -> Batches:
        self.starts.append(start)
        for number, first in enumerate(range((start or {"at": 0})["at"], len(self.texts), self.batch)):
            if number == self.fail_at:
                raise RunFailed("the network is gone")
            found = []
            for i, text in enumerate(self.texts[first : first + self.batch], start=first):
                if text is None:
                    bad(f"record {i}", "is none")
                else:
                    found.append(Document(text.encode(), hash64(text.encode())))
            if found:
                yield found, {"at": first + self.batch}


def job(source: Fake, tokenizer: str = "byte", **more: Any) -> Job:
    config = experiment(None, tokenizer, vocab_size=257 if tokenizer == "byte" else 300).tokenizer
    return Job(source, Recipe(config), skip_bad=True, **{"workers": 1, **more})


def quiet(wanted: Job) -> Prepared:
    return prepared(wanted, lambda line: None)


def documents(found: Prepared, split: str) -> list[str]:
    """Of a corpus of bytes."""
    stream = np.concatenate(found.shards[split])
    parts = np.split(stream, np.flatnonzero(stream == 256) + 1)
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts if len(part)]


TEXTS: list[str | None] = [None if i % 50 == 9 else text * (1 + i % 5) for i, text in enumerate(sentences(400))]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 3000 tokens, no more held out than need be; and a disk that need not be waited for."""
    monkeypatch.setattr(progress, "HELD_OUT", 0)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 3000)


@pytest.mark.parametrize("amount", [None, Amount(1, 1), Amount(10_000, 1000), Amount(20_000, 100)])
def test_a_source_read_once_gives_its_documents_in_order_up_to_the_amount(
    cache: Path, small: None, amount: Amount | None
) -> None:
    """A slow readable twin."""
    threshold = blind_split().threshold
    train: list[str] = []
    validation: list[str] = []

    def size(texts: list[str]) -> int:
        return sum(len(text) + 1 for text in texts)

    needed, held_out = (10**9, 10**9) if amount is None else (amount.train, 2 * amount.validation)
    for text in filter(None, TEXTS):
        split, least = (validation, held_out) if hash64(text.encode()) < threshold else (train, needed)
        if size(split) < least:
            split.append(text)
    for batch in (1, 7, 1000):
        found = quiet(job(Fake(TEXTS, batch), amount=amount, out=cache / f"out{batch}"))
        assert documents(found, "train") == train
        assert documents(found, "validation") == validation
        assert found.manifest["source"]["amount"] == (None if amount is None else list(amount))
    assert len(train) > 0 < len(validation)


def test_what_is_held_out_of_a_source_read_once_does_not_depend_on_the_train_tokens(cache: Path, small: None) -> None:
    texts: list[str | None] = [*sentences(3000)]
    found = [quiet(job(Fake(texts), amount=Amount(tokens, 500))) for tokens in (2000, 20_000, 100_000)]
    assert len({key_of(job(Fake(texts), amount=Amount(tokens, 500))) for tokens in (2000, 20_000)}) == 2
    held_out = [documents(each, "validation") for each in found]
    assert held_out[0] == held_out[1] == held_out[2]
    assert 1000 <= sum(len(text) + 1 for text in held_out[0]) < 1100
    assert len(documents(found[2], "train")) > 4 * len(documents(found[1], "train"))


def test_the_amount_is_part_of_the_name(cache: Path) -> None:
    folders = {key_of(job(Fake(TEXTS), amount=amount)) for amount in (None, Amount(5, 5), Amount(6, 5), Amount(5, 6))}
    assert len(folders) == 4
    assert key_of(job(Fake(TEXTS, batch=3))) in folders


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_interrupted_at_any_record_of_its_progress_it_goes_on_to_the_same_bits(
    cache: Path, small: None, monkeypatch: pytest.MonkeyPatch, local: bool, tokenizer: str
) -> None:
    amount = None if local else Amount(12_000 if tokenizer == "byte" else 5000, 500)
    wanted = job(Fake(TEXTS, 15, local), tokenizer, amount=amount, out=cache / "whole")
    expected = contents(quiet(wanted).folder)
    monkeypatch.setattr(progress, "SAVE", 0.0)
    whole, writes = prepare.write_whole, 0

    def killed(path: Path, text: str, when: int, after: bool) -> None:
        nonlocal writes
        writes += 1
        if writes == when and not after:
            raise KeyboardInterrupt
        whole(path, text)
        if writes == when:
            raise KeyboardInterrupt

    def kill(when: int) -> None:
        for module in (prepare, progress):
            monkeypatch.setattr(module, "write_whole", lambda path, text: killed(path, text, when, after=when % 2 == 0))

    kill(0)
    quiet(replace(wanted, source=Fake(TEXTS, 15, local), out=cache / "count"))
    last = writes
    assert last > 5
    for when in range(1, last + 1):
        source, out, writes = Fake(TEXTS, 15, local), cache / f"out{when}", 0
        kill(when)
        with pytest.raises(KeyboardInterrupt):
            quiet(replace(wanted, source=source, out=out))
        assert not out.exists()
        writes = last + 1
        assert contents(quiet(replace(wanted, source=source, out=out)).folder) == expected


def test_a_network_that_goes_and_comes(cache: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = quiet(job(Fake(TEXTS), out=cache / "whole"))
    monkeypatch.setattr(progress, "SAVE", 0.0)
    source, lines = Fake(TEXTS, fail_at=5), []
    legs = 0
    while True:
        try:
            found = prepared(job(source), lines.append)
            break
        except RunFailed:
            legs += 1
    assert legs > 8
    assert source.starts[-1] is not None
    assert contents(found.folder) == contents(expected.folder)
    assert any("goes on where it was stopped" in line for line in lines)
    assert found.manifest["source"]["bad_records"] == 8


def test_a_source_that_has_changed_is_begun_anew(cache: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SAVE", 0.0)
    out = cache / "out"
    with pytest.raises(RunFailed):
        quiet(job(Fake(TEXTS, fail_at=9), out=out))
    other = Fake(TEXTS[::-1])
    found = quiet(job(other, out=out))
    assert other.starts == [None]
    assert contents(found.folder) == contents(quiet(job(Fake(TEXTS[::-1]))).folder)


def test_a_folder_that_holds_something_else_is_left_alone(cache: Path) -> None:
    out = cache / "out"
    quiet(job(Fake(TEXTS), out=out))
    before = contents(out)
    quiet(job(Fake(TEXTS), out=out))
    with pytest.raises(RequestError, match="another corpus"):
        quiet(job(Fake(TEXTS[1:]), out=out))
    (cache / "mine").mkdir()
    (cache / "mine" / "thesis.tex").touch()
    with pytest.raises(RequestError, match="mine"):
        quiet(job(Fake(TEXTS), out=cache / "mine"))
    assert contents(out) == before
    assert [path.name for path in (cache / "mine").iterdir()] == ["thesis.tex"]


def test_nothing_of_a_user_is_in_the_way_or_lost(cache: Path) -> None:
    source = Fake(TEXTS)
    out = cache / "out"
    out.mkdir(parents=True)
    quiet(job(source, out=out))  # an empty folder may be filled
    for mine in ("notes.bin", "train-00000.bin"):
        other = cache / f"{mine}.out"
        part = cache / f"{mine}.out.part"
        part.mkdir()
        (part / mine).write_text("precious")
        with pytest.raises(RequestError, match=r"out\.part is where it would be made"):
            quiet(job(source, out=other))
        assert (part / mine).read_text() == "precious"
    done = quiet(job(source, out=cache / "new.part")).folder
    with pytest.raises(RequestError, match=r"new\.part is where"):
        quiet(job(source, out=cache / "new"))
    assert contents(done) == contents(out)
    (cache / "link").symlink_to(cache / "nowhere")
    (cache / "file").touch()
    for wrong in ("link", "file", "file/below"):
        with pytest.raises(RequestError, match=f"{wrong.split('/')[0]} for prepared data: .*Choose another --out"):
            quiet(job(Fake(TEXTS, fail_at=0), out=cache / wrong))  # before anything is read


def test_a_folder_that_would_change_its_own_source_is_refused(cache: Path) -> None:
    source = Fake(TEXTS)
    source.place = str(cache)
    with pytest.raises(RequestError, match="inside of the source"):
        quiet(job(source, out=cache / "out"))
    assert source.starts == []


def test_what_stopped_at_a_bad_record_goes_on_without_it(
    cache: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SAVE", 0.0)
    texts = [text for text in TEXTS if text is not None]
    texts[300:300] = [None]  # type: ignore[list-item]
    source, expected = Fake(texts), quiet(job(Fake(texts), out=cache / "whole"))
    with pytest.raises(RequestError, match="record 300: is none"):
        quiet(replace(job(source), skip_bad=False))
    found = quiet(job(source))
    assert source.starts[-1] is not None
    assert contents(found.folder) == contents(expected.folder)
    with pytest.raises(RequestError, match="leaves out 1 bad records, the first record 300: is none"):
        quiet(replace(job(source), skip_bad=False))


def test_too_little_text_leaves_nothing_behind(cache: Path, text: Path) -> None:
    jsonl(text, ["", " "])
    with pytest.raises(RequestError, match="holds no text"):
        opened(text)
    assert corpora(cache) == []


@pytest.mark.parametrize("texts", [[], [None, None], ["one text"], ["a"] * 5])
def test_a_source_read_once_without_enough_text_is_refused(cache: Path, texts: list[str | None]) -> None:
    with pytest.raises(RequestError, match="fake:// holds too little text"):
        quiet(job(Fake(texts)))


def test_any_number_of_threads_gives_the_same_bits(cache: Path, small: None) -> None:
    for tokenizer, amount in (("byte", None), ("bpe", Amount(5000, 500))):
        expected = contents(quiet(job(Fake(TEXTS), tokenizer, amount=amount, out=cache / tokenizer)).folder)
        for workers, batch in ((1, 7), (3, 7), (3, 2)):
            out = cache / f"{tokenizer}-{workers}-{batch}"
            assert (
                contents(quiet(job(Fake(TEXTS, batch), tokenizer, amount=amount, out=out, workers=workers)).folder)
                == expected
            )


class Refusing(ByteTokenizer):
    """Refuses the word `bad`."""

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        if b"bad" in documents:
            raise RequestError("bad")
        return super().encode_documents(documents)


def test_batches_are_read_a_few_ahead_and_errors_arrive_in_their_place() -> None:
    read: list[int] = []

    def batches(end: int) -> Iterator[tuple[list[bytes], int]]:
        for i in range(end):
            read.append(i)
            yield [b"bad" if i == 20 else b"x" * i], i

    stream = pool.encoded(batches(10**6), Refusing(), 2)
    assert [(i, encoded.lengths.tolist()) for (encoded, i), _ in zip(stream, range(5), strict=False)] == [
        (i, [i + 1]) for i in range(5)
    ]
    stream.close()
    assert len(read) <= 6 + 2 * pool.AHEAD
    seen: list[int] = []
    with pytest.raises(RequestError, match="bad"):
        seen.extend(i for _, i in pool.encoded(batches(50), Refusing(), 3))
    assert seen == list(range(20))


LONG = """
import time
from abovemup.data.pool import encoded
from abovemup.data.tokenizer import ByteTokenizer
class Long(ByteTokenizer):
    def encode_documents(self, documents):
        if documents == [b"long"]:
            time.sleep(600)
        return super().encode_documents(documents)
stream = encoded(iter([([b"short"], 0), *[([b"long"], i) for i in range(1, 9)]]), Long(), 2)
assert next(stream)[1] == 0
stream.close()
"""


def test_a_long_document_does_not_keep_a_process_that_ends() -> None:
    subprocess.run([sys.executable, "-c", LONG], check=True, timeout=120)


def test_another_tokenizer_column_or_text_is_another_corpus(cache: Path, text: Path) -> None:
    opened(text)
    opened(text, tokenizer="bpe", vocab_size=300)
    opened(text, tokenizer="bpe", vocab_size=301)
    opened(jsonl(text.parent / "b.jsonl", sentences(200)))
    assert len(corpora(cache)) == 4
    opened(text, skip_bad=True)  # as long as there is nothing to skip
    assert len(corpora(cache)) == 4


@pytest.mark.parametrize("damage", ["short", "missing", "manifest", "tokenizer", "no manifest"])
def test_a_damaged_cache_is_named_and_made_again(cache: Path, text: Path, damage: str) -> None:
    arguments = {"tokenizer": "bpe", "vocab_size": 300}
    opened(text, **arguments)
    (folder,) = corpora(cache)
    good = contents(folder)
    if damage == "short":
        (folder / "train-00000.bin").write_bytes(good["train-00000.bin"][:-4])
    elif damage == "missing":
        (folder / "validation-00000.bin").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_bytes(good["manifest.json"][:50])
    elif damage == "tokenizer":
        (folder / "tokenizer.json").write_bytes(good["tokenizer.json"][:-1])
    else:
        (folder / "manifest.json").unlink()
    (line,) = [line for line in notes(text, **arguments) if "is damaged" in line]
    assert str(folder) in line
    assert contents(folder) == good


def test_a_full_disk_keeps_what_was_written_and_the_same_command_goes_on(
    cache: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(quiet(job(Fake(TEXTS), out=cache / "whole")).folder)
    monkeypatch.setattr(progress, "SAVE", 0.0)
    append, count = shards.ShardWriter._append, 0

    def full(writer: shards.ShardWriter, tokens: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == 20:
            append(writer, tokens[: len(tokens) // 2])  # a part of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        append(writer, tokens)

    source = Fake(TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "_append", full)
        with pytest.raises(RunFailed, match=f"no space left in {cache}: free some, and the same command goes on"):
            quiet(job(source))
    found = quiet(job(source))
    assert source.starts[-1] is not None
    assert contents(found.folder) == expected


def test_a_reader_of_the_lines_that_has_left_is_no_matter_of_the_folder(cache: Path) -> None:
    def left(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        prepared(job(Fake(TEXTS)), left)


@pytest.mark.parametrize("place", ["a.jsonl", "a.jsonl/cache", "x" * 300, "~nobody_of_this_name/cache"])
def test_a_cache_that_cannot_be_is_named(text: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    before = text.read_bytes()
    monkeypatch.setenv("ABOVEMUP_CACHE", place if place[0] == "~" else str(text.parent / place))
    with pytest.raises(RequestError, match="Set ABOVEMUP_CACHE to a folder"):
        opened(text)
    assert text.read_bytes() == before
    assert list(text.parent.iterdir()) == [text]


def test_a_cache_that_is_read_only_can_be_read(cache: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    opened(text)
    other = jsonl(text.parent / "b.jsonl", sentences(100))
    for path in (text, other):
        os.utime(path, ns=(1, 1))  # text's listing is not the remembered one
    later = time.time() + 10
    monkeypatch.setattr(sources.time, "time", lambda: later)
    monkeypatch.setattr(Path, "mkdir", read_only)
    assert opened(text).windows
    with pytest.raises(RequestError, match=r"Read-only file system\. Set ABOVEMUP_CACHE"):
        opened(other)


def test_a_source_that_changes_while_it_is_read_is_refused(
    cache: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare.make_split

    def edited(*args: object) -> object:
        split = whole(*args)  # type: ignore[arg-type]
        jsonl(text, sentences(200, start=5))
        return split

    monkeypatch.setattr(prepare, "make_split", edited)
    with pytest.raises(RequestError, match="changed while it was read"):
        opened(text)
    assert corpora(cache) == []


def test_shards_and_batches_of_documents_change_nothing(
    cache: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened(text)
    monkeypatch.setenv("ABOVEMUP_CACHE", str(cache / "other"))
    monkeypatch.setattr(sources, "BATCH", 2)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    many = opened(text)
    assert len(many.manifest["train"]["shards"]) > 5
    assert (one.batch(0, one.windows) == many.batch(0, many.windows)).all()
    assert (one.validation == many.validation).all()
    assert one.unigram_entropy == many.unigram_entropy


OPEN = """
import sys
from pathlib import Path
from tests.data.opening import opened
opened(Path(sys.argv[1]), tokenizer="bpe", vocab_size=400)
"""


def process(text: Path, cache: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "ABOVEMUP_CACHE": str(cache)}
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", OPEN, str(text)], env=env, cwd=root, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_two_processes_at_once_fill_the_cache_once(cache: Path, text: Path) -> None:
    jsonl(text, sentences(20_000))
    both = [process(text, cache), process(text, cache)]
    for each in both:
        assert each.wait() == 0, each.stderr.read() if each.stderr else ""
    (folder,) = corpora(cache)
    assert json.loads((folder / "manifest.json").read_text())["source"]["documents"] == 20_000


LARGE = os.environ.get("ABOVEMUP_TEST_DATA")


@pytest.mark.slow
@pytest.mark.skipif(not LARGE, reason="ABOVEMUP_TEST_DATA is not set")
@pytest.mark.parametrize(("part", "documents"), [("text", 15_171), ("web", 11_208)])
def test_a_large_corpus(cache: Path, part: str, documents: int) -> None:
    arguments = {"tokenizer": "bpe", "vocab_size": 1024, "seq_len": 128, "eval_tokens": 2**17}
    corpus = opened(Path(str(LARGE), part), **arguments)
    assert corpus.manifest["source"]["documents"] == documents
    assert corpus.validation[:, 1:].numel() == 2**17
    assert notes(Path(str(LARGE), part), **arguments) == []  # nothing is short
    assert 2.2 < (corpus.bytes_per_token or 0) < 2.8


@pytest.mark.skipif(not LARGE, reason="ABOVEMUP_TEST_DATA is not set")
@pytest.mark.parametrize("part", ["fineweb", "fineweb-edu", "fineweb-2", "nemotron-cc", "nemotron-cc-v2", "c4"])
def test_the_true_schemas(cache: Path, part: str) -> None:
    corpus = opened(Path(str(LARGE), "schema", part))
    assert corpus.manifest["source"]["documents"] >= 20
