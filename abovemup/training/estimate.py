"""A step on paper: what a rank holds, computes and sends, and how long that would take (`abovemup train --dry-run`)."""

from math import prod
from typing import Any

from abovemup.config.schema import Experiment, Model
from abovemup.geometry.norms import NORMS, SPECTRAL, VECTOR
from abovemup.model.llama import NORM_SITES
from abovemup.optim.routing import Route
from abovemup.optim.sharded import Shape, assign
from abovemup.training.routes import sizes

# FLOP/s of dense products (NVIDIA's data sheets, without sparsity; float32 without TF32), by the names torch has.
HOPPER = {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}
AMPERE = {"bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12}
PEAKS = dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), HOPPER)
PEAKS |= dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), AMPERE)
# InfiniBand NDR is 400 Gbit/s.
ASSUMED = "H100 SXM at 40 % of 989 TFLOP/s (67 in float32); a GPU sends 450 GB/s in its node of 8, 50 GB/s out of it"
UTILISATION, NODE, NVLINK, NETWORK = 0.4, 8, 450e9, 50e9


def kept(m: Model, dtype: str) -> int:
    """Bytes a token that autograd keeps of one block, with attention that keeps no T x T scores (flash).

    Of matrices the input (in autocast a bfloat16 copy for each; in float32 they share one), of a norm its input in
    float32 and a length a row, with gains its output too; queries, keys, values, output and log-sum-exp of attention;
    w1 x, silu(w1 x) and w3 x. A norm on the input of wo reads attention's output, which in float32 is kept already.
    """
    wide = dtype == "float32"
    size, sites = 4 if wide else 2, NORM_SITES[m.norm_placement]
    d, q, kv, ffn = m.width, m.heads * m.head_dim, m.kv_heads * m.head_dim, m.ffn
    entries = {"residual": 2 * d, "qk": q + kv, "vo": q + kv, "mlp": ffn}
    rows = {"residual": 2, "qk": m.heads + m.kv_heads, "vo": m.kv_heads + 1, "mlp": 1}
    norms = sum(4 * ((1 + m.gains) * entries[site] + rows[site]) for site in sites - {"output"})
    matrices = size * ((2 if wide else 5) * d + 4 * ffn) + ("vo" in sites and not wide) * size * q
    return norms + matrices + size * 2 * (q + kv) + 4 * m.heads


def msign_flops(shape: Shape, steps: int) -> int:
    """X X^T, its square, and the polynomial times X, each step, of (m, n) with m <= n: 2 (2 m^2 n + m^3)."""
    m, n = sorted(shape[-2:])
    return steps * (4 * m * m * n + 2 * m**3)


