"""What a run *is*: one frozen dataclass per Hydra group, every value resolved and checked.

All there is to say of one key stands at its field: type, range, and whether the YAML files under ``conf/`` may leave
it open (``null``). `abovemup.config.resolve` closes what is open, so that nothing below the command line ever meets it.
"""

import math
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

Role = Literal["embedding", "hidden", "head", "gain", "bias"]
ROLES: tuple[Role, ...] = ("embedding", "hidden", "head", "gain", "bias")

NormPlacement = Literal[
    "everywhere",
    "everywhere_no_output",
    "standard",
    "residual_and_output",
    "residual_only",
    "qk_only",
    "output_only",
    "none",
]
DepthInit = Literal["identity", "total_depth", "relative_depth"]
Residual = Literal["identity", "depth_normalized", "completep_paper", "completep"]

# What weight_decay does: ordinary decay, or part 4 of "Above MuP" in the role's norm.
NormControl = Literal["decay", "pre_decay", "post_clip", "pre_decay_top1", "post_clip_top1"]
NormName = Literal[
    "rms_to_rms",
    "rms_to_inf",
    "one_to_rms",
    "max_abs",
    "frobenius",
    "stable_rank",
    "effective_rank",
    "condition_number",
]
# Where a row of metrics.jsonl has the norm of the output: the head's, which in a tied model is the embedding's.
OUTPUT_NORMS = ("norm/head/rms_to_inf", "norm/embedding/one_to_rms")

# A cadence is a number of steps (0 = never), tokens ("2^16tok") or "pow2": every power of two in tokens.
Cadence = int | str
ABOVE_0, BELOW_1 = sys.float_info.min, 1 - sys.float_info.epsilon / 2


@dataclass(frozen=True)
class Range:
    """What a number may be. No sane run is near `most`: beyond it something would overflow, or never end."""

    least: float
    most: float
    hint: str = ""  # what else to say about a value that is refused


@dataclass(frozen=True)
class Open:
    """A key that may wait for others, from which it follows: null, a ratio ("1/2") up to `ratio`, or a `length`."""

    null: bool = True
    ratio: int = 0
    length: bool = False  # tokens ("2^20tok") or a fraction of the run (0.1)


