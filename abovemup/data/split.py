"""Which documents are validation: a hash of each decides, so that the split needs no list and has no order.

The share is what 256 documents and 2^20 bytes need, between a hundredth and a fifth. A corpus of fewer than
50 documents could not keep every document below a fiftieth of the validation set; its long documents are cut
at line ends into pieces, and the pieces are split.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from abovemup.config.errors import RequestError
from abovemup.data.readers import BadRecords
from abovemup.data.sources import Document, Source, hash64

DOCUMENTS, BYTES = 256, 2**20  # what a validation split should have
LEAST, MOST = 0.01, 0.2  # its share of the documents
FEW = 50
PIECE = 2**14  # bytes


@dataclass(frozen=True)
class Split:
    threshold: int  # validation: key < threshold
    by_order: bool  # key of the place in the order, for a corpus whose documents are all the same text
    piece: int | None  # bytes of a piece, when long documents are cut
    documents: int  # as found in the source
    items: int  # after cutting
    bytes: int

    def assign(self, documents: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        """Documents or their pieces, each with whether it is validation."""
        for order, document in enumerate(cut(documents, self.piece)):
            key = hash64(order.to_bytes(8, "little")) if self.by_order else document.key
            yield document, key < self.threshold


@dataclass
class Survey:
    documents: int = 0
    bytes: int = 0
    smallest: int = 2**64
    largest: int = -1

    def add(self, size: int, key: int) -> None:
        self.documents += 1
        self.bytes += size
        self.smallest, self.largest = min(self.smallest, key), max(self.largest, key)


def make_split(source: Source, bad: BadRecords) -> Split:
    """Reads the source once. Raises RequestError when it has too little text for two splits."""
    whole = Survey()
    for document in source.documents(bad):
        whole.add(len(document.data), document.key)
    if not whole.documents:
        why = f"; the first bad record: {bad.first}" if bad.count else "; its files or documents are empty"
        raise RequestError(f"{source.place} holds no text{why}")
    survey, piece = whole, None
    if whole.documents < FEW:
        piece = PIECE if whole.documents > 1 else min(PIECE, max(64, whole.bytes // 20))
        survey = Survey()
        for document in cut(source.documents(BadRecords(bad.skip)), piece):
            survey.add(len(document.data), document.key)
        piece = piece if survey.documents > whole.documents else None
    if survey.documents < 2:
        raise RequestError(
            f"{source.place} holds one document of {whole.bytes} bytes: too little to hold out a validation split"
        )
    by_order = survey.smallest == survey.largest
    if by_order:
        keys = [hash64(order.to_bytes(8, "little")) for order in range(2)]
        survey.smallest, survey.largest = min(keys), max(keys)
    share = min(MOST, max(LEAST, DOCUMENTS / survey.documents, BYTES / survey.bytes))
    threshold = min(survey.largest, max(survey.smallest + 1, int(share * 2**64)))
    return Split(threshold, by_order, piece, whole.documents, survey.documents, whole.bytes)


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
