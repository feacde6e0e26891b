"""Documents to ids in threads: in order, and only so many batches at a time that memory is flat.

`tiktoken` and `tokenizers` let other threads run while they encode, which is nearly all of the time.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    threads = ThreadPoolExecutor(workers)
    waiting: deque[tuple[Future[Encoded], Kept]] = deque()
    try:
        for documents, kept in batches:
            waiting.append((threads.submit(encode, tokenizer, documents), kept))
            if len(waiting) > AHEAD * workers:
                future, kept = waiting.popleft()
                yield future.result(), kept
        for future, kept in waiting:
            yield future.result(), kept
    finally:  # without waiting for what nobody wants any more
        threads.shutdown(wait=False, cancel_futures=True)
