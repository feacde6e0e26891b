"""From choices and overrides to an `Experiment`: Hydra composes, then the schema's types, derivations and checks."""

import copy
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from abovemup.config.check import check_ranges, check_relations
from abovemup.config.conf import GROUPS, Choices, choices, conf_dir
from abovemup.config.diff import leaves
from abovemup.config.errors import RequestError
from abovemup.config.io import read_yaml
from abovemup.config.keys import SECTIONS, did_you_mean, is_key, unknown_key
from abovemup.config.overrides import Typed, parse
from abovemup.config.resolve import resolve
from abovemup.config.schema import Experiment
from abovemup.config.values import build, coerce

Tree = dict[str, Any]
# The keys a preset sets in these groups are about the choice it makes there (an lr belongs to its optimizer), so
# another choice leaves them out. What it sets on the model (gains, 2 query heads) is what it is for, and stays.
_BELONG_TO_CHOICE = tuple(group for group in GROUPS if group not in ("experiment", "model"))


def compose(overrides: list[str], config_file: Path | None = None, config_dir: Path | None = None) -> Experiment:
    """The experiment that was asked for, every value resolved and checked.

    `overrides` are `group=choice` and `key=value`; `config_file` is a run's config.yaml or a YAML file with some of its
    keys; `config_dir` adds a folder of YAML files in group folders. Keys win over the file, the file over the choices,
    and a group in `overrides` over the file's section. Keys that were open in the file are derived again, the rest of
    it stays. Raises RequestError.
    """
    available = choices(config_dir)
    typed = parse(overrides, available)
    file = _File(config_file, available, typed) if config_file else None
    tree, chosen, notes = _hydra({**(file.choices if file else {}), **typed.groups}, typed, config_dir)
    if file:
        file.lay_over(tree)
        chosen = {**chosen, **file.written_choices, **typed.groups}
    for key, value in typed.keys.items():
        _set(tree, key, value)
    _settle(tree, typed, file)
    tree = _interpolate(tree)
    sentences = tree.get("cannot_match") or []
    tree |= {
        "experiment": chosen["experiment"],
        "cannot_match": list(sentences.values()) if isinstance(sentences, dict) else sentences,
        "choices": {group: chosen[group] for group in GROUPS},
    }
    tree = coerce(Experiment, tree)
    tree["cannot_match"] += notes
    check_ranges(tree)
    tree["derived"] = resolve(tree)
    check_ranges(tree)  # what follows has the same bounds
    experiment: Experiment = build(Experiment, coerce(Experiment, tree, opened=False))
    check_relations(experiment)
    return experiment


def _hydra(groups: dict[str, str], typed: Typed, config_dir: Path | None) -> tuple[Tree, dict[str, str], list[str]]:
    """The composed tree, the choices made, and a sentence for each group whose preset settings do not apply."""
    tree, chosen = _hydra_compose(groups, config_dir)
    others = [g for g in typed.groups if g in _BELONG_TO_CHOICE]
    if chosen["experiment"] == "demo" or not others:
        return tree, chosen, []
    _, preset = _hydra_compose({"experiment": chosen["experiment"]}, config_dir)
    bare, _ = _hydra_compose({**groups, "experiment": "demo"}, config_dir)
    notes = []
    for group in others:
        if chosen[group] != preset[group] and tree[group] != bare[group]:
            tree[group] = bare[group]
            instead = f"{group}={chosen[group]} instead of {preset[group]}"
            notes.append(f"{instead}: the preset's {group} settings do not apply.")
    return tree, chosen, notes


def _hydra_compose(groups: dict[str, str], config_dir: Path | None) -> tuple[Tree, dict[str, str]]:
    return copy.deepcopy(_hydra_composed(tuple(groups.items()), config_dir))


