"""How init, learning rate, Adam's eps and forward pass change from a base shape: `standard`, `mup`, `above_mup`.

Everything is a factor on what the initialisation and the optimizer's own rule give at the base, so that there the
three are the same run, bit for bit. Depth has its own two rules, the same for all three, and no factor on lr.
The forward multiplier is 1 for every role and all three: a tied head, logits / d, is the one exception.
"""

from collections.abc import Sequence
from math import log2, sqrt

from abovemup.geometry.norms import DIAGONAL, ENTRIES, NORMS, ROWS, SPECTRAL, VECTOR
from abovemup.geometry.roles import ROLE_NORM

PARAMETERIZATIONS = ("standard", "mup", "above_mup")
ADAM = "adam"  # the rule whose steps have entries of size one
Shape = Sequence[int]


def step_norm(rule: str, role: str, shape: Shape) -> float:
    """The role's norm of a step of lr 1 by `rule`, a name in NORMS or "adam" (entries of size one).

    The largest it can be, by aligned rows or entries. With R the radius of the role's ball and r the rule's: singular
    values of r give r / R; rows of length r give r sqrt(d_out) / R as a hidden matrix and r / R in embedding and head;
    entries of r give r sqrt(d_out d_in) / R and r sqrt(d) / R. A step that is normalised as a whole, by `rms`, counts
    as spread evenly over the rows of a matrix; so does every step of a vector: 1. See `largest_step`.

    Raises ValueError for a shape that the role cannot have, KeyError for an unknown role or, of a matrix, rule.
    """
    own = NORMS[ROLE_NORM[role]]
    if len(shape) != own.ndim:
        raise ValueError(f"role {role} has {own.ndim} dimensions, not shape {tuple(shape)}")
    if own.ndim == 1:
        return 1.0
    geometry, radius = (ENTRIES, 1.0) if rule == ADAM else (NORMS[rule].geometry, NORMS[rule].radius(shape))
    aligned = shape[-2] if role == "hidden" and geometry is not SPECTRAL else 1
    entries = shape[-1] if geometry in (ENTRIES, DIAGONAL) else 1
    return radius * sqrt(aligned * entries) / own.radius(shape)


def largest_step(rule: str, role: str, shape: Shape) -> float:
    """`step_norm` whatever the gradient: `rms` can put a whole step into one entry of a gain, or row of a matrix."""
    norm = step_norm(rule, role, shape)
    uneven = rule != ADAM and role not in ("hidden", "bias") and NORMS[rule].geometry is VECTOR
    return norm * sqrt(shape[0]) if uneven else norm


def init_std(init: str, role: str, shape: Shape) -> float:
    """The std of a matrix to which `init`, "exact" or "gaussian", gives norm (about) 1 ("Above MuP", parts 2 and 3).

    A vector, which starts at a constant, has 0.
    """
    if len(shape) == 1:
        return 0.0
    d_out, d_in = shape
    if role != "hidden":
        return 1.0 if role == "embedding" else 1 / d_in
    if init == "exact":
        return sqrt(min(d_out, d_in)) / d_in
    return sqrt(d_out / d_in) / (sqrt(d_in) + sqrt(d_out))


def init_norm(parameterization: str, init: str, role: str, shape: Shape, base: Shape) -> float:
    """The role's norm after the initialisation (of "gaussian" the factor on it); a bias is zero whatever it is.

    `above_mup`: 1. `standard` and `mup` are laws of the std, turned into norms: under `standard` the std of hidden and
    head falls as 1/sqrt(fan_in); under `mup` as 1/sqrt(fan_in) where both dimensions grow, 1/fan_in where only
    fan_in does (the head; keys and values of a fixed number of heads), and not at all where fan_in does not
    (Tensor Programs V, arXiv:2203.03466, table 3). Embeddings keep their std of 1.
    """
    _check(parameterization)
    if parameterization == "above_mup" or role == "embedding" or len(shape) == 1:
        return 1.0
    n_out, n_in = (d / d0 for d, d0 in zip(shape, base, strict=True))
    output_like = parameterization == "mup" and n_out == 1
    std = n_in**-1.0 if output_like else n_in**-0.5
    return _snap(std * init_std(init, role, base) / init_std(init, role, shape))


