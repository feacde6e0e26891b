"""From routes to one optimizer: groups, ties, the composite, a user's own class."""

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from abovemup.config.errors import RequestError
from abovemup.config.schema import PerRole, RoleRule
from abovemup.optim.build import build_optimizer
from abovemup.optim.composite import Composite
from abovemup.optim.routing import routing_table
from abovemup.optim.steepest import SteepestDescent
from tests.optim.make import SHAPES, SPECS, TABLES, Spec, exact, experiment, parameters, set_grads, values


def build(table: str = "scion", named: dict[str, Parameter] | None = None, **options: Any) -> torch.optim.Optimizer:
    e = experiment(table, **options)
    return build_optimizer(parameters() if named is None else named, routing_table(SPECS, e), e)


def test_kinds() -> None:
    assert type(build("scion")) is SteepestDescent
    assert type(build("adam")) is AdamW
    muon = build("muon")
    assert type(muon) is Composite
    assert [type(part) for part in muon.parts] == [SteepestDescent, AdamW]


@pytest.mark.parametrize("table", TABLES)
def test_every_parameter_is_in_one_group_under_its_name(table: str) -> None:
    named = parameters()
    optimizer = build(table, named, lr=0.5, lr_scale=PerRole(hidden=0.25))
    seen = Counter()
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            assert named[name] is p
            assert SHAPES[name][0] == group["name"]
            seen[name] += 1
        assert group["lr"] == group["initial_lr"] == (0.125 if group["name"] == "hidden" else 0.5)
    assert seen == Counter(SHAPES.keys())
    assert {group["name"] for group in optimizer.param_groups} == {"embedding", "hidden", "head", "gain", "bias"}


def test_options_arrive() -> None:
    optimizer = build("muon", momentum=0.8, nesterov=True, weight_decay=0.1, beta2=0.7, lr_scale=PerRole(head=0.5))
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert groups["hidden"]["norm"] == "keller_jordan"
    assert (groups["hidden"]["momentum"], groups["hidden"]["nesterov"]) == (0.8, True)
    assert (groups["hidden"]["msign_method"], groups["hidden"]["msign_steps"]) == ("newton_schulz", 5)
    assert (groups["head"]["betas"], groups["head"]["eps"]) == ((0.8, 0.7), 1e-8)
    assert groups["head"]["weight_decay"] == 0.2
    own = build("muon", momentum=0.95, roles={"head": RoleRule(norm="adam", momentum=0.9)})
    momenta = {group["name"]: group.get("momentum", group.get("betas", (None,))[0]) for group in own.param_groups}
    assert (momenta["hidden"], momenta["head"], momenta["embedding"]) == (0.95, 0.9, 0.95)
    resting = {group["name"] for group in build("scion").param_groups if group["absent_rows_rest"]}
    assert resting == {"embedding"}


def test_a_second_group_of_a_role_has_a_number() -> None:
    e = experiment()
    routes = routing_table(SPECS, e)
    other = experiment(roles={"hidden": RoleRule(norm="rms_to_rms", scale=2.0)})
    routes[1] = routing_table([SPECS[1]], other)[0]
    optimizer = build_optimizer(parameters(), routes, e)
    names = {group["name"]: group["names"] for group in optimizer.param_groups}
    assert list(names) == ["embedding", "hidden", "hidden_2", "head", "gain", "bias"]
    assert names["hidden"] == ["layers.0.wq.weight"]


@pytest.mark.parametrize("table", TABLES)
def test_the_step_is_not_gradient_descent(table: str) -> None:
    """Case 2 for every optimizer, in the single-process mode."""
    g = torch.Generator().manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(32, 32, generator=g))
    p = Parameter(torch.randn(32, 32, generator=g))
    p.grad = U @ torch.logspace(0, -3, 32).diag() @ Vh
    e = exact(experiment(table, lr=2**-4, momentum=0.0))
    optimizer = build_optimizer({"w": p}, routing_table([Spec("w", (32, 32), "hidden", "rms_to_rms")], e), e)
    before = p.detach().clone()
    optimizer.step()
    dW = p.detach() - before
    assert torch.cosine_similarity(dW.flatten(), -p.grad.flatten(), dim=0) < 0.99
    if table in ("scion", "above_mup", "muon"):
        sigma = torch.linalg.svdvals(dW / 2**-4)
        assert sigma[0] / sigma[-1] < 1.01
        assert sigma[0].item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("table", ["muon", "scion"])
@pytest.mark.parametrize("alias_first", [False, True])
def test_tied_embedding(table: str, alias_first: bool) -> None:
    """Case 8: one tensor, one group, the embedding's, whichever name comes first; both names see its steps."""
    shared = Parameter(torch.randn(11, 8, generator=torch.Generator().manual_seed(0)))
    w = Parameter(torch.ones(8, 8))
    names = ["head.weight", "embedding.weight"] if alias_first else ["embedding.weight", "head.weight"]
    named = {**dict.fromkeys(names, shared), "w": w}
    specs = [Spec("embedding.weight", (11, 8), "embedding", "one_to_rms"), Spec("w", (8, 8), "hidden", "rms_to_rms")]
    e = experiment(table)
    optimizer = build_optimizer(named, routing_table(specs, e), e)
    holding = [group["name"] for group in optimizer.param_groups if any(p is shared for p in group["params"])]
    assert holding == ["embedding"]
    for step in range(3):
        set_grads({"embedding.weight": shared, "w": w}, step)
        optimizer.step()
    assert named["head.weight"].data_ptr() == named["embedding.weight"].data_ptr()


