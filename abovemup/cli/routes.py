"""What a routing table says of each parameter, and how large the vocabulary is."""

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


def decay(route: "Route") -> float:
    """As in W <- (1 - lr(t) * weight_decay) W: a route holds it over its lr multiplier."""
    return route.weight_decay * route.lr_mult


def vocabulary(e: "Experiment") -> str:
    """The rows of embedding and head; where some are padding, how many are not."""
    rows = e.model.vocab_size
    used = e.data.states + 1 if e.data.name == "synthetic" else e.tokenizer.vocab_size
    return f"{rows:,}" if used == rows else f"{used:,} ids in {rows:,} rows"
