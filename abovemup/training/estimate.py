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


def kept(m: Model, dtype: str, tensor: int = 1) -> int:
    """Bytes a token that autograd keeps of one block, with attention that keeps no T x T scores (flash), on each of
    `tensor` ranks that share heads and FFN.

    Of matrices the input (in autocast a bfloat16 copy for each; in float32 they share one), of a norm its input in
    float32 and a length a row, with gains its output too; queries, keys, values, output and log-sum-exp of attention;
    w1 x, silu(w1 x) and w3 x. A norm on the input of wo reads attention's output, which in float32 is kept already.
    """
    wide = dtype == "float32"
    size, sites = 4 if wide else 2, NORM_SITES[m.norm_placement]
    heads, kv_heads, d, ffn = m.heads // tensor, m.kv_heads // tensor, m.width, m.ffn // tensor
    q, kv = heads * m.head_dim, kv_heads * m.head_dim
    entries = {"residual": 2 * d, "qk": q + kv, "vo": q + kv, "mlp": ffn}
    rows = {"residual": 2, "qk": heads + kv_heads, "vo": kv_heads + 1, "mlp": 1}
    norms = sum(4 * ((1 + m.gains) * entries[site] + rows[site]) for site in sites - {"output"})
    matrices = size * ((2 if wide else 5) * d + 4 * ffn) + ("vo" in sites and not wide) * size * q
    return norms + matrices + size * 2 * (q + kv) + 4 * heads


def msign_flops(shape: Shape, steps: int) -> int:
    """X X^T, its square, and the polynomial times X, each step, of (m, n) with m <= n: 2 (2 m^2 n + m^3)."""
    m, n = sorted(shape[-2:])
    return steps * (4 * m * m * n + 2 * m**3)


