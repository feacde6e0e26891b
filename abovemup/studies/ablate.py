"""An ablation: a YAML file that says what is compared over which sizes, the runs that follow, and what they say."""

import csv
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from abovemup.config.compose import compose
from abovemup.config.conf import conf_dir
from abovemup.config.errors import RequestError
from abovemup.config.io import read_yaml
from abovemup.config.keys import did_you_mean
from abovemup.config.values import shown
from abovemup.studies.axes import Axes, grid, typed, values
from abovemup.studies.board import look
from abovemup.studies.cells import Cell, Result, cell
from abovemup.studies.transfer import Curve, by_arm, draw, drift, row, sentence
from abovemup.tracking.summary import write_summary

_CONDITIONS = ("model", "data", "schedule", "train.tokens")


@dataclass(frozen=True)
class Ablation:
    question: str
    fixed: dict[str, str]
    axes: Axes
    arms: list[str]  # axes: every combination is an arm
    size: str  # an axis; its first value is where one would tune
    seeds: str  # an axis
    lr: Axes  # optimizer -> grid; "" is any


@dataclass(frozen=True)
class Point:
    """A number that the ablation asks for; several points may share a cell."""

    arm: tuple[str, ...]
    size: str
    lr: float
    seed: str
    cell: Cell


def files(config_dir: Path | None) -> dict[str, Path]:
    """Name -> YAML file, the user's own included. Raises RequestError for one that hides ours."""
    ours, theirs = (
        {path.stem: path for path in sorted((folder / "ablation").glob("*.yaml"))} if folder else {}
        for folder in (conf_dir(), config_dir)
    )
    for name in ours.keys() & theirs.keys():
        raise RequestError(f"{theirs[name]}: the ablation {name} exists already. Give the file another name.")
    return ours | theirs


def load(name: str, overrides: list[str], config_dir: Path | None) -> Ablation:
    """The ablation with what was typed: a key of an axis replaces it, any other is set in every cell. RequestError."""
    known = files(config_dir)
    if name not in known:
        hint = did_you_mean(name, list(known)) or f" There are: {', '.join(known)}; your own needs --config-dir."
        raise RequestError(f"no ablation {name}.{hint}")
    tree = read_yaml(known[name])
    try:
        sections = [
            {str(k): values(str(k), v, config_dir) for k, v in tree[part].items()} for part in ("seeds", "size", "arms")
        ]
        (seeds,), (size,), arms = sections
        lr = {str(k): values("optimizer.lr", v) for k, v in tree["lr"].items()}
        fixed = {str(k): shown(v) for k, v in tree["fixed"].items()}
        question = str(tree["question"])
    except (LookupError, AttributeError, ValueError) as error:
        expected = "question, fixed, arms, size (one key), lr (optimizer: grid), seeds (one key)"
        raise RequestError(f"{known[name]}: expected {expected}. ({type(error).__name__}: {error})") from error
    axes = {key: found for section in sections for key, found in section.items()}
    asked, lengths = typed(overrides), {"train.steps", "train.tokens"}
    if lengths & asked.keys():  # the file's may be in the other unit
        fixed = {key: value for key, value in fixed.items() if key not in lengths}
    for key, value in asked.items():
        axis = next((axis for axis in axes if key in (axis, *axis.split(","))), None)
        if key == "optimizer.lr":
            lr = {"": values(key, value)}
        elif axis is not None:
            axes[axis] = values(key, value, config_dir)
        else:
            fixed[key] = value
    if "data" in axes and "data.path" in fixed and "text" not in axes["data"]:
        axes["data"].append("text")
    return Ablation(question, fixed, axes, [*arms], size, seeds, lr)


def points(ablation: Ablation, config_dir: Path | None) -> Iterator[Point]:
    """Every point: the first seed's whole grid, small sizes first, then the next. RequestError if one is no run."""
    for at, settings in grid(ablation.axes, ablation.fixed):
        if settings.get("data") not in (None, "text", "shards"):  # the path is for the arm that reads it
            settings.pop("data.path", None)
        lrs = ablation.lr.get(settings.get("optimizer", ""), ablation.lr.get("", []))
        if not lrs:
            raise RequestError(f"no lr grid for optimizer={settings.get('optimizer')}: set optimizer.lr=log2range(..).")
        for lr in lrs:
            overrides = [f"{key}={value}" for key, value in {**settings, "optimizer.lr": lr}.items()]
            experiment = compose(overrides, config_dir=config_dir)
            arm = tuple(at[axis] for axis in ablation.arms)
            run = cell(experiment, overrides)
            yield Point(arm, at[ablation.size], experiment.optimizer.lr, at[ablation.seeds], run)


def curves(ablation: Ablation, asked: list[Point], results: dict[tuple[str, int], Result]) -> list[Curve]:
    """One for each arm and size; a cell that is not done is nan."""
    found: list[Curve] = []
    runs: dict[frozenset[tuple[str, int]], tuple[str, ...]] = {}
    for arm, size in itertools.product(dict.fromkeys(p.arm for p in asked), ablation.axes[ablation.size]):
        own = [p for p in asked if (p.arm, p.size) == (arm, size)]
        lrs, seeds = sorted({p.lr for p in own}), ablation.axes[ablation.seeds]
        losses = np.full((len(lrs), len(seeds)), math.nan)
        for p in own:
            losses[lrs.index(p.lr), seeds.index(p.seed)] = results[p.cell.id].loss
        first = runs.setdefault(frozenset(p.cell.id for p in own), arm)
        found.append(Curve(arm, size, np.log2(lrs), losses, None if first == arm else first))
    return found


def report(ablation: Ablation, asked: list[Point], folder: Path) -> dict[str, Any]:
    """The table and the verdict on what is there so far; writes points.csv, result.json and the figure in `folder`."""
    cells = {p.cell.id: p.cell for p in asked}
    results = {id: look(folder, cell) for id, cell in cells.items()}
    with open(folder / "points.csv", "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([*ablation.arms, ablation.size, "lr", "seed", "status", "val_loss", "output_norm", "cell"])
        for p in asked:
            r = results[p.cell.id]
            lines.writerow([*p.arm, p.size, p.lr, p.seed, r.status, r.loss, r.output_norm, p.cell.name])
    found = curves(ablation, asked, results)
    draw(found, ablation.size, folder)
    drifts = [drift(group[0], group[-1]) for group in by_arm(found)]
    sizes, seeds = ablation.axes[ablation.size], len(ablation.axes[ablation.seeds])
    said = ", ".join(f"{key}={ablation.fixed[key]}" for key in _CONDITIONS if key in ablation.fixed)
    out = {
        "question": ablation.question,
        "cells": dict(Counter(r.status for r in results.values())),
        "table": [row(curve) for curve in found],
        "transfer": drifts,
        "verdict": sentence(drifts, f"from {ablation.size}={sizes[0]} to {sizes[-1]}"),
        "conditions": f"{said}, {seeds} seeds; intervals: the middle 95 % of a bootstrap over the seeds, the same for "
        "every lr and size. With so few seeds that is about the range from seed to seed.",
    }
    write_summary(folder / "result.json", out)
    return out
