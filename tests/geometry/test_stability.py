"""The metrics are suprema: attained where they say so, never exceeded, and blind to no layout."""

from collections.abc import Callable
from math import log, sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.geometry import stability
from abovemup.geometry.norms import NORMS
from abovemup.geometry.stability import Affine, Metric, attention_logit, linear, sphere, swiglu

SHAPES = [(16, 64), (64, 16), (13, 7), (7, 13), (11, 11), (1, 7), (7, 1), (1, 1)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def apply(W: Tensor, x: Tensor, b: Tensor | float = 0.0) -> Tensor:
    return (W @ x[..., None])[..., 0] + b


def attained(metric: Metric) -> Tensor:
    assert metric.attained_by is not None
    x = metric.attained_by()
    if x.is_floating_point():
        torch.testing.assert_close(
            rms(x), torch.ones_like(rms(x)), rtol=1e-6 if x.dtype == torch.float32 else 1e-12, atol=0
        )
    return x


# ---- linear ----


@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, int]) -> None:
    """THEORY test 1: attained, D with x2 = -x1 equal to it, the difference twice it, never exceeded."""
    W = gaussian(*shape)
    m = linear(W)
    x = attained(m)
    expected = sqrt(shape[1] / shape[0]) * torch.linalg.svdvals(W)[0]
    assert m.exact
    for value in (m.value, rms(apply(W, x)), rms(apply(W, x) - apply(W, -x)) / rms(x + x), rms(apply(W, 2 * x)) / 2):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert (rms(apply(W, sphere(gaussian(2000, shape[1], seed=1)))) <= expected * (1 + 1e-12)).all()


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (13, 7)])
def test_a_transposed_matrix_has_another_number(shape: tuple[int, int]) -> None:
    """THEORY test 2: every metric of a matrix sees which side is which."""
    W = gaussian(*shape)
    b = gaussian(shape[0])
    torch.testing.assert_close(linear(W.mT).value / linear(W).value, torch.tensor(shape[0] / shape[1]).double())
    for f in (stability.embedding, stability.head_logit, stability.head_pair):
        assert abs(f(W).value / f(W.mT).value - 1) > 0.1
    assert linear(W, b).value != linear(W.mT, gaussian(shape[1])).value
    assert attained(linear(W, b)).shape == (shape[1],)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_bias_between_its_bounds_and_at_a_stationary_maximum(shape: tuple[int, int], size: float) -> None:
    """THEORY test 14: sqrt(F^2 + |b|^2) <= exact <= F + |b|, attained, and the Lagrange condition with mu >= s_1^2."""
    W, b = gaussian(*shape), size * gaussian(shape[0], seed=1)
    m = linear(W, b)
    x = attained(m)
    f, bias = linear(W).value, rms(b)
    assert (f.square() + bias.square()).sqrt() * (1 - 1e-12) <= m.value <= (f + bias) * (1 + 1e-12)
    torch.testing.assert_close(m.value, rms(apply(W, x, b)), rtol=1e-12, atol=0)
    slope = W.mT @ apply(W, x, b)
    mu = slope @ x / shape[1]
    torch.testing.assert_close(slope, mu * x, rtol=0, atol=1e-10 * float(mu))
    assert mu >= torch.linalg.svdvals(W)[0] ** 2 * (1 - 1e-12)
    assert (rms(apply(W, sphere(gaussian(2000, shape[1], seed=2)), b)) <= m.value * (1 + 1e-12)).all()