class Estimate:
    """Of the busiest of `world` ranks, as `Ranks.settle` left the experiment; all counts are of one step.

    N is the number of parameters, n the ranks that hold them together (fsdp) or divide the steps among them, T the
    tokens of a micro-batch on a rank.
    """

    def __init__(self, e: Experiment, routes: list[Route], world: int) -> None:
        self.e, self.world = e, world
        self.size = sizes(routes)
        self.count: int = self.size["parameters"]
        self.ddp, self.fsdp = (world > 1 and e.parallel.name == name for name in ("ddp", "fsdp"))
        self.n = world // e.parallel.replicate if self.fsdp else world
        self.windows = -(-e.train.batch_size // world)
        micro = e.train.micro_batch
        self.micro = self.windows if micro == "auto" else min(micro, self.windows)
        self.blocks = sum(prod(r.shape) for r in routes if r.name.startswith("layers."))
        self.root = self.count - self.blocks  # what FSDP2 keeps whole between forward and backward
        self.head = e.model.vocab_size * e.model.width
        whole = (SPECTRAL, VECTOR) if self.fsdp else (SPECTRAL,)
        self.shapes = [r.shape for r in routes if r.rule in NORMS and NORMS[r.rule].geometry in whole]
        self.owned = [[self.shapes[i] for i in own] for own in assign(tuple(self.shapes), self.n)]

    def memory(self) -> dict[str, Any]:
        """Bytes. weights, gradients 4 N and the optimizer's state, over n under fsdp; None for a user's own optimizer.

        activations   T (depth * `kept` + the inputs of the last norm and the head); with train.recompute a block keeps
                      4 width, and one is whole. Token ids and rotary tables are not counted.
        logits        4 T vocabulary, three times: log-probabilities, their gradient, and that of the logits; of
                      train.loss_chunk positions where that is set.
        casts         2 for each entry of the blocks and the head, whole under fsdp too: what autocast multiplies with.
        buffers       fsdp: 4, whole, for weights and gradients of the root and of two blocks (the next is fetched
                      meanwhile); ddp: its buckets of gradients, 4 N.
        """
        m, t, parts = self.e.model, self.e.train, self.n if self.fsdp else 1
        held = {k: None if self.size[k] is None else self.size[k] // parts for k in ("weights", "gradients", "state")}
        low, block, tokens = t.dtype == "bfloat16", kept(m, t.dtype), self.micro * t.seq_len
        last = (2 if low else 4) * m.width + ("output" in NORM_SITES[m.norm_placement]) * 4 * (
            1 + (1 + m.gains) * m.width
        )
        blocks = 4 * m.width * m.depth + block if getattr(t, "recompute", False) else block * m.depth
        unsharded = 8 * (self.root + min(2, m.depth) * self.blocks // m.depth)
        return held | {
            "activations": tokens * (blocks + last),
            "logits": 3 * 4 * m.vocab_size * min(tokens, getattr(t, "loss_chunk", 0) or tokens),
            "casts": low * 2 * (self.blocks + self.head),
            "buffers": unsharded if self.fsdp else self.ddp * 4 * self.count,
        }

    def flops(self) -> dict[str, float]:
        """Of all ranks together, but for `owner`.

        model        6 a token for each entry of the blocks and the head, and 12 depth * heads * head_dim * seq_len
                     for attention, of which the causal half is not taken off (PaLM, arXiv:2204.02311, appendix B).
        recomputed   a third of it: of the blocks with train.recompute, of the head with train.loss_chunk.
        msign        `msign_flops` of each matrix; 0 for the SVD of msign.method=exact, which is not counted.
        owner        of that, the rank's that has most: the steps are no faster than it.
        """
        m, t, sign = self.e.model, self.e.train, self.e.optimizer.msign
        attention = 2 * m.depth * m.heads * m.head_dim * t.seq_len
        again = getattr(t, "recompute", False) * (self.blocks + attention)
        again += (getattr(t, "loss_chunk", 0) > 0) * self.head
        tokens, steps = t.batch_size * t.seq_len, 0 if sign.method == "exact" else sign.steps
        owned = [sum(msign_flops(shape, steps) for shape in own if len(shape) > 1) for own in self.owned]
        model = 6 * tokens * (self.blocks + self.head + attention)
        return {"model": model, "recomputed": 2 * tokens * again, "msign": sum(owned), "owner": max(owned)}

    def sent(self) -> dict[str, float]:
        """Bytes: 4 an element, 2 with parallel.dtype=bfloat16. p: forward and backward passes of a step.

        weights     fsdp: gathered forward and backward, the root once: p (n-1)/n (2 blocks + root)
        gradients   fsdp: scattered, p (n-1)/n N; ddp: one ring all-reduce, 2 (n-1)/n N
        replicas    fsdp with r = parallel.replicate > 1: gradient shards, all-reduced: p 2 (r-1)/r N/n
        steps       of M entries in matrices (`optim.sharded`), m of them of the owner that has most. fsdp: the shard to
                    the owners, and what it owns back, (M + (n-2) m) / n, which is 2 (n-1)/n^2 M if all own as much;
                    ddp: a ring all-gather, in which all send as much, (n-1) m.
        """
        n, r, count = self.n, self.e.parallel.replicate, self.count
        size = 2 if getattr(self.e.parallel, "dtype", "float32") == "bfloat16" else 4
        owned, passes = [sum(map(prod, own)) for own in self.owned], -(-self.windows // self.micro)
        ring, most = size * (n - 1) / n, max(owned)
        if not self.fsdp:
            return {"gradients": 2 * ring * count, "steps": size * (n - 1) * most}
        found = {"weights": passes * ring * (2 * self.blocks + self.root), "gradients": passes * ring * count}
        found |= {"replicas": passes * 2 * size * (r - 1) / r * count / n} if r > 1 else {}
        return found | {"steps": size * (sum(owned) + (n - 2) * most) / n}

    def seconds(self) -> tuple[float, float]:
        """Of a step under `ASSUMED`: communication all hidden behind the computation, or all after it.

        A ring over several nodes enters each through all its GPUs at once; what a rank sends to others one by one, or
        to the same rank of other nodes, leaves through its own. Passes over memory (norms, Adam) are not counted.
        """
        flops, e = self.flops(), self.e
        computing = flops["model"] + flops["recomputed"]
        computing *= self.windows / e.train.batch_size / HOPPER[e.train.dtype]
        computing = (computing + flops["owner"] / HOPPER[e.optimizer.msign.dtype]) / UTILISATION
        ring, direct = (NVLINK, NVLINK) if self.n <= NODE else (NODE * NETWORK, NETWORK)
        links = {"replicas": NVLINK if self.world <= NODE else NETWORK, "steps": direct if self.fsdp else ring}
        sending = sum(size / links.get(name, ring) for name, size in self.sent().items())
        return max(computing, sending), computing + sending
