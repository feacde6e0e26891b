"""Pre Decay and Post Clip in every optimizer of the table: what they do to a step, and the bound that they keep."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from abovemup.config.errors import RequestError
from abovemup.config.schema import PerRole, RoleRule
from abovemup.geometry.control import clip
from abovemup.geometry.norms import NORMS
from abovemup.geometry.parameterization import largest_step
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import Route, routing_table
from abovemup.optim.state import state_by_name
from tests.optim.make import (
    ROLE_NORM,
    SHAPES,
    SPECS,
    TABLES,
    exact,
    experiment,
    load_state_by_name,
    parameters,
    set_grads,
    values,
)

CONTROLS = ["pre_decay", "post_clip"]


def build(
    table: str, named: dict[str, Parameter], dtype: str = "float32", **options: Any
) -> tuple[Optimizer, list[Route]]:
    e = exact(experiment(table, **options), dtype)
    routes = routing_table(SPECS, e)
    return build_optimizer(named, routes, e), routes


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("control", [*CONTROLS, "pre_decay_top1", "post_clip_top1"])
def test_a_step_is_the_formula_around_the_step_without_decay(table: str, control: Any) -> None:
    """Pre: clip to (1 - lr lam) norm, then step; post: step, then clip to scale * largest_step * lr_mult / lam."""
    named = parameters(dtype=torch.float64)
    options = {"lr": 0.5, "lr_scale": PerRole(hidden=0.5, head=2.0), "momentum": 0.0}
    optimizer, routes = build(table, named, "float64", norm_control=control, weight_decay=0.5, **options)
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    top1 = control.endswith("top1")
    expected = {name: Parameter(p.detach().clone()) for name, p in named.items()}
    limits = {r.name: r.scale * largest_step(r.rule, r.role, r.shape) * r.lr_mult / 0.5 for r in routes}
    if control.startswith("pre"):
        for name, p in expected.items():
            ball = NORMS[ROLE_NORM[SHAPES[name][0]]]
            p.data = clip(ball, p.data, lambda n: (1 - 0.25 * 0.5) * n, top1)
    plain, _ = build(table, expected, "float64", **options)
    for parameter_set, one in ((named, optimizer), (expected, plain)):
        set_grads(parameter_set, 1)
        for group in one.param_groups:  # as a schedule does
            group["lr"] = group["initial_lr"] / 2
        one.step()
    if control.startswith("post"):
        for name, p in expected.items():
            ball = NORMS[ROLE_NORM[SHAPES[name][0]]]
            most = limits[name]
            p.data = clip(ball, p.data, lambda n, most=most: torch.full_like(n, most), top1)  # type: ignore[misc]
    for name, p in named.items():
        torch.testing.assert_close(p, expected[name], rtol=0, atol=1e-12)


LARGEST = {  # the role's norm of the largest step of lr 1, for what is not 1
    "above_mup": {},
    "scion": {"gain": 8**0.5},  # all of a step by `rms` in one entry
    "adam": {"hidden": "d_in", "head": "d_in"},
}
ADVERSARIES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "outwards": lambda p, t: -p,
    "one entry": lambda p, t: -torch.eye(p.numel(), dtype=p.dtype)[0].view_as(p),
    "aligned": lambda p, t: -torch.ones_like(p),
    "rising": lambda p, t: -torch.full_like(p, (0.95 / 0.9) ** t),  # Adam's step is largest after these
    "random": lambda p, t: torch.randn(p.shape, generator=torch.Generator().manual_seed(t), dtype=p.dtype),
}


def role_norms(named: dict[str, Parameter]) -> dict[str, float]:
    return {name: NORMS[ROLE_NORM[SHAPES[name][0]]].norm(p.detach()).item() for name, p in named.items()}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("table", LARGEST)
def test_the_bound_holds_against_every_adversary_and_schedule(table: str, control: Any) -> None:
    """THEORY test 10, every role: norm(W_t) <= max(norm(W_0), tau). Adam's pre_decay: its step reaches 1.165 lr."""
    half = RoleRule(norm="rms_to_rms", scale=0.5)
    roles = {"gain": RoleRule(norm=TABLES[table]["gain"], norm_control=control)}
    roles |= {} if table == "adam" else {"hidden": half}
    slack = 1.165 if table == "adam" and control == "pre_decay" else 1.0
    tau = {}
    for name, (role, shape) in SHAPES.items():
        longest = LARGEST[table].get(role, 1.0)
        tau[name] = (shape[-1] if longest == "d_in" else longest) * (0.5 if roles.get(role) == half else 1) / 0.25
    reached = dict.fromkeys(SHAPES, 0.0)
    for adversary in ADVERSARIES.values():
        named = parameters(dtype=torch.float64)
        start = role_norms(named)
        optimizer, _ = build(table, named, "float64", lr=1.0, norm_control=control, weight_decay=0.25, roles=roles)
        for t in range(40):
            for p in named.values():
                p.grad = adversary(p.detach(), t)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (0.25, 1, 0.5)[t % 3]
            optimizer.step()
            for name, norm in role_norms(named).items():
                assert norm <= max(start[name], tau[name] * slack) * (1 + 1e-12), (name, t)
        reached = {name: max(reached[name], norm / tau[name]) for name, norm in role_norms(named).items()}
    assert min(reached.values()) > (0.97 if slack == 1 else 1.05), reached  # so no lower bound is the true one


