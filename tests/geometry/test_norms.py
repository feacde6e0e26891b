"""Norm balls: norm, dual norm and dual belong together, on every shape; layout; initialisation."""

from math import log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abovemup.geometry.norms import NORMS

SIZES = st.sampled_from([1, 2, 3, 5, 7, 13])
MATRIX_NORMS = [name for name, ball in NORMS.items() if ball.ndim == 2]
SPECTRAL = ["rms_to_rms", "spectral", "keller_jordan", "moonlight"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def draw(name: str, rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A gradient in the shape of the ball: some of rank one, some with a zero row, some of integers."""
    if NORMS[name].ndim == 1:
        G = gaussian(rows * cols, seed=seed, dtype=dtype)
    elif seed % 3 == 0:
        G = gaussian(rows, 1, seed=seed, dtype=dtype) @ gaussian(1, cols, seed=seed + 1, dtype=dtype)
    else:
        G = gaussian(rows, cols, seed=seed, dtype=dtype)
    if seed % 4 == 0 and rows > 1:
        G[0] = 0
    return (5 * G).round() if seed % 4 == 1 else G


@pytest.mark.parametrize("name", NORMS)
@settings(max_examples=60, deadline=None)
@given(rows=SIZES, cols=SIZES, seed=st.integers(0, 10**6))
def test_dual(name: str, rows: int, cols: int, seed: int) -> None:
    """norm(dual(G)) = 1, <G, dual(G)> = dual_norm(G), and nothing feasible does better (THEORY test 7)."""
    ball, G = NORMS[name], draw(name, rows, cols, seed)
    D, best = ball.dual(G), ball.dual_norm(G)
    if not G.any():
        assert torch.equal(D, torch.zeros_like(D))
        assert best == 0
        return
    torch.testing.assert_close(ball.norm(D).item(), 1.0, rtol=1e-12, atol=0)
    torch.testing.assert_close((G * D).sum(), best, rtol=1e-12, atol=0)
    for i in range(20):
        competitor = gaussian(*G.shape, seed=seed + i) * (1e-3 if i % 2 else 1) + (D if i % 2 else 0)
        competitor = competitor / ball.norm(competitor)
        assert (G * competitor).sum() <= best * (1 + 1e-12)


@pytest.mark.parametrize("name", NORMS)
@settings(max_examples=20, deadline=None)
@given(rows=SIZES, cols=SIZES, seed=st.integers(0, 10**6), scale=st.sampled_from([1e-30, 1e-20, 1.0, 1e20]))
def test_dual_in_float32_at_any_scale(name: str, rows: int, cols: int, seed: int, scale: float) -> None:
    ball, G = NORMS[name], draw(name, rows, cols, seed, torch.float32) * scale
    if not G.any():
        return
    D = ball.dual(G)
    assert D.dtype == torch.float32
    torch.testing.assert_close(ball.norm(D).item(), 1.0, rtol=2e-6, atol=0)
    pairing = (G.double() * D.double()).sum()
    torch.testing.assert_close(ball.dual_norm(G.double()), pairing, rtol=1e-5, atol=0)
    torch.testing.assert_close(ball.dual_norm(G).double(), pairing, rtol=1e-5, atol=0)
    torch.testing.assert_close(ball.norm(G).double(), ball.norm(G.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NORMS)
def test_batches_are_their_members(name: str) -> None:
    ball = NORMS[name]
    G = gaussian(2, 3, *((5, 7) if ball.ndim == 2 else (7,)))
    G[0, 1] = 0
    for f in (ball.norm, ball.dual_norm, ball.dual):
        for i in range(2):
            for j in range(3):
                torch.testing.assert_close(f(G)[i, j], f(G[i, j]), rtol=1e-12, atol=0)
    assert ball.norm(G).shape == ball.dual_norm(G).shape == (2, 3)


def test_formulas() -> None:
    """DESIGN's table, written out once more by hand."""
    W = torch.tensor([[3.0, 0, 4, 0], [0, 0, 0, 2]])
    expected = {
        "one_to_rms": 2.5,  # max_i rms(W[i])
        "rms_to_inf": 10.0,  # sqrt(d) max_i norm2(W[i])
        "rms_to_rms": sqrt(4 / 2) * 5,  # the rows are orthogonal: sigma_max = 5
        "spectral": 5.0,
        "keller_jordan": 5.0,  # max(1, 2/4) = 1
        "moonlight": 5 / (0.2 * sqrt(4)),
        "sign": 4 * 4.0,  # d_in max |W|
    }
    for name, value in expected.items():
        torch.testing.assert_close(NORMS[name].norm(W).item(), value, rtol=1e-6, atol=0)
    assert set(MATRIX_NORMS) == set(expected)
    assert NORMS["max_abs"].norm(torch.tensor([1.0, -3.0])) == 3
    torch.testing.assert_close(NORMS["rms"].norm(torch.tensor([1.0, -7.0])).item(), 5.0, rtol=1e-6, atol=0)


def test_layout() -> None:
    """THEORY test 2: torch's (out, in), and a swapped ratio is off by the factor 4 on a 4:1 matrix."""
    A = gaussian(64, 16)
    posts = A.mT  # x W with W (d_in, d_out)
    x_to_y = sqrt(posts.shape[0] / posts.shape[1]) * torch.linalg.svdvals(posts)[0]
    torch.testing.assert_close(NORMS["rms_to_rms"].norm(A), x_to_y, rtol=1e-12, atol=0)
    torch.testing.assert_close(NORMS["rms_to_rms"].norm(A.mT.contiguous()), 4 * x_to_y, rtol=1e-12, atol=0)
    for name in ("one_to_rms", "rms_to_inf", "sign"):
        assert abs(NORMS[name].norm(A) / NORMS[name].norm(A.mT) - 1) > 0.2


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (31, 31), (1, 7), (7, 1)])
def test_linear_supremum(shape: tuple[int, int]) -> None:
    """THEORY test 1: the norm is attained at the top right singular vector, is never exceeded, and is D as well."""
    W = gaussian(*shape)
    bound = NORMS["rms_to_rms"].norm(W).item()

    def rms(x: Tensor) -> Tensor:
        return x.pow(2).mean(-1).sqrt()

    top = torch.linalg.svd(W).Vh[0] * sqrt(shape[1])
    torch.testing.assert_close(rms(W @ top).item(), bound, rtol=1e-12, atol=0)
    torch.testing.assert_close((rms(W @ top - W @ -top) / rms(top - -top)).item(), bound, rtol=1e-12, atol=0)
    torch.testing.assert_close(rms(W @ top - W @ -top).item(), 2 * bound, rtol=1e-12, atol=0)
    x = gaussian(2000, shape[1])
    assert (rms(x @ W.mT) / rms(x)).max() <= bound * (1 + 1e-12)


