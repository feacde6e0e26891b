"""Which run a command means: a new one, an old one continued (`--resume`), a new one from an old point (`--branch`)."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from abovemup.config import io
from abovemup.config.cadence import parse_tokens
from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.keys import differences
from abovemup.config.schema import Experiment
from abovemup.data.split import Amount
from abovemup.training import checkpoint

# What may change when a run goes on: how far, how often things are looked at, where they are sent, and over which ranks
# and in how little memory it goes.
CONTINUABLE = (
    *("train.steps", "train.tokens", "train.recompute", "train.loss_chunk", "eval.every", "norms.every"),
    *("checkpoint.", "tracking.", "parallel.name", "parallel.replicate", "parallel.tensor"),
)
BRANCHABLE = (*CONTINUABLE, "schedule.")
IGNORED = ("run.", "experiment")  # names


def run_folder(text: str) -> Path:
    """The run directory that `text` names: a path, or a name under runs/. Raises RequestError."""
    for path in (Path(text), Path("runs") / text):
        if (path / "config.yaml").is_file():
            return path
    have = sorted(p.parent.name for p in Path("runs").glob("*/config.yaml"))
    known = f" runs/ holds: {', '.join(have[-8:])}." if have else ""
    raise RequestError(f"{text} is not a run: it has no config.yaml.{known}")


def split_at(text: str) -> tuple[str, str | None]:
    """`RUN@POINT` -> (RUN, POINT); a path that itself holds an @ wins over the reading as a point."""
    run, at, point = text.rpartition("@")
    return (run, point) if at and not Path(text).exists() else (text, None)


@dataclass(frozen=True)
class Start:
    """Where a command starts from."""

    experiment: Experiment
    origin: Path | None = None  # the earlier run that is continued or branched from
    step: int | None = None  # the step that --resume asks for; None: the newest
    source: Path | None = None  # the checkpoint of a --branch
    summary: dict[str, Any] = field(default_factory=dict)  # of the earlier run; empty where it cannot be read


def start(
    overrides: list[str], config_file: Path | None, config_dir: Path | None, resume: str | None, branch: str | None
) -> Start:
    """What the overrides and at most one of `--config`, `--resume` and `--branch` mean. Raises RequestError."""
    if sum(x is not None for x in (config_file, resume, branch)) > 1:
        raise RequestError("--config, --resume and --branch each say where the settings come from: give one of them.")
    if resume is not None:
        return resume_from(resume, overrides, config_dir)
    if branch is not None:
        return branch_from(branch, overrides, config_dir)
    return Start(compose(overrides, config_file=config_file, config_dir=config_dir))


def read_summary(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads((folder / "summary.json").read_text()), dict):
            return found
    return {}


def resumed_checkpoint(folder: Path, start: Start, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint that a resumed run goes on from; None for one that was ended before its first. RequestError."""
    found, status = checkpoint.choose(folder, start.step, warn), start.summary.get("status", "running")
    if found is None and status not in ("running", "failed"):  # starting again would replace what it did
        raise RequestError(f"the checkpoints of {folder} are gone, and it is {status}. Start a new run.")
    return found


def resume_from(text: str, overrides: list[str], config_dir: Path | None) -> Start:
    """The meaning of `--resume RUN[@STEP]`. Raises RequestError."""
    name, point = split_at(text)
    if point is not None and not point.isdecimal():
        raise RequestError(f"--resume {text}: the part after @ is a step, for example {name}@100.")
    folder = run_folder(name)
    if moved := [o for o in overrides if o.lstrip("+").startswith("run.")]:
        raise RequestError(f"--resume {name} goes on in its own folder: {moved[0]} would be another. Use --branch.")
    old, new = changed(folder, overrides, config_dir, CONTINUABLE, f"--resume {name}")
    if new.train.steps != old.train.steps and old.schedule.name != "constant":
        raise RequestError(
            f"{name} decays its learning rate over {old.train.steps} steps: it cannot be made longer or shorter "
            f"({new.train.steps} steps).\nStart a tail from one of its checkpoints with --branch {name}@TOKENS."
        )
    step = None if point is None else int(point)
    return Start(with_schedule(new, old), folder, step, summary=read_summary(folder))


