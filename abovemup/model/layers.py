"""The layers a Llama is made of. Their parameters are empty until `init_weights` fills them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from abovemup.model.roles import Tag, Tagged


class Embedding(Tagged):
    """tokens (...) -> W[tokens] (..., d), W of shape (V, d)."""

    def __init__(self, vocab_size: int, width: int, tag: Tag):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.tags = {"weight": tag}

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Linear(Tagged):
    """x (..., d_in) -> forward * x W^T + b (..., d_out), W of shape (d_out, d_in)."""

    def __init__(self, d_in: int, d_out: int, tag: Tag, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None
        self.multiplier = tag.forward
        self.tags = {"weight": tag, "bias": Tag("bias", init=0.0, base=tag.base[:1])}

    def forward(self, x: Tensor) -> Tensor:
        # The input is scaled, not the output: a head's output is V / d times larger.
        return F.linear(x if self.multiplier == 1 else x * self.multiplier, self.weight, self.bias)


class RMSNorm(Tagged):
    """x / sqrt(mean(x^2) + eps) over the last axis, times a gain if there is a tag for one.

    The mean is taken in float32 whatever the dtype of x, so that eps = 1e-20 is a number and x = 0 gives 0.
    """

    def __init__(self, dim: int, eps: float, gain: Tag | None = None):
        super().__init__()
        self.shape, self.eps = (dim,), eps
        self.weight = nn.Parameter(torch.empty(dim)) if gain else None
        self.tags = {"weight": gain} if gain else {}

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.shape, eps=self.eps)
        return y if self.weight is None else (y * self.weight).type_as(x)


def rope_angles(length: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, 1, head_dim / 2), of position * theta^(-2i / head_dim) (RoFormer, arXiv:2104.09864).

    At least float32, on the device of `like`.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim)
    angle = torch.outer(torch.arange(length, device=like.device, dtype=dtype), frequency)[:, None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, heads, head_dim), each pair (x[i], x[i + head_dim / 2]) turned by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def document_mask(tokens: Tensor, eot: int) -> Tensor:
    """Which places (B, T) may look at which, (B, 1, T, T) bool: earlier ones of their own document, and themselves.

    A document begins with the end of text before it. (RoPE knows distances only, so no place has to start at 0.)
    """
    document = (tokens == eot).cumsum(-1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()
