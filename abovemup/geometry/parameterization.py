"""How init, learning rate and forward pass change from a base shape: `standard`, `mup`, `above_mup`.

Everything is a factor on what the exact initialisation and the optimizer's own rule give, so that at the base
(width ratio 1) the three are the same run, bit for bit. Depth has its own two rules, the same for all three.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from abovemup.geometry.norms import NORMS
from abovemup.geometry.roles import ROLE_NORM

Family = Literal["adam", "norm"]  # Adam's entries of size one, or a step of unit norm (`NormBall.dual`)

PARAMETERIZATIONS = ("standard", "mup", "above_mup")


@dataclass(frozen=True)
class Rule:
    init: float  # the role's norm after the exact initialisation (a bias: of what is zero)
    lr: float  # multiplier of the learning rate
    forward: float  # multiplier of the parameter in the forward pass


def rule(parameterization: str, role: str, family: str, shape: Sequence[int], width_ratio: float) -> Rule:
    """The rule of a parameter of torch `shape` at width = width_ratio * base width; all widths grow together.

    `mup`, `above_mup`: every role keeps its norm of 1. A step of unit norm then needs no factor. An Adam step has
    entries of size one, and a matrix of d_in aligned entries moves its output by d_in: hidden and head take
    1/width_ratio, the rest 1 (Tensor Programs V, table 8; "Above MuP", part 3). While all widths grow together the
    two agree here; they are derived differently and part ways in the shapes that do not.
    `standard`: std 1/sqrt(fan_in). Hidden matrices keep their norm by it, the head's grows as sqrt(width_ratio);
    learning rates stay what they were at the base.

    Raises ValueError for an unknown name, or a shape that the role cannot have.
    """
    if parameterization not in PARAMETERIZATIONS:
        raise ValueError(f"unknown parameterization {parameterization!r}: one of {', '.join(PARAMETERIZATIONS)}")
    if role not in ROLE_NORM:
        raise ValueError(f"unknown role {role!r}: one of {', '.join(ROLE_NORM)}")
    if family not in ("adam", "norm"):
        raise ValueError(f"unknown optimizer family {family!r}: adam or norm")
    if len(shape) != NORMS[ROLE_NORM[role]].ndim:
        raise ValueError(f"role {role} has {NORMS[ROLE_NORM[role]].ndim} dimensions, not shape {tuple(shape)}")
    if parameterization == "standard":
        return Rule(init=sqrt(width_ratio) if role == "head" else 1.0, lr=1.0, forward=1.0)
    adam = family == "adam" and role in ("hidden", "head")
    return Rule(init=1.0, lr=1 / width_ratio if adam else 1.0, forward=1.0)


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
    completep (1, base_depth/L) (arXiv 2505.01618, alpha = 1). Raises ValueError for another name.
    """
    branches = 2 * depth
    rules = {
        "identity": (1.0, 1.0),
        "depth_normalized": ((branches - 1) / branches, 1 / branches),
        "completep_paper": (1.0, 1 / branches),
        "completep": (1.0, base_depth / depth),
    }
    if residual not in rules:
        raise ValueError(f"unknown residual rule {residual!r}: one of {', '.join(rules)}")
    return rules[residual]


def depth_init(name: str, depth: int, index: int) -> float:
    """The norm of the last matrix of sub-block `index` (1 to 2L) of L = depth blocks after initialisation.

    identity 1; total_depth 1/sqrt(2L); relative_depth 1/sqrt(2 index) (arXiv 2510.03871, appendix A.10).
    Raises ValueError for another name, or an index out of range.
    """
    if not 1 <= index <= 2 * depth:
        raise ValueError(f"sub-block {index} of {depth} blocks: 1 to {2 * depth}")
    rules = {"identity": 1.0, "total_depth": 1 / sqrt(2 * depth), "relative_depth": 1 / sqrt(2 * index)}
    if name not in rules:
        raise ValueError(f"unknown depth init {name!r}: one of {', '.join(rules)}")
    return rules[name]
