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
        self.parts: list[Optimizer] = []
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(islice(groups, len(part.param_groups)))
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.parts:
            raise ValueError("add the group to one of the optimizers before they are joined")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of every part. Returns what `closure`, when given, returns; it is called once."""
        loss = torch.enable_grad()(closure)() if closure else None
        for part in self.parts:
            part.step()
        return loss
