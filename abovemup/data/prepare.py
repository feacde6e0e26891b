"""A source to token shards: once, under a lock, in a folder aside that is renamed when all is there.

A prepared corpus is a folder: shards, manifest.json and, where there is one, the file of its tokenizer. It is
`corpora/<key>` of the cache, or where a user wants it. The key is a hash of what decides the tokens: the contents of
the source, the tokenizer, the amount and the format; an edited file gets another folder.

`<folder>.part` is one that is being made: `plan.json` says how (split and tokenizer are settled), `progress.json`
how far. Whatever ends the process, the next one goes on from there, and the shards come out the same.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.io import write_whole
from abovemup.config.site import cache_folder
from abovemup.data.progress import SPLITS, Job, Note, Watch, tokenise
from abovemup.data.readers import BadRecords
from abovemup.data.recipe import SAMPLE, SAMPLED, reopen, train_bpe
from abovemup.data.shards import find_flaws, open_shards, read_manifest, read_record, sealed
from abovemup.data.sources import Document, hash64
from abovemup.data.split import Split, blind_split, documents, make_split
from abovemup.data.tokenizer import Tokenizer

FORMAT = 3
PROGRESS = 10.0  # seconds between lines
ELSEWHERE = "Choose another --out, or remove it."


class Prepared(NamedTuple):
    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    shards: dict[str, list[NDArray[Any]]]


def key_of(job: Job) -> str:
    """The name of a corpus: a hash of all that decides its tokens. What stops at a bad record can go on without it."""
    about = {"format": FORMAT, "source": job.source.name, "identity": job.source.identity(),
             "tokenizer": job.recipe.identity, "amount": job.amount}  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def folder_of(job: Job, key: str) -> Path:
    return job.out or cache_folder() / "corpora" / key


@contextlib.contextmanager
def _writing(folder: Path, fix: str) -> Iterator[None]:
    """An OSError in here is the folder's: those of a source are RequestErrors."""
    try:
        yield
    except BrokenPipeError:  # of who read our lines
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunFailed(f"no space left in {folder}: free some, and the same command goes on. {fix}") from error
        place = error.filename or folder
        raise RequestError(f"cannot use {place} for prepared data: {error.strerror or error}. {fix}") from error


def prepared(job: Job, note: Note, watch: Watch | None = None) -> Prepared:
    """The corpus of a job, opened; prepared if no process has done so before. Raises RequestError and RunFailed."""
    fix = "Choose another --out." if job.out else "Set ABOVEMUP_CACHE to a folder that can be written."
    with _writing(job.out or cache_folder(), fix):
        key = key_of(job)
        folder = folder_of(job, key)
        if found := _found(folder, key, job, lambda _: None):
            return found
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), note):
            if found := _found(folder, key, job, note):  # another process has made it while we waited
                return found
            _prepare(folder, key, job, note, watch or _lines(note))
        return open_prepared(folder)


def _locked(path: Path, note: Note) -> contextlib.AbstractContextManager[object]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    with contextlib.suppress(Timeout):
        return lock.acquire(timeout=0)
    note("data: another process is preparing this corpus; waiting for it")
    return lock.acquire()


