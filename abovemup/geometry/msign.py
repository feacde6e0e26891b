"""msign(G) = U_r V_r^T, the matrix sign: every singular value of G that is not zero becomes one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# An msign with its options bound: what a norm ball is handed for its step.
Msign = Callable[[Tensor], Tensor]

# Each step is X <- a X + b (X X^T) X + c (X X^T)^2 X.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's: singular values end between about 0.7 and 1.2
POLAR_EXPRESS = (  # Polar Express (arXiv 2505.16932): the best polynomial of each step for singular values above 1e-3
    (8.28721, -23.5959, 17.3004),
    (4.10706, -2.94785, 0.544843),
    (3.94869, -2.9089, 0.551819),
    (3.31842, -2.48849, 0.510049),
    (2.30065, -1.6689, 0.418807),
    (1.8913, -1.268, 0.376804),
)
POLAR_EXPRESS_TAIL = (1.875, -1.25, 0.375)  # from the seventh step on
POLAR_EXPRESS_SAFETY = 1.01  # the table is evaluated at x / 1.01: rounding may push a singular value above 1

EXPONENT_BITS = {torch.float32: (torch.int32, 0x7F80_0000), torch.float64: (torch.int64, 0x7FF0_0000_0000_0000)}


def msign(G: Tensor, method: str = "newton_schulz", steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix sign of G (..., d_out, d_in), in G's shape and dtype; batched over the leading dimensions.

    `newton_schulz` and `polar_express` run `steps` iterations of their polynomial in `dtype`; `exact` is an SVD
    that cuts the rank at eps * max(d_out, d_in) * sigma_1. The direction does not depend on the scale of G, and
    zero gives exactly zero. In float32 a rank-1 G gives a rank-1 result; in bfloat16 it does not, the rounding of
    G is amplified into directions of its own (a second singular value of up to 0.9).

    Raises ValueError for an unknown method.
    Muon (Keller Jordan); Polar Express (arXiv 2505.16932); "Above MuP", part 2.
    """
    # Dividing by a power of two is exact, so that neither float32 nor bfloat16 rounds differently at another scale.
    X = (wide(G) / power_of_two(wide(G), dim=(-2, -1))).to(dtype)
    if method == "exact":
        return _svd_sign(X).to(G.dtype)
    triples = coefficients(method, steps)
    transposed = G.shape[-2] > G.shape[-1]  # the smaller Gram matrix
    X = _iterate(X.mT if transposed else X, triples)
    return (X.mT if transposed else X).to(G.dtype)


def coefficients(method: str, steps: int) -> list[tuple[float, float, float]]:
    """The (a, b, c) of each step."""
    if method == "newton_schulz":
        return [NEWTON_SCHULZ] * steps
    if method == "polar_express":
        s = POLAR_EXPRESS_SAFETY
        table = [(a / s, b / s**3, c / s**5) for a, b, c in POLAR_EXPRESS]
        return (table + [POLAR_EXPRESS_TAIL] * steps)[:steps]
    raise ValueError(f"unknown msign method {method!r}: newton_schulz, polar_express or exact")


def _iterate(X: Tensor, triples: list[tuple[float, float, float]]) -> Tensor:
    """The polynomial iteration on (..., m, n) with m <= n, from the Frobenius sphere: sigma_1 <= 1."""
    shape = X.shape
    X = X.reshape(-1, *shape[-2:])
    # Only a zero matrix has a norm below 1 here: see power_of_two.
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for a, b, c in triples:
        gram = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.reshape(shape)


def _svd_sign(X: Tensor) -> Tensor:
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    cut = torch.finfo(X.dtype).eps * max(X.shape[-2:]) * sigma[..., :1]
    return (U * (sigma > cut).unsqueeze(-2)) @ Vh


def power_of_two(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest power of two not above max|x| over `dim` (kept as size 1), for x in float32 or float64.

    x divided by it has its largest entry in [1, 2), whatever the scale of x was, and not a bit of it rounded.
    Zero gives the smallest normal number; a non-finite x gives inf or nan.
    """
    largest = x.abs().amax(dim, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)  # 10x faster than an infinity norm
    integer, mask = EXPONENT_BITS[x.dtype]  # not frexp: it does not exist on every device
    return (largest.view(integer) & mask).view(x.dtype)


def wide(x: Tensor) -> Tensor:
    """x in float32 when its dtype is lower, else x itself."""
    return x if x.dtype in EXPONENT_BITS else x.float()


def whole(x: Any) -> Tensor:
    """All of a sharded tensor (a DTensor), which all its ranks have to ask for; another tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Any) -> Tensor:
    """The part of a sharded tensor (a DTensor) that is here, as a view; another tensor is all here."""
    return x.to_local() if hasattr(x, "to_local") else x


def home(x: Tensor) -> Tensor:
    """x where float64 exists: on the CPU instead of an Apple GPU."""
    return x.cpu() if x.device.type == "mps" else x
