"""The order of the windows is a permutation of any size, another one for each key."""

import numpy as np
import pytest

from abovemup.data.order import BLOCK, key, ordered, permute

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 97, 100, 101, 128, 1000, 1009, 4096, 4097, 65_537]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", [(0, 0), (0, 1), (1, 0), (-5, 3), (2**63, 7)])
def test_every_index_once(size: int, keys: tuple[int, ...]) -> None:
    out = permute(np.arange(size), size, *keys)
    assert np.array_equal(np.sort(out), np.arange(size))


@pytest.mark.parametrize("size", [2**31 + 11, 10**12 + 39, 2**48])
def test_large_sizes_stay_inside_and_apart(size: int) -> None:
    index = np.unique(np.concatenate([np.arange(5000), np.linspace(0, size - 1, 5000).astype(np.int64)]))
    out = permute(index, size, 3, 1)
    assert out.min() >= 0
    assert out.max() < size
    assert len(np.unique(out)) == len(index)


def test_an_index_goes_to_one_place_whatever_is_asked_with_it() -> None:
    together = permute(np.arange(1000), 1000, 5, 0)
    alone = [permute(np.array([i]), 1000, 5, 0)[0] for i in range(1000)]
    assert np.array_equal(together, alone)


def test_keys_give_different_and_unrelated_orders() -> None:
    size = 4000
    orders = [permute(np.arange(size), size, seed, epoch) for seed in range(4) for epoch in range(4)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 12  # about one in a random pair
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(size)


def test_the_order_looks_random() -> None:
    """Place and index are independent (chi-square over a grid), and neighbours do not stay neighbours."""
    size, cells = 10_007, 10
    place = permute(np.arange(size), size, 11, 0)
    table = np.histogram2d(np.arange(size), place, bins=cells)[0]
    expected = size / cells**2
    assert ((table - expected) ** 2 / expected).sum() < 130  # 81 degrees of freedom: 99.9 % are below 126
    assert (np.abs(np.diff(place)) == 1).sum() < 12  # about two


def test_small_orders_are_all_reached() -> None:
    """Each of the 6 orders of 3 windows comes up about as often as the others."""
    seen = [tuple(permute(np.arange(3), 3, seed, 0)) for seed in range(3000)]
    counts = [seen.count(order) for order in set(seen)]
    assert len(counts) == 6
    assert min(counts) > 350
    assert max(counts) < 650


def test_key_depends_on_every_part_and_their_order() -> None:
    keys = {
        int(key(*parts)) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**64 - 2,), (1, 2, 3), (3, 2, 1)]
    }
    assert len(keys) == 9


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 11])
def test_whole_blocks_give_the_same_order(size: int) -> None:
    for start, stop in ((0, size), (size // 2, size), (size // 3, size // 2 + 1)):
        assert np.array_equal(ordered(start, stop, size, 5, 1), permute(np.arange(start, stop), size, 5, 1))
