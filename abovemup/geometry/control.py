"""The nearest weights whose norm is not above a limit ("Above MuP", part 4): what Pre Decay and Post Clip do.

Nearest is meant entry by entry (the Frobenius distance). Singular values, rows or entries above the limit are cut
to it and the rest stays as it is, bit for bit; a vector is shrunk as a whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from abovemup.geometry.msign import home, wide
from abovemup.geometry.norms import ROWS, SPECTRAL, VECTOR, NormBall, length
from abovemup.geometry.spectrum import scaled

# From norms to limits, both (...): a factor times the norm, or a constant.
Limit = Callable[[Tensor], Tensor]


def clip(ball: NormBall, W: Tensor, limit: Limit, top1: bool = False) -> Tensor:
    """The nearest W' to each W with norm(W') <= limit(norm(W)), in W's shape and dtype. A matrix with a NaN stays.

    For a spectral norm this is mclip, U min(S, limit) V^T. `top1` cuts the largest singular value only, which is
    part 4's approximation of it: where several are above the limit, the norm stays above it too.
    """
    radius = ball.radius(W.shape)
    X = wide(W)

    def unscaled(norm: Tensor) -> Tensor:
        return limit(norm / radius) * radius

    if ball.geometry is SPECTRAL:
        return clip_spectrum(X, unscaled, top1).to(W.dtype)
    sizes = length(X) if ball.geometry in (ROWS, VECTOR) else X.abs()
    most = unscaled(sizes.flatten(-ball.ndim).amax(-1))[(..., *[None] * ball.ndim)]
    return torch.where(sizes > most, X * (most / sizes), X).to(W.dtype)


def clip_spectrum(W: Tensor, limit: Limit, top1: bool = False) -> Tensor:
    """mclip of each (..., m, n) from the smaller Gram matrix in float64; a norm r times above its limit ends at it
    to about 1e-16 r^2."""
    X, scale = (x.double() for x in scaled(home(W)))
    scale = scale[..., 0, 0]
    frobenius = torch.linalg.vector_norm(X, dim=(-2, -1)) * scale
    if (frobenius <= limit(frobenius)).all():  # a bound of sigma_max: nothing to cut, and Post Clip's usual case
        return W
    X = X.mT if X.shape[-2] > X.shape[-1] else X
    values, U = torch.linalg.eigh(X @ X.mT)
    sigma = values.clamp_min(0).sqrt()
    most = (limit(sigma[..., -1] * scale) / scale)[..., None]
    cut = (most / sigma).clamp_max(1).where(sigma > most, 1.0) - 1
    if top1:
        cut[..., :-1] = 0
    change = (U * cut.unsqueeze(-2)) @ (U.mT @ X)
    change = (change.mT if W.shape[-2] > W.shape[-1] else change) * scale[..., None, None]
    return (home(W) + change.where(scale.isfinite()[..., None, None], 0.0)).to(W)
