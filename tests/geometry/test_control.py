"""Norm control: projections onto the balls, and which of the forms of part 4 keep their bound."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from abovemup.geometry.control import clip
from abovemup.geometry.msign import msign
from abovemup.geometry.norms import NORMS


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def fixed(most: float) -> Callable[[Tensor], Tensor]:
    return lambda norm: torch.full_like(norm, most)


def mclip(W: Tensor, most: float) -> Tensor:
    U, sigma, Vh = torch.linalg.svd(W, full_matrices=False)
    return (U * sigma.clamp_max(most)) @ Vh


def two_msigns(W: Tensor, most: float) -> Tensor:
    """Part 4's mclip from two msigns; W wide or square."""

    def sign(X: Tensor) -> Tensor:
        return msign(X, "exact", dtype=torch.float64)

    inner = most * torch.eye(len(W), dtype=W.dtype) - W @ sign(W).mT
    return (W + most * sign(W) - inner @ sign(most * sign(W) - W)) / 2


MATRICES = [(7, 7), (5, 13), (13, 5), (1, 11), (11, 1), (1, 1)]


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("most", [0.3, 1.0, 2.0])
def test_mclip_is_the_svds_and_that_of_two_msigns(shape: tuple[int, int], most: float) -> None:
    """THEORY test 10."""
    W = gaussian(*shape)
    clipped = clip(NORMS["spectral"], W, fixed(most))
    torch.testing.assert_close(clipped, mclip(W, most), rtol=0, atol=1e-12)
    wide = W if shape[0] <= shape[1] else W.mT
    identity = two_msigns(wide, most)
    torch.testing.assert_close(clipped, identity if wide is W else identity.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_nearest_of_all_that_is_feasible(norm: str) -> None:
    """THEORY test 10: no feasible point is nearer; the norm is at the limit; in batches as one by one."""
    ball = NORMS[norm]
    W = gaussian(3, 6, 10) if ball.ndim == 2 else gaussian(3, 10)
    norms = ball.norm(W)
    half = clip(ball, W, lambda n: 0.5 * n)
    torch.testing.assert_close(ball.norm(half), 0.5 * norms, rtol=1e-12, atol=0)
    for i in range(3):
        torch.testing.assert_close(clip(ball, W[i], lambda n: 0.5 * n), half[i], rtol=0, atol=1e-13)
        for seed in range(100):
            # Mostly between the projection and W, where a nearer point would have to be.
            other = half[i] + 0.1 * 2.0 ** -(seed % 8) * gaussian(*W[i].shape, seed=seed) + 0.05 * (W[i] - half[i])
            other = other * (0.5 * norms[i] / ball.norm(other)).clamp_max(1)
            assert (other - W[i]).norm() >= (half[i] - W[i]).norm() - 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_within_the_limit_nothing_changes_not_a_bit(norm: str) -> None:
    ball = NORMS[norm]
    W = gaussian(3, 6, 10, dtype=torch.float32) if ball.ndim == 2 else gaussian(3, 10, dtype=torch.float32)
    most = ball.norm(W).max().item() * 1.001
    assert torch.equal(clip(ball, W, fixed(most)), W)
    if ball.ndim == 2 and norm in ("one_to_rms", "rms_to_inf"):
        longest = W.norm(dim=-1).argmax(-1)
        clipped = clip(ball, W, lambda n: 0.999 * n)
        for i in range(3):
            assert [bool((clipped[i, row] == W[i, row]).all()) for row in range(6)].count(False) == 1
            assert not torch.equal(clipped[i, longest[i]], W[i, longest[i]])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_zero_scale_dtype_and_nan(norm: str, scale: float) -> None:
    ball = NORMS[norm]
    W = gaussian(3, 6, 10, dtype=torch.float32) if ball.ndim == 2 else gaussian(3, 10, dtype=torch.float32)
    torch.testing.assert_close(
        clip(ball, W * scale, lambda n: 0.5 * n), clip(ball, W, lambda n: 0.5 * n) * scale, rtol=1e-5, atol=1e-6 * scale
    )
    assert torch.equal(clip(ball, torch.zeros_like(W), lambda n: 0.5 * n), torch.zeros_like(W))
    assert clip(ball, W, lambda n: 0.0 * n).abs().max() < 1e-6
    half = clip(ball, W.bfloat16(), lambda n: 0.5 * n)
    assert half.dtype == torch.bfloat16
    W[0].view(-1)[0] = torch.nan
    clipped = clip(ball, W, lambda n: 0.5 * n)  # LAPACK must not raise
    assert clipped[0].isnan().any()
    assert clipped[1:].isfinite().all()


def test_in_the_rms_norm_it_is_weight_decay() -> None:
    W = gaussian(10)
    torch.testing.assert_close(clip(NORMS["rms"], W, lambda n: 0.9 * n), 0.9 * W, rtol=1e-15, atol=0)


TAU, LR, DECAY, STEPS = 5.0, 0.05, 0.2, 400  # tau = 1 / DECAY


def largest(control: str, adversary: bool) -> float:
    """The largest spectral norm in the steps of THEORY 3.4's experiment J: against -msign(W), or at random."""
    ball, n = NORMS["spectral"], 24
    W = 0.999 * TAU * torch.linalg.qr(gaussian(n, n)).Q
    result, top1 = 0.0, control.endswith("top1")
    for t in range(STEPS):
        G = -W if adversary else gaussian(n, n, seed=t)
        step = -LR * msign(G, "exact", dtype=torch.float64)
        if control.startswith("pre"):
            W = clip(ball, W, lambda norm: (1 - LR * DECAY) * norm, top1) + step
        elif control.startswith("post"):
            W = clip(ball, W + step, fixed(TAU), top1)
        else:
            W = (1 - LR * DECAY) * W + step
        result = max(result, ball.norm(W).item())
    return result


@pytest.mark.parametrize("control", ["decay", "pre_decay", "post_clip"])
@pytest.mark.parametrize("adversary", [True, False])
def test_the_exact_forms_keep_the_bound(control: str, adversary: bool) -> None:
    """THEORY test 10 and the numbers of 3.4."""
    assert largest(control, adversary) <= TAU * (1 + 1e-12)


def test_the_top1_forms_do_not() -> None:
    """THEORY 3.4: 22.8 and 6.15."""
    assert largest("pre_decay_top1", True) == pytest.approx(22.8, rel=0.005)
    assert largest("post_clip_top1", True) == pytest.approx(6.15, rel=0.001)
