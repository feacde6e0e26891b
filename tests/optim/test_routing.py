"""The routing table: roles, norms, multipliers, decay; per tensor; refusals."""

from typing import Any

import pytest

from abovemup.config.errors import RequestError
from abovemup.config.schema import Msign, PerRole, RoleRule
from abovemup.optim.routing import Route, routing_table
from tests.optim.make import ROLE_NORM, TABLES, Spec, experiment, grown


def by_role(table: str = "scion", ratio: int = 1, **options: Any) -> dict[str, Route]:
    specs = grown(ratio)
    routes = routing_table(specs, experiment(table, **options))
    assert [(r.name, r.shape, r.base) for r in routes] == [(spec.name, spec.shape, spec.base) for spec in specs]
    return {route.role: route for route in routes}


def test_a_row() -> None:
    spec = Spec("w.weight", (8, 8), "hidden", "rms_to_rms", init=0.5, forward=2.0, base=(4, 4))
    e = experiment(weight_decay=0.1, roles={"hidden": RoleRule(norm="moonlight", scale=3.0, momentum=0.5)})
    assert routing_table([spec], e) == [
        Route(
            name="w.weight",
            shape=(8, 8),
            base=(4, 4),
            role="hidden",
            norm="rms_to_rms",
            init=0.5,
            forward=2.0,
            rule="moonlight",
            scale=3.0,
            lr_mult=0.70710678118655,
            weight_decay=0.1 / 0.70710678118655,
            momentum=0.5,
            eps=1e-20,
            optimizer="steepest_descent",
        )
    ]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("parameterization", ["standard", "mup", "above_mup"])
@pytest.mark.parametrize("ratio", [1, 4])
def test_multipliers(table: str, parameterization: str, ratio: int) -> None:
    """1/r for hidden and head under Adam and a muP; 1 everywhere else: never on a step of unit norm."""
    for role, route in by_role(table, ratio, parameterization=parameterization).items():
        assert route.norm == ROLE_NORM[role]
        assert route.rule == TABLES[table][role]
        adam = route.rule == "adam"
        assert route.optimizer == ("adam" if adam else "steepest_descent")
        scaled = adam and parameterization != "standard" and role in ("hidden", "head")
        assert route.lr_mult == (1 / ratio if scaled else 1)


def test_lr_scale_and_adams_scale() -> None:
    routes = by_role(
        "muon",
        ratio=4,
        lr_scale=PerRole(hidden=3.0, head=0.5),
        roles={"head": RoleRule(norm="adam", scale=8.0), "hidden": RoleRule(norm="keller_jordan", scale=8.0)},
    )
    assert (routes["hidden"].lr_mult, routes["hidden"].scale) == (3, 8)
    assert (routes["head"].lr_mult, routes["head"].scale) == (0.5 * 8 / 4, 1)


def test_weight_decay_takes_no_multiplier() -> None:
    routes = by_role(
        "adam",
        ratio=4,
        weight_decay=0.1,
        lr_scale=PerRole(embedding=2.0, bias=0.0),
        roles={"gain": RoleRule(norm="adam", weight_decay=0.0), "head": RoleRule(norm="adam", weight_decay=0.2)},
    )
    for role, decay in {"embedding": 0.1, "hidden": 0.1, "head": 0.2, "gain": 0.0, "bias": 0.0}.items():
        assert routes[role].lr_mult * routes[role].weight_decay == pytest.approx(decay, rel=1e-15)
    assert routes["hidden"].optimizer == "adamw"
    assert routes["gain"].optimizer == "adam"


def test_adams_eps() -> None:
    """With the gradients: 1 / width, and inside a block the block's multiplier, of which `standard` has the latter."""
    e = {"ratio": 4, "residual": "completep", "depth": 8, "eps": 1.0}
    routes = by_role("adam", **e)
    eps = {role: route.eps for role, route in routes.items()}
    assert eps == {"embedding": 1 / 4, "hidden": 1 / 16, "bias": 1 / 16, "gain": 1 / 16, "head": 1}
    assert {role: route.eps for role, route in by_role("adam", parameterization="standard", **e).items()} == {
        **{"embedding": 1, "hidden": 1 / 4, "bias": 1 / 4, "gain": 1 / 4, "head": 1}
    }
    assert {route.eps for route in by_role("scion", **e).values()} == {1.0}
    assert {route.eps for route in by_role("adam", eps=1e-8).values()} == {1e-8}


def test_a_users_optimizer_is_named() -> None:
    assert {route.optimizer for route in by_role(target="my.module:Cls").values()} == {"my.module:Cls"}


def test_refusals() -> None:
    with pytest.raises(RequestError, match=r"roles.hidden.norm=rms_to_rns .* rms_to_rms\?"):
        by_role(roles={"hidden": RoleRule(norm="rms_to_rns")})
    with pytest.raises(RequestError, match=r"roles.head.norm=x does not exist. Choices: adam, one_to_rms, "):
        by_role(roles={"head": RoleRule(norm="x")})
    with pytest.raises(RequestError, match=r"roles.bias.norm=sign .* layers.0.wq.bias .* max_abs"):
        by_role(roles={"bias": RoleRule(norm="sign")})
    with pytest.raises(RequestError, match=r"roles.hidden.norm=one_to_rms: mup .* parameterization=above_mup"):
        by_role(parameterization="mup", roles={"hidden": RoleRule(norm="one_to_rms")})
    with pytest.raises(RequestError, match=r"msign.dtype"):
        by_role(msign=Msign(method="exact", steps=1, dtype="bfloat16"))
