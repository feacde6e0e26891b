"""What a run *is*: one frozen dataclass per Hydra group, every value resolved and checked.

The YAML files under ``conf/`` may leave values open (``null``); `abovemup.config.resolve` closes
them, so that nothing below the command line ever meets an open value.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

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

# A cadence is a number of steps (0 = never), tokens ("2^16tok") or "pow2": every power of two in tokens.
Cadence = int | str


@dataclass(frozen=True, kw_only=True)
class Base:
    """The shape at which all parameterizations coincide."""

    width: int
    depth: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    width: int
    depth: int  # blocks
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    ffn: int  # hidden width of SwiGLU
    vocab_size: int  # rows of embedding and head; at least the tokenizer's
    norm_placement: NormPlacement
    tie_embeddings: bool
    gains: bool  # a trainable gain on every norm
    biases: bool  # a bias on every linear layer inside the blocks
    init: Literal["exact", "gaussian"]
    depth_init: DepthInit
    residual: Residual
    rope_theta: float
    norm_eps: float
    base: Base


@dataclass(frozen=True, kw_only=True)
class Parameterization:
    name: Literal["standard", "mup", "above_mup"]
    base_width: int
    base_depth: int
    base_head_dim: int
    base_kv_heads: int
    base_ffn: int


@dataclass(frozen=True, kw_only=True)
class Msign:
    method: Literal["newton_schulz", "polar_express", "exact"]
    steps: int
    dtype: Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class RoleRule:
    """One row of the optimizer's table: how a role steps."""

    norm: str  # a name in geometry.NORMS, or "adam"
    scale: float = 1.0  # the step is lr * scale * dual(G): a radius, in the constrained form
    momentum: float | None = None  # None: the optimizer's
    weight_decay: float | None = None  # None: the optimizer's
    norm_control: NormControl | None = None  # None: the optimizer's


@dataclass(frozen=True, kw_only=True)
class PerRole:
    embedding: float = 1.0
    hidden: float = 1.0
    head: float = 1.0
    gain: float = 1.0
    bias: float = 1.0


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
    lr: float
    momentum: float  # coefficient of the running average: 0.9 keeps 90 %, 0 is none; Adam's beta1
    nesterov: bool
    weight_decay: float  # W <- (1 - lr(t) * weight_decay) W - ...; picks up no lr multiplier
    eps: float
    clip: float | None  # global gradient norm; None: off
    beta2: float  # Adam's second coefficient
    norm_control: NormControl = "decay"
    target: str | None  # "my.module:Cls": a user's own optimizer, called with (param_groups, lr=..., **args)
    args: dict[str, Any]
    msign: Msign
    lr_scale: PerRole
    roles: Roles


@dataclass(frozen=True, kw_only=True)
class Schedule:
    name: Literal["constant", "cosine", "wsd"]
    warmup: int  # steps, resolved from steps, tokens ("2^20tok") or a fraction (0.1)
    decay: int  # steps; the last ones of the run (wsd); cosine decays over all after the warmup
    final: float  # fraction of the peak at the end of a decay


@dataclass(frozen=True, kw_only=True)
class Data:
    name: Literal["stdlib", "python", "synthetic", "text"]
    seed: int  # the order of the windows
    path: str | None
    column: str
    allow_repeat: bool
    skip_bad: bool
    states: int  # synthetic: contexts of the Markov source
    branching: int  # synthetic: successors of a context


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    name: Literal["bpe", "byte", "hf"]
    vocab_size: int  # ids in use, end of text included
    path: str | None  # hf: a tokenizer.json, or a folder holding one


@dataclass(frozen=True, kw_only=True)
class Train:
    batch_size: int  # sequences
    seq_len: int  # tokens
    steps: int  # optimizer steps
    tokens: int  # = steps * batch_size * seq_len
    micro_batch: int | Literal["auto"]  # sequences in one forward
    seed: int  # the initialisation
    device: Literal["auto", "cpu", "cuda", "mps"]
    dtype: Literal["float32", "bfloat16"]  # bfloat16: autocast over float32 master weights
    compile: bool
    threads: int


@dataclass(frozen=True, kw_only=True)
class Eval:
    every: Cadence
    tokens: int
    batch: int  # sequences in one forward


@dataclass(frozen=True, kw_only=True)
class Norms:
    every: Cadence
    which: Literal["role", "all"] | list[NormName]  # besides each layer's role norm
    gradients: bool = False  # the raw gradients' dual norms too


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: Cadence
    keep: int


@dataclass(frozen=True, kw_only=True)
class Tracking:
    name: Literal["wandb", "local"]
    every: int  # steps between rows of metrics.jsonl
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
    choices: dict[str, str] = field(default_factory=dict)  # group -> chosen file, for --config
    # Keys that were open, and how they were written (null, "1/2", "2^20tok", 0.1): recomputed when another key changes.
    derived: dict[str, Any] = field(default_factory=dict)
