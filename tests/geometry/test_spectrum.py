"""Singular values from Gram matrices and from blocks, against float64 SVDs."""

import math

import pytest
import torch
from torch import Tensor

from abovemup.geometry import spectrum
from abovemup.geometry.msign import msign
from abovemup.geometry.spectrum import (
    BLOCK,
    KEPT,
    TOLERANCE,
    condition_number,
    effective_rank,
    largest_singular_value,
    singular_values,
    stable_rank,
)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(shape: tuple[int, int], sigma: Tensor, seed: int = 0) -> Tensor:
    n = min(shape)
    U = torch.linalg.qr(gaussian(shape[0], n, seed=seed)).Q
    V = torch.linalg.qr(gaussian(shape[1], n, seed=seed + 1)).Q
    return (U * sigma) @ V.mT


def hard(kind: str, shape: tuple[int, int]) -> Tensor:
    n = min(shape)
    spectra = {
        "close": torch.cat([1 - 1e-4 * torch.arange(20.0), torch.linspace(0.95, 0.1, n - 20)]),
        "twins": torch.cat([torch.tensor([1.0, 0.999]), torch.linspace(0.998, 0.9, n - 2)]),
        "decaying": torch.arange(1.0, n + 1) ** -0.3,
        "orthogonal": torch.ones(n),
        "low rank": torch.cat([torch.linspace(1, 0.5, 12), torch.zeros(n - 12)]),
    }
    if kind in spectra:
        return with_spectrum(shape, spectra[kind])
    return {
        "gaussian": lambda G: G,
        "sign": torch.sign,
        "newton_schulz": lambda G: msign(G, "newton_schulz", 5),
        "polar_express": lambda G: msign(G, "polar_express", 6),
    }[kind](gaussian(*shape))


def truth(W: Tensor) -> Tensor:
    return torch.linalg.svdvals(W.double())


FLAT = ["gaussian", "sign", "newton_schulz", "polar_express", "orthogonal"]
KINDS = [*FLAT, "close", "twins", "decaying", "low rank"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(521, 521), (700, 521), (521, 700)])
def test_a_cold_block_finds_the_largest(kind: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    W = hard(kind, shape)
    monkeypatch.setattr(spectrum, "singular_values", None)  # it settles by itself
    sigma, kept = largest_singular_value(W[None], gaussian(1, 521, BLOCK, seed=5))
    assert sigma.item() == pytest.approx(truth(W)[0].item(), rel=TOLERANCE / 2)
    assert kept.shape == (1, 521, KEPT)


def test_a_warm_block_finds_what_is_new() -> None:
    """The kept vectors are orthogonal to a direction that has outgrown them."""
    W = hard("close", (521, 600))
    cold = gaussian(1, 521, BLOCK, seed=5)
    _, kept = largest_singular_value(W[None], cold)
    u = torch.linalg.qr(torch.cat([kept[0], gaussian(521, 1, seed=6)], -1)).Q[:, -1:]
    start = torch.cat([kept, cold[..., KEPT:]], -1)
    for size in (0.1, 0.5, 1.05, 1.2, 3.0):
        grown = W + size * u @ torch.nn.functional.normalize(gaussian(1, 600, seed=7))
        sigma, _ = largest_singular_value(grown[None], start)
        assert sigma.item() == pytest.approx(truth(grown)[0].item(), rel=TOLERANCE / 2)


def test_a_batch_is_each_alone_and_what_does_not_settle_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    W = torch.stack([hard("gaussian", (521, 530)), torch.zeros(521, 530), hard("low rank", (521, 530)) * 1e30])
    W = torch.stack([W[:2], W[1:]])
    start = gaussian(2, 2, 521, BLOCK)
    sigma, kept = largest_singular_value(W, start)
    torch.testing.assert_close(sigma, truth(W)[..., 0], rtol=TOLERANCE / 2, atol=0)
    assert sigma[0, 1] == 0
    assert kept.shape == (2, 2, 521, KEPT)
    monkeypatch.setattr(spectrum, "PASSES", (4, 4))
    sigma, _ = largest_singular_value(W, start)
    torch.testing.assert_close(sigma[0, 0], truth(W[0, 0])[0], rtol=1e-12, atol=0)  # a Gaussian needs more passes
    torch.testing.assert_close(sigma, truth(W)[..., 0], rtol=TOLERANCE / 2, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_alone(bad: float) -> None:
    W = torch.stack([hard("decaying", (521, 530))] * 2)
    W[0, 3, 4] = bad
    sigma, kept = largest_singular_value(W, gaussian(2, 521, BLOCK))
    assert not sigma[0].isfinite()
    assert sigma[1].item() == pytest.approx(truth(W[1])[0].item(), rel=TOLERANCE)
    assert kept.isfinite().all()  # it goes into a checkpoint
    assert singular_values(W[:, :7, :5])[0].isnan().all() == (not W[0, :7, :5].isfinite().all())


@pytest.mark.parametrize("shape", [(7, 7), (3, 11), (11, 3), (1, 5), (1, 1)])
def test_all_singular_values_and_what_is_made_of_them(shape: tuple[int, int]) -> None:
    W = gaussian(*shape).double()
    sigma = torch.linalg.svdvals(W).flip(-1)
    torch.testing.assert_close(singular_values(W), sigma, rtol=1e-12, atol=0)
    p = sigma / sigma.sum()
    found = singular_values(W)
    assert effective_rank(found).item() == pytest.approx(math.exp(-(p * p.log()).sum()), rel=1e-12)
    assert condition_number(found).item() == pytest.approx((sigma[-1] / sigma[0]).item(), rel=1e-9)
    expected = ((sigma**2).sum() / sigma[-1] ** 2).item()
    assert stable_rank(W.norm(), found[-1]).item() == pytest.approx(expected, rel=1e-12)


def test_ranks_of_special_matrices() -> None:
    eye, one, zero = torch.eye(5), torch.ones(5, 5), torch.zeros(5, 5)
    nan = torch.full((5, 5), math.nan)
    sigma = singular_values(torch.stack([eye, one, zero, nan]))
    assert effective_rank(sigma)[:3].tolist() == pytest.approx([5, 1, 0])
    assert condition_number(sigma)[:3].tolist() == [1, math.inf, 0]
    frobenius = torch.stack([eye, one, zero, nan]).double().norm(dim=(-2, -1))
    assert stable_rank(frobenius, sigma[:, -1])[:3].tolist() == pytest.approx([5, 1, 0])
    for value in (effective_rank(sigma), condition_number(sigma), stable_rank(frobenius, sigma[:, -1])):
        assert value[3].isnan()
