"""From the routing table to one optimizer."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from abovemup.config.errors import RequestError
from abovemup.config.schema import ROLES, Experiment
from abovemup.config.schema import Optimizer as Options
from abovemup.optim.composite import Composite
from abovemup.optim.control import attach
from abovemup.optim.routing import ADAM, Route
from abovemup.optim.sharded import Owners, complete
from abovemup.optim.steepest import Group, SteepestDescent


def build_optimizer(
    named_parameters: Mapping[str, Parameter],
    routes: Sequence[Route],
    experiment: Experiment,
    owners: Owners | None = None,
) -> Optimizer:
    """The optimizer of a routing table: SteepestDescent, torch's AdamW, both as a Composite, or the user's own.

    A group has `name` (its role; a second group of a role gets a number), `names` (of its `params`, in their order),
    `lr` and `initial_lr`, and where its weight decay is norm control, the Route that says how as `control`. Adam's
    decay is decoupled, as everywhere here; without decay AdamW is Adam, bit for bit. With `owners` several ranks step
    together, whatever the optimizer.

    Raises ValueError for a tensor without a route, which would never be stepped (a second name of one that has a route
    may be left out), RequestError for an `optimizer.target` that cannot be imported or constructed.
    """
    routed = {id(named_parameters[route.name]) for route in routes}
    if missing := [name for name, p in named_parameters.items() if id(p) not in routed]:
        raise ValueError(f"parameters without a route: {', '.join(missing)}")
    options = experiment.optimizer
    groups = [make_group(name, members, named_parameters, options) for name, members in group_routes(routes).items()]
    steepest = [group for group in groups if "norm" in group]
    adam = [group for group in groups if group.get("rule") == ADAM]
    parts: list[Optimizer] = [SteepestDescent(steepest, lr=options.lr, owners=owners)] if steepest else []
    parts += [AdamW(adam, lr=options.lr)] if adam else []
    parts += [users_own(options.target, groups, options)] if options.target is not None else []
    optimizer = parts[0] if len(parts) == 1 else Composite(parts)
    if owners is not None:
        optimizer.register_step_pre_hook(complete)
    if any("control" in group for group in groups):
        attach(optimizer)
    return optimizer


def group_routes(routes: Sequence[Route]) -> dict[str, list[Route]]:
    """Group name -> routes that step alike, in the order of the roles."""
    alike: dict[tuple[Any, ...], list[Route]] = {}
    for route in sorted(routes, key=lambda route: ROLES.index(route.role)):
        decay = (route.weight_decay, route.norm_control)
        key = (route.role, route.rule, route.scale, route.lr_mult, *decay, route.momentum, route.eps)
        alike.setdefault(key, []).append(route)
    named: dict[str, list[Route]] = {}
    for (role, *_), members in alike.items():
        number = 1 + sum(name.split("_")[0] == role for name in named)
        named[role if number == 1 else f"{role}_{number}"] = members
    return named


def make_group(name: str, routes: list[Route], parameters: Mapping[str, Parameter], options: Options) -> Group:
    """Of routes that step alike, for the optimizer of their rule or the user's own."""
    route, lr, names = routes[0], options.lr * routes[0].lr_mult, [route.name for route in routes]
    group = {"name": name, "names": names, "params": [parameters[n] for n in names], "lr": lr, "initial_lr": lr}
    if options.target is not None:
        # A weight decay that was asked for; in the group, `optimizer.args` would not override it.
        asked = route.weight_decay != 0 and "weight_decay" not in options.args
        return group | ({"weight_decay": route.weight_decay} if asked else {})
    controlled = route.norm_control != "decay"
    group |= {"eps": route.eps, "weight_decay": 0.0 if controlled else route.weight_decay}
    group |= {"control": route} if controlled else {}
    if route.rule == ADAM:
        return group | {"rule": ADAM, "betas": (route.momentum, options.beta2)}
    return group | {
        "norm": route.rule,
        "scale": route.scale,
        "momentum": route.momentum,
        "nesterov": options.nesterov,
        "msign_method": options.msign.method,
        "msign_steps": options.msign.steps,
        "msign_dtype": options.msign.dtype,
        "absent_rows_rest": route.role == "embedding",
    }


def users_own(target: str, groups: list[Group], options: Options) -> Optimizer:
    """`target(groups, lr=..., **optimizer.args)`; a momentum and the like are for `optimizer.args` to say."""
    cls = load_class(target)
    try:
        optimizer = cls(groups, lr=options.lr, **options.args)
    except (Exception, SystemExit) as error:
        raise RequestError(f"optimizer.target={target} cannot be constructed: {reason(error)}") from error
    if not isinstance(optimizer, Optimizer):
        raise RequestError(f"optimizer.target={target} is not a torch.optim.Optimizer.")
    if not all({"name", "names", "initial_lr"} <= group.keys() for group in optimizer.param_groups):
        raise RequestError(f"optimizer.target={target} must keep the param groups that it is given.")
    return optimizer


def load_class(target: str) -> Any:
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not look where it was started
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module of the user's can raise anything
        raise RequestError(f"optimizer.target={target} cannot be loaded: {reason(error)}") from error


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
