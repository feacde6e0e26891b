"""The roles that a parameter can have, and the one norm of each: everything else follows from it. Free of torch."""

from dataclasses import dataclass

ROLE_NORM = {
    "embedding": "one_to_rms",
    "hidden": "rms_to_rms",
    "head": "rms_to_inf",
    "gain": "max_abs",
    "bias": "rms",
}


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What a model says of one of its tensors."""

    name: str
    shape: tuple[int, ...]
    base: tuple[int, ...]  # the shape at the base of the parameterization
    role: str
    norm: str  # the role's, in which it is watched: a name in geometry.NORMS
    init: float  # that norm after exact initialisation
    forward: float  # multiplier in the forward pass
