"""The parameterizations' table, entry by entry, and depth."""

from math import sqrt

import pytest

from abovemup.geometry.parameterization import (
    PARAMETERIZATIONS,
    Rule,
    attention_scale,
    depth_init,
    residual_multipliers,
    rule,
)

SHAPES = {"embedding": (61, 32), "hidden": (88, 32), "head": (61, 32), "gain": (32,), "bias": (32,)}
RATIOS = [1, 4, 16, 0.5]


def expected(parameterization: str, role: str, family: str, r: float) -> Rule:
    """The whole table, written as exceptions from (1, 1, 1)."""
    init, lr = 1.0, 1.0
    if parameterization == "standard" and role == "head":
        init = sqrt(r)
    if parameterization in ("mup", "above_mup") and family == "adam" and role in ("hidden", "head"):
        lr = 1 / r
    return Rule(init, lr, 1.0)


@pytest.mark.parametrize("family", ["adam", "norm"])
@pytest.mark.parametrize("role", SHAPES)
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_table(parameterization: str, role: str, family: str) -> None:
    for r in RATIOS:
        assert rule(parameterization, role, family, SHAPES[role], r) == expected(parameterization, role, family, r)


def test_an_adam_factor_never_reaches_a_step_of_unit_norm() -> None:
    for parameterization in PARAMETERIZATIONS:
        for role, shape in SHAPES.items():
            for r in RATIOS:
                assert rule(parameterization, role, "norm", shape, r).lr == 1


def test_at_the_base_all_three_are_one_bit_for_bit() -> None:
    for role, shape in SHAPES.items():
        for family in ("adam", "norm"):
            assert {rule(p, role, family, shape, 1) for p in PARAMETERIZATIONS} == {Rule(1, 1, 1)}
    for head_dim in (16, 24, 64, 100, 128):
        assert {attention_scale(p, head_dim, head_dim) for p in PARAMETERIZATIONS} == {1 / sqrt(head_dim)}


def test_standard_head_is_fan_in_init() -> None:
    """std 1/d at the base, falling as 1/sqrt(fan_in): the norm sqrt(d) max|row| = d * std grows as sqrt(r)."""
    d = 64
    for r in (1, 4, 16):
        std = 1 / d / sqrt(r)
        assert rule("standard", "head", "adam", (100, d * r), r).init == pytest.approx(d * r * std, rel=1e-15)


def test_attention_scale() -> None:
    """Case 21: inversely proportional to head_dim from the base on, except under `standard`."""
    for parameterization in ("mup", "above_mup"):
        scales = [attention_scale(parameterization, h, 16) for h in (16, 32, 64)]
        assert scales == [1 / 4, 1 / 8, 1 / 16]
    assert [attention_scale("standard", h, 16) for h in (16, 64)] == [1 / 4, 1 / 8]


def test_depth() -> None:
    assert residual_multipliers("identity", 4, 2) == (1, 1)
    assert residual_multipliers("depth_normalized", 4, 2) == (7 / 8, 1 / 8)
    assert residual_multipliers("completep_paper", 4, 2) == (1, 1 / 8)
    assert residual_multipliers("completep", 4, 2) == (1, 1 / 2)
    assert residual_multipliers("completep", 2, 2) == (1, 1)
    assert [depth_init("identity", 8, i) for i in (1, 16)] == [1, 1]
    assert [depth_init("total_depth", 8, i) for i in (1, 16)] == [1 / 4, 1 / 4]
    assert [depth_init("relative_depth", 8, i) for i in (2, 8)] == [1 / 2, 1 / 4]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ntk"):
        rule("ntk", "hidden", "adam", (2, 2), 1)
    with pytest.raises(ValueError, match="query"):
        rule("mup", "query", "adam", (2, 2), 1)
    with pytest.raises(ValueError, match="sgd"):
        rule("mup", "hidden", "sgd", (2, 2), 1)
    with pytest.raises(ValueError, match="dimensions"):
        rule("mup", "gain", "adam", (2, 2), 1)
    with pytest.raises(ValueError, match="residual"):
        residual_multipliers("none", 2, 2)
    with pytest.raises(ValueError, match="depth init"):
        depth_init("none", 2, 1)
    for index in (0, 5):
        with pytest.raises(ValueError, match="sub-block"):
            depth_init("identity", 2, index)
