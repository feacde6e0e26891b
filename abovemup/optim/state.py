"""Optimizer state by parameter name: what a checkpoint holds, whatever the order of parameters and groups."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from abovemup.config.errors import RequestError
from abovemup.optim.composite import Composite
from abovemup.optim.routing import ADAM
from abovemup.optim.steepest import SteepestDescent

PLAIN = (bool, int, float, complex, str, type(None))
State = dict[str, Any]  # state name -> tensor (a user's own optimizer may keep plain numbers besides)


def state_by_name(optimizer: Optimizer) -> dict[str, State]:
    """Parameter name -> its state, for every parameter of an optimizer that `build_optimizer` made.

    The tensors are the optimizer's own, not copies. Where it has none yet, what it would start from is given, so
    that a state that is missing from a file is always an error. Raises RequestError for a value of a user's own
    optimizer that could be saved and not be read again.
    """
    result = {}
    for name, p, blank in _parameters(optimizer):
        result[name] = dict(optimizer.state[p]) if optimizer.state.get(p) else blank or {}
        for key, value in result[name].items():
            if not _readable(value):
                raise RequestError(
                    f"optimizer {type(optimizer).__name__} keeps a {type(value).__name__} as {key} of {name}, which a "
                    "checkpoint cannot hold: keep tensors, numbers, strings, or lists, tuples and dicts of these."
                )
    return result


def _readable(value: Any) -> bool:
    """Whether `torch.load` reads it with its safe default, which goes by the exact type: numpy's float is none."""
    if type(value) in (dict, list, tuple):
        return all(map(_readable, [*value, *value.values()] if type(value) is dict else value))
    return isinstance(value, Tensor) or type(value) in PLAIN


@torch.no_grad()
def make_room(optimizer: Optimizer, state: Mapping[str, State]) -> None:
    """Give the optimizer a state like `state`: tensors of these shapes, to be filled, and what else is in it.

    Raises RequestError, with nothing changed, that names what is missing, left over or of another shape. Of a
    user's own optimizer only the parameter names can be checked.
    """
    parameters = list(_parameters(optimizer))
    wrong = [f"left over: {name}" for name in state if name not in {name for name, _, _ in parameters}]
    for name, _, blank in parameters:
        wrong += [f"missing: {name}"] if name not in state else _differences(name, blank, state[name])
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise RequestError(f"The saved optimizer state does not fit. {', '.join(wrong[:5])}{more}.")
    for name, p, blank in parameters:
        if blank is None:
            blank = {key: _room(p, value) for key, value in state[name].items()}
        optimizer.state.pop(p, None)
        if blank:
            optimizer.state[p] = blank


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, State | None]]:
    """Every parameter with its name and the state it starts from; None where that is not ours to know."""
    for part in optimizer.parts if isinstance(optimizer, Composite) else [optimizer]:
        for group in part.param_groups:
            for name, p in zip(group["names"], group["params"], strict=True):
                yield name, p, _blank(part, group, p)


def _blank(optimizer: Optimizer, group: dict[str, Any], p: Tensor) -> State | None:
    if type(optimizer) is SteepestDescent:
        return {"momentum_buffer": torch.zeros_like(p)} if group["momentum"] != 0 else {}
    if group.get("rule") == ADAM:  # a group of ours: a user's own AdamW may have options that need more state
        step = torch.zeros((), dtype=torch.float32)
        return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return None


def _differences(name: str, blank: State | None, given: State) -> list[str]:
    if blank is None:
        return []
    wrong = [f"missing: {key} of {name}" for key in blank if key not in given]
    wrong += [f"left over: {key} of {name}" for key in given if key not in blank]
    for key in blank.keys() & given.keys():
        have, want = tuple(given[key].shape), tuple(blank[key].shape)
        wrong += [f"{key} of {name} has shape {have}, not {want}"] if have != want else []
    return wrong


def _room(p: Tensor, value: Any) -> Any:
    """A tensor beside the parameter, sharded as that is when it has its shape; a scalar (a step count) on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == p.shape:
        return torch.empty_like(p, dtype=value.dtype)
    return torch.empty_like(value, device=p.device if value.ndim else "cpu")
