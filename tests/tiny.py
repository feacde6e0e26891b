"""The smallest model that has everything, for tests: width 32, 2 layers, half as many kv heads as heads."""

from typing import Any

import torch
from torch import Tensor

from abovemup.config.schema import Base, Model, Parameterization
from abovemup.model.llama import Llama


def model(**changes: Any) -> Model:
    settings: dict[str, Any] = {
        "name": "test",
        "width": 32,
        "depth": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 88,
        "vocab_size": 61,
        "norm_placement": "everywhere",
        "tie_embeddings": False,
        "gains": False,
        "biases": False,
        "init": "exact",
        "depth_init": "total_depth",
        "residual": "identity",
        "rope_theta": 10000.0,
        "norm_eps": 1e-20,
        "base": Base(width=32, depth=2, head_dim=8),
    }
    return Model(**{**settings, **changes})


def parameterization(
    name: Any = "above_mup", width: int = 32, depth: int = 2, head_dim: int = 8, **base: int
) -> Parameterization:
    """The base has half as many kv heads as heads and ffn 11/4 of its width, or `base_kv_heads` and `base_ffn`."""
    settings = {"base_kv_heads": max(1, width // (2 * head_dim)), "base_ffn": width * 11 // 4, **base}
    return Parameterization(name=name, base_width=width, base_depth=depth, base_head_dim=head_dim, **settings)


def llama(
    seed: int = 0, p: Parameterization | None = None, dtype: torch.dtype = torch.float32, **changes: Any
) -> Llama:
    net = Llama(model(**changes), p or parameterization()).to(dtype)
    net.init_weights(seed)
    return net


def tokens(batch: int = 3, length: int = 12, vocab: int = 61, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
