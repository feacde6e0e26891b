"""msign: exact where it says so, scale-free, zero-safe, the same alone and in a batch."""

import pytest
import torch
from torch import Tensor

from abovemup.geometry.msign import coefficients, msign, power_of_two

ITERATIONS = ("newton_schulz", "polar_express")
METHODS = (*ITERATIONS, "exact")
SHAPES = [(7, 7), (5, 13), (13, 5), (1, 11), (11, 1), (1, 1)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_is_the_polar_factor(shape: tuple[int, int]) -> None:
    G = gaussian(*shape, dtype=torch.float64)
    S = msign(G, "exact", dtype=torch.float64)
    identity = torch.eye(min(shape), dtype=torch.float64)
    small = S @ S.mT if shape[0] <= shape[1] else S.mT @ S
    torch.testing.assert_close(small, identity, rtol=0, atol=1e-13)
    # S^T G is the symmetric positive half of G = S P, which makes S the nearest orthogonal matrix.
    P = S.mT @ G if shape[0] >= shape[1] else G @ S.mT
    torch.testing.assert_close(P, P.mT, rtol=0, atol=1e-13)
    assert torch.linalg.eigvalsh(P).min() > 0


def test_of_a_diagonal_is_its_signs() -> None:
    g = torch.tensor([3.0, -0.5, 1e-3, -20.0], dtype=torch.float64)
    torch.testing.assert_close(msign(g.diag(), "exact", dtype=torch.float64), g.sign().diag(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_keeps_the_rank(rank: int, dtype: torch.dtype) -> None:
    G = gaussian(40, rank, dtype=dtype) @ gaussian(rank, 23, seed=1, dtype=dtype)
    sigma = torch.linalg.svdvals(msign(G, "exact", dtype=dtype))
    torch.testing.assert_close(sigma[:rank], torch.ones(rank, dtype=dtype), rtol=0, atol=1e-5)
    assert sigma[rank:].max() < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_rank_one_stays_rank_one_in_float32(method: str) -> None:
    """Case 3."""
    sigma = torch.linalg.svdvals(msign(gaussian(64, 1) @ gaussian(1, 128, seed=1), method))
    assert 0.6 < sigma[0] < 1.3
    assert sigma[1] < 1e-3 * sigma[0]


def test_rank_one_is_lost_in_bfloat16_as_the_docs_say() -> None:
    sigma = torch.linalg.svdvals(msign(gaussian(64, 1) @ gaussian(1, 128, seed=1), dtype=torch.bfloat16))
    assert sigma[1] > 0.3 * sigma[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ITERATIONS)
@pytest.mark.parametrize("shape", [(8, 8), (5, 13), (13, 5)])
def test_scale_by_powers_of_two_changes_no_bit(method: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    G = gaussian(*shape)
    for exponent in (-67, -10, 1, 67):  # 1e-20 to 1e20
        assert torch.equal(msign(G * 2.0**exponent, method, dtype=dtype), msign(G, method, dtype=dtype))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e-12, 1e18, 1e20, 1e37])
def test_direction_does_not_depend_on_scale(method: str, scale: float) -> None:
    G = gaussian(6, 9).double()
    torch.testing.assert_close(msign((G * scale).float(), method), msign(G.float(), method), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gives_exactly_zero_also_between_others(method: str, dtype: torch.dtype) -> None:
    G = gaussian(3, 4, 6, dtype=dtype)
    alone = msign(G[[0, 2]], method, dtype=dtype)
    G[1] = 0
    S = msign(G, method, dtype=dtype)
    assert torch.equal(S[1], torch.zeros_like(S[1]))
    torch.testing.assert_close(S[[0, 2]], alone, rtol=0, atol=1e-6)
    assert msign(torch.zeros(3, 2), dtype=torch.bfloat16).abs().max() == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_its_matrices_whatever_their_scales(method: str, shape: tuple[int, int]) -> None:
    G = gaussian(2, 3, *shape, dtype=torch.float64) * torch.tensor([1e-20, 1.0, 1e20]).double()[:, None, None]
    batched = msign(G, method, dtype=torch.float64)
    assert batched.shape == G.shape
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(batched[i, j], msign(G[i, j], method, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ITERATIONS)
@pytest.mark.parametrize("shape", [(13, 5), (5, 13)])
def test_the_smaller_gram_is_used(method: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: products.append(bmm(a, b)) or products[-1])
    G = gaussian(*shape)
    torch.testing.assert_close(msign(G, method), msign(G.mT.contiguous(), method).mT, rtol=0, atol=1e-5)
    assert {tuple(gram.shape) for gram in products} == {(1, 5, 5)}


def test_newton_schulz_leaves_the_singular_values_that_are_documented() -> None:
    """THEORY section 5: square 0.007 to 1.20, four to one 0.68 to 1.13, so that a step is not exactly of unit norm."""
    square = torch.linalg.svdvals(msign(gaussian(128, 128)))
    assert square.max() < 1.21
    assert 0.8 < square.median() < 0.95
    wide = torch.linalg.svdvals(msign(gaussian(64, 256)))
    assert wide.min() > 0.67
    assert wide.max() < 1.14


def test_polar_express_converges() -> None:
    six = torch.linalg.svdvals(msign(gaussian(128, 128), "polar_express", steps=6))
    assert six.max() < 1.002
    assert abs(six.median() - 1) < 2e-3
    G = gaussian(12, 20, dtype=torch.float64)
    exact = msign(G, "exact", dtype=torch.float64)
    errors = [(msign(G, "polar_express", n, torch.float64) - exact).norm().item() for n in (4, 5, 6, 7)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 1e-2
    assert errors[3] < 1e-6  # the tail triples the digits
    assert (msign(G, "polar_express", 12, torch.float64) - exact).norm() < 1e-13


def test_coefficients() -> None:
    assert coefficients("newton_schulz", 5) == [(3.4445, -4.7750, 2.0315)] * 5
    table = coefficients("polar_express", 8)
    assert table[0] == (8.28721 / 1.01, -23.5959 / 1.01**3, 17.3004 / 1.01**5)
    assert table[5] == (1.8913 / 1.01, -1.268 / 1.01**3, 0.376804 / 1.01**5)
    assert table[6:] == [(1.875, -1.25, 0.375)] * 2


def test_float32_is_float32_and_float64_float64() -> None:
    G = gaussian(24, 40, dtype=torch.float64)
    best = msign(G, dtype=torch.float64)
    single = (msign(G.float()) - best).abs().max()
    half = (msign(G.float(), dtype=torch.bfloat16) - best).abs().max()
    assert single < 1e-5
    assert half > 1e-3
    assert msign(G.bfloat16()).dtype == torch.bfloat16
    assert msign(G.float(), dtype=torch.bfloat16).dtype == torch.float32


def test_a_nan_stays_one() -> None:
    G = gaussian(3, 4)
    G[0, 0] = torch.nan
    assert msign(G).isnan().any()


def test_refusals() -> None:
    with pytest.raises(IndexError):
        msign(torch.ones(3))
    with pytest.raises(ValueError, match="svd"):
        msign(torch.ones(3, 3), "svd")
    with pytest.raises(RuntimeError, match="BFloat16"):
        msign(torch.ones(3, 3), "exact", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_power_of_two(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.75, -3.0], [1.0, 0.5], [-1e-30, 1e-31], [0.0, 0.0]], dtype=dtype)
    expected = torch.tensor([[2.0], [1.0], [2.0**-100], [torch.finfo(dtype).tiny]], dtype=dtype)
    assert torch.equal(power_of_two(x, dim=-1), expected)