@pytest.mark.parametrize("table", ["scion", "muon"])
def test_routes_and_parameters_are_one_to_one(table: str) -> None:
    e = experiment(table)
    routes, named = routing_table(SPECS, e), parameters()
    with pytest.raises(KeyError, match=r"head\.weight"):
        build_optimizer({n: p for n, p in named.items() if n != "head.weight"}, routes, e)
    with pytest.raises(ValueError, match=r"without a route: head\.weight"):
        build_optimizer(named, routes[:-1], e)
    named["head.weight"] = named["embedding.weight"]
    with pytest.raises(ValueError, match=r"more than one parameter group"):
        build_optimizer(named, routes, e)


# ---- the composite ----


def test_composite_is_one_optimizer() -> None:
    """Its groups and state are its parts', a scheduler and state_dict work, and a saved one goes on bit for bit."""
    named, others = parameters(), parameters()
    optimizer, copy = build("muon", named), build("muon", others)
    assert isinstance(optimizer, Composite)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(2):
        set_grads(named, step)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [2**-6] * 5
    assert set(optimizer.state) == set(named.values())

    copy.load_state_dict(deepcopy(optimizer.state_dict()))
    for name, p in others.items():
        p.data.copy_(named[name].data)
    set_grads(named, 7)
    set_grads(others, 7)
    optimizer.step()
    copy.step()
    assert all(torch.equal(named[name], others[name]) for name in named)
    assert not all(torch.equal(p, q) for p, q in zip(values(parameters()).values(), named.values(), strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in named.values())


def test_composite_calls_a_closure_once() -> None:
    named = parameters()
    optimizer = build("muon", named)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_grads(named, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == [True]


# ---- a user's own ----


def test_users_class_from_the_working_directory(elsewhere: Path) -> None:
    (elsewhere / "my_optimizers.py").write_text(
        "import torch\n"
        "class Plain(torch.optim.SGD):\n"
        "    pass\n"
        "class Deaf:\n"
        "    def __init__(self, groups, lr): pass\n"
        "class Regroups(torch.optim.SGD):\n"
        "    def __init__(self, groups, lr):\n"
        "        super().__init__([p for g in groups for p in g['params']], lr=lr)\n"
    )
    named = parameters()
    optimizer = build(named=named, lr=0.5, target="my_optimizers:Plain", args={"dampening": 0.25}, weight_decay=0.1)
    assert type(optimizer).__name__ == "Plain"
    assert {group["dampening"] for group in optimizer.param_groups} == {0.25}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}
    before = values(named)
    set_grads(named, 0)
    optimizer.step()
    torch.testing.assert_close(
        named["head.weight"].detach(), before["head.weight"] * 0.95 - 0.5 * named["head.weight"].grad
    )
    own = build(target="my_optimizers:Plain", args={"weight_decay": 0.3}, weight_decay=0.1)
    assert {group["weight_decay"] for group in own.param_groups} == {0.3}
    with pytest.raises(RequestError, match=r"not a torch\.optim\.Optimizer"):
        build(target="my_optimizers:Deaf")
    with pytest.raises(RequestError, match="param groups"):
        build(target="my_optimizers:Regroups")


@pytest.mark.parametrize(
    ("target", "args", "why"),
    [
        ("torch.optim.SGD", {}, "No module named 'torch.optim.SGD'"),
        ("no_such_module:SGD", {}, "No module named 'no_such_module'"),
        ("torch.optim:Sgd", {}, "has no attribute 'Sgd'"),
        ("torch.optim:SGD", {"mass": 1}, "unexpected keyword argument 'mass'"),
        ("torch.optim:SGD", {"momentum": -1}, "Invalid momentum value: -1"),
        ("quits_at_once:SGD", {}, "cannot be loaded: SystemExit: 0"),
        ("quits_later:SGD", {}, "cannot be constructed: SystemExit: 0"),
    ],
)
def test_users_class_that_does_not_work(
    target: str, args: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "quits_later.py").write_text("import sys\ndef SGD(*args, **kwargs):\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError) as error:
        build(target=target, args=args)
    assert why in str(error.value)
    assert f"optimizer.target={target}" in str(error.value)


@pytest.mark.parametrize("table", TABLES)
def test_a_pipeline_stage_steps_as_it_does_in_the_whole(table: str) -> None:
    """Nothing in a step looks across parameters: a stage's are an ordinary list."""
    e = experiment(table, weight_decay=0.1)
    whole, stages = parameters(), parameters()
    optimizers = [build_optimizer(whole, routing_table(SPECS, e), e)]
    for first in (True, False):
        specs = [spec for spec in SPECS if spec.name.startswith(("embedding", "layers.0")) is first]
        optimizers.append(build_optimizer({s.name: stages[s.name] for s in specs}, routing_table(specs, e), e))
    for seed in range(3):
        set_grads(whole, seed)
        set_grads(stages, seed)
        for optimizer in optimizers:
            optimizer.step()
    for name, p in whole.items():
        torch.testing.assert_close(stages[name], p, rtol=1e-6, atol=1e-6)
