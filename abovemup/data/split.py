"""Which documents are validation: a hash of each decides, so that the split needs no list and has no order.

The share is what 256 documents and 2^20 bytes need, between a hundredth and a fifth. A corpus of fewer than
50 documents could not keep every document below a fiftieth of the validation set; its long documents are cut
at line ends into pieces, and the pieces are split. What is read from far away is not read twice: its share is a
twentieth whatever was asked for, so that runs of all lengths are measured on the same documents.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from abovemup.config.errors import RequestError
from abovemup.data.readers import BadRecords
from abovemup.data.sources import Document, Source, hash64

DOCUMENTS, BYTES = 256, 2**20  # what a validation split should have
LEAST, MOST = 0.01, 0.2  # its share of the documents
FEW = 50
PIECE = 2**14  # bytes
FAR = 0.05  # the share of what is read once


class Amount(NamedTuple):
    """The tokens after which reading stops, both counts being reached; a document that begins before is whole."""

    train: int
    validation: int


@dataclass(frozen=True)
class Split:
    """What a survey has counted is 0 where there was none."""

    threshold: int  # validation: key < threshold
    piece: int | None = None  # bytes of a piece, when long documents are cut
    documents: int = 0  # as found in the source
    items: int = 0  # after cutting
    bytes: int = 0

    def assign(self, documents: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        """Documents or their pieces, each with whether it is validation."""
        for document in cut(documents, self.piece):
            yield document, document.key < self.threshold


def documents(source: Source, bad: BadRecords) -> Iterator[Document]:
    return itertools.chain.from_iterable(batch for batch, _ in source.batches(bad, None))


def blind_split() -> Split:
    """The split of a source that is read once."""
    return Split(int(FAR * 2**64))


def make_split(source: Source, bad: BadRecords) -> Split:
    """Reads the source once. Raises RequestError when it has too little text for two splits."""
    found, size, smallest, largest = _survey(documents(source, bad))
    if not found:
        why = f"; the first bad record: {bad.first}" if bad.count else "; its files or documents are empty"
        raise RequestError(f"{source.place} holds no text{why}")
    items, piece = found, None
    if found < FEW:
        piece = PIECE if found > 1 else min(PIECE, max(64, size // 20))
        items, _, smallest, largest = _survey(cut(documents(source, BadRecords(bad.skip)), piece))
    if smallest == largest:  # equal texts are on the same side
        raise RequestError(f"{source.place} holds only one text: too little to hold out a validation split")
    share = min(MOST, max(LEAST, DOCUMENTS / items, BYTES / size))
    threshold = min(largest, max(smallest + 1, int(share * 2**64)))
    return Split(threshold, piece if items > found else None, found, items, size)


def _survey(documents: Iterable[Document]) -> tuple[int, int, int, int]:
    """How many, their bytes, the smallest key and the largest."""
    count, size, smallest, largest = 0, 0, 2**64, -1
    for document in documents:
        count += 1
        size += len(document.data)
        smallest, largest = min(smallest, document.key), max(largest, document.key)
    return count, size, smallest, largest


def cut(documents: Iterable[Document], piece: int | None) -> Iterator[Document]:
    """Documents of two pieces or more cut after the first line end past each piece, never inside a character."""
    for document in documents:
        if piece is None or len(document.data) < 2 * piece:
            yield document
            continue
        data, start = document.data, 0
        while len(data) - start >= 2 * piece:
            end = data.find(b"\n", start + piece, start + 2 * piece - 1) + 1  # something is left
            if not end:
                end = start + piece
                while end < len(data) and data[end] & 0xC0 == 0x80:  # a byte that continues a character
                    end += 1
            yield Document(data[start:end], hash64(data[start:end]))
            start = end
        yield Document(data[start:], hash64(data[start:]))