def test_one_hot_attains_the_gain_norm() -> None:
    """THEORY test 8, second half."""
    g = gaussian(9)
    worst = sqrt(9) * torch.eye(9, dtype=torch.float64)[g.abs().argmax()]
    torch.testing.assert_close((g * worst).pow(2).mean().sqrt(), NORMS["max_abs"].norm(g), rtol=1e-12, atol=0)


def test_wide_dual_steps_move_every_output_alike() -> None:
    """THEORY test 12: d_out >= d_in moves every x by the same RMS, d_out < d_in only at most."""
    x = gaussian(50, 16)
    for name, size in {"rms_to_rms": 1.0, "spectral": sqrt(16 / 48), "keller_jordan": 1.0}.items():
        y = x @ NORMS[name].dual(gaussian(48, 16, seed=1)).mT
        ratio = y.pow(2).mean(-1).sqrt() / x.pow(2).mean(-1).sqrt()
        torch.testing.assert_close(ratio, torch.full_like(ratio, size), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5)])
def test_update_rms(shape: tuple[int, int]) -> None:
    """THEORY test 11: msign has RMS 1/sqrt(max), Moonlight's step 0.2."""
    G = gaussian(*shape)
    rms = {name: NORMS[name].dual(G).pow(2).mean().sqrt().item() for name in ("spectral", "moonlight")}
    torch.testing.assert_close(rms, {"spectral": 1 / sqrt(max(shape)), "moonlight": 0.2}, rtol=1e-12, atol=0)