def branch_from(text: str, overrides: list[str], config_dir: Path | None) -> Start:
    """The meaning of `--branch RUN@TOKENS`. Raises RequestError."""
    name, point = split_at(text)
    if point is None:
        raise RequestError(f"--branch {text}: say at how many tokens, for example --branch {name}@2^21.")
    folder, tokens = run_folder(name), parse_tokens(point)
    old, new = changed(folder, overrides, config_dir, BRANCHABLE, f"--branch {text}")
    batch = old.train.batch_size * old.train.seq_len
    found = checkpoint.steps(folder / "checkpoints")
    if tokens % batch or tokens // batch not in found:
        have = ", ".join(f"{step * batch}" for step in found) or "none"
        raise RequestError(
            f"{name} has no checkpoint at {tokens} tokens. It has: {have}.\n"
            "checkpoint.every=pow2 keeps one at every power of two."
        )
    step = tokens // batch
    if new.train.steps <= step:
        raise RequestError(
            f"the branch starts at step {step} ({tokens} tokens) and would end at {new.train.tokens} tokens. "
            f"Say how far it goes: train.tokens={2 * tokens}."
        )
    if "schedule" not in sections(overrides):
        if old.schedule.name != "constant" and new.train.steps != old.train.steps:
            raise RequestError(
                f"{name} decays its learning rate over {old.train.steps} steps, the branch has {new.train.steps}: "
                "say how it decays, for example schedule=wsd schedule.decay=0.25."
            )
        new = with_schedule(new, old)
    return Start(new, folder, source=checkpoint.choose(folder, step), summary=read_summary(folder))


def changed(
    folder: Path, overrides: list[str], config_dir: Path | None, allowed: tuple[str, ...], what: str
) -> tuple[Experiment, Experiment]:
    """The run's experiment as it was, and with the overrides. Raises RequestError for one that is not `allowed`."""
    old = io.load(folder / "config.yaml")
    new = compose(overrides, config_file=folder / "config.yaml", config_dir=config_dir)
    refused = [
        f"{key} was {before}, is now {after}"
        for key, before, after in differences(old, new)
        if not key.startswith((*allowed, *IGNORED))
        # A warm-up given as a fraction moves with the horizon unless it stays what it was.
        and not (key.startswith("schedule.") and "schedule" not in sections(overrides))
    ]
    if refused:
        raise RequestError(
            f"{what}: {'; '.join(refused[:4])}.\n"
            "Only the horizon, cadences, tracking and parallel may change; start a new run for the rest."
        )
    return old, new


def with_schedule(new: Experiment, old: Experiment) -> Experiment:
    """`new` with the schedule of `old`, which over a new horizon no longer follows it."""
    settled = new.train.steps != old.train.steps
    derived = {key: how for key, how in new.derived.items() if not (settled and key.startswith("schedule."))}
    return dataclasses.replace(new, schedule=old.schedule, derived=derived)


def amount(summary: dict[str, Any]) -> Amount | None:
    """What a run has of a remote source; None for a new run, and where nothing is known."""
    with suppress(LookupError, TypeError):  # `check_origin` says what is wrong
        return Amount(*summary["data"]["source"]["amount"])
    return None


def check_origin(start: Start, manifest: dict[str, Any], note: Callable[[str], None]) -> None:
    """Raise RequestError when the tokens are not those that the earlier run began with; note another torch."""
    folder, summary = start.origin, start.summary
    try:
        before, torch_before = tokens_of(summary["data"]), summary["versions"]["torch"]
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{folder}/summary.json is damaged, or does not say which data the run began with.\n"
            "Restore the file, or start a new run."
        ) from error
    now = tokens_of(manifest)
    if before != now:
        raise RequestError(
            f"the data of {folder} has changed since the run began: its tokens were {before}, are now {now}.\n"
            "Restore the data, or start a new run."
        )
    if torch_before != torch.__version__:
        note(f"warning: {folder} was made with torch {torch_before}, this is {torch.__version__}: not the same bits")


def tokens_of(manifest: dict[str, Any]) -> str:
    """What identifies the tokens of a corpus: the checksums of its shards, or the settings of an endless source."""
    if "train" not in manifest:
        return str(sorted(manifest["source"].items()))
    shards = [*manifest["train"]["shards"], *manifest["validation"]["shards"]]
    digest = hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()
    return f"{sum(shard['tokens'] for shard in shards):,}, sha256 {digest[:12]}"


def sections(overrides: list[str]) -> set[str]:
    """The sections and groups that overrides touch."""
    return {o.lstrip("+").split("=", 1)[0].split(".", 1)[0].strip() for o in overrides}
