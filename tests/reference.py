"""The default experiment in one plain file: a Llama with norms everywhere, trained by unconstrained Scion.

Written from the papers (arXiv:2510.03871 sections A.2, A.3; arXiv:2502.07529), torch only, nothing of abovemup.
Weights come in as a dict by name; everything is a loop, nothing is batched or fused.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, eps: float = 1e-20) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rope(x: Tensor, theta: float = 10000.0) -> Tensor:
    """x (T, head_dim): the pair (i, i + head_dim / 2) at position t is turned by t * theta^(-2i / head_dim)."""
    T, dim = x.shape
    out = torch.empty_like(x)
    for i in range(dim // 2):
        angle = torch.arange(T, dtype=x.dtype) * theta ** (-2 * i / dim)
        a, b = x[:, i], x[:, i + dim // 2]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + dim // 2] = a * angle.sin() + b * angle.cos()
    return out


def attention(w: dict[str, Tensor], at: str, x: Tensor, head_dim: int) -> Tensor:
    """x (T, d), one sequence."""
    T = x.shape[0]
    q, k, v = (x @ w[f"{at}.w{n}.weight"].T for n in "qkv")
    share = q.shape[1] // k.shape[1]  # query heads per key head
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    heads = []
    for h in range(q.shape[1] // head_dim):
        mine, shared = slice(h * head_dim, (h + 1) * head_dim), h // share
        theirs = slice(shared * head_dim, (shared + 1) * head_dim)
        qh, kh, vh = rope(rms_norm(q[:, mine])), rope(rms_norm(k[:, theirs])), rms_norm(v[:, theirs])
        logits = (qh @ kh.T / math.sqrt(head_dim)).masked_fill(future, -math.inf)
        heads.append(torch.softmax(logits, dim=-1) @ vh)
    return rms_norm(torch.cat(heads, dim=-1)) @ w[f"{at}.wo.weight"].T


def feed_forward(w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up = x @ w[f"{at}.w1.weight"].T, x @ w[f"{at}.w3.weight"].T
    return rms_norm(gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}.w2.weight"].T


def loss(w: dict[str, Tensor], batch: Tensor, layers: int, head_dim: int) -> Tensor:
    """Mean cross-entropy of batch (B, T + 1), each token from those before it."""
    losses = []
    for ids in batch:
        x = w["embedding.weight"][ids[:-1]]
        for n in range(layers):
            x = x + attention(w, f"layers.{n}.attention", rms_norm(x), head_dim)
            x = x + feed_forward(w, f"layers.{n}.feed_forward", rms_norm(x))
        logits = rms_norm(x) @ w["head.weight"].T
        losses.append(torch.logsumexp(logits, dim=-1) - logits.gather(1, ids[1:, None])[:, 0])
    return torch.cat(losses).mean()


def newton_schulz(G: Tensor, steps: int = 5) -> Tensor:
    X = G / G.abs().max()
    X = X / X.norm()
    tall = X.shape[0] > X.shape[1]
    if tall:
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if tall else X


def unit_step(name: str, M: Tensor) -> Tensor:
    """The steepest direction of norm 1 for the averaged gradient M; rows of zeros stay zeros."""
    if name in ("embedding.weight", "head.weight"):
        length = M.norm(dim=1, keepdim=True)
        rows = torch.where(length > 0, M / length, 0.0)
        return rows * math.sqrt(M.shape[1]) if name == "embedding.weight" else rows / math.sqrt(M.shape[1])
    return math.sqrt(M.shape[0] / M.shape[1]) * newton_schulz(M)


def train(
    weights: dict[str, Tensor], batches: list[Tensor], layers: int, head_dim: int, lr: float, momentum: float
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of every batch before its step, and the weights after the last one."""
    w = {name: W.detach().clone().requires_grad_() for name, W in weights.items()}
    average = {name: torch.zeros_like(W) for name, W in weights.items()}
    losses = []
    for batch in batches:
        value = loss(w, batch, layers, head_dim)
        gradients = torch.autograd.grad(value, list(w.values()))
        losses.append(value.item())
        with torch.no_grad():
            for (name, W), G in zip(w.items(), gradients, strict=True):
                average[name] = momentum * average[name] + (1 - momentum) * G
                step = unit_step(name, average[name])
                if name == "embedding.weight":
                    step[(G == 0).all(dim=1)] = 0.0  # a token that was not in the batch rests
                W -= lr * step
    return losses, {name: W.detach() for name, W in w.items()}
