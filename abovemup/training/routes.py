"""The routing table of an experiment, from the model on the meta device: sizes without memory."""

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
