"""A Llama decoder: RoPE, SwiGLU, grouped-query attention, and norms where the placement puts them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from abovemup.config.schema import Model, NormPlacement, Parameterization, Role
from abovemup.geometry.parameterization import attention_scale, depth_init, residual_multipliers, rule
from abovemup.model.init import init_parameter
from abovemup.model.layers import Embedding, Linear, RMSNorm, rope_angles, rotate
from abovemup.model.roles import Tag, tagged_parameters

# Where norms can stand: on the queries and keys of each head (qk), on the values of each head and the input
# of wo (vo), on the input of w2 (mlp), on the input of each sub-block (residual), before the head (output).
# The eight placements of "Optimal Scaling Needs Optimal Norm" (arXiv:2510.03871), Fig. 13.
NORM_SITES: dict[NormPlacement, frozenset[str]] = {
    "everywhere": frozenset({"qk", "vo", "mlp", "residual", "output"}),
    "everywhere_no_output": frozenset({"qk", "vo", "mlp", "residual"}),
    "standard": frozenset({"qk", "residual", "output"}),
    "residual_and_output": frozenset({"residual", "output"}),
    "residual_only": frozenset({"residual"}),
    "qk_only": frozenset({"qk"}),
    "output_only": frozenset({"output"}),
    "none": frozenset(),
}


def norm(cfg: Model, site: str, dim: int) -> nn.Module:
    """The norm of that site, or the identity where the placement has none."""
    return RMSNorm(dim, cfg.norm_eps, cfg.gains) if site in NORM_SITES[cfg.norm_placement] else nn.Identity()


def matrix_tag(cfg: Model, p: Parameterization, role: Role, shape: tuple[int, int], depth: float = 1.0) -> Tag:
    """The tag of a matrix; `depth` is the factor that the depth initialisation puts on the last one of a block."""
    # The initialisation and the forward pass do not depend on the optimizer's family; only lr does.
    r = rule(p.name, role, "norm", shape, cfg.width / p.base_width)
    return Tag(role, init=r.init * depth, forward=r.forward)


def hidden(cfg: Model, p: Parameterization, d_in: int, d_out: int, depth: float = 1.0) -> Linear:
    return Linear(d_in, d_out, matrix_tag(cfg, p, "hidden", (d_out, d_in), depth), cfg.biases)


class Attention(nn.Module):
    def __init__(self, cfg: Model, p: Parameterization, depth: float):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.scale = attention_scale(p.name, cfg.head_dim, p.base_head_dim)
        queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        self.wq = hidden(cfg, p, cfg.width, queries)
        self.wk = hidden(cfg, p, cfg.width, keys)
        self.wv = hidden(cfg, p, cfg.width, keys)
        self.wo = hidden(cfg, p, queries, cfg.width, depth)
        self.q_norm = norm(cfg, "qk", cfg.head_dim)
        self.k_norm = norm(cfg, "qk", cfg.head_dim)
        self.v_norm = norm(cfg, "vo", cfg.head_dim)
        self.o_norm = norm(cfg, "vo", queries)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)  # (B, T, heads, head_dim)
        q = rotate(self.q_norm(self.wq(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.wk(x).view(heads)), cos, sin)
        v = self.v_norm(self.wv(x).view(heads))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        out: Tensor = self.wo(self.o_norm(y.transpose(1, 2).flatten(2)))
        return out


class FeedForward(nn.Module):
    def __init__(self, cfg: Model, p: Parameterization, depth: float):
        super().__init__()
        self.w1 = hidden(cfg, p, cfg.width, cfg.ffn)
        self.w3 = hidden(cfg, p, cfg.width, cfg.ffn)
        self.w2 = hidden(cfg, p, cfg.ffn, cfg.width, depth)
        self.norm = norm(cfg, "mlp", cfg.ffn)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.norm(F.silu(self.w1(x)) * self.w3(x)))
        return out


class Block(nn.Module):
    """Each half: x <- alpha x + beta f(norm(x))."""

    def __init__(self, cfg: Model, p: Parameterization, layer: int):
        super().__init__()
        self.alpha, self.beta = residual_multipliers(cfg.residual, cfg.depth, p.base_depth)
        # The sub-blocks of the whole model are numbered 1..2L.
        self.attention_norm = norm(cfg, "residual", cfg.width)
        self.attention = Attention(cfg, p, depth_init(cfg.depth_init, cfg.depth, 2 * layer + 1))
        self.feed_forward_norm = norm(cfg, "residual", cfg.width)
        self.feed_forward = FeedForward(cfg, p, depth_init(cfg.depth_init, cfg.depth, 2 * layer + 2))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x if self.alpha == 1 else x * self.alpha, y, alpha=self.beta)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.add(x, self.attention(self.attention_norm(x), cos, sin))
        return self.add(x, self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V), float32 also under autocast.

    Its parameters are empty until `init_weights`; on the meta device it costs nothing. A tied model computes
    logits = x E^T / d, which is the head's rule with the multiplier outside (Above MuP, part 3).
    """

    def __init__(self, cfg: Model, p: Parameterization):
        super().__init__()
        self.cfg = cfg
        vocabulary = (cfg.vocab_size, cfg.width)
        self.embedding = Embedding(*vocabulary, matrix_tag(cfg, p, "embedding", vocabulary))
        self.layers = nn.ModuleList(Block(cfg, p, layer) for layer in range(cfg.depth))
        self.final_norm = norm(cfg, "output", cfg.width)
        tied = Tag("head", init=1.0, forward=1 / cfg.width)
        head = tied if cfg.tie_embeddings else matrix_tag(cfg, p, "head", vocabulary)
        self.head = Linear(cfg.width, cfg.vocab_size, head)
        self.tie()

    def tie(self) -> None:
        """One tensor for embedding and head if the config says so; again after `to_empty`, which splits them."""
        if self.cfg.tie_embeddings:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from a generator of its own, seeded by (seed, name): the order does not matter."""
        self.tie()
        for name, parameter, tag in tagged_parameters(self):
            init_parameter(parameter, name, tag, self.cfg.init, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rope_angles(tokens.shape[-1], self.cfg.head_dim, self.cfg.rope_theta, x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.final_norm(x))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
