"""Documents to ids in processes of our own: in order, and only so many batches at a time that memory is flat."""

import multiprocessing
import os
import queue
import signal
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from abovemup.config.errors import RunFailed
from abovemup.data.recipe import Recipe
from abovemup.data.shards import shard_dtype
from abovemup.data.tokenizer import Tokenizer

AHEAD = 2  # batches for each process

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
    batches: Iterator[tuple[list[bytes], Kept]], recipe: Recipe, workers: int
) -> Generator[tuple[Encoded, Kept]]:
    """Each batch's ids, with what came beside it, in order; 0 `workers`: by this process. Raises RunFailed."""
    if not workers:
        tokenizer = recipe.load(recipe.text)
        yield from ((encode(tokenizer, documents), kept) for documents, kept in batches)
        return
    # A thread waits for each process, over a pipe of its own: whoever dies, and wherever, the other end is told.
    threads, idle = ThreadPoolExecutor(workers), queue.SimpleQueue[Connection]()
    processes: list[BaseProcess] = []
    waiting: deque[tuple[Future[Encoded], Kept]] = deque()
    try:
        for documents, kept in batches:
            if len(processes) < workers:
                # In a thread, because there a signal of ours does not raise: a process is whole or is not.
                threads.submit(_start, recipe, processes, idle).result()
            waiting.append((threads.submit(_ask, idle, documents), kept))
            if len(waiting) > AHEAD * workers:
                future, kept = waiting.popleft()
                yield future.result(), kept
        for future, kept in waiting:
            yield future.result(), kept
    finally:  # without waiting for what nobody wants any more
        for process in processes:
            process.kill()
            process.join()
        threads.shutdown(cancel_futures=True)


def _start(recipe: Recipe, processes: list[BaseProcess], idle: "queue.SimpleQueue[Connection]") -> None:
    context = multiprocessing.get_context("spawn")  # a fork copies locks that other threads hold
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, recipe), daemon=True)
    # The terminal sends Ctrl-C to all, and the parent decides: blocked signals stay so in a new process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    processes.append(process)
    idle.put(ours)


def _ask(idle: "queue.SimpleQueue[Connection]", documents: list[bytes]) -> Encoded:
    connection = idle.get()
    try:
        connection.send(documents)
        answer: Encoded | Exception = connection.recv()
    except (EOFError, OSError) as error:
        raise RunFailed(
            "a tokenising process was ended from outside, as for too little memory: with fewer --workers, the same "
            "command goes on"
        ) from error
    finally:
        idle.put(connection)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work(connection: Connection, recipe: Recipe) -> None:
    """Until the parent closes its end, or ends."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    answer: Encoded | Exception
    try:
        tokenizer = recipe.load(recipe.text)
        while True:
            documents = connection.recv()
            try:
                answer = encode(tokenizer, documents)
            except Exception as error:
                answer = error
            connection.send(answer)
    except (EOFError, OSError):
        pass
