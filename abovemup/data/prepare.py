"""A source to token shards in the cache: once, under a lock, written aside and then renamed.

A prepared corpus is a folder `corpora/<key>` of the cache (ABOVEMUP_CACHE, else ~/.cache/abovemup): shards,
manifest.json and, where there is one, tokenizer.json. The key is a hash of the contents of the source, of what
makes the tokenizer, and of the format, so an edited file gets another folder.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abovemup.config import schema
from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.io import write_whole
from abovemup.data.readers import BadRecords
from abovemup.data.shards import ShardWriter, open_shards, shard_dtype
from abovemup.data.sources import Document, Source, content_hash, find_source, hash64, listing
from abovemup.data.split import Split, make_split
from abovemup.data.tokenizer import ByteTokenizer, Tokenizer, load_fast, read_hf, text_hash, train_bpe

FORMAT = 1
SAMPLE = 4_000_000  # bytes of train documents that a BPE is trained on
SAMPLED = 256  # or all, if there are fewer
BATCH = 64  # documents tokenised at once
PROGRESS = 10.0  # seconds between lines
FIX = "Set ABOVEMUP_CACHE to a folder that can be written."

Note = Callable[[str], None]


def cache_folder() -> Path:
    """Raises RequestError for the home of nobody."""
    try:
        return Path(os.environ.get("ABOVEMUP_CACHE") or "~/.cache/abovemup").expanduser()
    except RuntimeError as error:
        raise RequestError(f"no folder for prepared data: {error} {FIX}") from error


@contextlib.contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    """An OSError in here is the cache's: those of the source are RequestErrors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(f"no space left in {cache} (ABOVEMUP_CACHE): free some, or choose another disk.") from error
        raise RequestError(f"cannot use {cache} for prepared data: {error.strerror or error}. {FIX}") from error


class Recipe:
    """What makes the tokenizer, known before any text is read: enough to name the corpus in the cache."""

    def __init__(self, tokenizer: schema.Tokenizer, vocab_size: int) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.trained = tokenizer.name == "bpe"  # on the text itself
        self.identity: dict[str, Any] = {"name": tokenizer.name}
        self.text = ""  # of tokenizer.json, where there is one
        self.loaded: Tokenizer = ByteTokenizer()
        if tokenizer.name == "hf":
            self.text, config, place = read_hf(tokenizer.path)
            self.identity |= {"hash": text_hash(self.text), "config": text_hash(config or "")}
            self.loaded = load_fast(self.text, False, config, str(place))
        if self.trained:
            sample, library = [SAMPLE, SAMPLED], version("tokenizers")
            self.identity |= {"vocab_size": self.vocab_size, "sample": sample, "tokenizers": library}
        size = self.vocab_size if self.trained else self.loaded.size
        if size > vocab_size:
            raise RequestError(
                f"the tokenizer has {size:,} ids and the model {vocab_size:,}: set model.vocab_size={size} or more"
            )

    def load(self, text: str) -> Tokenizer:
        """The tokenizer; `text` is the tokenizer.json of a trained one."""
        if self.trained:
            self.text, self.loaded = text, load_fast(text, cuttable=True)
        return self.loaded


Prepared = tuple[dict[str, Any], Tokenizer, dict[str, list[NDArray[Any]]]]


def prepared(data: schema.Data, tokenizer: schema.Tokenizer, vocab_size: int, note: Note) -> Prepared:
    """Manifest, tokenizer and open shards of each split; prepares them if no run has done so before."""
    recipe = Recipe(tokenizer, vocab_size)
    source = find_source(data)
    cache = cache_folder()
    seen = listing(source.files)
    with _cache_errors(cache):
        contents = content_hash(source.files, seen, cache / "contents")
        about = {"format": FORMAT, "source": source.name, "contents": contents, "column": source.column,
                 "skip_bad": data.skip_bad, "tokenizer": recipe.identity}  # fmt: skip
        folder = cache / "corpora" / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        found = _open(folder, recipe, lambda _: None)
        if found is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock"), note):
                found = _open(folder, recipe, note)  # another process may have made it while we waited
                if found is None:
                    _prepare(folder, about, source, recipe, seen, note)
                    found = _open(folder, recipe, note)
    if found is None:
        raise OSError(f"{folder} was written and cannot be read back")
    return found


def _locked(path: Path, note: Note) -> contextlib.AbstractContextManager[object]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        note("data: another process is preparing this corpus; waiting for it")
        return lock.acquire()


def _open(folder: Path, recipe: Recipe, note: Note) -> Prepared | None:
    """The prepared corpus, or None if there is none, or it is damaged (which a line says)."""
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        shards = {s: open_shards(folder, manifest[s]["shards"], manifest["dtype"]) for s in ("train", "validation")}
        text = (folder / "tokenizer.json").read_text("utf-8") if recipe.trained else recipe.text
        if text_hash(text) != manifest["tokenizer"]["hash"]:
            raise ValueError("tokenizer.json is not the one the tokens were made with")
        return manifest, recipe.load(text), shards
    except (OSError, ValueError, KeyError, TypeError) as error:
        note(f"data: the cached corpus {folder} is damaged ({error}) and is made again")
        return None


