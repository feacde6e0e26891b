"""Numbers as they are typed, and cadences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abovemup.config.cadence import due, parse_cadence, parse_tokens
from abovemup.config.errors import RequestError
from abovemup.config.numbers import parse_float, parse_int


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64", 64),
        ("1e6", 10**6),
        (1e6, 10**6),
        ("10M", 10**7),
        ("16k", 16_000),
        ("1.5B", 1_500_000_000),
        ("0.7k", 700),
        ("2^20", 2**20),
        ("2**20", 2**20),
        ("2^63", 2**63),
        ("3^39", 3**39),
        ("1_000", 1000),
        ("-1", -1),
    ],
)
def test_integers(text: object, number: int) -> None:
    assert parse_int(text) == number
    assert isinstance(parse_int(text), int)


@pytest.mark.parametrize("text", ["1.5", "abc", "", "2^-4", "nan", "inf", "2^9999", True, None, "10m", "1e400"])
def test_no_integers(text: object) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_int(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("2^-4", 2**-4), ("2**-4", 2**-4), ("2^-4.5", 2**-4.5), ("1e-3", 1e-3), (1, 1.0), ("-.5", -0.5), ("10M", 1e7)],
)
def test_floats(text: object, number: float) -> None:
    assert parse_float(text) == number


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e999", "2^9999", "x", "", False, float("nan"), "0^-1", "-2^-4"]
)
def test_no_floats(text: object) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_float(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number: float) -> None:
    assert parse_float(repr(number)) == number


@pytest.mark.parametrize("text", [-1, "-1", "pow3", "0tok", "1.5", "tok", True, None, "2^16 tokens"])
def test_no_cadences(text: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cadence(text)


def test_steps() -> None:
    assert [s for s in range(8) if due(3, s, 1)] == [3, 6]
    assert not any(due(0, s, 1) for s in range(8))


def test_every_batch_size_is_measured_at_the_same_tokens() -> None:
    for batch in (1, 2, 8, 64):
        tokens = {s * batch for s in range(1, 512 // batch + 1) if due("64tok", s, batch)}
        assert tokens == set(range(64, 513, 64))
        powers = {s * batch for s in range(1, 512 // batch + 1) if due("pow2", s, batch)}
        assert powers == {2**k for k in range(10) if 2**k >= batch}


@given(st.integers(1, 50), st.integers(1, 200))
def test_a_cadence_in_tokens_is_never_missed(every: int, batch: int) -> None:
    """A multiple that lies within a step is reached at that step, once."""
    for step in range(1, 30):
        crossed = any(n % every == 0 for n in range((step - 1) * batch + 1, step * batch + 1))
        assert due(f"{every}tok", step, batch) == crossed
        power = any(n & (n - 1) == 0 for n in range((step - 1) * batch + 1, step * batch + 1))
        assert due("pow2", step, batch) == power


def test_tokens() -> None:
    assert parse_tokens("2^21") == parse_tokens("2^21tok") == 2**21
    for text in ("", "x", "0", "-5", "1.5"):
        with pytest.raises(RequestError, match=f"^{text!r}: "):
            parse_tokens(text)