@cache
def _hydra_composed(groups: tuple[tuple[str, str], ...], config_dir: Path | None) -> tuple[Tree, dict[str, str]]:
    """Kept: YAML files do not change meanwhile, and one process may compose many cells of a grid."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    overrides = [f"{group}={choice}" for group, choice in groups]
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=['file://{str(config_dir.resolve()).replace(chr(39), chr(92) + chr(39))}']")
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra_compose("config", overrides=overrides, return_hydra_config=True)
        chosen = {group: str(config.hydra.runtime.choices[group]) for group in GROUPS}
        tree = OmegaConf.to_container(config)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError, RecursionError) as error:
        asked = ", ".join(f"{group}={choice}" for group, choice in groups)
        raise RequestError(f"the configuration ({asked}) does not compose: {_one_line(error)}") from error
    assert isinstance(tree, dict)
    if isinstance(tree.get("experiment"), dict):
        missing = "its first line must be `# @package _global_`"
        raise RequestError(f"{config_dir}/experiment/{chosen['experiment']}.yaml: {missing}, or it sets nothing.")
    del tree["hydra"]
    return {str(key): value for key, value in tree.items()}, chosen


class _File:
    """A YAML file that lies over the composed tree: a run's config.yaml, or a part of one."""

    def __init__(self, path: Path, available: Choices, typed: Typed):
        self.path = path
        if "experiment" in typed.groups:
            preset = f"experiment={typed.groups['experiment']}"
            raise RequestError(f"{preset} sets everything, and so does {path}: drop one of them.")
        tree = read_yaml(path)
        for name, kind in (("cannot_match", list), ("derived", dict), ("choices", dict)):
            if not isinstance(tree.get(name) or kind(), kind):
                expected = "a list" if kind is list else "keys and values"
                raise RequestError(f"{path}: {name}={tree[name]}: expected {expected}.")
        self.cannot_match = tree.pop("cannot_match", None)
        opened = tree.pop("derived", None) or {}
        written = tree.pop("choices", None) or {}
        if "experiment" in tree:
            written = {"experiment": tree.pop("experiment"), **written}
        self.written_choices = {str(group): str(choice) for group, choice in written.items()}
        for group in self.written_choices:
            if group not in GROUPS:
                raise RequestError(f"{path}: unknown group {group} in its choices.{did_you_mean(group, list(GROUPS))}")
        self.choices = {g: c for g, c in self.written_choices.items() if c in available[g]}
        missing = {g: c for g, c in self.written_choices.items() if c not in available[g]}
        if "experiment" in missing and typed.groups:
            preset = f"experiment={missing['experiment']}"
            raise RequestError(f"{path} was made with {preset}, which is not here: add --config-dir.")
        kept = ((k, v) for k, v in leaves(tree) if k.partition(".")[0] not in typed.groups)
        self.values = {k: v for k, v in kept if not (k in SECTIONS and v in ({}, None))}  # an empty section is none
        for key in self.values:
            self._check(key)
        for group, choice in missing.items():
            if group not in typed.groups and group != "experiment" and f"{group}.name" not in self.values:
                near = did_you_mean(choice, available[group])
                raise RequestError(f"{path}: {group}={choice}: no such choice.{near} Your own needs --config-dir.")
        self.values |= {key: value for key, value in opened.items() if key in self.values}

    def _check(self, key: str) -> None:
        if key in SECTIONS:
            choice = f"choices: {{{key}: {self.values[key]}}}"
            raise RequestError(f"{self.path}: {key} is a section. A choice is written {choice}.")
        group, _, rest = key.partition(".")
        if not is_key(key) and not (group in GROUPS and rest == "name"):
            raise RequestError(f"{self.path}: {unknown_key(key)}")

    def lay_over(self, tree: Tree) -> None:
        if any(key == "optimizer.args" or key.startswith("optimizer.args.") for key in self.values):
            tree["optimizer"]["args"] = {}
        for key, value in self.values.items():
            _set(tree, key, value)
        if self.cannot_match is not None:
            tree["cannot_match"] = self.cannot_match


def _settle(tree: Tree, typed: Typed, file: _File | None) -> None:
    """Of two keys that say the same, the one that was set last counts: the other opens, whatever it was before."""
    layers = [typed.keys, file.values if file else {}]
    for first, second in (("train.steps", "train.tokens"), ("model.heads", "model.head_dim"), ("run.name", "run.dir")):
        for layer in layers:
            given = [key for key in (first, second) if layer.get(key) is not None]
            if len(given) == 2 and first == "train.steps":
                raise RequestError(f"{first}={layer[first]} and {second}={layer[second]} are both given: keep one.")
            if len(given) == 1:
                _set(tree, second if given == [first] else first, None)
            if given:
                break


def _interpolate(tree: Tree) -> Tree:
    """Hydra's `${other.key}`, resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RequestError(f"the configuration does not resolve: {_one_line(error)}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _set(tree: Tree, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = copy.deepcopy(value)


def _one_line(error: Exception) -> str:
    """Without the places where Hydra looked, which are many."""
    text = re.split(r"\.?\s*(?:Available options in|Config search path)", str(error) or str(error.__cause__))[0]
    return textwrap.shorten(text, 300, placeholder="...") + "."
