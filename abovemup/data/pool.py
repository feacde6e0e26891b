"""Documents to ids in threads: in order, and only so many batches at a time that memory is flat.

`tiktoken` and `tokenizers` let other threads run while they encode, which is nearly all of the time.
"""

from collections import deque
from collections.abc import Generator, Iterator
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from abovemup.data.shards import shard_dtype
from abovemup.data.tokenizer import Tokenizer

AHEAD = 2  # batches for each thread

Kept = TypeVar("Kept")


class Encoded(NamedTuple):
    ids: NDArray[Any]  # of all documents, each with its end of text, in the dtype of the shards
    lengths: NDArray[np.int64]  # tokens of each document


def encode(tokenizer: Tokenizer, documents: list[bytes]) -> Encoded:
    end = np.array([tokenizer.eot], np.uint32)
    ids = tokenizer.encode_documents(documents)
    joined = np.concatenate([part for own in ids for part in (own, end)])
    return Encoded(joined.astype(shard_dtype(tokenizer.size)), np.array([len(own) + 1 for own in ids], np.int64))


def encoded(
    batches: Iterator[tuple[list[bytes], Kept]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Encoded, Kept]]:
    """Each batch's ids, with what came beside it, in order."""
    threads = ThreadPool(workers)  # its threads do not keep a process that ends: a document can be long
    waiting: deque[tuple[AsyncResult[Encoded], Kept]] = deque()
    try:
        for documents, kept in batches:
            waiting.append((threads.apply_async(encode, (tokenizer, documents)), kept))
            if len(waiting) > AHEAD * workers:
                result, kept = waiting.popleft()
                yield result.get(), kept
        for result, kept in waiting:
            yield result.get(), kept
    finally:  # without waiting for what nobody wants any more
        threads.terminate()
