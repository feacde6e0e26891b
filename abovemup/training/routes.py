"""The routing table of an experiment, from the model on the meta device: sizes without memory."""

from math import prod
from typing import Any

import torch

from abovemup.config.schema import Experiment
from abovemup.model.llama import Llama
from abovemup.model.roles import specs
from abovemup.optim.routing import Route, routing_table


def table(experiment: Experiment) -> list[Route]:
    """One row per distinct tensor. Raises RequestError for a norm that does not exist or does not fit."""
    with torch.device("meta"):
        model = Llama(experiment.model, experiment.parameterization)
    return routing_table(specs(model), experiment)


def sizes(routes: list[Route]) -> dict[str, Any]:
    """The number of parameters, and the bytes of weights, gradients and state, all float32.

    The state is two moments of Adam, or a momentum where there is one; None for a user's own optimizer.
    """
    tensors = [{"adam": 2, "adamw": 2, "steepest_descent": int(r.momentum > 0)}.get(r.optimizer) for r in routes]
    count = sum(prod(route.shape) for route in routes)
    state = sum(4 * (n or 0) * prod(route.shape) for n, route in zip(tensors, routes, strict=True))
    known = None not in tensors
    return {"parameters": count, "weights": 4 * count, "gradients": 4 * count, "state": state if known else None}
