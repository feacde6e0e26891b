"""Documents to ids in processes of our own: in order, and only so many batches at a time that memory is flat."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from abovemup.config.errors import RunFailed
from abovemup.data.recipe import Recipe
from abovemup.data.shards import shard_dtype
from abovemup.data.tokenizer import Tokenizer

AHEAD = 2  # batches for each process

Kept = TypeVar("Kept")
_tokenizer: Tokenizer  # of a worker


class Encoded(NamedTuple):
    ids: NDArray[Any]  # of all documents, each with its end of text, in the dtype of the shards
    lengths: NDArray[np.int64]  # tokens of each document


def encode(tokenizer: Tokenizer, documents: list[bytes]) -> Encoded:
    end = np.array([tokenizer.eot], np.uint32)
    ids = tokenizer.encode_documents(documents)
    joined = np.concatenate([part for own in ids for part in (own, end)])
    return Encoded(joined.astype(shard_dtype(tokenizer.size)), np.array([len(own) + 1 for own in ids], np.int64))


def encoded(
    batches: Iterator[tuple[list[bytes], Kept]], recipe: Recipe, workers: int
) -> Generator[tuple[Encoded, Kept]]:
    """Each batch's ids, with what came beside it, in order; 0 `workers`: by this process. Raises RunFailed."""
    tokenizer = recipe.load(recipe.text)
    if not workers:
        yield from ((encode(tokenizer, documents), kept) for documents, kept in batches)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a fork copies locks that other threads hold
    pool = ProcessPoolExecutor(workers, context, _begin, (recipe,))
    waiting: deque[tuple[Future[Encoded], Kept]] = deque()
    try:
        for documents, kept in batches:
            waiting.append((pool.submit(_encode, documents), kept))
            if len(waiting) > AHEAD * workers:
                future, kept = waiting.popleft()
                yield future.result(), kept
        for future, kept in waiting:
            yield future.result(), kept
    except BrokenProcessPool as error:
        raise RunFailed(
            "a tokenising process was ended from outside, as for too little memory: with fewer --workers, the same "
            "command goes on"
        ) from error
    finally:  # without waiting for what nobody wants any more
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        pool.shutdown(cancel_futures=True)


def _begin(recipe: Recipe) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all: the parent decides
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = recipe.load(recipe.text)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(documents: list[bytes]) -> Encoded:
    return encode(_tokenizer, documents)
