"""`abovemup coordcheck`: train a few steps at several sizes, and see which numbers of each layer depend on the size.

A plain coordinate check (Tensor Programs V, appendix D.1) looks at activations. Beside them stand the three stability
metrics of "Above MuP" (part 1) and the role norms of weights and updates: an update of the wrong norm shows there
before any activation does.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.data.corpus import open_corpus
from abovemup.geometry.roles import ROLE_NORM
from abovemup.model.composed import lower_bounds
from abovemup.model.layers import Embedding, Linear, document_mask, rope_angles, rotate
from abovemup.model.llama import Attention, Block, FeedForward, Llama
from abovemup.model.stability import Row as Measured
from abovemup.model.stability import report
from abovemup.training.device import placed
from abovemup.training.trainer import Diverged, Trainer

# Unless something else is typed: endless tokens, no files, one thread, since more wait for each other on a busy CPU.
SETTINGS = ["data=synthetic", "train.batch_size=8", "train.seq_len=64", "tracking=local", "train.threads=1"]
SETTINGS += [f"{cadence}.every=0" for cadence in ("eval", "checkpoint", "norms")]  # norms: the first and the last step
PROBE = 4  # windows of the validation split on which activations are measured

NORM_TOLERANCE = 0.1  # of the slope of a role norm
RMS_TOLERANCE = 0.35  # of the slope of an activation's RMS, upwards: the mean case of a sound layer may fall
QUANTITIES = {  # name -> column of the table, title of the panel
    "norm": ("|W|", "role norm of W"),
    "update": ("|dW|", "role norm of the update"),
    "forward": ("forward", "forward metric"),  # the three of "Above MuP", part 1
    "dependency": ("depend.", "dependency metric"),
    "stability": ("update", "update metric"),
    "change": ("d output", "change of the output (RMS)"),
    "rms": ("output", "output (RMS)"),
    "logit": ("logit", "largest attention logit"),
}
STABILITY = {"update": "stability"}  # the update metric's name here, where `update` is the norm of the change
NORMS = ("norm", "update")  # judged by NORM_TOLERANCE
JUDGED_RMS = ("residual", "feed_forward.middle", "feed_forward.output")

# The modules whose outputs are shown, and what is added to their names.
SHOWN = {Embedding: "", Linear: "", Block: ".residual", Attention: ".output", FeedForward: ".output"}
Key = tuple[str, str]  # (layer, quantity)


@dataclass(frozen=True)
class Row:
    """One quantity of one layer over the sizes."""

    layer: str
    quantity: str
    values: list[float]
    slope: float  # of log2(value) over log2(size), least squares; nan where a value is 0 or not finite
    verdict: str  # flat, grows, shrinks, no slope, or none: not judged
    sound: bool  # within the tolerance, or not judged
    exact: bool = True  # False: the value is an upper bound
    # Where no norm stands in front and the maximum is conditional on RMS(x) = 1: the largest one measured.
    input_rms: float | None = None


@dataclass(frozen=True)
class Check:
    """One parameterization x optimizer over one kind of size."""

    parameterization: str
    optimizer: str
    over: str  # width or depth
    sizes: list[int]  # those of `values`, which did not diverge
    steps: int
    lr: float
    rows: list[Row] = field(repr=False)
    # By layer and quantity, of halves of blocks and of the whole, at the smallest size: (found by ascent, composed).
    bounds: dict[str, dict[str, tuple[float, float]]]
    diverged: list[int]  # sizes at which a loss or gradient was not finite

    @property
    def flat(self) -> bool:
        return not self.diverged and all(row.sound for row in self.rows)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"flat": self.flat, "tolerance": {"norms": NORM_TOLERANCE, "rms": RMS_TOLERANCE}}


def pairs(overrides: Sequence[str]) -> list[list[str]]:
    """`parameterization=a,b optimizer=c,d` among the overrides: one list of overrides for each pair."""
    lists: list[list[str]] = [[]]
    for override in overrides:
        group, _, value = override.partition("=")
        choices = dict.fromkeys(value.split(",")) if group in ("parameterization", "optimizer") else [value]
        lists = [[*chosen, f"{group}={choice}"] for chosen in lists for choice in choices]
    return lists


def check(over: str, experiments: Sequence[Experiment], note: Callable[[str], None]) -> Check:
    """Train each of `experiments`, which differ in `model.width` or `model.depth`, and compare their last steps."""
    measured: dict[int, dict[Key, Measured]] = {}
    bounds: dict[str, dict[str, tuple[float, float]]] = {}
    diverged = []
    for exp in experiments:
        size = getattr(exp.model, over)
        note(f"{exp.parameterization.name} x {exp.optimizer.name}, {over} {size}")
        try:
            measured[size], model, before = measure(exp)
        except Diverged:
            diverged.append(size)
            continue
        if not bounds:
            for (layer, metric), lower in lower_bounds(model, before).items():
                quantity = STABILITY.get(metric, metric)
                bounds.setdefault(layer, {})[quantity] = lower, measured[size][layer, quantity].value
    if over == "depth":
        measured = {size: by_kind(values) for size, values in measured.items()}
    rows = list(compare(measured, over, exp)) if len(measured) > 1 else []
    pair = exp.parameterization.name, exp.optimizer.name
    return Check(*pair, over, [*measured], exp.train.steps, exp.optimizer.lr, rows, bounds, diverged)


def experiment(overrides: Sequence[str], over: str, size: int, steps: int) -> Experiment:
    """What is trained at one size. Raises RequestError, also for an override that the check sets itself."""
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for key, option in (f"model.{over}", f"--{over}s"), ("train.steps", "--steps"), ("train.tokens", "--steps"):
        if key in typed:
            raise RequestError(f"{key} is set by {option} here.")
    ours = [setting for setting in SETTINGS if setting.partition("=")[0] not in typed]
    exp = placed(compose([*ours, *overrides, f"model.{over}={size}", f"train.steps={steps}", "train.tokens=null"]))
    windows = replace(exp.eval, tokens=PROBE * exp.train.seq_len)
    return replace(exp, eval=windows, norms=replace(exp.norms, which="role"))


# ---- one size ----


def measure(exp: Experiment) -> tuple[dict[Key, Measured], Llama, dict[str, Tensor]]:
    """Every quantity of every layer at the last step, the model behind it, its weights before it. Raises Diverged."""
    torch.set_num_threads(exp.train.threads)
    trainer = Trainer(exp, open_corpus(exp, lambda text: None))
    model, tokens = trainer.model, trainer.validation[:PROBE, :-1].to(trainer.device)
    start, _, _ = activations(model, tokens)
    for _ in range(exp.train.steps):
        before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
        record = trainer.advance()
    end, inputs, logits = activations(model, tokens)
    rows = [replace(r, metric=STABILITY.get(r.metric, r.metric)) for r in report(model, before, inputs)]
    norms = [(key.split("/"), value) for key, value in (record or {}).items() if key.startswith(("norm/", "update/"))]
    rows += [Measured(layer, quantity, value) for (quantity, layer, _), value in norms]
    for layer, output in end.items():
        rows += [Measured(layer, "rms", rms(output)), Measured(layer, "change", rms(output - start[layer]))]
    rows += [Measured(layer, "logit", value) for layer, value in logits.items()]
    return {(row.layer, row.metric): row for row in rows}, model, before


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def by_kind(values: dict[Key, Measured]) -> dict[Key, Measured]:
    """Without the number of the block, so that depths can be compared: the largest of each kind."""
    kinds: dict[Key, Measured] = {}
    for (layer, quantity), value in values.items():
        key = re.sub(r"layers\.\d+\.?", "", layer), quantity
        kinds[key] = max(kinds.get(key, value), value, key=lambda v: math.inf if math.isnan(v.value) else v.value)
    return kinds


@torch.no_grad()
def activations(model: Llama, tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """One forward pass over tokens (B, T): the output of each layer, half and block; the largest RMS of an input of
    each module; the largest |scale q.k| of each attention. Without padded logits."""
    arrives: dict[str, Tensor] = {}
    gives: dict[str, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        arrives[names[module]], gives[names[module]] = args[0].detach().float(), result.detach().float()

    with nn.modules.module.register_module_forward_hook(keep):
        model(tokens)
    outputs, logits = {}, {}
    seen = document_mask(tokens, -1 if model.eot is None else model.eot)
    for module, name in names.items():
        if type(module) in SHOWN:
            outputs[name + SHOWN[type(module)]] = gives[name][..., : model.ids] if name == "head" else gives[name]
        if isinstance(module, FeedForward):
            outputs[f"{name}.middle"] = arrives[f"{name}.norm"]
        if isinstance(module, Attention):
            q, k = gives[f"{name}.q_norm"], gives[f"{name}.k_norm"]
            logits[f"{name}.logits"] = largest_logit(module, q, k, model.cfg.rope_theta, seen)
    return outputs, {name: x.square().mean(-1).amax().sqrt().item() for name, x in arrives.items()}, logits


def largest_logit(attention: Attention, q: Tensor, k: Tensor, theta: float, seen: Tensor) -> float:
    """max |scale q.k| over heads and what is `seen` (B, 1, T, T) from where; q, k (B, T, heads, head_dim)."""
    cos, sin = rope_angles(q.shape[1], attention.head_dim, theta, q)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k).where(seen, 0.0).abs()
    return attention.scale * logits.max().item()


# ---- over the sizes ----


def compare(measured: dict[int, dict[Key, Measured]], over: str, exp: Experiment) -> Iterator[Row]:
    sizes = list(measured)
    for layer, quantity in measured[sizes[0]]:
        rows = [measured[size][layer, quantity] for size in sizes]
        values = [row.value for row in rows]
        slope = log_slope(sizes, values)
        verdict, sound = judge(slope, tolerance(layer, quantity, over, exp), both=quantity in NORMS)
        loose = [row.input_rms for row in rows if row.input_rms is not None]
        exact = all(row.exact for row in rows)
        yield Row(layer, quantity, values, slope, verdict, sound, exact, max(loose, default=None))


def log_slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The least-squares slope of log2(value) over log2(size); nan when a value has no logarithm."""
    if not all(0 < value < math.inf for value in values):
        return math.nan
    return linear_regression([math.log2(size) for size in sizes], [math.log2(value) for value in values]).slope


def tolerance(layer: str, quantity: str, over: str, exp: Experiment) -> float | None:
    """Of a slope; None for what is shown only.

    A gain or bias is judged by its update, where that has the norm of its role; in its weight a few steps add up or
    cancel, and the largest entry is chance. Over depths the norm of wo and w2 follows model.depth_init by design, and
    only their updates are judged.
    """
    if quantity in NORMS:
        role = "gain" if layer.endswith("norm") else "bias" if layer.endswith("bias") else None
        if role is not None:
            own = getattr(exp.optimizer.roles, role).norm == ROLE_NORM[role]
            return NORM_TOLERANCE if own and quantity == "update" else None
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