def test_the_posts_example_of_a_bias() -> None:
    """THEORY section 1.4 checked one: 2.380 <= 2.716 <= 3.224; here a 2 x 2 with the answer by a fine circle."""
    W, b = torch.tensor([[2.0, 0.3], [0.1, 1.0]]).double(), torch.tensor([0.5, -1.2]).double()
    angle = torch.linspace(0, 2 * torch.pi, 200_001, dtype=torch.float64)
    circle = sqrt(2) * torch.stack((angle.cos(), angle.sin()), -1)
    torch.testing.assert_close(linear(W, b).value, rms(apply(W, circle, b)).max(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("part", [0.0, 1e-30, 1e-18, 1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("other", [0.0, 0.1, 1.0, 1.9, 2.1, 50.0])
def test_the_hard_case_and_its_neighbours(part: float, other: float) -> None:
    """b with (almost) no part in the top direction, which the maximum uses none the less while |b| is small."""
    s = torch.tensor([2.0, 1.0, 0.5]).double()
    b = torch.tensor([part, other, 0.3 * other]).double()
    m = linear(s.diag(), b)
    x = attained(m)
    torch.testing.assert_close(rms(s * x + b), m.value, rtol=1e-12, atol=0)
    starts = sphere(torch.cat((gaussian(500, 3), x + 1e-3 * gaussian(500, 3, seed=1))))
    for _ in range(300):  # the power method climbs any convex function on a sphere
        starts = sphere(s * (s * starts + b))
    assert rms(s * starts + b).max() <= m.value * (1 + 1e-12)
    assert rms(s * starts + b).max() >= m.value * (1 - 1e-6)


def test_equal_singular_values_zero_bias_and_zero_matrix() -> None:
    W = NORMS["rms_to_rms"].dual(gaussian(5, 5))
    torch.testing.assert_close(linear(W, gaussian(5)).value, 1 + rms(gaussian(5)), rtol=1e-12, atol=0)
    W = gaussian(6, 4)
    torch.testing.assert_close(linear(W, torch.zeros(6)).value, linear(W).value, rtol=1e-12, atol=0)
    attained(linear(W, torch.zeros(6)))
    zero = linear(torch.zeros(6, 4), gaussian(6))
    torch.testing.assert_close(zero.value.double(), rms(gaussian(6)), rtol=1e-6, atol=0)
    attained(zero)
    attained(linear(torch.zeros(6, 4)))
    assert linear(torch.zeros(6, 4), torch.zeros(6)).value == 0


def test_a_nan_stays_alone() -> None:
    W, b = gaussian(3, 5, 4), gaussian(3, 5)
    W[1, 2, 3] = torch.nan
    b[2, 0] = torch.nan
    values = linear(W, b).value
    torch.testing.assert_close(values[0], linear(W[0], b[0]).value)
    assert values[1:].isnan().all()
    attained(linear(W))
    assert stability.head_pair(W).value.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("power", [-120, -60, 0, 60, 120])
def test_the_scale_of_the_weights_does_not_matter(dtype: torch.dtype, power: int) -> None:
    """Squares of such entries over- or underflow."""
    size = 2.0 ** (power if dtype == torch.float32 else 5 * power)
    W, b = gaussian(9, 4).to(dtype), gaussian(9, seed=1).to(dtype)
    for f in (linear, stability.embedding, stability.head_logit, stability.head_centred, stability.head_pair):
        torch.testing.assert_close(f(size * W).value / size, f(W).value, rtol=1e-6, atol=0)
        assert f(size * W).value > 0
    torch.testing.assert_close(linear(size * W, size * b).value / size, linear(W, b).value, rtol=1e-6, atol=0)
    torch.testing.assert_close(attained(linear(size * W, size * b)), attained(linear(W, b)), rtol=1e-4, atol=1e-6)
    pair = stability.head_pair(size * W)
    logits = (W @ attained(pair)).double()
    assert (logits.max() - logits.min()).item() == pytest.approx(stability.head_pair(W).value.item(), rel=1e-6)


METRICS: dict[str, tuple[Callable[..., Metric], list[tuple[int, ...]]]] = {
    "linear": (linear, [(7, 5)]),
    "affine": (linear, [(7, 5), (7,)]),
    "affine wide": (linear, [(5, 7), (5,)]),
    "embedding": (stability.embedding, [(11, 5)]),
    "head_logit": (stability.head_logit, [(11, 5)]),
    "head_pair": (stability.head_pair, [(11, 5)]),
    "gain": (stability.gain, [(5,)]),
    "logit": (lambda q, k: attention_logit(linear(q).value, linear(k).value, 0.3, 3), [(4, 3, 5), (2, 3, 5)]),
    "head_centred": (stability.head_centred, [(11, 5)]),
    "swiglu": (lambda g, a, u, b: swiglu(Affine(g, a), Affine(u, b)), [(7, 5), (7,), (7, 5), (7,)]),
    "swiglu_change": (
        lambda g, u: stability.swiglu_change(Affine(g), Affine(u), Affine(u), Affine(g)),
        [(7, 5), (7, 5)],
    ),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batches_and_dtypes(name: str, dtype: torch.dtype) -> None:
    f, shapes = METRICS[name]
    inputs = [gaussian(2, 3, *shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    whole = f(*inputs)
    assert whole.value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    x = None if whole.attained_by is None else whole.attained_by()
    if x is not None and x.is_floating_point():
        assert x.dtype == whole.value.dtype
    for i in range(2):
        for j in range(3):
            one = f(*(t[i, j].double() for t in inputs))
            rtol = 1e-12 if dtype == torch.float64 else 3e-6
            torch.testing.assert_close(whole.value[i, j].double(), one.value, rtol=rtol, atol=0)
            if x is not None and dtype == torch.float64:
                torch.testing.assert_close(x[i, j].abs(), attained(one).abs(), rtol=0, atol=1e-8)


# ---- gain and vocabulary ----


def test_gain_and_embedding_are_attained() -> None:
    """THEORY test 8, second half."""
    g, E = gaussian(9), gaussian(31, 5)
    torch.testing.assert_close(rms(g * attained(stability.gain(g))), g.abs().max(), rtol=1e-12, atol=0)
    torch.testing.assert_close(rms(E[attained(stability.embedding(E))]), rms(E).max(), rtol=1e-12, atol=0)
    x = gaussian(1000, 9)
    assert (rms(g * x) / rms(x)).max() <= g.abs().max()


@pytest.mark.parametrize(("V", "d"), [(500, 64), (37, 5), (5, 37), (2, 3), (1, 4)])
@pytest.mark.parametrize("pairs", [2**24, 100, 1])
def test_pair_metric_is_every_pairs_in_chunks_of_any_size(
    V: int, d: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability, "PAIRS", pairs * V)
    W = gaussian(V, d) + 100  # a common part does not matter
    m = stability.head_pair(W)
    slow = sqrt(d) * max(float((W - w).square().sum(-1).max().sqrt()) for w in W)
    assert m.value.item() == pytest.approx(slow, rel=1e-12)
    logits = W @ attained(m)
    torch.testing.assert_close(logits.max() - logits.min(), m.value, rtol=1e-12, atol=1e-12)
    assert stability.head_pair(W.float()).value == pytest.approx(slow, rel=1e-5)


def test_a_large_common_part_hides_no_pair() -> None:
    """In float32 the squares of the rows as they are would have no digit left for their distance."""
    W = (gaussian(200, 5) + 3000).float()
    slow = sqrt(5) * max(float((W.double() - w).square().sum(-1).max().sqrt()) for w in W.double())
    assert stability.head_pair(W).value.item() == pytest.approx(slow, rel=1e-5)


def test_the_memory_of_the_pair_metric_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "PAIRS", 1000)
    seen: list[int] = []
    original = torch.Tensor.flatten

    def flatten(x: Tensor, *dims: int) -> Tensor:
        seen.append(x.numel())
        return original(x, *dims)

    monkeypatch.setattr(torch.Tensor, "flatten", flatten)
    stability.head_pair(gaussian(2, 97, 3))
    assert max(seen) <= 1000
    assert sum(seen) < 2 * 97 * 97


def head(seed: int = 0) -> tuple[Tensor, Tensor, float]:
    W = gaussian(500, 64, seed=seed) / 64
    x = sphere(gaussian(300, 64, seed=1))
    return W, x, stability.head_pair(W).value.item()


def loss(W: Tensor, x: Tensor, t: Tensor | int) -> Tensor:
    return (x @ W.mT).logsumexp(-1) - (x * W[t]).sum(-1)


def test_head_bounds() -> None:
    """THEORY test 5: P <= sup over pairs of the loss <= ln V + P, R <= P <= 2R, P <= 2M, invariance, D and U."""
    W, x, P = head()
    largest = 0.0
    for t in range(500):
        others = sphere(W - W[t])[torch.arange(500) != t]
        largest = max(largest, loss(W, others, t).max().item())
    assert 1.8 < P <= largest <= log(500) + P
    assert pytest.approx(1.94, abs=0.1) == P  # the example's sizes: 1.94 <= 7.25 <= 8.15
    assert largest == pytest.approx(7.25, abs=0.15)
    M, R = stability.head_logit(W), stability.head_centred(W)
    assert R.value <= P <= 2 * R.value
    assert 2 * M.value >= P
    torch.testing.assert_close((W @ attained(M)).max(), M.value, rtol=1e-12, atol=0)

    c = 7 * gaussian(64, seed=3)
    shifted = stability.head_centred(W + c).value
    torch.testing.assert_close((loss(W + c, x, 3), shifted), (loss(W, x, 3), R.value), rtol=0, atol=1e-11)
    assert stability.head_pair(W + c).value == pytest.approx(P, rel=1e-12)
    assert stability.head_logit(W + c).value > 2 * M.value  # which is not invariant

    y = sphere(x + 0.3 * gaussian(300, 64, seed=4))
    assert ((loss(W, x, 3) - loss(W, y, 3)).abs() / rms(x - y)).max() <= P
    dW = 0.1 * gaussian(500, 64, seed=5) / 64
    U = stability.head_pair(dW).value
    assert (loss(W + dW, x, 3) - loss(W, x, 3)).abs().max() <= U <= 2 * stability.head_logit(dW).value
    W.requires_grad_()
    (grad,) = torch.autograd.grad(loss(W, x, 3).sum(), W)
    torch.testing.assert_close(grad.sum(0), torch.zeros(64).double(), rtol=0, atol=1e-12)


def test_logsumexp_moves_no_more_than_its_largest_entry() -> None:
    """THEORY test 6."""
    a, b = 5 * gaussian(10_000, 17), 5 * gaussian(10_000, 17, seed=1)
    assert ((a.logsumexp(-1) - b.logsumexp(-1)).abs() <= (a - b).abs().amax(-1)).all()


# ---- attention ----


def rotation(position: int, d_h: int) -> Tensor:
    """RoPE's of a relative position, in the layout of pairs (i, i + d_h/2)."""
    angle = position * 10.0 ** -torch.arange(d_h // 2, dtype=torch.float64)
    cos, sin = angle.cos().diag(), angle.sin().diag()
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))


@pytest.mark.parametrize("biased", [False, True])
def test_no_pair_of_inputs_at_any_distance_has_a_larger_logit(biased: bool) -> None:
    """And where the tops of both matrices face each other, one has that logit."""
    d_h, d = 4, 7
    q, k = gaussian(4, d_h, d), gaussian(2, d_h, d, seed=1)
    bq, bk = (gaussian(4, d_h, seed=2), gaussian(2, d_h, seed=3)) if biased else (None, None)
    query, key = linear(q, bq), linear(k, bk)
    bound = attention_logit(query.value, key.value, 0.3, d_h)
    assert not bound.exact
    serving = [0, 0, 1, 1]  # grouped queries: each kv head serves two neighbours
    x, y = attained(query), attained(key)[serving]
    a, b = apply(q, x, 0 if bq is None else bq), apply(k[serving], y, 0 if bk is None else bk[serving])
    torch.testing.assert_close(0.3 * a.norm(dim=-1) * b.norm(dim=-1), bound.value, rtol=1e-12, atol=0)
    for position in range(5):
        assert (0.3 * (a * apply(rotation(position, d_h), b)).sum(-1).abs() <= bound.value).all()
    if not biased:
        slow = [
            0.3 * d * torch.linalg.svdvals(one.mT @ rotation(3, d_h) @ two)[0]
            for one, two in zip(q, k[serving], strict=True)
        ]
        assert (torch.stack(slow) <= bound.value).all()


def test_a_full_matrix_does_not_bound_its_heads() -> None:
    """THEORY test 14: F_h <= sqrt(H) F, attained by a matrix of rank one that is one head's."""
    H, d_h, d = 8, 4, 32
    W = torch.zeros(H * d_h, d).double()
    W[:d_h] = gaussian(d_h, 1) @ gaussian(1, d, seed=1)
    per_head = linear(W.unflatten(0, (H, d_h))).value
    torch.testing.assert_close(per_head[0], sqrt(H) * linear(W).value, rtol=1e-12, atol=0)
    assert per_head[1:].abs().max() == 0
    W = gaussian(H * d_h, d)
    assert (linear(W.unflatten(0, (H, d_h))).value <= sqrt(H) * linear(W).value).all()
    init = NORMS["rms_to_rms"].gaussian_(torch.empty(256, 256), torch.Generator().manual_seed(0))
    assert linear(init.unflatten(0, (8, 32))).value.mean() == pytest.approx(1.89, abs=0.06)


def test_value_path() -> None:
    """max_h F_h^v F(W_o) over any rows of softmax and any tokens."""
    v, o = gaussian(3, 4, 8), gaussian(8, 12, seed=1)
    bound = stability.chain(linear(v).value.amax(), Affine(o))
    for seed in range(20):
        x = sphere(gaussian(50, 8, seed=seed))
        weights = (5 * gaussian(3, 50, 50, seed=seed)).softmax(-1)
        mixed = torch.einsum("hts,hcd,sd->thc", weights, v, x).flatten(1)
        assert rms(mixed @ o.mT).max() <= bound


# ---- SwiGLU and residual ----


def test_swiglu_worst_case_is_sqrt_d_ff() -> None:
    """THEORY test 14: both matrices concentrate on one unit, and the product of the two F is sqrt(d_ff) too small."""
    d_ff, d = 23, 7
    gate, up = torch.zeros(d_ff, d).double(), torch.zeros(d_ff, d).double()
    gate[5] = 100 * gaussian(d)
    up[5] = gaussian(d, seed=1)
    m = swiglu(Affine(gate), Affine(up))
    assert m.exact is False  # the rows are not aligned
    assert m.attained_by is None
    up[5] = gate[5] / 100
    m = swiglu(Affine(gate), Affine(up))
    x = attained(m)
    assert m.exact
    torch.testing.assert_close(rms(F.silu(gate @ x) * (up @ x)), m.value, rtol=1e-12, atol=0)
    ratio = m.value / (linear(gate).value * linear(up).value)
    assert ratio.item() == pytest.approx(sqrt(d_ff), rel=1e-12)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_swiglu_bounds_hold(size: float) -> None:
    d_ff, d = 23, 7
    weights = [size * gaussian(*shape, seed=i) for i, shape in enumerate([(d_ff, d), (d_ff,)] * 4)]
    gate, up, dgate, dup = (
        Affine(W / n, b / n) for W, b, n in zip(weights[::2], weights[1::2], (1, 1, 9, 9), strict=True)
    )

    def f(x: Tensor, g: Affine, u: Affine) -> Tensor:
        a, b = (apply(layer.weight, x, 0 if layer.bias is None else layer.bias) for layer in (g, u))
        return F.silu(a) * b

    x, y = sphere(gaussian(3000, d, seed=10)), sphere(gaussian(3000, d, seed=11))
    near = sphere(x + 0.01 * y)
    assert rms(f(x, gate, up)).max() <= swiglu(gate, up).value
    D = stability.swiglu_change(gate, up, gate.slope, up.slope).value
    for z in (y, near):
        assert (rms(f(x, gate, up) - f(z, gate, up)) / rms(x - z)).max() <= D
    after_gate, after_up = (Affine(a.weight + b.weight, a.bias + b.bias) for a, b in ((gate, dgate), (up, dup)))
    change = after_gate - gate
    torch.testing.assert_close((change.weight, change.bias), (dgate.weight, dgate.bias))
    U = stability.swiglu_change(gate, after_up, dgate, dup).value
    moved = rms(f(x, after_gate, after_up) - f(x, gate, up)).max()
    assert 0.01 * U < moved <= U


def test_a_small_change_at_the_steepest_point_of_silu_is_that_of_the_bound() -> None:
    gate, change = Affine(torch.tensor([[2.4]]).double()), Affine(torch.tensor([[1e-4]]).double())
    up = Affine(torch.tensor([[1.0]]).double())
    U = stability.swiglu_change(gate, up, change, up - up).value.item()
    moved = F.silu(gate.weight + change.weight).sub(F.silu(gate.weight)).item()
    assert 0.9999 * U < moved <= U


@pytest.mark.parametrize("before", [0.0, 3.0])
def test_gate_and_up_that_grow_or_vanish_together(before: float) -> None:
    """One of the two is that before the step, the other that after it; two of one side miss the change."""
    W = gaussian(1, 5)
    old, new = Affine(before * W), Affine((3 - before) * W)
    U = stability.swiglu_change(old, new, new - old, new - old).value
    largest = 3 * sqrt(5) * W.norm()
    moved = F.silu(largest) * largest
    assert moved <= U <= 1.2 * moved


def test_silu_slope() -> None:
    z = torch.linspace(2.3, 2.5, 10_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.silu(z).sum(), z)
    assert 0 <= stability.SILU_SLOPE - slope.max() < 1e-9


def test_chain() -> None:
    """Post 2's FFN under relu, with a bias."""
    up, down, b = gaussian(20, 6), gaussian(6, 20, seed=1), gaussian(6, seed=2)
    x = sphere(gaussian(2000, 6, seed=3))
    y = apply(down, apply(up, x).relu(), b)
    assert rms(y).max() <= stability.chain(linear(up).value, Affine(down, b))
    two = stability.chain(torch.tensor([0.5, 2.0]).double(), Affine(down, b))
    torch.testing.assert_close(two, torch.tensor([0.5, 2.0]).double() * linear(down).value + rms(b))


@pytest.mark.parametrize("shape", [(64, 64), (1024, 256), (256, 1024), (64, 4096)])
def test_gaussian_mean_case_within_one_percent(shape: tuple[int, int]) -> None:
    """THEORY test 3: the mean output is sqrt(d_out) / (sqrt(d_in) + sqrt(d_out)), not the metric."""
    W = NORMS["rms_to_rms"].gaussian_(
        torch.empty(16 if shape == (64, 64) else 2, *shape), torch.Generator().manual_seed(1)
    )
    x = sphere(gaussian(shape[1], 2000, seed=1, dtype=torch.float32).mT)
    mean = (W @ x.mT).square().mean().sqrt().item()
    assert mean == pytest.approx(sqrt(shape[0]) / (sqrt(shape[1]) + sqrt(shape[0])), rel=0.01)
    assert 0.97 <= linear(W).value.mean() <= 1.02
