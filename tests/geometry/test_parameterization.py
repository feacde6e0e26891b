"""The parameterizations' rules one by one: step norms against matrices that attain them, limits, std laws, depth."""

from math import log2, sqrt

import pytest
import torch
from torch import Tensor

from abovemup.geometry.norms import NORMS, SPECTRAL
from abovemup.geometry.parameterization import (
    ADAM,
    PARAMETERIZATIONS,
    attention_scale,
    depth_init,
    eps_multiplier,
    init_norm,
    init_std,
    largest_step,
    lr_multiplier,
    residual_multipliers,
    step_norm,
)
from abovemup.geometry.roles import ROLE_NORM
from tests.geometry.exponents import exponents

RULES = [ADAM, *NORMS]
MATRICES = ("embedding", "hidden", "head")
SHAPES = [(3, 5), (5, 3), (1, 7), (7, 1), (4, 4), (13, 11)]
BASES = {"embedding": (61, 32), "hidden": (88, 32), "head": (61, 32), "gain": (32,), "bias": (32,)}


def step(rule: str, G: Tensor) -> Tensor:
    return G.sign() if rule == ADAM else NORMS[rule].dual(G)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("role", MATRICES)
@pytest.mark.parametrize("rule", RULES)
def test_step_norm_is_the_least_upper_bound(rule: str, role: str, shape: tuple[int, int]) -> None:
    bound, own = step_norm(rule, role, shape), NORMS[ROLE_NORM[role]]
    g = torch.Generator().manual_seed(0)
    signs = torch.randn(shape[0], 1, generator=g).sign() * torch.randn(1, shape[1], generator=g).sign()
    spectral = rule != ADAM and NORMS[rule].geometry is SPECTRAL
    aligned = torch.eye(*shape) if spectral else signs
    assert own.norm(step(rule, aligned.double())).item() == pytest.approx(bound, rel=1e-12)
    for _ in range(20):
        G = torch.randn(shape, generator=g, dtype=torch.float64)
        assert own.norm(step(rule, G)).item() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("shape", [*SHAPES, (6,), (1,)])