def test_pre_decay_of_a_bias_is_weight_decay() -> None:
    """THEORY test 10: in the RMS norm the two are one."""
    ours, theirs = parameters(), parameters()
    for named, options in ((ours, {"norm_control": "pre_decay"}), (theirs, {})):
        optimizer, _ = build("adam", named, weight_decay=0.5, **options)
        for t in range(3):
            set_grads(named, t)
            optimizer.step()
    torch.testing.assert_close(ours["layers.0.wq.bias"], theirs["layers.0.wq.bias"], rtol=1e-6, atol=1e-6)
    assert (ours["layers.0.wq.weight"] - theirs["layers.0.wq.weight"]).abs().max() > 1e-3


def test_decay_is_the_default() -> None:
    optimizer, routes = build("scion", parameters(), weight_decay=0.5)
    assert {route.norm_control for route in routes} == {"decay"}
    assert not any("control" in key for group in optimizer.param_groups for key in group)


def test_roles_choose_for_themselves() -> None:
    roles = {
        "gain": RoleRule(norm="rms", weight_decay=0.0),  # exempt from decay
        "head": RoleRule(norm="rms_to_inf", norm_control="decay"),
        "bias": RoleRule(norm="rms", norm_control="post_clip", weight_decay=0.1),
    }
    optimizer, routes = build("scion", parameters(), norm_control="pre_decay", weight_decay=0.5, roles=roles)
    chosen = {route.role: route.norm_control for route in routes}
    assert chosen == {
        "embedding": "pre_decay",
        "hidden": "pre_decay",
        "head": "decay",
        "gain": "decay",
        "bias": "post_clip",
    }
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"embedding": 0, "hidden": 0, "head": 0.5, "gain": 0, "bias": 0}


def test_without_a_gradient_nothing_moves() -> None:
    named = parameters()
    before = values(named)
    optimizer, _ = build("above_mup", named, norm_control="pre_decay", weight_decay=0.5)
    set_grads({name: p for name, p in named.items() if name != "head.weight"}, 0)
    optimizer.step()
    changed = {name for name, p in named.items() if not torch.equal(p, before[name])}
    assert changed == named.keys() - {"head.weight"}


@pytest.mark.parametrize("table", ["muon", "adam", "scion"])
@pytest.mark.parametrize("control", CONTROLS)
def test_resumed_and_copied_it_steps_the_same(table: str, control: Any) -> None:
    named = parameters()
    optimizer, _ = build(table, named, norm_control=control, weight_decay=0.5)
    for t in range(2):
        set_grads(named, t)
        optimizer.step()
    again = {name: Parameter(p.detach().clone()) for name, p in named.items()}
    resumed, _ = build(table, again, norm_control=control, weight_decay=0.5)
    load_state_by_name(resumed, deepcopy(state_by_name(optimizer)))
    for parameter_set, one in ((named, optimizer), (again, resumed)):
        set_grads(parameter_set, 2)
        one.step()
    assert all(torch.equal(p, again[name]) for name, p in named.items())


def test_refusals() -> None:
    with pytest.raises(RequestError, match=r"optimizer\.norm_control=pre_decay .* optimizer\.weight_decay, which is 0"):
        build("scion", parameters(), norm_control="pre_decay")
    own = {"head": RoleRule(norm="rms_to_inf", norm_control="post_clip", weight_decay=0.0)}
    with pytest.raises(RequestError, match=r"optimizer\.roles\.head\.weight_decay, which is 0"):
        build("scion", parameters(), weight_decay=0.5, roles=own)
    for lr in (2.0, 2.001):  # a longer step would be above tau by itself
        options: dict[str, Any] = {"lr": lr, "weight_decay": 0.5, "norm_control": "pre_decay_top1"}
        if lr > 2:
            with pytest.raises(
                RequestError, match=r"optimizer\.norm_control=pre_decay_top1 needs .* <= 1, not 1\.0005"
            ):
                build("scion", parameters(), **options)
        build("scion", parameters(), **options | ({"norm_control": "post_clip"} if lr > 2 else {}))
    with pytest.raises(RequestError, match=r"norm_control=post_clip does not reach optimizer\.target"):
        build("scion", parameters(), weight_decay=0.5, norm_control="post_clip", target="my.module:Cls")
