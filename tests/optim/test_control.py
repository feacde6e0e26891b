"""Pre Decay and Post Clip in every optimizer of the table: what they do to a step, and the bound that they keep."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from abovemup.config.errors import RequestError
from abovemup.config.schema import PerRole, RoleRule
from abovemup.geometry.control import clip
from abovemup.geometry.norms import NORMS
from abovemup.geometry.parameterization import step_norm
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import Route, routing_table
from abovemup.optim.state import load_state_by_name, state_by_name
from tests.optim.make import ROLE_NORM, SHAPES, SPECS, TABLES, exact, experiment, parameters, set_grads, values

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
    """Pre: clip to (1 - lr lam) norm, then step; post: step, then clip to scale * step_norm * lr_mult / lam."""
    named = parameters(dtype=torch.float64)
    options = {"lr": 0.25, "lr_scale": PerRole(hidden=0.5, head=2.0), "momentum": 0.0}
    optimizer, routes = build(table, named, "float64", norm_control=control, weight_decay=0.5, **options)
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    top1 = control.endswith("top1")
    expected = {name: Parameter(p.detach().clone()) for name, p in named.items()}
    limits = {r.name: r.scale * step_norm(r.rule, r.role, r.shape) * r.lr_mult / 0.5 for r in routes}
    if control.startswith("pre"):
        for name, p in expected.items():
            ball = NORMS[ROLE_NORM[SHAPES[name][0]]]
            p.data = clip(ball, p.data, lambda n: (1 - 0.25 * 0.5) * n, top1)
    plain, _ = build(table, expected, "float64", **options)
    for parameter_set, one in ((named, optimizer), (expected, plain)):
        set_grads(parameter_set, 1)
        one.step()
    if control.startswith("post"):
        for name, p in expected.items():
            ball = NORMS[ROLE_NORM[SHAPES[name][0]]]
            most = limits[name]
            p.data = clip(ball, p.data, lambda n, most=most: torch.full_like(n, most), top1)  # type: ignore[misc]
    for name, p in named.items():
        torch.testing.assert_close(p, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("adversary", [True, False])
def test_the_bound_holds_with_the_roles_own_steps(control: Any, adversary: bool) -> None:
    """THEORY test 10, every role: norm(W_t) <= max(norm(W_0), tau), with gradients that push outwards and others."""
    named = parameters(dtype=torch.float64)
    start = {name: NORMS[ROLE_NORM[SHAPES[name][0]]].norm(p.detach()).item() for name, p in named.items()}
    roles = {"hidden": RoleRule(norm="rms_to_rms", scale=0.5), "gain": RoleRule(norm="max_abs", norm_control=control)}
    optimizer, _ = build(
        "above_mup", named, "float64", lr=0.5, momentum=0.5, norm_control=control, weight_decay=0.25, roles=roles
    )
    for t in range(60):
        set_grads(named, t)
        for p in named.values() if adversary else ():
            p.grad = -p.detach().clone()
        optimizer.step()
        for name, p in named.items():
            tau = (0.5 if SHAPES[name][0] == "hidden" else 1) / 0.25
            norm = NORMS[ROLE_NORM[SHAPES[name][0]]].norm(p.detach()).item()
            assert norm <= max(start[name], tau) * (1 + 1e-12), (name, t)
            if control == "post_clip":
                assert norm <= tau * (1 + 1e-12)
    if adversary:
        for name, p in named.items():  # the bound is reached, so it is not another that was tested
            tau = (0.5 if SHAPES[name][0] == "hidden" else 1) / 0.25
            assert NORMS[ROLE_NORM[SHAPES[name][0]]].norm(p.detach()).item() > 0.9 * tau


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


def test_decay_is_the_default_and_nothing_is_attached() -> None:
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


def test_without_a_gradient_nothing_moves_and_a_closure_sees_the_weights_as_they_were() -> None:
    named = parameters()
    before = values(named)
    optimizer, _ = build("above_mup", named, norm_control="pre_decay", weight_decay=0.5)

    def closure() -> float:
        assert all(torch.equal(p, before[name]) for name, p in named.items())
        set_grads({name: p for name, p in named.items() if name != "head.weight"}, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
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
    with pytest.raises(RequestError, match=r"norm_control=post_clip does not reach optimizer\.target"):
        build("scion", parameters(), weight_decay=0.5, norm_control="post_clip", target="my.module:Cls")