def lr_multiplier(parameterization: str, role: str, rule: str, shape: Shape, base: Shape) -> float:
    """The factor on the learning rate of a parameter that steps by `rule`, relative to the base.

    `standard`: 1. `above_mup`: `step_norm` stays that of the base, exactly. So it is 1 for vectors, although the
    largest entry of a gain's step by `rms` may grow with the width.
    `mup`: n^-e, where the role's norm of a step grows as n^e in the limit of large n, the dimensions that differ from
    the base growing as n. For Adam that is 1/fan_in for hidden and head (Tensor Programs V, table 3); for msign
    sqrt(d), 1 and 1/sqrt(d) for embedding, hidden and head.

    Raises ValueError for an unknown parameterization, or a rule that `mup` has no row for.
    """
    _check(parameterization)
    at_base = step_norm(rule, role, base)
    if parameterization == "standard" or len(shape) == 1:
        return 1.0
    if parameterization == "above_mup":
        return _snap(at_base / step_norm(rule, role, shape))
    if role == "hidden" and rule != ADAM and NORMS[rule].geometry in (ROWS, VECTOR):
        raise ValueError("mup covers steps by entry and by singular value, not row-normalised hidden matrices")
    n_out, n_in = (d / d0 for d, d0 in zip(shape, base, strict=True))
    large, larger = ([d << k if d != d0 else d for d, d0 in zip(shape, base, strict=True)] for k in (60, 62))
    power = round(log2(step_norm(rule, role, larger) / step_norm(rule, role, large))) / 2  # a multiple of 1/2
    return _snap((n_out if n_in == 1 else n_in) ** -power)


def eps_multiplier(parameterization: str, role: str, shape: Shape, base: Shape) -> float:
    """The factor on Adam's eps: under `mup` and `above_mup` that of a gradient's entries, 1 over the growth of d_out.

    CompleteP (arXiv:2505.01618, table 1) has the same 1/m_N for embedding and blocks. Its head has it too, as it
    carries a forward multiplier of 1/m_N and weights m_N times ours: without it, a head's gradients do not shrink.
    """
    _check(parameterization)
    grown = -1 if role == "embedding" else 0  # where torch has the dimension that the layer puts out
    return 1.0 if parameterization == "standard" else _snap(base[grown] / shape[grown])


def _check(parameterization: str) -> None:
    """Raises ValueError for a name that would pass for one of the others."""
    if parameterization not in PARAMETERIZATIONS:
        raise ValueError(f"unknown parameterization {parameterization!r}: one of {', '.join(PARAMETERIZATIONS)}")


def _snap(factor: float) -> float:
    """To 14 digits: factors that are equal but for rounding must be the same number, or groups of matrices split."""
    return float(f"{factor:.14g}")


def attention_scale(parameterization: str, head_dim: int, base_head_dim: int) -> float:
    """The factor on q.k: 1/sqrt(head_dim) under `standard`, else that of the base times base_head_dim / head_dim.

    With unit RMS the product q.k can reach head_dim ("Above MuP", part 3; Tensor Programs V, appendix B.1).
    """
    if parameterization == "standard":
        return 1 / sqrt(head_dim)
    return 1 / sqrt(base_head_dim) * (base_head_dim / head_dim)


def residual_multipliers(residual: str, depth: int, base_depth: int) -> tuple[float, float]:
    """(alpha, beta) of Y = alpha X + beta Block(Norm X), for L = depth blocks of two sub-blocks each.

    identity (1, 1); depth_normalized ((2L-1)/2L, 1/2L); completep_paper (1, 1/2L) (arXiv 2510.03871, appendix A.10);
    completep (1, base_depth/L) (arXiv 2505.01618, alpha = 1). Raises KeyError for another name.
    """
    branches = 2 * depth
    rules = {
        "identity": (1.0, 1.0),
        "depth_normalized": ((branches - 1) / branches, 1 / branches),
        "completep_paper": (1.0, 1 / branches),
        "completep": (1.0, base_depth / depth),
    }
    return rules[residual]


def depth_init(name: str, depth: int, index: int) -> float:
    """The norm of the last matrix of sub-block `index` (1 to 2L) of L = depth blocks after initialisation.

    identity 1; total_depth 1/sqrt(2L); relative_depth 1/sqrt(2 index) (arXiv 2510.03871, appendix A.10).
    Raises KeyError for another name.
    """
    rules = {"identity": 1.0, "total_depth": 1 / sqrt(2 * depth), "relative_depth": 1 / sqrt(2 * index)}
    return rules[name]
