"""The order of the data: a permutation of any size that needs no memory.

A Feistel network on pairs (left, right) of numbers below `side` is a bijection whatever its round function.
With side**2 a little over the size it is applied again to the few numbers that fall outside (cycle walking),
which keeps it a bijection of 0..size-1 (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
BLOCK = 2**13  # places computed at once: a few hundred calls of numpy cost as much for one as for thousands


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), elementwise: 64 well-mixed bits of 64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*parts: int) -> np.uint64:
    """One 64-bit key of several integers, order included; a negative one counts modulo 2**64."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix((state + np.uint64(0x9E3779B97F4A7C15)) ^ np.array([part % 2**64], np.uint64))
    return np.uint64(state[0])


def permute(index: NDArray[np.int64], size: int, *keys: int) -> NDArray[np.int64]:
    """Where each index of 0..size-1 goes in the permutation that the keys choose. Same shape, no memory."""
    side = math.isqrt(size - 1) + 1
    rounds = _round_keys(keys)
    out = _feistel(index.astype(np.uint64), np.uint64(side), rounds)
    while (outside := out >= np.uint64(size)).any():
        out[outside] = _feistel(out[outside], np.uint64(side), rounds)
    return out.astype(np.int64)


def ordered(start: int, stop: int, size: int, *keys: int) -> NDArray[np.int64]:
    """`permute` of start .. stop - 1, at least one: whole blocks of them are computed, and the last few kept."""
    numbers = range(start // BLOCK, (stop - 1) // BLOCK + 1)
    blocks = [_block(n, size, *keys)[max(0, start - n * BLOCK) : stop - n * BLOCK] for n in numbers]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


@functools.lru_cache(maxsize=4)
def _block(number: int, size: int, *keys: int) -> NDArray[np.int64]:
    return permute(np.arange(number * BLOCK, min(size, (number + 1) * BLOCK), dtype=np.int64), size, *keys)


@functools.lru_cache(maxsize=64)
def _round_keys(keys: tuple[int, ...]) -> list[np.uint64]:
    return [key(*keys, r) for r in range(ROUNDS)]


def _feistel(x: NDArray[np.uint64], side: np.uint64, rounds: list[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 0..side**2-1: undo a round by taking its F away again."""
    left, right = x // side, _modulo(x, side)
    for k in rounds:
        left, right = right, _modulo(left + _modulo(mix(right ^ k), side), side)
    return left * side + right


def _modulo(x: NDArray[np.uint64], side: np.uint64) -> NDArray[np.uint64]:
    """x % side: numpy divides several times faster than it takes remainders."""
    return x - x // side * side
