"""Several optimizers that step as one."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class Composite(Optimizer):
    """Optimizers over disjoint parameters as one: the same group dicts, one state, one `step`.

    What is written into `param_groups` (a learning rate) or `state` reaches the parts, and `state_dict` is whole.
    """

    def __init__(self, parts: Sequence[Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of every part. Returns what `closure`, when given, returns; it is called once."""
        loss = torch.enable_grad()(closure)() if closure else None
        groups = iter(self.param_groups)
        for part in self.parts:  # what has been loaded meanwhile is in new groups and a new state
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state
            part.step()
        return loss
