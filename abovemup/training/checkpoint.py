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
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abovemup.config.errors import RequestError
from abovemup.config.io import write_whole

FILES = ("model.pt", "optimizer.pt", "state.pt")
STEP = re.compile(r"step_\d+")


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
    target = folder / f"step_{state.step:08d}"
    aside = target.with_name(f".writing-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        rest = {key: value for key, value in vars(state).items() if key not in ("model", "optimizer")}
        for name, content in zip(FILES, (state.model, state.optimizer, rest), strict=True):
            _write(content, aside / name)
            _sync(aside / name)
        files = {n: {"bytes": (aside / n).stat().st_size, "sha256": _sha256(aside / n)} for n in FILES}
        manifest = {"step": state.step, "tokens": state.tokens, "files": files}
        write_whole(aside / "manifest.json", json.dumps(manifest, indent=1) + "\n")
        _sync(aside)
        replaced = target.with_name(f".replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():  # of an earlier leg; there is none only from here to the next line
            target.rename(replaced)
        aside.rename(target)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def steps(folder: Path) -> dict[int, Path]:
    """step -> folder, in rising order of the *number* (names are padded to a width that a longer run outgrows)."""
    paths = [path for path in folder.glob("step_*") if STEP.fullmatch(path.name) and path.is_dir()]
    return dict(sorted((int(path.name.removeprefix("step_")), path) for path in paths))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, None when it is complete."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        for name in FILES:
            if _sha256(path / name) != files[name]["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(path: Path) -> State:
    """Read a complete checkpoint (see `damage`) onto the CPU.

    Raises RequestError when it is whole but lacks a part of the state.
    """
    rest = read(path / "state.pt")
    if missing := [key for key in ("step", "tokens", "rng", "last_row", "pending") if key not in rest]:
        raise RequestError(f"{path} lacks {', '.join(missing)}: it cannot be continued exactly. Choose another @STEP.")
    return State(model=read(path / "model.pt"), optimizer=read(path / "optimizer.pt"), **rest)


def read(path: Path) -> dict[str, Any]:
    """One of the files of a complete checkpoint."""
    return torch.load(path, map_location="cpu", weights_only=True)


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
    """Delete checkpoints beyond `step`: the run goes on from there, and its rows after it are taken back."""
    for later, path in steps(folder).items():
        if later > step:
            _delete(path)


def _delete(path: Path) -> None:
    # Renamed first: a kill in the middle of the deletion must not leave a half-empty step_ folder.
    dying = path.with_name(f".deleting-{path.name}")
    path.rename(dying)
    shutil.rmtree(dying, ignore_errors=True)


def prune(folder: Path, keep: int, keep_always: Callable[[int], bool]) -> None:
    """Delete all but the `keep` newest checkpoints and those that `keep_always` names; and what a kill left behind."""
    for step, path in list(steps(folder).items())[:-keep]:
        if not keep_always(step):
            _delete(path)
    for left in folder.glob(".*-step_*"):
        shutil.rmtree(left, ignore_errors=True)