# ---- rows and vectors ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tiny_rows_have_full_length_and_zero_rows_none(dtype: torch.dtype) -> None:
    G = gaussian(5, 32).to(dtype)
    G[1] *= 1e-30
    G[2] *= 1e-20
    G[3] = 0
    G[4] *= 1e18
    for name, rms in {"one_to_rms": 1.0, "rms_to_inf": 1 / 32}.items():
        D = NORMS[name].dual(G)
        assert D.dtype == dtype
        assert torch.equal(D[3], torch.zeros_like(D[3]))
        length = D[[0, 1, 2, 4]].double().pow(2).mean(-1).sqrt()
        tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(length, torch.full_like(length, rms), rtol=tolerance, atol=0)
    assert NORMS["rms"].dual(torch.zeros(4)).abs().max() == 0


@pytest.mark.parametrize("name", ["one_to_rms", "rms_to_inf", "rms"])
def test_eps_is_added_to_lengths(name: str) -> None:
    """PAPER 3.1: row / (|row| + eps), also where |row|^2 would underflow."""
    unit = torch.nn.functional.normalize(gaussian(1, 8), dim=-1)
    full = NORMS[name].dual(unit)
    for dtype in (torch.float32, torch.float64):
        half = NORMS[name].dual((unit * 1e-25).to(dtype), eps=1e-25)
        torch.testing.assert_close(half, (full / 2).to(dtype), rtol=1e-5, atol=0)
        assert torch.equal(NORMS[name].dual(unit.to(dtype), eps=1e-20), NORMS[name].dual(unit.to(dtype)))


def test_norms_of_broken_and_empty_weights() -> None:
    W = torch.stack([torch.eye(3), torch.zeros(3, 3), torch.full((3, 3), torch.nan)])
    for name in MATRIX_NORMS:
        value = NORMS[name].norm(W)
        assert value[0] > 0
        assert value[1] == 0
        assert value[2].isnan()


@pytest.mark.parametrize("shape", [(64, 64), (32, 64), (64, 176)])
def test_spectral_norm_is_exact(shape: tuple[int, int]) -> None:
    """Also on a flat spectrum, where power iteration is 4e-2 off."""
    W = gaussian(4, *shape, dtype=torch.float32)
    for X in (W, NORMS["spectral"].dual(W)):
        torch.testing.assert_close(
            NORMS["spectral"].norm(X), torch.linalg.svdvals(X.double())[:, 0].float(), rtol=1e-6, atol=0
        )


def test_bfloat16_norms_are_float32() -> None:
    W = gaussian(4, 6, dtype=torch.bfloat16)
    for name in MATRIX_NORMS:
        assert NORMS[name].norm(W).dtype == torch.float32
        assert torch.equal(NORMS[name].norm(W), NORMS[name].norm(W.float()))


# ---- initialisation ----


@pytest.mark.parametrize("shape", [(64, 64), (48, 16), (16, 48), (7, 1), (1, 7), (97, 13)])
@pytest.mark.parametrize("name", NORMS)
def test_exact_init_has_norm_one(name: str, shape: tuple[int, int]) -> None:
    ball = NORMS[name]
    W = torch.empty(shape if ball.ndim == 2 else shape[0])
    assert ball.init_(W, generator(3)) is W
    again = ball.init_(torch.empty_like(W), generator(3))
    assert torch.equal(W, again)
    expected = 0.0 if name == "rms" else 1.0
    torch.testing.assert_close(ball.norm(W).item(), expected, rtol=3e-7, atol=0)
    if ball.ndim == 2 and min(shape) > 1:
        assert not torch.equal(W, ball.init_(torch.empty_like(W), generator(4)))


