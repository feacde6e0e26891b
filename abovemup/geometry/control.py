"""The nearest weights whose norm is not above a limit ("Above MuP", part 4): what Pre Decay and Post Clip do.

Nearest is meant entry by entry (the Frobenius distance). Singular values, rows or entries above the limit are cut
to it and the rest stays as it is, bit for bit; a vector is shrunk as a whole.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from abovemup.geometry.msign import wide
from abovemup.geometry.norms import DIAGONAL, ENTRIES, ROWS, SPECTRAL, VECTOR, Geometry, NormBall, length
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
    return CLIPS[ball.geometry](X, unscaled).to(W.dtype)


def clip_spectrum(W: Tensor, limit: Limit, top1: bool = False) -> Tensor:
    """mclip of each (..., m, n) from the smaller Gram matrix in float64; a norm r times above its limit ends at it
    to about 1e-16 r^2."""
    X, scale = scaled(W.cpu() if W.device.type == "mps" else W)  # which has no float64
    X, scale = X.double(), scale[..., 0, 0].double().to(W.device)
    frobenius = torch.linalg.vector_norm(X, dim=(-2, -1)).to(W.device) * scale
    if (frobenius <= limit(frobenius)).all():  # a bound of sigma_max: nothing to cut, and Post Clip's usual case
        return W
    X = X.mT if X.shape[-2] > X.shape[-1] else X
    values, U = torch.linalg.eigh(X @ X.mT)
    sigma = values.clamp_min(0).sqrt()
    most = (limit(sigma[..., -1].to(W.device) * scale) / scale).to(sigma.device)[..., None]
    cut = (most / sigma).clamp_max(1).where(sigma > most, 1.0) - 1
    if top1:
        cut[..., :-1] = 0
    change = (U * cut.unsqueeze(-2)) @ (U.mT @ X)
    change = (change.mT if W.shape[-2] > W.shape[-1] else change).to(W.device)
    change = (change * scale[..., None, None]).where(scale.isfinite()[..., None, None], 0.0)
    return (W + change).to(W.dtype)


def clip_rows(W: Tensor, limit: Limit) -> Tensor:
    lengths = length(W)
    return _shrink(W, lengths, limit(lengths.amax((-2, -1)))[..., None, None])


def clip_entries(W: Tensor, limit: Limit, ndim: int = 1) -> Tensor:
    sizes = W.abs()
    most = limit(sizes.flatten(-ndim).amax(-1))[(..., *[None] * ndim)]
    return torch.where(sizes > most, W.sign() * most, W)


def clip_vector(W: Tensor, limit: Limit) -> Tensor:
    lengths = length(W)
    return _shrink(W, lengths, limit(lengths[..., 0])[..., None])


def _shrink(W: Tensor, lengths: Tensor, most: Tensor) -> Tensor:
    return torch.where(lengths > most, W * (most / lengths), W)


CLIPS: dict[Geometry, Callable[[Tensor, Limit], Tensor]] = {
    ROWS: clip_rows,
    ENTRIES: partial(clip_entries, ndim=2),
    DIAGONAL: clip_entries,
    VECTOR: clip_vector,
}
