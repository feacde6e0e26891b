"""The initial weights: exact (every role's norm is what its rule says) or Gaussian (norms near it)."""

import hashlib
from typing import Literal

import torch
from torch import Tensor

from abovemup.geometry.norms import NORMS
from abovemup.geometry.roles import ROLE_NORM
from abovemup.model.roles import Tag


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The generator of one parameter. On the CPU, so that every device starts from the same weights."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def init_parameter(parameter: Tensor, name: str, tag: Tag, init: Literal["exact", "gaussian"], seed: int) -> None:
    """Overwrite a parameter of any dtype and device with weights of norm `tag.init`, drawn in float32 on the CPU."""
    ball = NORMS[ROLE_NORM[tag.role]]
    fill = ball.init_ if init == "exact" else ball.gaussian_
    weight = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(fill(weight, parameter_generator(seed, name)) * tag.init)
