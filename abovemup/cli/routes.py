"""What a routing table says of memory."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from abovemup.optim.routing import Route


@dataclass(frozen=True)
class Sizes:
    parameters: int
    weights: int  # bytes
    gradients: int  # bytes
    state: int | None  # bytes of the optimizer's state; None for a user's own


def sizes(routes: "list[Route]") -> Sizes:
    """Everything is float32: 4 bytes a weight and a gradient, two moments of Adam, a momentum where there is one."""
    count = sum(prod(route.shape) for route in routes)
    state: int | None = 0
    for route in routes:
        tensors = _state_tensors(route)
        state = None if tensors is None or state is None else state + 4 * tensors * prod(route.shape)
    return Sizes(parameters=count, weights=4 * count, gradients=4 * count, state=state)


def _state_tensors(route: "Route") -> int | None:
    if route.optimizer in ("adam", "adamw"):
        return 2
    if route.optimizer == "steepest_descent":
        return 1 if route.momentum else 0
    return None
