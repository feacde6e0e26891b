"""Experiments, specs and parameters for the tests of this room."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from abovemup.config.schema import Msign, Optimizer, Parameterization, PerRole, RoleRule, Roles
from abovemup.optim.state import make_room, state_by_name

ROLE_NORM = {"embedding": "one_to_rms", "hidden": "rms_to_rms", "head": "rms_to_inf", "gain": "max_abs", "bias": "rms"}
TABLES = {
    "scion": dict(ROLE_NORM, gain="rms"),
    "above_mup": ROLE_NORM,
    "muon": {"embedding": "adam", "hidden": "keller_jordan", "head": "adam", "gain": "adam", "bias": "adam"},
    "signsgd": {"embedding": "max_abs", "hidden": "sign", "head": "sign", "gain": "max_abs", "bias": "max_abs"},
    "adam": dict.fromkeys(ROLE_NORM, "adam"),
}


@dataclass(frozen=True)
class Spec:
    name: str
    shape: tuple[int, ...]
    role: Any
    norm: str
    init: float = 1.0
    forward: float = 1.0
    base: tuple[int, ...] = ()  # the shape itself

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", self.base or self.shape)


SHAPES = {
    "embedding.weight": ("embedding", (11, 8)),
    "layers.0.wq.weight": ("hidden", (8, 8)),
    "layers.0.wq.bias": ("bias", (8,)),
    "layers.0.w1.weight": ("hidden", (22, 8)),
    "layers.0.w2.weight": ("hidden", (8, 22)),
    "layers.0.norm.weight": ("gain", (8,)),
    "layers.1.wq.weight": ("hidden", (8, 8)),
    "layers.1.wq.bias": ("bias", (8,)),
    "layers.1.w1.weight": ("hidden", (22, 8)),
    "layers.1.w2.weight": ("hidden", (8, 22)),
    "layers.1.norm.weight": ("gain", (8,)),
    "head.weight": ("head", (11, 8)),
}
SPECS = [Spec(name, shape, role, ROLE_NORM[role]) for name, (role, shape) in SHAPES.items()]


def grown(ratio: int) -> list[Spec]:
    """All widths times `ratio`, which is not the vocabulary."""
    return [
        replace(
            s,
            shape=tuple(d if i == 0 and s.role in ("embedding", "head") else d * ratio for i, d in enumerate(s.shape)),
        )
        for s in SPECS
    ]


def experiment(
    table: str = "scion",
    parameterization: Any = "above_mup",
    residual: str = "identity",
    depth: int = 2,
    **options: Any,
) -> Any:
    """What this room reads of an Experiment; the base depth is 2. `roles` replaces rows of the table."""
    roles = {role: RoleRule(norm=norm) for role, norm in TABLES[table].items()} | options.pop("roles", {})
    settings: dict[str, Any] = {
        "name": table,
        "lr": 2**-4,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "eps": 1e-8 if table in ("adam", "muon") else 1e-20,
        "clip": None,
        "beta2": 0.95,
        "target": None,
        "args": {},
        "msign": Msign(method="newton_schulz", steps=5, dtype="float32"),
        "lr_scale": PerRole(),
        "roles": Roles(**roles),
    }
    return SimpleNamespace(
        model=SimpleNamespace(residual=residual, depth=depth),
        parameterization=Parameterization(
            name=parameterization, base_width=8, base_depth=2, base_head_dim=4, base_kv_heads=2, base_ffn=22
        ),
        optimizer=Optimizer(**{**settings, **options}),
    )


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    g = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=g, dtype=dtype)) for name, (_, shape) in SHAPES.items()}


def set_grads(named: dict[str, Parameter], seed: int) -> None:
    """Gradients that depend on the name and the seed only, not on any order."""
    for name, p in named.items():
        g = torch.Generator().manual_seed(1000 * seed + sum(name.encode()))
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)


def values(named: dict[str, Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


def exact(e: Any, dtype: Any = "float32") -> Any:
    e.optimizer = replace(e.optimizer, msign=Msign(method="exact", steps=1, dtype=dtype))
    return e


@torch.no_grad()
def load_state_by_name(optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """What a run does, with the tensors in place of their files."""
    make_room(optimizer, state)
    for name, entry in state_by_name(optimizer).items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                value.copy_(state[name][key])
