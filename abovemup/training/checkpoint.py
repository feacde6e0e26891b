"""Checkpoints: written aside, flushed, renamed; complete or absent.

    checkpoints/step_00000100/
        model.pt       parameter name -> tensor (a tied tensor once)
        optimizer.pt   parameter name -> state name -> tensor
        state.pt       step, tokens, random state, where the largest singular values of large weights were, the row of
                       metrics.jsonl that still waits for its evaluation
        manifest.json  size and SHA-256 of each file: what makes a checkpoint complete

Tensors and plain types only, so `torch.load` reads them with its safe default.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abovemup.config.errors import RequestError

FILES = ("model.pt", "optimizer.pt", "state.pt")
REST = ("step", "tokens", "rng", "last_row", "pending", "norms")
STEP = re.compile(r"step_(\d+)")


@dataclass
class State:
    """Everything that a run is at one step."""

    step: int
    tokens: int
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    rng: Tensor
    last_row: int | None  # step of the last row in metrics.jsonl; None: no row yet
    pending: dict[str, float | int] | None = None  # the row of this step, not yet logged: its evaluation was cut short
    norms: dict[str, Tensor] = field(default_factory=dict)  # where the largest singular value of a large weight was

    def finite(self) -> bool:
        tensors = [*self.model.values(), *(v for s in self.optimizer.values() for v in s.values())]
        return all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor) and t.is_floating_point())


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _write(content: object, path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:
        # torch reports a short write as an inconsistency of its own container.
        raise OSError(errno.ENOSPC, "the checkpoint could not be written whole", str(path)) from error


def save(folder: Path, state: State) -> Path:
    """Write `state` under `folder` (`checkpoints/`); whole when this returns, absent when it does not.

    Raises OSError (a full disk), leaving the earlier checkpoints as they were.
    """
    folder.mkdir(exist_ok=True)
    target, aside = folder / step_name(state.step), folder / f".writing-{step_name(state.step)}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        rest = {key: getattr(state, key) for key in REST}
        for name, content in zip(FILES, (state.model, state.optimizer, rest), strict=True):
            _write(content, aside / name)
            _sync(aside / name)
        files = {n: {"bytes": (aside / n).stat().st_size, "sha256": _sha256(aside / n)} for n in FILES}
        manifest = {"step": state.step, "tokens": state.tokens, "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        _sync(aside / "manifest.json")
        _sync(aside)
        if target.exists():  # the same step of an earlier leg: same bits, but whole again if it was damaged
            replaced = folder / f".replaced-{step_name(state.step)}"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
            aside.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            aside.rename(target)
        _sync(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def steps(folder: Path) -> dict[int, Path]:
    """step -> folder, in rising order of the *number* (names are padded to a width that a longer run outgrows)."""
    found = {}
    for path in folder.glob("step_*") if folder.is_dir() else ():
        if (match := STEP.fullmatch(path.name)) and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None when it is complete."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest["files"]
        for name in FILES:
            size = (path / name).stat().st_size
            if size != files[name]["bytes"]:
                return f"{name} has {size} bytes, its manifest says {files[name]['bytes']}"
            if _sha256(path / name) != files[name]["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(path: Path) -> State:
    """Read a complete checkpoint (see `damage`) onto the CPU.

    Raises RequestError when it is whole but lacks a part of the state.
    """
    model, optimizer, rest = (_read(path / name) for name in FILES)
    rest.setdefault("norms", {})  # earlier checkpoints lack it, and nothing but where a measurement starts is in it
    if missing := [key for key in REST if key not in rest]:
        raise RequestError(f"{path} lacks {', '.join(missing)}: it cannot be continued exactly. Choose another @STEP.")
    return State(model=model, optimizer=optimizer, **{key: rest[key] for key in REST})


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise RequestError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise RequestError(f"{path} is not what a checkpoint holds. Choose another @STEP.")
    return content


def load_model(path: Path) -> dict[str, Tensor]:
    """The weights of a complete checkpoint alone. Raises RequestError."""
    return _read(path / "model.pt")


def choose(run: Path, step: int | None, warn: Callable[[str], None]) -> Path | None:
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
    """Delete checkpoints beyond `step`: the run goes on from there, and its rows after it are taken back."""
    for path in [path for later, path in steps(folder).items() if later > step]:
        _delete(path)


def _delete(path: Path) -> None:
    # Renamed first: a kill in the middle of the deletion must not leave a half-empty step_ folder.
    dying = path.with_name(f".deleting-{path.name}")
    path.rename(dying)
    shutil.rmtree(dying, ignore_errors=True)


def prune(folder: Path, keep: int, keep_always: Callable[[int], bool]) -> None:
    """Delete all but the `keep` newest checkpoints and those that `keep_always` names; and what a kill left behind."""
    for path in list(steps(folder).values())[:-keep]:
        if not keep_always(int(path.name.removeprefix("step_"))):
            _delete(path)
    for left in folder.glob(".*-step_*"):
        shutil.rmtree(left, ignore_errors=True)
