"""The fixed validation set: windows spread over many documents, with no document of great weight.

Losses of neighbouring windows are alike, and one odd document can move a mean, so the set takes first one
window from each of 200 documents and then others at random, as long as no document has more than 2 % of the
tokens. The choice depends on the split and the sizes asked, never on a seed.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from abovemup.data.order import permute
from abovemup.data.shards import TokenWindows

DOCUMENTS = 200
SHARE = 0.02


class Choice(NamedTuple):
    windows: NDArray[np.int64]  # numbers, ascending
    documents: int  # that have a token among the targets
    largest: float  # the greatest share of one document


def choose_windows(stream: TokenWindows, eot: int, tokens: int) -> Choice:
    """About `tokens` target tokens of the split (at least one window, at most all), by the rule above.

    A split whose documents are too few for the 2 % gives the smallest share, in doublings, that fills the set.
    """
    found = [np.flatnonzero(shard == eot) + start for shard, start in zip(stream.shards, stream.starts, strict=False)]
    ends = np.concatenate(found).astype(np.int64)  # token p belongs to document searchsorted(ends, p)
    if not stream.windows:
        return Choice(np.zeros(1, np.int64), ends.size, 1.0)
    wanted = max(1, min(tokens // stream.seq_len, stream.windows))
    starts = np.arange(stream.windows, dtype=np.int64) * stream.seq_len + 1
    first = np.searchsorted(ends, starts)
    last = np.searchsorted(ends, starts + stream.seq_len - 1)
    order = permute(np.arange(stream.windows, dtype=np.int64), stream.windows, 0)

    chosen: list[int] = []
    weight = Counter[int]()  # target tokens of each document so far
    limit = max(SHARE * wanted * stream.seq_len, stream.seq_len)

    def take(w: int, needs_new: bool) -> bool:
        if len(chosen) == wanted or (needs_new and len(weight) >= DOCUMENTS):
            return False
        cuts = [starts[w], *(ends[first[w] : last[w]] + 1), starts[w] + stream.seq_len]
        parts = dict(enumerate(np.diff(cuts).tolist(), start=int(first[w])))
        if needs_new and all(document in weight for document in parts):
            return False
        if any(weight[document] + n > limit for document, n in parts.items()):
            return False
        chosen.append(w)
        weight.update(parts)
        return True

    rest = [w for w in order.tolist() if not take(w, needs_new=True)]
    while len(chosen) < wanted:
        rest = [w for w in rest if not take(w, needs_new=False)]
        limit *= 2
    return Choice(np.sort(np.array(chosen, np.int64)), len(weight), max(weight.values()) / (wanted * stream.seq_len))
