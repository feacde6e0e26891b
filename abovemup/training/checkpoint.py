"""Checkpoints: written aside, flushed, renamed; complete or absent.

    checkpoints/step_00000100/
        __0_0.distcp   what rank 0 holds of the tensors model/<parameter name> (a tied one once) and
                       optimizer/<parameter name>/<state name>; of every rank such a file
        .metadata      where each part of a tensor is: the format is torch.distributed.checkpoint's
        state.pt       step, tokens, random state, where the largest singular values of large weights were, the row of
                       metrics.jsonl that still waits for its evaluation, the names and shapes of the tensors above, and
                       what else a user's own optimizer keeps
        manifest.json  size and SHA-256 of each file: what makes a checkpoint complete

Tensors and plain types only: what is read is read by `torch.load` with its safe default, .metadata as `tensors` says.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from abovemup.config.errors import RequestError
from abovemup.config.io import sha256, write_whole
from abovemup.geometry.msign import local

STEP = re.compile(r"step_\d+")


@dataclass
class State:
    """Everything that a run is at one step. Of a sharded tensor each rank has its part."""

    step: int
    tokens: int
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    rng: Tensor
    last_row: int | None  # step of the last row in metrics.jsonl; None: no row yet
    pending: dict[str, float | int] | None = None  # the row of this step, not yet logged: its evaluation was cut short
    norms: dict[str, Tensor] = field(default_factory=dict)  # where the largest singular value of a large weight was

    def tensors(self) -> dict[str, Tensor]:
        """Those of model and optimizer, by the names that they have in a file."""
        named = ((f"optimizer/{name}/{key}", v) for name, s in self.optimizer.items() for key, v in s.items())
        return {f"model/{n}": p for n, p in self.model.items()} | {n: v for n, v in named if isinstance(v, Tensor)}

    def finite(self) -> bool:
        """Whether all that is here is."""
        return all(bool(local(t).isfinite().all()) for t in self.tensors().values() if t.is_floating_point())

    def copied(self) -> "State":
        """On the CPU, where no later step changes it."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        return State(**BlockingAsyncStager().stage(vars(self)))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> Path:
    """Write `state` under `folder` (`checkpoints/`); whole when this returns, absent when it does not.

    All ranks of `group` (None: this is the only one) call it. Raises OSError (a full disk), on all of them, leaving
    the earlier checkpoints as they were.
    """
    from abovemup.training.tensors import write  # what it needs takes a second to import

    folder.mkdir(exist_ok=True)
    target = folder / f"step_{state.step:08d}"
    aside = target.with_name(f".writing-{target.name}")
    try:
        write(state.tensors(), aside, lambda: _complete(state, aside, target), group)
    finally:
        if group is None or not dist.get_rank(group):  # no other rank: this one may be completing it
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _complete(state: State, aside: Path, target: Path) -> None:
    """Make a checkpoint of the tensors that all ranks have written `aside`."""
    shapes = {key: {name: _shape(v) for name, v in values.items()} for key, values in state.optimizer.items()}
    rest = vars(state) | {"model": {name: _shape(p) for name, p in state.model.items()}, "optimizer": shapes}
    torch.save(rest, aside / "state.pt")
    _sync(aside / "state.pt")
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(aside.iterdir())}
    manifest = {"step": state.step, "tokens": state.tokens, "files": files}
    write_whole(aside / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    _sync(aside)
    replaced = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():  # of an earlier leg; there is none only from here to the next line
        target.rename(replaced)
    aside.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _shape(value: Any) -> Any:
    """A tensor without its values (on the "meta" device); what is none as it is."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def steps(folder: Path) -> dict[int, Path]:
    """step -> folder, in rising order of the *number* (names are padded to a width that a longer run outgrows)."""
    paths = [path for path in folder.glob("step_*") if STEP.fullmatch(path.name) and path.is_dir()]
    return dict(sorted((int(path.name.removeprefix("step_")), path) for path in paths))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None when it is complete. Raises RequestError for one of an earlier version."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        if "model.pt" in files:
            raise RequestError(f"{path} is of an earlier version and lacks a .metadata: it cannot be read any more.")
        for name in sorted({".metadata", "state.pt", *files}):
            if sha256(path / name) != files[name]["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(path: Path) -> State:
    """What a complete checkpoint (see `damage`) holds; of model and optimizer the shapes: `fill` reads the values.

    Raises RequestError when it is whole but lacks a part of the state.
    """
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    if missing := sorted({"step", "tokens", "model", "optimizer", "rng", "last_row", "pending"} - state.keys()):
        raise RequestError(f"{path} lacks {', '.join(missing)}: it cannot be continued exactly. Choose another @STEP.")
    return State(**state)


def fill(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read the values of `tensors`, named as `State.tensors` does, into them. Raises RequestError when it cannot."""
    from abovemup.training.tensors import read

    read(tensors, path)


def choose(run: Path, step: int | None = None, warn: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest complete checkpoint of a run, or exactly the one of `step`. None: there is none yet.

    Damaged ones are skipped with a warning. Raises RequestError when `step` is given and absent or damaged, and when
    all are damaged.
    """
    found = steps(run / "checkpoints")
    if step is not None:
        if step not in found:
            have = ", ".join(map(str, found)) or "none"
            raise RequestError(f"{run} has no checkpoint of step {step}. It has: {have}.")
        if wrong := damage(found[step]):
            raise RequestError(f"{found[step]} is damaged: {wrong}. Choose another step.")
        return found[step]
    for path in reversed(found.values()):
        if wrong := damage(path):
            warn(f"skipping the damaged checkpoint {path}: {wrong}")
        else:
            return path
    if found:
        raise RequestError(f"{run} has no whole checkpoint left. Start a new run, or delete {run} and begin again.")
    return None


def forget_after(folder: Path, step: int) -> None:
    """Delete checkpoints beyond `step`: the run goes on from there, and its rows after it are taken back.

    And what a kill left behind.
    """
    for later, path in steps(folder).items():
        if later > step:
            _delete(path)
    for left in folder.glob(".*-step_*"):
        shutil.rmtree(left, ignore_errors=True)


def _delete(path: Path) -> None:
    # Renamed first: a kill in the middle of the deletion must not leave a half-empty step_ folder.
    dying = path.with_name(f".deleting-{path.name}")
    path.rename(dying)
    shutil.rmtree(dying, ignore_errors=True)


def prune(folder: Path, keep: int, keep_always: Callable[[int], bool]) -> None:
    """Delete all but the `keep` newest checkpoints and those that `keep_always` names."""
    for step, path in list(steps(folder).items())[:-keep]:
        if not keep_always(step):
            _delete(path)
