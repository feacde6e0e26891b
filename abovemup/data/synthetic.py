"""An endless source with a known entropy rate: a Markov chain of order one whose rows are one distribution.

Token s has `branching` different successors. The k-th is drawn with probability p_k proportional to 1/(k+1),
the same p for every s, so the entropy of the next token given the past is H(p) = -sum_k p_k ln p_k whatever the
state: the entropy rate is exact, in closed form, and no model can have a lower expected loss. Successor 0 of a
token is the next one on a random cycle through all tokens, so the chain reaches every token and its stationary
distribution is unique; the others are drawn with popularity 1/(rank+1), so that tokens are unequally frequent.
Every sample starts from the stationary distribution. Which successor sample i takes at place t is a hash of
(seed, i, t): samples are independent, endless, and read in any order.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from abovemup.config.errors import RequestError
from abovemup.data.order import key, mix

CHAIN = 20251003  # the chain depends on states and branching only: data.seed chooses samples of the same source
ENDLESS = 2**62


class MarkovSource:
    """Tokens 0..states-1; id `states` is end of text, which the source never produces."""

    def __init__(self, states: int, branching: int) -> None:
        self.states, self.eot, self.size = states, states, states + 1
        weights = 1 / np.arange(1, branching + 1)
        self.probabilities = weights / weights.sum()
        self.successors = _successors(states, branching)  # (states, branching)
        self.stationary = self._stationary()

    @property
    def entropy_rate(self) -> float:
        """nats/token: H(p), exact."""
        return float(-(self.probabilities * np.log(self.probabilities)).sum())

    @property
    def unigram_entropy(self) -> float:
        """nats/token of the stationary distribution."""
        positive = self.stationary[self.stationary > 0]
        return float(-(positive * np.log(positive)).sum())

    def _stationary(self) -> NDArray[np.float64]:
        """pi of pi P = pi; the lazy chain (I + P)/2 has the same pi and converges though P may be periodic."""
        flow = np.repeat(self.probabilities[None], self.states, 0).ravel()
        targets = self.successors.ravel()
        pi = np.full(self.states, 1 / self.states)
        for _ in range(10_000):
            moved = np.bincount(targets, flow * np.repeat(pi, len(self.probabilities)), self.states)
            new = (pi + moved) / 2
            new /= new.sum()
            if np.abs(new - pi).sum() < 1e-15:
                break
            pi = new
        return new

    def rows(self, samples: NDArray[np.int64], length: int, *seeds: int) -> NDArray[np.int64]:
        """Samples of the given numbers: (n, length) tokens, a pure function of (seeds, number, place)."""
        stream = mix(samples.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) ^ key(*seeds))
        state = np.searchsorted(np.cumsum(self.stationary), _uniform(stream, 0), "right").clip(0, self.states - 1)
        out = np.empty((len(samples), length), np.int64)
        out[:, 0] = state
        choices = np.cumsum(self.probabilities)[:-1]
        for t in range(1, length):
            state = self.successors[state, np.searchsorted(choices, _uniform(stream, t), "right")]
            out[:, t] = state
        return out

    def encode(self, text: str) -> list[int]:
        """Tokens are written as numbers with spaces between. Raises RequestError for anything else."""
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.size for word in words):
            raise RequestError(f"text of data=synthetic is numbers from 0 to {self.states - 1} with spaces: '{text}'")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


def _uniform(stream: NDArray[np.uint64], place: int) -> NDArray[np.float64]:
    """In [0, 1): 53 bits of the place-th number of each sample's own SplitMix64 stream."""
    step = np.uint64((place + 1) * 0x9E3779B97F4A7C15 % 2**64)
    return (mix(stream + step) >> np.uint64(11)).astype(np.float64) / 2**53


def _successors(states: int, branching: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64([CHAIN, states, branching]))
    cycle = generator.permutation(states)
    following = np.empty(states, np.int64)
    following[cycle] = np.roll(cycle, -1)
    popularity = -np.log(np.arange(1, states + 1))  # ln of 1/(rank+1)
    out = np.empty((states, branching), np.int64)
    for state in range(states):
        keys = popularity + generator.gumbel(size=states)  # the largest keys: a draw without replacement
        keys[following[state]] = np.inf
        out[state] = np.argsort(-keys)[:branching]
    return out