@pytest.mark.parametrize("role", ROLE_NORM)
@pytest.mark.parametrize("rule", RULES)
def test_largest_step_is_attained_and_bounds_every_step(rule: str, role: str, shape: tuple[int, ...]) -> None:
    """Here `rms` normalises a matrix as a whole, as the optimizer does."""
    ndim = 1 if rule == ADAM else NORMS[rule].ndim
    own = NORMS[ROLE_NORM[role]]
    if own.ndim != len(shape) or ndim > len(shape):
        return
    g = torch.Generator().manual_seed(0)
    one, ones = torch.zeros(shape).double(), torch.ones(shape).double()
    one.view(-1)[0] = 1
    gradients = [one, ones, *([torch.eye(*shape).double()] if len(shape) == 2 else [])]
    gradients += [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(20)]
    steps = [step(rule, G if ndim == 2 else G.flatten()).view(shape) for G in gradients]
    assert max(own.norm(D).item() for D in steps) == pytest.approx(largest_step(rule, role, shape), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_by_the_roles_own_norm_is_1(shape: tuple[int, int]) -> None:
    for role in MATRICES:
        assert step_norm(ROLE_NORM[role], role, shape) == 1.0
    assert {step_norm(rule, role, (7,)) for rule in ("max_abs", "rms", ADAM) for role in ("gain", "bias")} == {1.0}


@pytest.mark.parametrize("rule", ["max_abs", "rms"])
@pytest.mark.parametrize("role", ["gain", "bias"])
def test_an_even_step_of_a_vector_is_1(role: str, rule: str) -> None:
    assert NORMS[ROLE_NORM[role]].norm(step(rule, torch.ones(13).double())).item() == pytest.approx(1, rel=1e-15)


def grown(role: str, n: int) -> tuple[int, ...]:
    base = BASES[role]
    return (base[0], base[1] * n) if role in ("embedding", "head") else tuple(d * n for d in base)


@pytest.mark.parametrize("role", BASES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_at_the_base_everything_is_1_bit_for_bit(parameterization: str, rule: str, role: str) -> None:
    if role in ("gain", "bias") and rule not in ("max_abs", "rms", ADAM):
        return
    base = BASES[role]
    for init in ("exact", "gaussian"):
        assert init_norm(parameterization, init, role, base, base) == 1.0
    if not (parameterization == "mup" and role == "hidden" and rule in ("one_to_rms", "rms_to_inf", "rms")):
        assert lr_multiplier(parameterization, role, rule, base, base) == 1.0
    assert eps_multiplier(parameterization, role, base, base) == 1.0


@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize("role", MATRICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_every_rule_has_its_documented_power(parameterization: str, rule: str, role: str, n: int) -> None:
    """All widths grow together; a vocabulary larger than every width, as moonlight and keller_jordan need it."""
    if parameterization == "mup" and role == "hidden" and rule in ("one_to_rms", "rms_to_inf", "rms"):
        return
    base, shape = BASES[role], grown(role, n)
    if role != "hidden":
        base, shape = (10_000, base[1]), (10_000, shape[1])
    expected = n ** exponents(parameterization, role, rule).lr
    assert lr_multiplier(parameterization, role, rule, shape, base) == pytest.approx(expected, rel=1e-13)


def test_the_tensor_programs_table_for_msign() -> None:
    """THEORY 3.2 (B0): sqrt(d), 1, 1/sqrt(d); Moonlight's hidden lr falls as 1/sqrt(d)."""
    powers = [log2(lr_multiplier("mup", role, "spectral", grown(role, 4), BASES[role])) / 2 for role in MATRICES]
    assert powers == [0.5, 0, -0.5]
    assert lr_multiplier("mup", "hidden", "moonlight", (352, 128), (88, 32)) == 0.5
    assert lr_multiplier("above_mup", "hidden", "moonlight", (352, 128), (88, 32)) == 0.5


@pytest.mark.parametrize("rule", RULES)
def test_groups_do_not_split_by_rounding(rule: str) -> None:
    """Matrices of other shapes that grow alike have the same factor to the last bit, also at ratios like 3/7."""
    for parameterization in ("mup", "above_mup") if rule not in ("one_to_rms", "rms_to_inf", "rms") else ("above_mup",):
        for n, m in ((3, 7), (7, 3), (49, 11), (5, 1)):
            shapes = ((1, 1), (3, 1), (1, 3), (2, 1), (1, 11), (5, 7))
            pairs = [((7 * n * a, 7 * n * b), (7 * m * a, 7 * m * b)) for a, b in shapes]
            assert len({lr_multiplier(parameterization, "hidden", rule, s, b) for s, b in pairs}) == 1
            assert len({init_norm(parameterization, "exact", "hidden", s, b) for s, b in pairs}) == 1


# ---- fixed widths ----

KV = ((8, 128), (8, 32))  # keys of a fixed number of heads at 4 times the width
MIXED = ((16, 128), (8, 32))  # twice as many


def test_fixed_kv_heads() -> None:
    """Where the two muPs part: the Tensor Programs know growing and finite, "Above MuP" the shape."""
    for rule, alike in ((ADAM, 1 / 4), ("spectral", 1 / 2), ("rms_to_rms", 1), ("sign", 1)):
        for parameterization in ("mup", "above_mup"):
            assert lr_multiplier(parameterization, "hidden", rule, *KV) == alike
    # Wider than the base is: keller_jordan's radius leaves max(1, d_out / d_in) at 1 on the way.
    crossing = ((88, 128), (88, 32))
    assert lr_multiplier("mup", "hidden", "keller_jordan", *crossing) == 1 / 2
    assert lr_multiplier("above_mup", "hidden", "keller_jordan", *crossing) == pytest.approx(sqrt(88 / 128), rel=1e-13)
    assert lr_multiplier("mup", "hidden", "spectral", *MIXED) == 1
    assert lr_multiplier("above_mup", "hidden", "spectral", *MIXED) == pytest.approx(sqrt(1 / 2), rel=1e-13)
    # Output-like std 1/fan_in is norm 1 under exact; the Gaussian's largest singular value has sqrt(d_out) besides.
    assert init_norm("mup", "exact", "hidden", *KV) == 1
    assert init_norm("mup", "gaussian", "hidden", *KV) == pytest.approx(
        (sqrt(128) + sqrt(8)) / (sqrt(32) + sqrt(8)) / 2, rel=1e-13
    )
    assert init_norm("mup", "exact", "hidden", *MIXED) == pytest.approx(sqrt(2), rel=1e-13)
    assert init_norm("above_mup", "exact", "hidden", *MIXED) == 1
    # Input-like: fan_in does not grow, so neither std nor lr changes.
    assert init_norm("mup", "exact", "hidden", (128, 8), (32, 8)) == 1
    assert lr_multiplier("mup", "hidden", ADAM, (128, 8), (32, 8)) == 1
    # But singular values of one size have a norm that falls as d_out alone grows.
    assert lr_multiplier("mup", "hidden", "spectral", (128, 8), (32, 8)) == 2


STD_POWER = {  # parameterization -> power of the std in n_in for growing, kv-fixed and mixed matrices, and the head
    "standard": (-1 / 2, -1 / 2, -1 / 2, -1 / 2),
    "mup": (-1 / 2, -1, -1 / 2, -1),
}


@pytest.mark.parametrize("init", ["exact", "gaussian"])
@pytest.mark.parametrize("parameterization", STD_POWER)
def test_the_std_of_the_weights_follows_the_law(parameterization: str, init: str) -> None:
    """Measured on drawn weights, at 4 times the width."""
    cases = [("hidden", (352, 128), (88, 32)), ("hidden", *KV), ("hidden", *MIXED), ("head", (500, 128), (500, 32))]
    for (role, shape, base), power in zip(cases, STD_POWER[parameterization], strict=True):
        ball = NORMS[ROLE_NORM[role]]
        fill = ball.init_ if init == "exact" else ball.gaussian_
        stds = []
        for size in (base, shape):
            W = torch.stack([fill(torch.empty(size).double(), torch.Generator().manual_seed(i)) for i in range(40)])
            stds.append(W.square().mean().sqrt().item())
            assert stds[-1] == pytest.approx(init_std(init, role, size), rel=1e-12 if init == "exact" else 0.02)
        ratio = init_norm(parameterization, init, role, shape, base) * stds[1] / stds[0]
        assert ratio == pytest.approx(4**power, rel=1e-12 if init == "exact" else 0.03), (role, shape)


def test_eps_follows_the_gradients() -> None:
    """A gradient's entries are 1 / d_out: it halves where the output doubles, and the vocabulary does not grow."""
    for parameterization, halves in (("mup", 0.5), ("above_mup", 0.5), ("standard", 1.0)):
        for role in ("embedding", "hidden", "gain", "bias"):
            assert eps_multiplier(parameterization, role, grown(role, 2), BASES[role]) == halves
        assert eps_multiplier(parameterization, "head", grown("head", 2), BASES["head"]) == 1
        assert eps_multiplier(parameterization, "hidden", *KV) == 1


# ---- attention and depth ----


def test_attention_scale() -> None:
    """Case 21: inversely proportional to head_dim from the base on, except under `standard`."""
    for parameterization in ("mup", "above_mup"):
        scales = [attention_scale(parameterization, h, 16) for h in (16, 32, 64)]
        assert scales == [1 / 4, 1 / 8, 1 / 16]
    assert [attention_scale("standard", h, 16) for h in (16, 64)] == [1 / 4, 1 / 8]
    for head_dim in (16, 24, 64, 100, 128):
        assert {attention_scale(p, head_dim, head_dim) for p in PARAMETERIZATIONS} == {1 / sqrt(head_dim)}


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
    for function in (
        lambda name: init_norm(name, "exact", "hidden", (2, 2), (2, 2)),
        lambda name: lr_multiplier(name, "hidden", ADAM, (2, 2), (2, 2)),
        lambda name: eps_multiplier(name, "hidden", (2, 2), (2, 2)),
    ):
        with pytest.raises(ValueError, match="ntk"):
            function("ntk")
    with pytest.raises(KeyError, match="query"):
        step_norm(ADAM, "query", (2, 2))
    with pytest.raises(KeyError, match="sgd"):
        lr_multiplier("mup", "hidden", "sgd", (2, 2), (2, 2))
    with pytest.raises(ValueError, match="dimensions"):
        step_norm(ADAM, "gain", (2, 2))
    for rule in ("one_to_rms", "rms_to_inf", "rms"):
        with pytest.raises(ValueError, match="row-normalised"):
            lr_multiplier("mup", "hidden", rule, (2, 2), (2, 2))
    with pytest.raises(KeyError, match="none"):
        residual_multipliers("none", 2, 2)
    with pytest.raises(KeyError, match="none"):
        depth_init("none", 2, 1)
