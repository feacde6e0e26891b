"""The smallest run that has everything: about 0.1 s, no files but its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abovemup.training import checkpoint
from abovemup.training.run import Outcome, train

TINY = [
    "model.width=32",
    "model.head_dim=8",
    "model.base.width=32",
    "model.base.head_dim=8",
    "model.vocab_size=257",
    "data=synthetic",
    "data.states=256",
    "tracking=local",
    "train.seq_len=32",
    "train.batch_size=4",
    "train.steps=6",
    "eval.every=2",
    "eval.tokens=512",
    "norms.every=1",
    "checkpoint.every=2",
    "checkpoint.keep=10",
]
TIMED = ("tokens_per_second", "memory", "mfu")  # what no two runs share


def run(*overrides: str, **options: Any) -> Outcome:
    """Train TINY with more overrides, of which a later one wins."""
    settings: dict[str, str] = {}
    for override in (*(() if "resume" in options or "branch" in options else TINY), *overrides):
        key, _, value = override.partition("=")
        if key == "train.tokens":
            settings.pop("train.steps", None)
        settings[key] = value
    return train([f"{key}={value}" for key, value in settings.items()], **options)


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is timed."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines if line]


def read(path: Path) -> checkpoint.State:
    """All of a checkpoint, its tensors whole."""
    state = checkpoint.load(path)
    there = {name: torch.empty_like(t, device="cpu") for name, t in state.tensors().items()}
    checkpoint.fill(path, there)
    state.model = {name: there[f"model/{name}"] for name in state.model}
    for name, values in state.optimizer.items():
        values |= {key: there[f"optimizer/{name}/{key}"] for key, v in values.items() if isinstance(v, Tensor)}
    return state


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    return read(folder / f"checkpoints/step_{step:08d}").model


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write_text() -> None:
    """A corpus `text/` of 60 documents in the working directory."""
    Path("text").mkdir()
    for i in range(60):
        Path(f"text/{i}.txt").write_text(f"document {i} " + "ten words of text that are not very many " * 30)


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of inputs of every graph that torch.compile compiles from now on."""
    compilations: list[int] = []
    original = torch.compile
    torch.compiler.reset()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compilations.append(len(inputs))
        return graph.forward

    def counting(model: Any, **options: Any) -> Any:
        return original(model, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", counting)
    return compilations
