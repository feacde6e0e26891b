"""The same for each of several, some of which may refuse."""

from collections.abc import Callable, Iterable
from typing import Any


def attempted(
    each: Iterable[Any], do: Callable[[Any], Any], refusal: type[Exception]
) -> tuple[dict[Any, Any], dict[str, str]]:
    """What `do` gives for each; and where it raises `refusal`, why, by the text of that one."""
    found, refused = {}, {}
    for one in each:
        try:
            found[one] = do(one)
        except refusal as error:
            refused[str(one)] = str(error)
    return found, refused