Size = Annotated[int, Range(1, 2**20)]
Blocks = Annotated[int, Range(1, 10_000)]
Ids = Annotated[int, Range(1, 2**22)]
Long = Annotated[int, Range(1, 2**24)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Length = Annotated[int, Range(0, 2**40, 'Or tokens ("2^20tok"), or a fraction of the run (0.1).')]
Positive = Annotated[float, Range(ABOVE_0, 10**6)]
Average = Range(0, BELOW_1, "0.9 keeps 90 %.")
Decay = Range(0, 10**6)


@dataclass(frozen=True, kw_only=True)
class Base:
    """The shape at which all parameterizations coincide."""

    width: Size
    depth: Blocks
    head_dim: Size


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    width: Size
    depth: Blocks
    heads: Annotated[Size, Open()]  # query heads
    kv_heads: Annotated[Size, Open(ratio=1)]
    head_dim: Annotated[Size, Open()]
    ffn: Annotated[Long, Open(ratio=1000)]  # hidden width of SwiGLU
    vocab_size: Annotated[Ids, Open()]  # rows of embedding and head; at least the tokenizer's
    norm_placement: NormPlacement
    tie_embeddings: bool
    gains: bool  # a trainable gain on every norm
    biases: bool  # a bias on every linear layer inside the blocks
    init: Literal["exact", "gaussian"]
    depth_init: DepthInit
    residual: Residual
    rope_theta: Annotated[float, Range(ABOVE_0, 10**12)]
    norm_eps: Positive
    base: Base


@dataclass(frozen=True, kw_only=True)
class Parameterization:
    name: Literal["standard", "mup", "above_mup"]
    base_width: Annotated[Size, Open()]
    base_depth: Annotated[Blocks, Open()]
    base_head_dim: Annotated[Size, Open()]
    base_kv_heads: Annotated[Size, Open()]
    base_ffn: Annotated[Long, Open()]


@dataclass(frozen=True, kw_only=True)
class Msign:
    method: Literal["newton_schulz", "polar_express", "exact"]
    steps: Annotated[int, Range(1, 1000)]
    dtype: Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class RoleRule:
    """One row of the optimizer's table: how a role steps."""

    norm: str  # a name in geometry.NORMS, or "adam"
    scale: Positive = 1.0  # the step is lr * scale * dual(G): a radius, in the constrained form
    momentum: Annotated[float | None, Average] = None  # None: the optimizer's
    weight_decay: Annotated[float | None, Decay] = None  # None: the optimizer's
    norm_control: NormControl | None = None  # None: the optimizer's


@dataclass(frozen=True, kw_only=True)
class PerRole:
    embedding: Positive = 1.0
    hidden: Positive = 1.0
    head: Positive = 1.0
    gain: Positive = 1.0
    bias: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Roles:
    embedding: RoleRule
    hidden: RoleRule
    head: RoleRule
    gain: RoleRule
    bias: RoleRule


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: str
    lr: Positive
    momentum: Annotated[float, Average]  # coefficient of the running average: 0.9 keeps 90 %, 0 is none; Adam's beta1
    nesterov: bool
    weight_decay: Annotated[float, Decay]  # W <- (1 - lr(t) * weight_decay) W - ...; picks up no lr multiplier
    eps: Positive
    clip: Annotated[float | None, Range(ABOVE_0, math.inf, "Null turns it off.")]  # global gradient norm; None: off
    beta2: Annotated[float, Average]  # Adam's second coefficient
    norm_control: NormControl = "decay"
    target: str | None  # "my.module:Cls": a user's own optimizer, called with (param_groups, lr=..., **args)
    args: dict[str, Any]
    msign: Msign
    lr_scale: PerRole
    roles: Roles


@dataclass(frozen=True, kw_only=True)
class Schedule:
    name: Literal["constant", "cosine", "wsd"]
    warmup: Annotated[Length, Open(null=False, length=True)]  # steps
    decay: Annotated[Length, Open(length=True)]  # steps: the run's last (wsd), or all after the warmup (cosine)
    final: Annotated[float, Range(0, 1, "It is a fraction of the peak.")]  # at the end of a decay


@dataclass(frozen=True, kw_only=True)
class Data:
    name: Literal[
        "stdlib", "python", "synthetic", "text", "shards", "hub", "fineweb", "fineweb_edu", "fineweb2_rus",
        "fineweb2_tha", "nemotron_cc", "nemotron_cc_v2",
    ]  # fmt: skip
    seed: Seed  # the order of the windows
    path: str | None  # text: a file or a folder; shards: what `data prepare` wrote
    column: str  # of the text
    repo: str | None = None  # a data set of the Hugging Face hub, or a local folder with the same layout
    subset: str | None = None  # what the hub calls a config; nemotron_cc: quality/kind/kind2, several with commas
    split: str = "train"  # of the hub's data set
    revision: str | None = None  # a branch, tag or commit; None: the newest
    url: str | None = None  # nemotron_cc: where its files are, or a local folder with the same layout
    pack: Literal["stream", "document"] = "stream"  # attend over the ends of documents in a window, or not
    allow_repeat: bool
    skip_bad: bool
    states: Annotated[int, Range(2, 2**20)]  # synthetic: contexts of the Markov source
    branching: Annotated[int, Range(2, 2**20)]  # synthetic: successors of a context


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    name: Literal["bpe", "byte", "llama3", "gpt2", "hf"]
    vocab_size: Annotated[Ids, Open()]  # ids in use, end of text included
    path: str | None  # hf: a tokenizer.json, a folder holding one, or a hub id; llama3, gpt2: the file of ranks too


@dataclass(frozen=True, kw_only=True)
class Train:
    batch_size: Size  # sequences
    seq_len: Long  # tokens
    steps: Annotated[int, Range(1, 2**40), Open()]  # optimizer steps
    tokens: Annotated[int, Range(1, 2**60), Open()]  # = steps * batch_size * seq_len
    micro_batch: Annotated[int | Literal["auto"], Range(1, 2**20), Open()]  # sequences in one forward
    seed: Seed  # the initialisation
    device: Literal["auto", "cpu", "cuda", "mps"]
    dtype: Literal["float32", "bfloat16"]  # bfloat16: autocast over float32 master weights
    compile: bool  # block by block
    threads: Annotated[int, Range(1, 1024, "Or null: what suits this machine."), Open()]
    recompute: bool = False  # a block keeps its input only, and is computed once more in the backward pass
    loss_chunk: Annotated[int, Range(0, 2**40)] = 0  # positions whose logits exist at a time in the loss; 0: all


@dataclass(frozen=True, kw_only=True)
class Eval:
    every: Cadence
    tokens: Annotated[int, Range(1, 2**30), Open()]
    batch: Size  # sequences in one forward


@dataclass(frozen=True, kw_only=True)
class Norms:
    every: Cadence
    which: Literal["role", "all"] | list[NormName]  # besides each layer's role norm
    gradients: bool = False  # the raw gradients' dual norms too


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: Cadence
    keep: Size
    asynchronous: bool = False  # written by a thread, beside the training


@dataclass(frozen=True, kw_only=True)
class Tracking:
    name: Literal["wandb", "local"]
    every: Annotated[int, Range(1, 2**40)]  # steps between rows of metrics.jsonl
    layers: Literal["roles", "all"]  # what W&B gets; metrics.jsonl always has all
    mode: Literal["auto", "online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str | None  # None: made from the settings
    dir: str | None  # None: runs/<name>


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Several processes: abovemup train --nproc N, or torchrun."""

    name: Literal["single", "ddp", "fsdp"] = "single"  # ddp: weights on every rank; fsdp: sharded by rows (FSDP2)
    replicate: Size = 1  # fsdp: groups of ranks that hold all the weights together (hybrid sharding)
    tensor: Size = 1  # fsdp: ranks that share the heads, the FFN and the vocabulary of one sequence
    dtype: Literal["float32", "bfloat16"] = "float32"  # what is sent of gradients and of steps


@dataclass(frozen=True, kw_only=True)
class Experiment:
    experiment: str  # the preset's name
    cannot_match: list[str]  # what a preset of the paper cannot reproduce, in words
    model: Model
    parameterization: Parameterization
    optimizer: Optimizer
    schedule: Schedule
    data: Data
    tokenizer: Tokenizer
    train: Train
    eval: Eval
    norms: Norms
    checkpoint: Checkpoint
    tracking: Tracking
    run: Run
    parallel: Parallel = Parallel()
    choices: dict[str, str] = field(default_factory=dict)  # group -> chosen file, for --config
    # Keys that were open, and how they were written (null, "1/2", "2^20tok", 0.1): recomputed when another key changes.
    derived: dict[str, Any] = field(default_factory=dict)
