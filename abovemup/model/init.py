"""The initial weights: exact (every role's norm is what its rule says) or Gaussian (norms near it)."""

import hashlib
from typing import Literal

import torch
from torch import Tensor

from abovemup.geometry.norms import NORMS
from abovemup.geometry.roles import ROLE_NORM
from abovemup.model.roles import Tag


def init_parameter(parameter: Tensor, name: str, tag: Tag, init: Literal["exact", "gaussian"], seed: int) -> None:
    """Overwrite a parameter of any dtype and device with weights of norm `tag.init`, drawn in float32 on the CPU by a
    generator of its own, so that every device starts from the same weights."""
    ball = NORMS[ROLE_NORM[tag.role]]
    fill = ball.init_ if init == "exact" else ball.gaussian_
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    weight = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(fill(weight, generator) * tag.init)
