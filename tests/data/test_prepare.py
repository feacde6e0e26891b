"""The cache: filled once, never half, the same bits however often it was stopped."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from abovemup.config.errors import RequestError, RunFailed
from abovemup.data import prepare, sources

from .opening import jsonl, notes, opened, sentences


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


def test_another_tokenizer_column_or_text_is_another_corpus(cache: Path, text: Path) -> None:
    opened(text)
    opened(text, tokenizer="bpe", vocab_size=300)
    opened(text, tokenizer="bpe", vocab_size=301)
    opened(text, skip_bad=True)
    opened(jsonl(text.parent / "b.jsonl", sentences(200)))
    assert len(corpora(cache)) == 5


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


def test_a_failure_leaves_nothing_behind(cache: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare.ShardWriter, "close", full)
        with pytest.raises(RunFailed, match=f"no space left in {cache} .ABOVEMUP_CACHE"):
            opened(text)
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]
    assert opened(text).windows


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
    monkeypatch.setattr(prepare, "BATCH", 2)
    monkeypatch.setattr(prepare.ShardWriter.__init__, "__defaults__", (1000,))
    many = opened(text)
    assert len(many.manifest["train"]["shards"]) > 5
    assert (one.batch(0, one.windows) == many.batch(0, many.windows)).all()
    assert (one.validation() == many.validation()).all()
    assert one.unigram_entropy == many.unigram_entropy


OPEN = """
import sys
from pathlib import Path
from tests.data.opening import opened
opened(Path(sys.argv[1]), tokenizer="bpe", vocab_size=400)
"""


def process(text: Path, cache: Path, parallel: str = "true") -> subprocess.Popen[bytes]:
    env = {**os.environ, "ABOVEMUP_CACHE": str(cache), "TOKENIZERS_PARALLELISM": parallel}
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


@pytest.mark.slow
def test_killed_at_any_moment_the_next_preparation_gives_the_same_bits(cache: Path, text: Path) -> None:
    jsonl(text, sentences(40_000))
    whole = cache.with_name("whole")
    started = time.monotonic()
    assert process(text, whole, parallel="false").wait() == 0
    took = time.monotonic() - started
    for part in (0.5, 0.65, 0.8, 0.9):
        killed = process(text, cache)
        time.sleep(part * took)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    assert process(text, cache).wait() == 0
    (folder,), (expected,) = corpora(cache), corpora(whole)
    assert contents(folder) == contents(expected)
    assert not [path for path in (cache / "corpora").iterdir() if path.name.startswith(".")]


LARGE = os.environ.get("ABOVEMUP_TEST_DATA")


@pytest.mark.slow
@pytest.mark.skipif(not LARGE, reason="ABOVEMUP_TEST_DATA is not set")
@pytest.mark.parametrize(("part", "documents"), [("text", 15_171), ("web", 11_208)])
def test_a_large_corpus(cache: Path, part: str, documents: int) -> None:
    arguments = {"tokenizer": "bpe", "vocab_size": 1024, "seq_len": 128, "eval_tokens": 2**17}
    corpus = opened(Path(str(LARGE), part), **arguments)
    assert corpus.manifest["source"]["documents"] == documents
    assert corpus.validation()[:, 1:].numel() == 2**17
    assert notes(Path(str(LARGE), part), **arguments) == []  # nothing is short
    assert 2.2 < (corpus.bytes_per_token or 0) < 2.8


@pytest.mark.skipif(not LARGE, reason="ABOVEMUP_TEST_DATA is not set")
@pytest.mark.parametrize("part", ["fineweb", "fineweb-edu", "fineweb-2", "nemotron-cc", "nemotron-cc-v2", "c4"])
def test_the_true_schemas(cache: Path, part: str) -> None:
    corpus = opened(Path(str(LARGE), "schema", part))
    assert corpus.manifest["source"]["documents"] >= 20
