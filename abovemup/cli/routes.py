"""What a routing table says: the numbers of each parameter, and memory."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment
    from abovemup.optim.routing import Route


def rows(e: "Experiment", routes: "list[Route]") -> list[dict[str, Any]]:
    """How each parameter starts and steps. `step norm / lr` is the role's norm, of an aligned step."""
    from abovemup.geometry.parameterization import init_std, step_norm

    return [
        {
            "parameter": r.name,
            "shape": r.shape,
            "base": r.base,
            "role": r.role,
            "norm": r.norm,
            "init norm": r.init,
            "init std": init_std(e.model.init, r.role, r.shape) * r.init,
            "forward": r.forward,
            "rule": r.rule,
            "scale": r.scale,
            "lr x": r.lr_mult,
            "step norm / lr": step_norm(r.rule, r.role, r.shape) * r.scale * r.lr_mult,
            "decay": f"{decay(r):g}" + ("" if r.norm_control == "decay" else f" {r.norm_control}"),
            "momentum": r.momentum,
            "optimizer": r.optimizer,
        }
        for r in routes
    ]


def print_rows(rows: list[dict[str, Any]]) -> None:
    from abovemup.cli.output import print_table

    columns = list(rows[0]) if rows else []
    print_table(columns, ([f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows))


def decay(route: "Route") -> float:
    """As in W <- (1 - lr(t) * weight_decay) W: a route holds it over its lr multiplier."""
    return route.weight_decay * route.lr_mult


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