def _prepare(folder: Path, about: dict[str, Any], source: Source, recipe: Recipe, seen: str, note: Note) -> None:
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir()
    try:
        manifest = _write(aside, source, recipe, about["skip_bad"], note)
        manifest["source"]["content_hash"] = about["contents"]
        if listing(source.files) != seen:
            raise RequestError(f"{source.place} was changed while it was read: start again")
        write_whole(aside / "manifest.json", json.dumps(manifest, indent=1) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(aside: Path, source: Source, recipe: Recipe, skip: bool, note: Note) -> dict[str, Any]:
    """Surveys, splits, trains the tokenizer and writes the shards. Returns the manifest."""
    bad = BadRecords(skip)
    split = make_split(source, bad)
    note(f"data: {source.title}: {split.documents:,} documents, {split.bytes / 1e6:,.1f} MB")
    if bad.count:
        note(f"data: {bad.count:,} bad records left out (data.skip_bad); the first: {bad.first}")
    if split.piece:
        note(f"data: few documents: long ones are cut at line ends into pieces of {split.piece:,} bytes")

    def items() -> Iterator[tuple[Document, bool]]:
        return split.assign(source.documents(BadRecords(skip)))

    # All cores, unless the user said otherwise; said, because the library warns of later forks else.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    started = time.monotonic()
    tokenizer = recipe.load(train_bpe(_sample(items(), split), recipe.vocab_size) if recipe.trained else "")
    if recipe.trained:
        note(f"data: trained a BPE of {tokenizer.size:,} ids in {time.monotonic() - started:.1f} s")
        if tokenizer.size < recipe.vocab_size:
            note(f"data: the text is too small for the {recipe.vocab_size:,} ids that were asked")
    if recipe.text:
        write_whole(aside / "tokenizer.json", recipe.text)
    manifest = _tokenise(aside, items(), tokenizer, split, note)
    tokens = {s: sum(shard["tokens"] for shard in manifest[s]["shards"]) for s in ("train", "validation")}
    took = time.monotonic() - started
    note(f"data: {tokens['train']:,} train and {tokens['validation']:,} validation tokens in {took:.1f} s")
    packages = {name: version(name) for name in ("numpy", "pyarrow", "tokenizers")}
    return {
        "format": FORMAT,
        "source": {"name": source.name, "place": source.place, "files": len(source.files), "column": source.column,
                   "documents": split.documents, "bytes": split.bytes, "bad_records": bad.count, "piece": split.piece},
        "tokenizer": recipe.identity
        | {"size": tokenizer.size, "eot": tokenizer.eot, "hash": text_hash(recipe.text)},
        **manifest,
        "python": platform.python_version(),
        "packages": packages,
    }  # fmt: skip


def _sample(items: Iterator[tuple[Document, bool]], split: Split) -> Iterator[str]:
    """About SAMPLE bytes of at least SAMPLED train documents, chosen by a second hash; of a long one, its start."""
    below = int(min(1.0, max(SAMPLE / split.bytes, SAMPLED / split.items)) * 2**64)
    longest = SAMPLE // 64
    for document, validation in items:
        if not validation and hash64(document.key.to_bytes(8, "little")) < below:
            yield document.data[:longest].decode("utf-8", "replace")


def _tokenise(
    aside: Path, items: Iterator[tuple[Document, bool]], tokenizer: Tokenizer, split: Split, note: Note
) -> dict[str, Any]:
    size, eot = tokenizer.size, tokenizer.eot
    writers = {v: ShardWriter(aside, "validation" if v else "train", size, eot) for v in (False, True)}
    sizes = {False: 0, True: 0}  # bytes
    end = np.array([eot], np.uint32)
    said = time.monotonic()
    while batch := list(itertools.islice(items, BATCH)):
        ids = tokenizer.encode_documents([document.data for document, _ in batch])
        for validation in (False, True):
            mine = [part for own, (_, v) in zip(ids, batch, strict=True) if v == validation for part in (own, end)]
            if mine:
                writers[validation].write(np.concatenate(mine))
        for document, validation in batch:
            sizes[validation] += len(document.data)
        if time.monotonic() - said > PROGRESS:
            said = time.monotonic()
            note(f"data: tokenised {sum(sizes.values()) / 1e6:,.0f} of {split.bytes / 1e6:,.0f} MB")
    shards = {validation: writer.close() for validation, writer in writers.items()}
    counts = writers[False].counts
    frequency = counts[counts > 0] / counts.sum()
    return {
        "dtype": shard_dtype(size),
        "train": {"bytes": sizes[False], "shards": shards[False]},
        "validation": {"bytes": sizes[True], "shards": shards[True]},
        "unigram_entropy": float(-(frequency * np.log(frequency)).sum()) + 0.0,
    }
