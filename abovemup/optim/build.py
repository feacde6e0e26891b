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
from abovemup.optim.steepest import SteepestDescent

Group = dict[str, Any]


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

    Raises ValueError when routes and parameters are not one to one (a name for a tensor that another name has
    brought already may be left out), RequestError for an `optimizer.target` that cannot be imported or constructed.
    """
    check_one_to_one(named_parameters, routes)
    options = experiment.optimizer
    tables = group_routes(routes)
    if options.target is not None:
        own = [base(n, rs, named_parameters, options) | own_options(rs[0], options) for n, rs in tables.items()]
        return ranked(users_own(options.target, own, options), owners)
    adam: list[Group] = []
    steepest: list[Group] = []
    for name, members in tables.items():
        group = base(name, members, named_parameters, options)
        if members[0].rule == ADAM:
            adam.append(group | adam_options(members[0], options))
        else:
            steepest.append(group | steepest_options(members[0], options))
    parts: list[Optimizer] = [SteepestDescent(steepest, lr=options.lr, owners=owners)] if steepest else []
    parts += [AdamW(adam, lr=options.lr)] if adam else []
    optimizer = ranked(parts[0] if len(parts) == 1 else Composite(parts), owners)
    if any("control" in group for group in optimizer.param_groups):
        attach(optimizer)
    return optimizer


def ranked(optimizer: Optimizer, owners: Owners | None) -> Optimizer:
    """All ranks step the same parameters."""
    if owners is not None:
        optimizer.register_step_pre_hook(complete)
    return optimizer


def check_one_to_one(named_parameters: Mapping[str, Parameter], routes: Sequence[Route]) -> None:
    """Every tensor has one route: per tensor, not per name, so that tied weights are stepped once."""
    unknown = [route.name for route in routes if route.name not in named_parameters]
    if unknown:
        raise ValueError(f"routes without a parameter: {', '.join(unknown)}")
    routed: dict[int, str] = {}
    for route in routes:
        first = routed.setdefault(id(named_parameters[route.name]), route.name)
        if first is not route.name:
            raise ValueError(f"{first} and {route.name} are one tensor and have two routes")
    missing = [name for name, p in named_parameters.items() if id(p) not in routed]
    if missing:
        raise ValueError(f"parameters without a route: {', '.join(missing)}")


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


def base(name: str, routes: list[Route], parameters: Mapping[str, Parameter], options: Options) -> Group:
    """What every group has, whatever the optimizer."""
    lr = options.lr * routes[0].lr_mult
    names = [route.name for route in routes]
    group = {"name": name, "names": names, "params": [parameters[n] for n in names], "lr": lr, "initial_lr": lr}
    return group | ({} if routes[0].norm_control == "decay" else {"control": routes[0]})


def steepest_options(route: Route, options: Options) -> Group:
    return {
        "norm": route.rule,
        "scale": route.scale,
        "momentum": route.momentum,
        "nesterov": options.nesterov,
        "weight_decay": plain_decay(route),
        "eps": options.eps,
        "msign_method": options.msign.method,
        "msign_steps": options.msign.steps,
        "msign_dtype": options.msign.dtype,
        "absent_rows_rest": route.role == "embedding",
    }


def adam_options(route: Route, options: Options) -> Group:
    return {
        "rule": ADAM,
        "betas": (route.momentum, options.beta2),
        "eps": route.eps,
        "weight_decay": plain_decay(route),
    }


def plain_decay(route: Route) -> float:
    """The decay that is left to the optimizer itself."""
    return route.weight_decay if route.norm_control == "decay" else 0.0


def own_options(route: Route, options: Options) -> Group:
    """A weight decay that was asked for; it stands in the group, where `optimizer.args` would not override it."""
    asked = route.weight_decay != 0 and "weight_decay" not in options.args
    return {"weight_decay": route.weight_decay} if asked else {}


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
    if not module or not name:
        raise RequestError(f"optimizer.target={target}: write it as my.module:Class.")
    if os.getcwd() not in sys.path:  # a console script does not look where it was started
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module of the user's can raise anything
        raise RequestError(f"optimizer.target={target} cannot be loaded: {reason(error)}") from error


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