def test_exact_init_is_what_the_table_says() -> None:
    W = NORMS["rms_to_rms"].init_(torch.empty(12, 48, dtype=torch.float64), generator())
    torch.testing.assert_close(W @ W.mT, 12 / 48 * torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-14)
    E = NORMS["one_to_rms"].init_(torch.empty(100, 16), generator())
    torch.testing.assert_close(E.pow(2).mean(-1), torch.ones(100), rtol=1e-6, atol=0)
    H = NORMS["rms_to_inf"].init_(torch.empty(100, 16), generator())
    torch.testing.assert_close(H.norm(dim=-1), torch.full((100,), 1 / sqrt(16)), rtol=1e-6, atol=0)
    assert torch.equal(NORMS["max_abs"].init_(torch.empty(5), generator()), torch.ones(5))
    assert torch.equal(NORMS["rms"].init_(torch.empty(5), generator()), torch.zeros(5))
    assert torch.equal(NORMS["rms"].gaussian_(torch.empty(5), generator()), torch.zeros(5))
    assert torch.equal(NORMS["max_abs"].gaussian_(torch.empty(5), generator()), torch.ones(5))


def test_semi_orthogonal_init_is_uniform() -> None:
    """Without the signs of R the diagonal of a QR factor is biased: its mean would be about -0.5 here."""
    W = torch.empty(4000, 2, 2)
    mean = NORMS["rms_to_rms"].init_(W, generator()).mean(0)
    torch.testing.assert_close(mean, torch.zeros(2, 2), rtol=0, atol=0.05)


@pytest.mark.parametrize("shape", [(64, 64), (1024, 256), (256, 1024), (64, 4096)])
def test_gaussian_linear(shape: tuple[int, int]) -> None:
    """THEORY test 3."""
    d_out, d_in = shape
    W = NORMS["rms_to_rms"].gaussian_(torch.empty(shape), generator())
    std = sqrt(d_out / d_in) / (sqrt(d_in) + sqrt(d_out))
    torch.testing.assert_close(W.std().item(), std, rtol=0.02, atol=0)
    # One 64 x 64 scatters by 2.5 % around 0.976 (Tracy-Widom): the mean of many stands for it.
    many = torch.empty(128 if shape == (64, 64) else 1, *shape)
    norms = NORMS["rms_to_rms"].norm(NORMS["rms_to_rms"].gaussian_(many, generator()))
    assert 0.97 <= norms.mean() <= 1.02
    x = gaussian(3000, d_in, seed=5, dtype=torch.float32)
    mean_case = ((x @ W.mT).pow(2).mean() / x.pow(2).mean()).sqrt().item()
    torch.testing.assert_close(mean_case, sqrt(d_out) / (sqrt(d_in) + sqrt(d_out)), rtol=0.012, atol=0)


@pytest.mark.parametrize(("vocab", "d"), [(1000, 64), (8192, 64), (4096, 256)])
def test_gaussian_embedding_and_head(vocab: int, d: int) -> None:
    """THEORY test 4."""
    tail = 1 + sqrt(log(vocab) / d)
    E = NORMS["one_to_rms"].gaussian_(torch.empty(vocab, d), generator(1))
    H = NORMS["rms_to_inf"].gaussian_(torch.empty(vocab, d), generator(2))
    torch.testing.assert_close(NORMS["one_to_rms"].norm(E).item(), tail, rtol=0.05, atol=0)
    torch.testing.assert_close(NORMS["rms_to_inf"].norm(H).item(), tail, rtol=0.05, atol=0)
    torch.testing.assert_close((E.std().item(), H.std().item()), (1.0, 1 / d), rtol=0.01, atol=0)
    x = gaussian(200, d, dtype=torch.float32)
    x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    loss = torch.nn.functional.cross_entropy(x @ H.mT, torch.arange(200)).item()
    assert abs(loss - log(vocab) - 1 / (2 * d)) < 0.02
