"""How often something happens: every n steps, every n tokens ("2^16tok"), or at every power of two ("pow2")."""

from abovemup.config.errors import RequestError
from abovemup.config.numbers import parse_int
from abovemup.config.schema import Cadence


def token_count(value: object) -> int | None:
    """The n of "<n>tok", at least 1; None when the value is not written so. Raises ValueError when n is not a count."""
    if not isinstance(value, str) or not value.strip().endswith("tok"):
        return None
    count = parse_int(value.strip().removesuffix("tok"))
    if count < 1:
        raise ValueError("a number of tokens is at least 1")
    return count


def parse_tokens(text: str) -> int:
    """A number of tokens that was typed, "2^21" or "2^21tok". Raises RequestError."""
    try:
        count = token_count(text) or parse_int(text)
    except ValueError as error:
        raise RequestError(f"{text!r}: {error}; expected a number of tokens such as 2^21 or 10M.") from error
    if count < 1:
        raise RequestError(f"{text!r}: a number of tokens is at least 1.")
    return count


def parse_cadence(value: object) -> Cadence:
    """A checked cadence: a number of steps (0 = never), "<n>tok" or "pow2". Raises ValueError for anything else."""
    if isinstance(value, str) and value.strip() == "pow2":
        return "pow2"
    if token_count(value) is not None:
        return str(value).strip()
    steps = parse_int(value)
    if steps < 0:
        raise ValueError("a number of steps is at least 0")
    return steps


def due(cadence: Cadence, step: int, tokens_per_step: int) -> bool:
    """Whether it happens after optimizer step number `step` (1, 2, ...), whose batch held `tokens_per_step` tokens.

    Token cadences are true at the step that reaches or passes a multiple of n (a power of two for "pow2"), so that
    every batch size that divides it is measured at the same exact token counts.
    """
    if step < 1:
        return False
    if isinstance(cadence, int):
        return cadence > 0 and step % cadence == 0
    now, before = step * tokens_per_step, (step - 1) * tokens_per_step
    if cadence == "pow2":
        return now.bit_length() > before.bit_length()
    every = token_count(cadence)
    if every is None:
        raise ValueError(f"{cadence!r} is no cadence")
    return now // every > before // every