class Estimate:
    """Of the busiest of `world` ranks, as `Ranks.settle` left the experiment; all counts are of one step.

    N is the number of parameters, n the ranks that hold them together (fsdp) or divide the steps among them, T the
    tokens of a micro-batch on a rank, t is parallel.tensor.
    """

    def __init__(self, e: Experiment, routes: list[Route], world: int) -> None:
        self.e, self.world, self.bytes = e, world, 4 if e.train.dtype == "float32" else 2
        self.size = sizes(routes)
        self.count: int = self.size["parameters"]
        self.ddp, self.fsdp = (world > 1 and e.parallel.name == name for name in ("ddp", "fsdp"))
        self.n = world // e.parallel.replicate if self.fsdp else world
        self.tensor = e.parallel.tensor if world > 1 else 1
        self.windows = -(-e.train.batch_size // (world // self.tensor))
        asked = e.train.micro_batch
        micro = self.windows if asked == "auto" else min(asked, self.windows)
        self.tokens, self.passes = micro * e.train.seq_len, -(-self.windows // micro)
        self.blocks = sum(prod(r.shape) for r in routes if r.name.startswith("layers."))
        self.root = self.count - self.blocks  # what FSDP2 keeps whole between forward and backward
        self.head = e.model.vocab_size * e.model.width
        whole = (SPECTRAL, VECTOR) if self.fsdp else (SPECTRAL,)
        shapes = tuple(r.shape for r in routes if r.rule in NORMS and NORMS[r.rule].geometry in whole)
        self.owned = [[shapes[i] for i in own] for own in assign(shapes, self.n)]
        self.entries = [sum(map(prod, own)) for own in self.owned]

    def memory(self) -> dict[str, Any]:
        """Bytes. weights, gradients 4 N and the optimizer's state, over n under fsdp; None for a user's own optimizer.

        activations   T (depth * `kept` + the inputs of the last norm and the head); with train.recompute a block keeps
                      4 width, and one is whole. Token ids and rotary tables are not counted.
        logits        4 T vocabulary, three times: log-probabilities, their gradient, and that of the logits; of
                      train.loss_chunk positions where that is set.
        casts         2 for each entry of the blocks and the head, whole under fsdp too: what autocast multiplies with.
        buffers       fsdp: 4, whole, for weights and gradients of the root and of two blocks (the next is fetched
                      meanwhile), none where all ranks share one sequence; ddp: its buckets of gradients, 4 N.
        step          4, of what a step needs whole (`sent`): fsdp: m, the owner's; ddp: n m, all that is gathered;
                      with t > 1 the M completed ones besides.

        Each of t ranks has of a block's activations what `kept` says, and 1/t of the next three. Activations, logits
        and casts are gone when the step is taken.
        """
        m, t, parts, tokens = self.e.model, self.e.train, self.n if self.fsdp else 1, self.tokens
        held = {k: None if self.size[k] is None else self.size[k] // parts for k in ("weights", "gradients", "state")}
        block = kept(m, t.dtype, self.tensor)
        blocks = 4 * m.width * m.depth + block if t.recompute else block * m.depth
        norm = 4 * (1 + (1 + m.gains) * m.width) if "output" in NORM_SITES[m.norm_placement] else 0
        unsharded = (self.world > self.tensor) * 8 * (self.root + min(2, m.depth) * self.blocks // m.depth)
        owned = self.entries
        step = max(owned) * (1 if self.fsdp and self.tensor == 1 else self.n) + (self.tensor > 1) * sum(owned)
        return held | {
            "activations": tokens * (blocks + norm + self.bytes * m.width),
            "logits": 3 * 4 * m.vocab_size * min(tokens, t.loss_chunk or tokens) // self.tensor,
            "casts": (self.bytes == 2) * 2 * (self.blocks + self.head) // self.tensor,
            "buffers": (unsharded if self.fsdp else self.ddp * 4 * self.count) // self.tensor,
            "step": (self.world > 1) * 4 * step,
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
        again = t.recompute * (self.blocks + attention) + (t.loss_chunk > 0) * self.head
        tokens, steps = t.batch_size * t.seq_len, 0 if sign.method == "exact" else sign.steps
        owned = [sum(msign_flops(shape, steps) for shape in own if len(shape) > 1) for own in self.owned]
        model = 6 * tokens * (self.blocks + self.head + attention)
        return {"model": model, "recomputed": 2 * tokens * again, "msign": sum(owned), "owner": max(owned)}

    def sent(self) -> dict[str, float]:
        """Bytes: 4 an element, of gradients and steps 2 with parallel.dtype=bfloat16. In p passes, forward and back:

        weights       fsdp: gathered forward and backward, the root once: p (s-1)/s (2 blocks + root) / t, s = n / t
        gradients     fsdp: scattered, p (s-1)/s N/t; ddp: one ring all-reduce, 2 (n-1)/n N
        replicas      fsdp with r = parallel.replicate > 1: gradient shards, all-reduced: p 2 (r-1)/r N/n
        steps         of M entries in matrices (`optim.sharded`), m of them of the owner that has most. fsdp: the shard
                      to the owners, and what it owns back, (M + (n-2) m) / n, which is 2 (n-1)/n^2 M if all own as
                      much; ddp, and with t > 1: a ring all-gather, in which all send as much, (n-1) m.
        activations   t > 1: all-reduced behind each half of a block and the embedding, and in front of them and the
                      head on the way back: p 2 (2 depth + 1) 2 (t-1)/t T width; train.recompute repeats attention's,
                      depth more. moments: completed, (n-1)/n M.
        """
        n, r, t, p, m = self.n, self.e.parallel.replicate, self.tensor, self.passes, self.e.model
        size = 2 if self.e.parallel.dtype == "bfloat16" else 4
        owned = self.entries
        gathered = {"steps": size * (n - 1) * max(owned)}
        if not self.fsdp:
            return {"gradients": 2 * size * (n - 1) / n * self.count} | gathered
        ring = p * (n - t) / n / t
        found = {"weights": 4 * ring * (2 * self.blocks + self.root), "gradients": size * ring * self.count}
        found |= {"replicas": p * 2 * size * (r - 1) / r * self.count / n} if r > 1 else {}
        if t == 1:
            return found | {"steps": size * (sum(owned) + (n - 2) * max(owned)) / n}
        sums = 2 * (2 * m.depth + 1) + self.e.train.recompute * m.depth
        reduced = p * sums * 2 * (t - 1) / t * self.tokens * m.width
        return found | gathered | {"moments": 4 * (n - 1) / n * sum(owned), "activations": reduced * self.bytes}

    def seconds(self) -> tuple[float, float]:
        """Of a step under `ASSUMED`: communication all hidden behind the computation, or all after it.

        A ring over several nodes enters each through all of its GPUs there at once (one in t); what a rank sends to
        others one by one, or to the same rank of other nodes, leaves through its own. Passes over memory (norms, Adam)
        are not counted.
        """
        flops, e = self.flops(), self.e
        computing = flops["model"] + flops["recomputed"]
        computing *= self.windows / e.train.batch_size / self.tensor / HOPPER[e.train.dtype]
        computing = (computing + flops["owner"] / HOPPER[e.optimizer.msign.dtype]) / UTILISATION
        ring, direct = (NVLINK, NVLINK) if self.n <= NODE else (NODE * NETWORK, NETWORK)
        links = {"replicas": NVLINK if self.world <= NODE else NETWORK}
        links |= {"activations": NVLINK if self.tensor <= NODE else NODE * NETWORK}
        if self.n > NODE:  # of a ring over data the ranks that share a sequence are no neighbours
            links |= dict.fromkeys(("weights", "gradients"), NETWORK * max(1, NODE // self.tensor))
        links |= {"steps": direct} if self.fsdp and self.tensor == 1 else {}
        sending = sum(size / links.get(name, ring) for name, size in self.sent().items())
        return max(computing, sending), computing + sending
