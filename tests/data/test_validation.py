"""The validation set: many documents, none of great weight, the same whatever the seed."""

import numpy as np
import pytest

from abovemup.data.shards import TokenWindows
from abovemup.data.validation import DOCUMENTS, SHARE, choose_windows

EOT = 50_000


def stream(lengths: list[int], seq_len: int) -> TokenWindows:
    """Document k is `lengths[k]` tokens k and an end of text."""
    parts = [np.append(np.full(n, k % EOT, np.uint16), np.uint16(EOT)) for k, n in enumerate(lengths)]
    tokens = np.concatenate(parts)
    return TokenWindows([tokens[:777], tokens[777:]], seq_len)


def weights(windows: TokenWindows, chosen: np.ndarray) -> dict[int, int]:
    """Targets of each document, counted token by token; an end of text is its document's."""
    whole = np.concatenate(windows.shards)
    owner = np.cumsum(whole == EOT) - (whole == EOT)
    targets = [owner[w * windows.seq_len + 1 : (w + 1) * windows.seq_len + 1] for w in chosen]
    documents, counts = np.unique(np.concatenate(targets), return_counts=True)
    return dict(zip(documents.tolist(), counts.tolist(), strict=True))


LENGTHS = np.random.default_rng(0).lognormal(6, 1.2, 400).astype(int).tolist()


@pytest.mark.parametrize(
    ("lengths", "seq_len", "tokens"),
    [
        (LENGTHS, 128, 2**16),
        (LENGTHS, 64, 2**14),
        ([100_000, *LENGTHS], 128, 2**16),
        ([5] * 5000 + [30_000] * 3, 16, 2**13),
        ([300] * 1000, 256, 2**17),
    ],
)
def test_spread_over_200_documents_and_none_over_2_percent(lengths: list[int], seq_len: int, tokens: int) -> None:
    windows = stream(lengths, seq_len)
    choice = choose_windows(windows, EOT, tokens)
    assert len(choice.windows) == tokens // seq_len
    assert len(np.unique(choice.windows)) == len(choice.windows)
    counted = weights(windows, choice.windows)
    assert len(counted) == choice.documents >= DOCUMENTS
    assert max(counted.values()) / tokens == pytest.approx(choice.largest)
    assert choice.largest <= SHARE


def test_a_small_split_gives_what_it_has() -> None:
    windows = stream([900, 40, 300], 64)
    choice = choose_windows(windows, EOT, 2**17)
    assert choice.windows.tolist() == list(range(windows.windows))
    assert choice.documents == 3
    assert max(weights(windows, choice.windows).values()) / (windows.windows * 64) == pytest.approx(choice.largest)


def test_few_documents_are_weighted_as_evenly_as_they_can_be() -> None:
    choice = choose_windows(stream([50_000, 6000, 6000, 6000], 100), EOT, 20_000)
    assert len(choice.windows) == 200
    assert choice.largest <= 0.33  # the limit of 2 % doubled four times


def test_less_than_one_window() -> None:
    assert choose_windows(stream([5, 6], 64), EOT, 2**17).windows.tolist() == [0]
    assert len(choose_windows(stream([500] * 9, 64), EOT, 10).windows) == 1
