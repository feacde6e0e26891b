"""Singular values without an SVD: all of them from the smaller Gram matrix, the largest from a block of vectors."""

import torch
from torch import Tensor

from abovemup.geometry.msign import home, power_of_two

BLOCK = 8  # vectors that go through the matrix together
KEPT = 6  # of them, those that the next measurement starts from
PASSES = (4, 32)  # through the matrix at least, and before the Gram matrix is cheaper
TOLERANCE = 1e-3  # relative, of a largest singular value


def scaled(W: Tensor) -> tuple[Tensor, Tensor]:
    """W over its power of two (..., 1, 1), which is given too; a matrix that is not finite as zeros, since LAPACK
    raises on NaN: times its scale, which is inf or nan then, whatever comes of the zeros is nan all the same."""
    scale = power_of_two(W, dim=(-2, -1))
    return (W / scale).where(scale.isfinite(), 0.0), scale


def singular_values(W: Tensor) -> Tensor:
    """All min(m, n) singular values of each (..., m, n), rising, in float64: roots of the eigenvalues of the smaller
    Gram matrix. The largest is exact to rounding, one that is r times smaller to about 1e-16 r^2 of itself.

    One core: 4 ms for 28 matrices of width 64, 0.15 s for one of 1024; it rises with the cube of the width.
    """
    X, scale = scaled(home(W))
    X = X.double()
    gram = X @ X.mT if X.shape[-2] <= X.shape[-1] else X.mT @ X
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt() * scale[..., 0].double()


def stable_rank(frobenius: Tensor, largest: Tensor) -> Tensor:
    """(Frobenius norm / largest singular value)^2; 0 for a zero matrix."""
    return (frobenius / largest.where(largest != 0, 1.0)).square()


def effective_rank(sigma: Tensor) -> Tensor:
    """exp of the entropy of p = sigma / sum(sigma), over the last dimension (arXiv:2510.03871); 0 for all zeros."""
    total = sigma.sum(-1, keepdim=True)
    p = sigma / total.where(total != 0, 1.0)
    return (-torch.xlogy(p, p).sum(-1)).exp().where(total[..., 0] != 0, 0.0)


def condition_number(sigma: Tensor) -> Tensor:
    """Largest over smallest of `singular_values`; inf from 1e7 on, where the smallest is rounding; 0 for zeros."""
    largest, smallest = sigma[..., -1], sigma[..., 0]
    known = smallest.where(smallest > 1e-7 * largest, 0.0) + 0 * largest  # a nan stays one
    return (largest / known).where(largest != 0, 0.0)


def largest_singular_value(W: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """The largest singular value of each (..., m, n) within `TOLERANCE`, and KEPT vectors to start from next time.

    `start` (..., min(m, n), BLOCK) spans where to look. A block Krylov space grows from it by one pass through the
    matrix at a time, in float32 with Householder QR; a Ritz pair (theta, v) of the Gram matrix S counts once
    |S v - theta v| <= 2 TOLERANCE theta, so that some singular value is within TOLERANCE of sqrt(theta). That it is
    the largest is not proved by this (no start could), but a random part in it has always found it: over Gaussian,
    orthogonalized and clustered spectra the error was at most half the tolerance. What does not settle within
    PASSES is taken from the Gram matrix. Cost: that of 2 * BLOCK matrix-vector products a pass.
    """
    W, start = home(W), home(start)
    X, scale = scaled(W.flatten(0, -3))
    X = (X.mT if W.shape[-2] <= W.shape[-1] else X).float()  # the smaller side last
    Q = torch.linalg.qr(start.flatten(0, -3).float()).Q
    V, Z = Q[..., :0], Q[..., :0]  # orthonormal vectors, and S times them
    theta = torch.full((len(X),), torch.nan, dtype=torch.float64, device=W.device)
    kept = Q[..., :KEPT]
    for done in range(1, PASSES[1] + 1):
        V, Z = torch.cat([V, Q], -1), torch.cat([Z, X.mT @ (X @ Q)], -1)
        if done >= PASSES[0] and done % 2 == 0:
            theta, kept, settled = _ritz(V, Z, theta, kept)
            if settled:
                break
        Q = Z[..., -BLOCK:]
        for _ in range(2):  # twice: what is left of a matrix of low rank is noise, and mostly along V
            Q = torch.linalg.qr(Q - V @ (V.mT @ Q)).Q
    sigma, left = theta.sqrt() * scale[:, 0, 0].double(), theta.isnan()
    if left.any():
        sigma[left] = singular_values(W.flatten(0, -3)[left])[:, -1]
    return sigma.view(W.shape[:-2]), kept.view(*start.shape[:-1], KEPT)


def _ritz(V: Tensor, Z: Tensor, theta: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Fill in the theta that have settled, and replace `kept` of the rest; whether all have."""
    S = (V.mT @ Z).double()
    values, vectors = torch.linalg.eigh((S + S.mT) / 2)
    top, y = values[:, -1].clamp_min(0), vectors[:, :, -KEPT:].float()
    rest = (Z @ y[..., -1:] - top[:, None, None].float() * (V @ y[..., -1:])).norm(dim=(-2, -1))
    opened = theta.isnan()  # one that has settled stays as it is, whatever its noise becomes
    kept = torch.where(opened[:, None, None], V @ y, kept)
    theta = torch.where(opened & (rest <= 2 * TOLERANCE * top), top, theta)
    return theta, kept, not bool(theta.isnan().any())