def open_prepared(folder: Path) -> Prepared:
    """Raises RequestError that says what is not as it was written: the manifest, a shard or the tokenizer."""
    try:
        manifest = read_manifest(folder)
        for flaw in find_flaws(folder, manifest):
            raise ValueError(flaw)
        shards = {split: open_shards(folder, manifest[split]["shards"], manifest["dtype"]) for split in SPLITS}
        return Prepared(folder, manifest, reopen(manifest["tokenizer"]["name"], folder), shards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{folder}: {error}") from error


def _found(folder: Path, key: str, job: Job, note: Note) -> Prepared | None:
    """The prepared corpus; None when there is none, or the cache's is damaged (which a line says)."""
    if not os.path.lexists(folder) or not any(folder.iterdir()):
        return None
    try:
        found = open_prepared(folder)
    except RequestError as error:
        if job.out is None:
            note(f"data: what was prepared is damaged: {error}: made again")
            return None
        raise RequestError(f"{error}.\n{ELSEWHERE}") from error
    if found.manifest["key"] != key:
        raise RequestError(f"{folder} holds another corpus, or the source has changed since.\n{ELSEWHERE}")
    if (about := found.manifest["source"])["bad_records"] and not job.skip_bad:
        left = f"{folder} leaves out {about['bad_records']:,} bad records, the first {about['first_bad']}"
        raise RequestError(f"{left}\ndata.skip_bad=true takes it as it is")
    return found


def _prepare(folder: Path, key: str, job: Job, note: Note, watch: Watch) -> None:
    part = folder.with_name(f"{folder.name}.part")
    if part.exists() and any(part.iterdir()) and not any(part.glob("plan.json*")):
        raise RequestError(f"{part} is where it would be made, and holds something else.\n{ELSEWHERE}")
    if not job.source.local and Path(job.source.place).resolve() in folder.resolve().parents:
        raise RequestError(f"{folder} is inside of the source, which may not change: choose another --out")
    plan = read_record(part / "plan.json")
    if plan.get("key") != key:
        plan = {"key": key, **_plan(part, job, note)}
        write_whole(part / "plan.json", json.dumps(plan))
    manifest = tokenise(part, job, reopen(job.recipe.name, part), Split(**plan["split"]), note, watch)
    if key_of(job) != key:
        shutil.rmtree(part)
        raise RequestError(f"{job.source.place} was changed while it was read: start again")
    packages = {name: version(name) for name in ("numpy", "pyarrow", "tokenizers", "tiktoken", "datasets")}
    about = {"format": FORMAT, "key": key, "tokenizer": plan["tokenizer"], **manifest}
    about |= {"python": platform.python_version(), "packages": packages}
    write_whole(part / "manifest.json", json.dumps(sealed(about), indent=1) + "\n")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)
    for left in folder.glob("p*.json*"):
        left.unlink()


def _plan(part: Path, job: Job, note: Note) -> dict[str, Any]:
    """How the source is split, and its tokenizer, whose file is put into the folder."""
    source, recipe, bad = job.source, job.recipe, BadRecords(job.skip_bad)
    split = make_split(source, bad) if source.local else blind_split()
    known = f": {split.documents:,} documents, {split.bytes / 1e6:,.1f} MB" if source.local else ""
    note(f"data: {source.title}{known}")
    if split.piece:
        note(f"data: few documents: long ones are cut at line ends into pieces of {split.piece:,} bytes")
    # All cores, unless the user said otherwise; said, because the library warns of later forks else.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    started, trained = time.monotonic(), ""
    if recipe.trained:
        sample = _sample(split.assign(documents(source, BadRecords(job.skip_bad))), split)
        trained = train_bpe(sample, recipe.size)
    took = time.monotonic() - started
    part.mkdir(exist_ok=True)
    write_whole(part / "plan.json", "")  # first: by it the folder is known as ours
    for left in part.iterdir():
        if left.name != "plan.json":
            left.unlink()
    kept = recipe.keep(part, trained)
    tokenizer = reopen(recipe.name, part)
    if recipe.trained:
        note(f"data: trained a BPE of {tokenizer.size:,} ids in {took:.1f} s")
    if tokenizer.size < recipe.size:
        note(f"data: the text is too small for the {recipe.size:,} ids that were asked")
    made = {"vocab_size": recipe.size, **recipe.identity, "size": tokenizer.size, "eot": tokenizer.eot, **kept}
    return {"split": asdict(split), "tokenizer": made}


def _sample(items: Iterator[tuple[Document, bool]], split: Split) -> Iterator[str]:
    """About SAMPLE bytes of at least SAMPLED train documents, chosen by a second hash; of a long one, its start.

    Of a source that is read once, the first documents.
    """
    below, left = 2**64, SAMPLE
    if split.items:
        below = int(min(1.0, max(SAMPLE / split.bytes, SAMPLED / split.items)) * 2**64)
    longest = SAMPLE // 64
    for document, validation in items:
        if not validation and hash64(document.key.to_bytes(8, "little")) < below:
            yield document.data[:longest].decode("utf-8", "replace")
            left -= len(document.data[:longest])
            if left <= 0 and not split.items:
                return


def _lines(note: Note) -> Watch:
    """Progress in plain lines."""
    said = time.monotonic()

    def watch(documents: int, tokens: int, size: int, share: float | None) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS:
            said = time.monotonic()
            part = "" if share is None else f" ({100 * share:.0f} %)"
            note(f"data: tokenised {documents:,} documents, {tokens:,} tokens, {size / 1e6:,.0f} MB{part}")

    return watch
