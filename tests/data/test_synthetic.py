"""The endless source: what it says about its entropy is true, and any sample can be read at any time."""

import numpy as np
import pytest

from abovemup.config.errors import RequestError
from abovemup.data.corpus import Corpus
from abovemup.data.synthetic import MarkovSource

from .opening import opened


def transitions(source: MarkovSource) -> np.ndarray:
    matrix = np.zeros((source.states, source.states))
    for state, successors in enumerate(source.successors):
        matrix[state, successors] += source.probabilities
    return matrix


@pytest.mark.parametrize(("states", "branching"), [(2, 2), (5, 3), (64, 4), (256, 8), (50, 50)])
def test_entropies_are_those_of_the_chain(states: int, branching: int) -> None:
    source = MarkovSource(states, branching)
    assert all(len(set(row.tolist())) == branching for row in source.successors)
    matrix = transitions(source)
    pi = np.linalg.lstsq(np.vstack([matrix.T - np.eye(states), np.ones(states)]), np.eye(states + 1)[-1], rcond=None)[0]
    rows = -np.sum(np.where(matrix > 0, matrix * np.log(np.where(matrix > 0, matrix, 1)), 0), axis=1)
    assert source.entropy_rate == pytest.approx(float(pi @ rows), rel=1e-12)
    assert np.allclose(source.stationary, pi, rtol=0, atol=1e-12)
    assert source.unigram_entropy == pytest.approx(float(-(pi * np.log(pi)).sum()), rel=1e-10)


def test_golden_entropy() -> None:
    """Two successors at 2/3 and 1/3: ln 3 - (2/3) ln 2."""
    assert MarkovSource(10, 2).entropy_rate == pytest.approx(np.log(3) - 2 / 3 * np.log(2), rel=1e-14)


def test_samples_follow_the_chain_and_are_stationary() -> None:
    source = MarkovSource(20, 4)
    rows = source.rows(np.arange(20_000), 17, 0, 0)
    matrix = transitions(source)
    for place in (0, 16):
        counts = np.bincount(rows[:, place], minlength=20)
        assert ((counts - 20_000 * source.stationary) ** 2 / (20_000 * source.stationary)).sum() < 50  # 19 degrees
    pairs = np.zeros((20, 20))
    np.add.at(pairs, (rows[:, :-1].ravel(), rows[:, 1:].ravel()), 1)
    assert not pairs[matrix == 0].any()
    loss = -(pairs[matrix > 0] * np.log(matrix[matrix > 0])).sum() / pairs.sum()
    assert loss == pytest.approx(source.entropy_rate, abs=0.005)  # the loss of the perfect model; 4 sigma is 0.004


def test_tokens_given_the_last_one_do_not_depend_on_the_one_before() -> None:
    rows = MarkovSource(4, 2).rows(np.arange(40_000), 3, 0, 0)
    for last in range(4):
        here = rows[rows[:, 1] == last]
        pairs = np.array([[np.sum((here[:, 0] == a) & (here[:, 2] == b)) for b in range(4)] for a in range(4)])
        expected = pairs.sum(1, keepdims=True) * pairs.sum(0, keepdims=True) / pairs.sum()
        seen = expected > 0
        assert ((pairs[seen] - expected[seen]) ** 2 / expected[seen]).sum() < 25


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return opened(name="synthetic", states=32, branching=4, vocab_size=64)


def test_a_sample_is_a_function_of_seed_and_number(corpus: Corpus) -> None:
    whole = corpus.batch(1000, 24)
    assert whole.shape == (24, 17)
    assert whole.max() < 32
    assert all((corpus.batch(1000 + i, 1)[0] == whole[i]).all() for i in range(24))
    other = opened(name="synthetic", states=32, branching=4, vocab_size=64, seed=1)
    assert not (other.batch(1000, 24) == whole).all()
    assert (other.validation == corpus.validation).all()


def test_it_is_endless_and_held_out(corpus: Corpus) -> None:
    corpus.require(10**15)
    assert corpus.epoch(10**15) == 0
    far = corpus.batch(10**15, 4)
    rows = {tuple(row) for row in [*far.tolist(), *corpus.batch(0, 500).tolist(), *corpus.validation.tolist()]}
    assert len(rows) == 504 + corpus.validation.shape[0]
    assert corpus.validation.shape == (16, 17)


def test_what_it_says_of_itself(corpus: Corpus) -> None:
    assert corpus.entropy_rate == corpus.manifest["entropy_rate"] == MarkovSource(32, 4).entropy_rate
    assert corpus.entropy_rate < corpus.unigram_entropy < np.log(32)
    assert corpus.bytes_per_token is None
    assert corpus.coder.eot == 32
    assert corpus.coder.decode(corpus.coder.encode("3 1 31")) == "3 1 31"
    with pytest.raises(RequestError, match="numbers from 0 to 31"):
        corpus.coder.encode("def main")
