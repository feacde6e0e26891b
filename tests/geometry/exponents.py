"""The documented powers of the width: a literal table, against which the tests hold what the code computes."""

from dataclasses import dataclass

_COLUMNS = ("embedding", "hidden", "head")  # gains and biases have no powers
_STD = {"standard": (0, -1 / 2, -1 / 2), "mup": (0, -1 / 2, -1), "above_mup": (0, -1 / 2, -1)}
# lr under `above_mup`, by rule: of entries (adam, max_abs, sign), of rows, of singular values (the last four).
_LR = {
    "adam": (0, -1, -1),
    "max_abs": (0, -1, -1),
    "sign": (1, 0, 0),
    "one_to_rms": (0, -1, -1),
    "rms": (0, -1, -1),
    "rms_to_inf": (1, 0, 0),
    "rms_to_rms": (1, 0, 0),
    "spectral": (1 / 2, 0, -1 / 2),
    "keller_jordan": (1, 0, 0),
    "moonlight": (1 / 2, -1 / 2, -1 / 2),
}
# max(V, d) is in the radius of the last two: above while V is at least d, under `mup` the limit of large d.
_LR_MUP = _LR | {"keller_jordan": (1 / 2, 0, -1 / 2), "moonlight": (0, -1 / 2, -1)}


@dataclass(frozen=True)
class Exponents:
    """The powers of the width ratio when all widths grow together; of the depth ratio, lr's is 0 for every pair."""

    init_std: float  # of the entries
    lr: float
    forward: float = 0.0  # of the multiplier in the forward pass (a tied head's, outside of this table, is -1)
    lr_depth: float = 0.0  # "Above MuP"; CompleteP (arXiv:2505.01618) with alpha = 1: depth is in the block multiplier


def exponents(parameterization: str, role: str, rule: str) -> Exponents:
    """The powers of a role that steps by `rule`. Raises KeyError for a name that is in no table.

    Tensor Programs V (arXiv:2203.03466), table 3; "Above MuP", parts 2 and 3; for msign of radius 1 the same author's
    first look at muP.
    """
    if role not in _COLUMNS:
        return Exponents(0.0, 0.0)
    lr = {"standard": (0, 0, 0), "mup": _LR_MUP[rule], "above_mup": _LR[rule]}[parameterization]
    column = _COLUMNS.index(role)
    return Exponents(_STD[parameterization][column], lr[column])
