"""A Llama decoder: RoPE, SwiGLU, grouped-query attention, and norms where the placement puts them."""

from dataclasses import replace
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from abovemup.config.schema import Model, NormPlacement, Parameterization, Role
from abovemup.geometry.msign import local, whole
from abovemup.geometry.parameterization import attention_scale, depth_init, init_norm, residual_multipliers
from abovemup.model.init import init_parameter
from abovemup.model.layers import Embedding, Linear, RMSNorm, document_mask, rope_angles, rotate
from abovemup.model.loss import chunked_loss, loss_sum
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


Size = tuple[int, int]  # a dimension here, and at the base


def sizes(cfg: Model, p: Parameterization) -> dict[str, Size]:
    """The dimensions that can grow."""
    queries = cfg.heads * cfg.head_dim  # as wide as the residual stream, or a fraction of it, also at the base
    return {
        "width": (cfg.width, p.base_width),
        "head_dim": (cfg.head_dim, p.base_head_dim),
        "queries": (queries, max(1, round(Fraction(queries, cfg.width) * p.base_width))),
        "keys": (cfg.kv_heads * cfg.head_dim, p.base_kv_heads * p.base_head_dim),
        "ffn": (cfg.ffn, p.base_ffn),
    }


def norm(cfg: Model, site: str, dim: Size) -> nn.Module:
    """The norm of that site, or the identity where the placement has none."""
    if site not in NORM_SITES[cfg.norm_placement]:
        return nn.Identity()
    return RMSNorm(dim[0], cfg.norm_eps, Tag("gain", init=1.0, base=dim[1:]) if cfg.gains else None)


def matrix_tag(cfg: Model, p: Parameterization, role: Role, d_out: Size, d_in: Size, depth: float = 1.0) -> Tag:
    """The tag of a matrix; `depth` is the factor that the depth initialisation puts on the last one of a block."""
    shape, base = zip(d_out, d_in, strict=True)
    return Tag(role, init=init_norm(p.name, cfg.init, role, shape, base) * depth, base=base)


def hidden(cfg: Model, p: Parameterization, d_in: Size, d_out: Size, depth: float = 1.0) -> Linear:
    return Linear(d_in[0], d_out[0], matrix_tag(cfg, p, "hidden", d_out, d_in, depth), cfg.biases)


class Attention(nn.Module):
    def __init__(self, cfg: Model, p: Parameterization, depth: float):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.scale = attention_scale(p.name, cfg.head_dim, p.base_head_dim)
        s = sizes(cfg, p)
        self.wq = hidden(cfg, p, s["width"], s["queries"])
        self.wk = hidden(cfg, p, s["width"], s["keys"])
        self.wv = hidden(cfg, p, s["width"], s["keys"])
        self.wo = hidden(cfg, p, s["queries"], s["width"], depth)
        self.q_norm = norm(cfg, "qk", s["head_dim"])
        self.k_norm = norm(cfg, "qk", s["head_dim"])
        self.v_norm = norm(cfg, "vo", s["head_dim"])
        self.o_norm = norm(cfg, "vo", s["queries"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)  # (B, T, heads, head_dim)
        q = rotate(local(self.q_norm(self.wq(x).view(heads))), cos, sin)
        k = rotate(local(self.k_norm(self.wk(x).view(heads))), cos, sin)
        v = local(self.v_norm(self.wv(x).view(heads)))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return self.wo(self.o_norm(y.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, cfg: Model, p: Parameterization, depth: float):
        super().__init__()
        s = sizes(cfg, p)
        self.w1 = hidden(cfg, p, s["width"], s["ffn"])
        self.w3 = hidden(cfg, p, s["width"], s["ffn"])
        self.w2 = hidden(cfg, p, s["ffn"], s["width"], depth)
        self.norm = norm(cfg, "mlp", s["ffn"])

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.norm(F.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    """Each half: x <- alpha x + beta f(norm(x))."""

    def __init__(self, cfg: Model, p: Parameterization, layer: int):
        super().__init__()
        self.alpha, self.beta = residual_multipliers(cfg.residual, cfg.depth, p.base_depth)
        # The sub-blocks of the whole model are numbered 1..2L.
        width = sizes(cfg, p)["width"]
        self.attention_norm = norm(cfg, "residual", width)
        self.attention = Attention(cfg, p, depth_init(cfg.depth_init, cfg.depth, 2 * layer + 1))
        self.feed_forward_norm = norm(cfg, "residual", width)
        self.feed_forward = FeedForward(cfg, p, depth_init(cfg.depth_init, cfg.depth, 2 * layer + 2))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x if self.alpha == 1 else x * self.alpha, y, alpha=self.beta)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.add(x, self.attention(self.attention_norm(x), cos, sin, mask))
        return self.add(x, self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, ids or V), float32 also under autocast; given targets (B, T) their summed
    loss instead (`loss_sum`).

    Its parameters are empty until `init_weights`; on the meta device it costs nothing. A tied model computes
    logits = x E^T / d, which is the head's rule with the multiplier outside (Above MuP, part 3).

    `ids`, where it is set, is how many of the V rows are in use: the others start as zeros, have no logits, and so
    no gradient. `eot`, where it is set, is the id at which a document begins: none sees another. To save memory, the
    logits of the loss exist for `loss_chunk` positions at a time (0: of all), and with `recompute` a block keeps its
    input only and is computed once more in the backward pass.
    """

    def __init__(self, cfg: Model, p: Parameterization):
        super().__init__()
        self.cfg = cfg
        self.ids: int | None = None
        self.eot: int | None = None
        self.loss_chunk, self.recompute = 0, False
        vocabulary, width = (cfg.vocab_size, cfg.vocab_size), sizes(cfg, p)["width"]  # a vocabulary does not grow
        self.embedding = Embedding(cfg.vocab_size, cfg.width, matrix_tag(cfg, p, "embedding", vocabulary, width))
        self.layers = nn.ModuleList(Block(cfg, p, layer) for layer in range(cfg.depth))
        self.final_norm = norm(cfg, "output", width)
        head = matrix_tag(cfg, p, "head", vocabulary, width)
        head = replace(head, forward=1 / cfg.width) if cfg.tie_embeddings else head
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
        if self.ids is not None:
            for table in (self.embedding, self.head):
                table.weight[self.ids :] = 0

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        mask = None if self.eot is None else document_mask(tokens, self.eot)
        x = self.stream(self.embedding(tokens), mask)
        if targets is None:
            return whole(self.logits(x))
        if self.loss_chunk:
            return chunked_loss(self.logits, x, targets, self.loss_chunk)
        return loss_sum(self.logits(x), targets)

    def decode(self, x: Tensor) -> Tensor:
        """Logits from streams (B, T, d), from behind the embedding on."""
        return self.logits(self.stream(x))

    def stream(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Through the blocks: streams (B, T, d), and which places look at which if not all earlier ones."""
        cos, sin = rope_angles(x.shape[-2], self.cfg.head_dim, self.cfg.rope_theta, x)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, mask)
        return x

    def logits(self, x: Tensor) -> Tensor:
        logits = self.head(self.final_norm(x))[..., : self.ids]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
