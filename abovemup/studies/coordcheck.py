"""`abovemup coordcheck`: train a few steps at several sizes, and see which numbers of each layer depend on the size.

A plain coordinate check (Tensor Programs V, appendix D.1) looks at activations. Beside them stand the three stability
metrics of "Above MuP" (part 1) and the role norms of weights and updates: an update of the wrong norm shows there
before any activation does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.data.corpus import open_corpus
from abovemup.model.layers import Embedding, Linear, rope_angles, rotate
from abovemup.model.llama import Attention, Block, FeedForward, Llama
from abovemup.model.stability import report
from abovemup.training.device import device
from abovemup.training.trainer import Diverged, Trainer

# What a check trains on unless something else is typed: endless tokens, no files, a small vocabulary.
SETTINGS = {
    "data": "synthetic",
    "train.batch_size": "8",
    "train.seq_len": "64",
    "tracking": "local",
    "norms.every": "0",  # the first and the last step
    "eval.every": "0",
    "checkpoint.every": "0",
}
PROBE = 4  # windows of the validation split on which activations are measured

NORM_TOLERANCE = 0.1  # of the slope of a role norm
RMS_TOLERANCE = 0.35  # of the slope of an activation's RMS, upwards: the mean case of a sound layer may fall
NORMS = ("norm", "update")  # judged by NORM_TOLERANCE, in every layer
METRICS = ("forward", "dependency", "stability")  # "Above MuP", part 1; the third is update stability
QUANTITIES = (*NORMS, *METRICS, "change", "rms", "logit")
JUDGED_RMS = ("residual", "feed_forward.middle", "feed_forward.output")

Key = tuple[str, str]  # (layer, quantity)


@dataclass(frozen=True)
class Row:
    """One quantity of one layer over the sizes."""

    layer: str
    quantity: str
    values: list[float]
    slope: float  # of log2(value) over log2(size), least squares; nan where a value is 0 or not finite
    judged: bool
    verdict: str  # flat, grows, shrinks, or none
    sound: bool  # within the tolerance, or not judged
    exact: bool = True  # False: the value is an upper bound
    input_rms: float | None = (
        None  # no norm in front: the maximum is conditional on RMS(x) = 1; the largest one measured
    )


@dataclass(frozen=True)
class Check:
    """One parameterization x optimizer over one kind of size."""

    parameterization: str
    optimizer: str
    over: str  # width or depth
    sizes: list[int]
    steps: int
    lr: float
    rows: list[Row] = field(repr=False)
    diverged: list[int]  # sizes at which a loss or gradient was not finite

    @property
    def flat(self) -> bool:
        return not self.diverged and all(row.sound for row in self.rows)

    def json(self) -> dict[str, Any]:
        tolerance = {"norms": NORM_TOLERANCE, "rms": RMS_TOLERANCE}
        return asdict(self) | {"flat": self.flat, "tolerance": tolerance}


def pairs(overrides: Sequence[str]) -> list[list[str]]:
    """`parameterization=a,b optimizer=c,d` among the overrides: one list of overrides for each pair."""
    lists: list[list[str]] = [[]]
    for override in overrides:
        group, _, value = override.partition("=")
        choices = value.split(",") if group in ("parameterization", "optimizer") else [value]
        lists = [[*chosen, f"{group}={choice}"] for chosen in lists for choice in choices]
    return lists


def check(overrides: Sequence[str], over: str, sizes: Sequence[int], steps: int, note: Callable[[str], None]) -> Check:
    """Train `steps` steps at each size (`model.width` or `model.depth`) and compare the last one.

    Raises RequestError for fewer than two sizes, or an override that the check sets itself.
    """
    if len(set(sizes)) < 2:
        raise RequestError(f"--{over}s {','.join(map(str, sizes))}: a slope needs at least two sizes.")
    measured: dict[int, dict[Key, Value]] = {}
    diverged = []
    for size in sorted(set(sizes)):
        exp = experiment(overrides, over, size, steps)
        note(f"{exp.parameterization.name} x {exp.optimizer.name}, {over} {size}")
        try:
            measured[size] = measure(exp, kinds=over == "depth")
        except Diverged:
            diverged.append(size)
    rows = list(compare(measured, over, exp)) if len(measured) > 1 else []
    name, optimizer = exp.parameterization.name, exp.optimizer
    return Check(name, optimizer.name, over, sorted(set(sizes)), steps, optimizer.lr, rows, diverged)


def experiment(overrides: Sequence[str], over: str, size: int, steps: int) -> Experiment:
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for key, option in (f"model.{over}", f"--{over}s"), ("train.steps", "--steps"), ("train.tokens", "--steps"):
        if key in typed:
            raise RequestError(f"{key} is set by {option} here.")
    ours = [f"{key}={value}" for key, value in SETTINGS.items() if key not in typed]
    exp = compose([*ours, *overrides, f"model.{over}={size}", f"train.steps={steps}", "train.tokens=null"])
    windows = replace(exp.eval, tokens=PROBE * exp.train.seq_len)
    train = replace(exp.train, device=device(exp.train))
    return replace(exp, eval=windows, train=train, norms=replace(exp.norms, which="role"))


# ---- one size ----


@dataclass(frozen=True)
class Value:
    value: float
    exact: bool = True
    input_rms: float | None = None


def measure(exp: Experiment, kinds: bool) -> dict[Key, Value]:
    """Every quantity of every layer at the last step. Raises Diverged.

    `kinds`: layers of one kind together, the largest value of them, so that depths can be compared.
    """
    torch.set_num_threads(exp.train.threads)
    trainer = Trainer(exp, open_corpus(exp, lambda text: None))
    tokens = trainer.validation[:PROBE, :-1].to(trainer.device)
    start = activations(trainer.model, tokens)
    record = {}
    for t in range(1, exp.train.steps + 1):
        if t == exp.train.steps:
            before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
        record = trainer.advance() or {}
    end = activations(trainer.model, tokens)
    values: dict[Key, Value] = {}
    for key, value in record.items():
        quantity, _, rest = key.partition("/")
        if quantity in NORMS:
            values[rest.rpartition("/")[0], quantity] = Value(value)
    for row in report(trainer.model, before, end.inputs):
        quantity = "stability" if row.metric == "update" else row.metric
        values[row.layer, quantity] = Value(row.value, row.exact, None if row.in_norm else row.input_rms)
    for layer, output in end.outputs.items():
        values[layer, "rms"] = Value(rms(output))
        values[layer, "change"] = Value(rms(output - start.outputs[layer]))
    for layer, logit in end.logits.items():
        values[layer, "logit"] = Value(logit)
    return by_kind(values) if kinds else values


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def by_kind(values: dict[Key, Value]) -> dict[Key, Value]:
    """Without the number of the block: the largest of each kind."""
    kinds: dict[Key, Value] = {}
    for (layer, quantity), value in values.items():
        key = (".".join(part for part in layer.split(".") if part != "layers" and not part.isdigit()), quantity)
        kinds[key] = max(kinds.get(key, value), value, key=lambda v: math.inf if math.isnan(v.value) else v.value)
    return kinds


@dataclass
class Activations:
    outputs: dict[str, Tensor] = field(default_factory=dict)  # of each layer, of each block (residual)
    inputs: dict[str, float] = field(default_factory=dict)  # the largest RMS of an input of each linear layer
    logits: dict[str, float] = field(default_factory=dict)  # the largest |scale q.k| of each attention


@torch.no_grad()
def activations(model: Llama, tokens: Tensor) -> Activations:
    """One forward pass over tokens (B, T), watched."""
    seen = Activations()
    with watching(model, seen):
        model(tokens)
    return seen


@contextmanager
def watching(model: Llama, seen: Activations) -> Iterator[None]:
    """Hooks that fill `seen` during a forward pass."""
    handles = []
    queries: dict[str, Tensor] = {}

    def output(name: str) -> Callable[..., None]:
        return lambda module, inputs, result: seen.outputs.update({name: result.detach().float()})

    def middle(name: str) -> Callable[..., None]:
        return lambda module, inputs: seen.outputs.update({name: inputs[0].detach().float()})

    def entry(name: str) -> Callable[..., None]:
        return lambda module, inputs: seen.inputs.update(
            {name: inputs[0].float().square().mean(-1).amax().sqrt().item()}
        )

    def query(name: str) -> Callable[..., None]:
        return lambda module, inputs, result: queries.update({name: result.detach().float()})

    def key(name: str, attention: Attention) -> Callable[..., None]:
        def logit(module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
            seen.logits[f"{name}.logits"] = largest_logit(attention, queries[name], result.detach().float(), model)

        return logit

    try:
        for name, module in model.named_modules():
            if isinstance(module, Embedding | Linear):
                handles.append(module.register_forward_hook(output(name)))
            if isinstance(module, Linear):
                handles.append(module.register_forward_pre_hook(entry(name)))
            elif isinstance(module, Block):
                handles.append(module.register_forward_hook(output(f"{name}.residual")))
            elif isinstance(module, FeedForward):
                handles.append(module.norm.register_forward_pre_hook(middle(f"{name}.middle")))
                handles.append(module.register_forward_hook(output(f"{name}.output")))
            elif isinstance(module, Attention):
                handles.append(module.register_forward_hook(output(f"{name}.output")))
                handles.append(module.q_norm.register_forward_hook(query(name)))
                handles.append(module.k_norm.register_forward_hook(key(name, module)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def largest_logit(attention: Attention, q: Tensor, k: Tensor, model: Llama) -> float:
    """max |scale q.k| over heads and pairs of positions that see each other; q, k (B, T, heads, head_dim)."""
    cos, sin = rope_angles(q.shape[1], attention.head_dim, model.cfg.rope_theta, q)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k).tril().abs()
    return attention.scale * logits.max().item()


# ---- over the sizes ----


def compare(measured: dict[int, dict[Key, Value]], over: str, exp: Experiment) -> Iterator[Row]:
    sizes = list(measured)
    for layer, quantity in measured[sizes[0]]:
        values = [measured[size][layer, quantity] for size in sizes if (layer, quantity) in measured[size]]
        if len(values) < len(sizes):
            continue
        slope = log_slope(sizes, [v.value for v in values])
        tolerance = judged(layer, quantity, over, exp)
        verdict, sound = judge(slope, tolerance, both=quantity in NORMS)
        conditional = [v.input_rms for v in values if v.input_rms is not None]
        yield Row(
            layer=layer,
            quantity=quantity,
            values=[v.value for v in values],
            slope=slope,
            judged=tolerance is not None,
            verdict=verdict,
            sound=sound,
            exact=all(v.exact for v in values),
            input_rms=max(conditional) if conditional else None,
        )


def log_slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The least-squares slope of log2(value) over log2(size); nan when a value has no logarithm."""
    if not all(0 < value < math.inf for value in values):
        return math.nan
    x = [math.log2(size) for size in sizes]
    y = [math.log2(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def judged(layer: str, quantity: str, over: str, exp: Experiment) -> float | None:
    """The tolerance of a slope; None for what is shown only.

    Over depths the norm of wo and w2 follows model.depth_init by design, and only their updates are judged.
    """
    if quantity in NORMS:
        designed = over == "depth" and quantity == "norm" and exp.model.depth_init != "identity"
        return None if designed and layer.endswith((".wo", ".w2")) else NORM_TOLERANCE
    return RMS_TOLERANCE if quantity == "rms" and layer.endswith(JUDGED_RMS) else None


def judge(slope: float, tolerance: float | None, both: bool) -> tuple[str, bool]:
    """(verdict, sound). `both`: falling is as wrong as growing."""
    if tolerance is None:
        return "none", True
    if math.isnan(slope):
        return "no slope", False
    verdict = "grows" if slope > tolerance else "shrinks" if slope < -tolerance else "flat"
    return verdict, verdict == "flat" or (verdict == "shrinks" and not both)
