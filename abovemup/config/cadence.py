"""How often something happens: every n steps, every n tokens ("2^16tok"), or at every power of two ("pow2")."""

from abovemup.config.errors import RequestError
from abovemup.config.numbers import parse_int
from abovemup.config.schema import Cadence


def token_count(value: object) -> int | None:
    """The n of "<n>tok", at least 1; None when the value is not written so. Raises ValueError when n is not a count."""
    return _count(value.removesuffix("tok")) if isinstance(value, str) and value.endswith("tok") else None


def parse_tokens(text: str) -> int:
    """A number of tokens that was typed, "2^21" or "2^21tok". Raises RequestError."""
    try:
        return _count(text.removesuffix("tok"))
    except ValueError as error:
        raise RequestError(f"{text!r}: {error}; expected a number of tokens such as 2^21 or 10M.") from error


def _count(text: str) -> int:
    if (count := parse_int(text)) < 1:
        raise ValueError("a number of tokens is at least 1")
    return count


def parse_cadence(value: object) -> Cadence:
    """A checked cadence: a number of steps (0 = never), "<n>tok" or "pow2". Raises ValueError for anything else."""
    if value == "pow2" or token_count(value) is not None:
        return str(value)
    steps = parse_int(value)
    if steps < 0:
        raise ValueError("a number of steps is at least 0")
    return steps


def due(cadence: Cadence, step: int, tokens_per_step: int) -> bool:
    """Whether it happens after optimizer step number `step` (1, 2, ...), whose batch held `tokens_per_step` tokens.

    Token cadences are true at the step that reaches or passes a multiple of n (a power of two for "pow2"), so that
    every batch size that divides it is measured at the same exact token counts.
    """
    now, before = step * tokens_per_step, (step - 1) * tokens_per_step
    if step < 1 or cadence == 0:
        return False
    if cadence == "pow2":
        return now.bit_length() > before.bit_length()
    every = token_count(cadence) or int(cadence) * tokens_per_step
    return now // every > before // every
