"""The norm balls: for every kind of layer its norm, the dual norm, the step of unit norm, and where to start.

A ball is a geometry (which matrices have size one) and a radius (how large that is for a shape): five geometries
and the radii in `NORMS` are all of Scion, Muon, SignSGD and "Above MuP". A new ball is one more line there.

Matrices are torch's (..., d_out, d_in), an embedding or head (..., V, d), vectors (..., n); everything is batched
over the leading dimensions. float64 stays float64; results of lower dtypes are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod, sqrt

import torch
from torch import Tensor

from abovemup.geometry.msign import Msign, home, msign, power_of_two, wide
from abovemup.geometry.spectrum import singular_values

MATRIX = (-2, -1)
Shape = Sequence[int]


def exact(G: Tensor) -> Tensor:
    """msign by SVD."""
    return msign(G, "exact", dtype=wide(G).dtype)


@dataclass(frozen=True)
class Geometry:
    """The ball of radius one: what is measured, and the point of it that has the largest product with G."""

    ndim: int  # 1: a vector (..., n); 2: a matrix (..., d_out, d_in)
    norm: Callable[[Tensor], Tensor]
    dual_norm: Callable[[Tensor], Tensor]
    direction: Callable[[Tensor, Msign, float], Tensor]  # (G, msign, eps), eps where G is divided by a length
    start: Callable[[Tensor], Tensor]  # from a standard Gaussian to initial weights of norm one (a bias: zero)
    gaussian: Callable[[Tensor], Tensor]  # from a standard Gaussian to Gaussian weights of norm about one


@dataclass(frozen=True)
class NormBall:
    """All W with norm(W) <= 1 ("Above MuP", parts 2 and 3; modular duality; Scion's linear minimization oracles)."""

    geometry: Geometry
    radius: Callable[[Shape], float]

    @property
    def ndim(self) -> int:
        """1 for a norm of vectors, 2 for a norm of matrices."""
        return self.geometry.ndim

    def norm(self, W: Tensor) -> Tensor:
        """The norm of each W, without the matrix's own dimensions. Zero gives 0, a NaN gives nan."""
        return self.geometry.norm(wide(W)) / self.radius(W.shape)

    def dual_norm(self, G: Tensor) -> Tensor:
        """max <G, D> over norm(D) <= 1: what one step of unit norm can gain to first order."""
        return self.geometry.dual_norm(wide(G)) * self.radius(G.shape)

    def dual(self, G: Tensor, msign: Msign = exact, eps: float = 0.0) -> Tensor:
        """The D of norm one with the largest <G, D>, in G's shape and dtype; the descent step is -lr * D.

        Zero matrices and zero rows give exactly zero. `eps` is added to the lengths that rows and vectors are
        divided by (a row of length eps takes half a step); the direction of a matrix is scale-free as it is.
        """
        return self.radius(G.shape) * self.direction(G, msign, eps)

    def direction(self, G: Tensor, msign: Msign = exact, eps: float = 0.0) -> Tensor:
        """`dual` without the factor `radius(G.shape)`."""
        return self.geometry.direction(wide(G), msign, eps).to(G.dtype)

    @torch.no_grad()
    def init_(self, W: Tensor, generator: torch.Generator) -> Tensor:
        """Fill W with random weights of norm exactly one (a gain: ones; a bias: zeros)."""
        return W.copy_(self.radius(W.shape) * self.geometry.start(_draw(W, generator)))

    @torch.no_grad()
    def gaussian_(self, W: Tensor, generator: torch.Generator) -> Tensor:
        """Fill W with Gaussian weights of norm about one (a gain: ones; a bias: zeros).

        std per entry: hidden sqrt(d_out/d_in) / (sqrt(d_in) + sqrt(d_out)), embedding 1, head 1/d ("Above MuP",
        parts 2 and 3); the largest row of embedding and head is then near 1 + sqrt(ln V / d).
        """
        return W.copy_(self.radius(W.shape) * self.geometry.gaussian(_draw(W, generator)))


def _draw(W: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(W.shape, generator=generator, device=generator.device, dtype=wide(W[:0]).dtype)


# ---- lengths that neither overflow nor underflow when they are squared ----


def length(x: Tensor) -> Tensor:
    """The L2 norm over the last dimension, which is kept as size 1."""
    scale = power_of_two(x, dim=-1)
    return torch.linalg.vector_norm(x / scale, dim=-1, keepdim=True) * scale


def unit(x: Tensor, eps: float = 0.0) -> Tensor:
    """x / (|x| + eps) over the last dimension; zero gives zero, also for eps = 0."""
    scale = power_of_two(x, dim=-1)
    x = x / scale
    # The length is at least 1 here, or 0.
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + eps / scale).clamp_min(torch.finfo(x.dtype).tiny)


def frobenius(W: Tensor) -> Tensor:
    """The root of the sum of all squares of each (n, ...): lengths of at most 256 entries, and theirs in float64. One
    float32 sum over a vocabulary of 128256 rows is off by up to 0.8 %."""
    count = prod(W.shape[1:])
    return home(length(W.reshape(len(W), -1, gcd(count, 256)))[..., 0]).double().norm(dim=-1)


# ---- the spectral geometry ----


def sigma_max(W: Tensor) -> Tensor:
    """The largest singular value of each (..., m, n): exact to rounding."""
    return singular_values(W)[..., -1].to(W)


def nuclear(G: Tensor) -> Tensor:
    """The sum of the singular values of each (..., m, n)."""
    return torch.linalg.svdvals(home(G).double()).sum(-1).to(G)


def semi_orthogonal(G: Tensor) -> Tensor:
    """From a Gaussian (..., m, n) to a uniformly distributed matrix whose singular values are all one."""
    tall = G.shape[-2] >= G.shape[-1]
    Q, R = torch.linalg.qr((G if tall else G.mT).double())
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # without the signs Q is not uniform
    return (Q if tall else Q.mT).to(G.dtype)


SPECTRAL = Geometry(
    ndim=2,
    norm=sigma_max,
    dual_norm=nuclear,
    direction=lambda G, msign, eps: msign(G),
    start=semi_orthogonal,
    # The largest singular value of a Gaussian (m, n) is near sqrt(m) + sqrt(n).
    gaussian=lambda G: G / (sqrt(G.shape[-2]) + sqrt(G.shape[-1])),
)

# ---- rows or entries: each on its own, the largest counts (a vector as a whole is one row) ----


def largest(
    ndim: int,
    size: Callable[[Tensor], Tensor],  # of each row or entry, kept as size 1
    step: Callable[[Tensor, float], Tensor],  # (G, eps): one of size one along each
    start: Callable[[Tensor], Tensor],
    gaussian: Callable[[Tensor], Tensor],
) -> Geometry:
    dims = MATRIX[-ndim:]
    return Geometry(
        ndim,
        norm=lambda W: size(W).amax(dims),
        dual_norm=lambda G: size(G).sum(dims),
        direction=lambda G, msign, eps: step(G, eps),
        start=start,
        gaussian=gaussian,
    )


def sign(G: Tensor, eps: float) -> Tensor:
    return G.sign()


ROWS = largest(2, length, unit, start=unit, gaussian=lambda G: G / sqrt(G.shape[-1]))
ENTRIES = largest(2, torch.abs, sign, start=torch.sign, gaussian=lambda G: G)
DIAGONAL = largest(1, torch.abs, sign, torch.ones_like, torch.ones_like)  # a gain: the diagonal of a matrix
VECTOR = largest(1, length, unit, torch.zeros_like, torch.zeros_like)  # a bias


def aspect(shape: Shape) -> float:
    """d_out / d_in."""
    return shape[-2] / shape[-1]


NORMS: dict[str, NormBall] = {
    # the roles' own norms
    "one_to_rms": NormBall(ROWS, lambda shape: sqrt(shape[-1])),  # embedding: max_i rms(W[i])
    "rms_to_rms": NormBall(SPECTRAL, lambda shape: sqrt(aspect(shape))),  # hidden: sqrt(d_in/d_out) sigma_max(W)
    "rms_to_inf": NormBall(ROWS, lambda shape: 1 / sqrt(shape[-1])),  # head: sqrt(d) max_i norm2(W[i])
    "max_abs": NormBall(DIAGONAL, lambda shape: 1.0),  # gain: max_i |g_i|
    "rms": NormBall(VECTOR, lambda shape: sqrt(shape[-1])),  # bias
    # Muon's, which differ by their radius only
    "spectral": NormBall(SPECTRAL, lambda shape: 1.0),
    "keller_jordan": NormBall(SPECTRAL, lambda shape: sqrt(max(1, aspect(shape)))),
    "moonlight": NormBall(SPECTRAL, lambda shape: 0.2 * sqrt(max(shape[-2:]))),
    # Scion's sign oracle, its default for the head: entries of 1/d_in
    "sign": NormBall(ENTRIES, lambda shape: 1 / shape[-1]),
}
