"""From choices and overrides to an `Experiment`: Hydra composes, then the schema's types, derivations and checks."""

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from abovemup.config.conf import GROUPS, Choices, choices, conf_dir
from abovemup.config.errors import RequestError
from abovemup.config.io import read_yaml
from abovemup.config.keys import SECTIONS, did_you_mean, leaves
from abovemup.config.overrides import Asked, parse
from abovemup.config.resolve import resolve
from abovemup.config.schema import Experiment
from abovemup.config.tokenizer_file import of_shards
from abovemup.config.values import Values, build, coerce, refuse_unknown

Tree = dict[str, Any]
# The keys a preset sets in these groups are about the choice it makes there (an lr belongs to its optimizer), so
# another choice leaves them out. What it sets on the model (gains, 2 query heads) is what it is for, and stays.
_BELONG_TO_CHOICE = tuple(group for group in GROUPS if group not in ("experiment", "model"))
# Of two keys that say the same, the one that was set last counts: the other opens, whatever it was before.
_PAIRS = (("train.steps", "train.tokens"), ("model.heads", "model.head_dim"), ("run.name", "run.dir"))


def compose(overrides: list[str], config_file: Path | None = None, config_dir: Path | None = None) -> Experiment:
    """The experiment that was asked for, every value resolved and checked.

    `overrides` are `group=choice` and `key=value`; `config_file` is a run's config.yaml or a YAML file with some of its
    keys; `config_dir` adds a folder of YAML files in group folders. Keys win over the file, the file over the choices,
    and a group in `overrides` over the file's section. Keys that were open in the file are derived again, the rest of
    it stays. Raises RequestError.
    """
    available = choices(config_dir)
    typed = parse(overrides, available)
    file = _read(config_file, available, typed) if config_file else Asked()
    groups = {**file.groups, **typed.groups}
    tree, chosen, notes = _hydra({g: c for g, c in groups.items() if c in available[g]}, typed, config_dir)
    chosen |= groups
    values = _layered(tree, file.keys | typed.keys)
    for pair in _PAIRS:
        given = [[key for key in pair if layer.get(key) is not None] for layer in (typed.keys, file.keys)]
        if last := given[0] or given[1]:
            values |= dict.fromkeys({*pair} - {*last})
    values |= {"experiment": chosen["experiment"], "choices": {group: chosen[group] for group in GROUPS}}
    opened: Values = {}
    values = coerce(values, opened)
    values["cannot_match"] += notes
    if values["data.name"] == "shards":
        asked = ["tokenizer.name"] * ("tokenizer" in typed.groups) + [key for key in typed.keys if key in values]
        named = {key.removeprefix("tokenizer."): values[key] for key in asked if key.startswith("tokenizer.")}
        values |= {f"tokenizer.{key}": value for key, value in of_shards(values["data.path"], named).items()}
    resolve(values)
    # The number of threads is in the last bits of a run: one that is repeated elsewhere, or wider, keeps it.
    values["derived"] = {key: how for key, how in opened.items() if key != "train.threads"}
    experiment: Experiment = build(coerce(values))  # what followed has the same bounds
    return experiment


def _read(path: Path, available: Choices, typed: Asked) -> Asked:
    """What a YAML file asks for that lies over the composed tree: a run's config.yaml, or a part of one."""
    if "experiment" in typed.groups:
        preset = f"experiment={typed.groups['experiment']}"
        raise RequestError(f"{preset} sets everything, and so does {path}: drop one of them.")
    tree = read_yaml(path)
    for name, kind in (("cannot_match", list), ("derived", dict), ("choices", dict)):
        if not isinstance(tree.get(name) or kind(), kind):
            raise RequestError(f"{path}: {name}={tree[name]}: expected a {kind.__name__}.")
    opened = tree.pop("derived", None) or {}
    written = {"experiment": tree.pop("experiment", None), **(tree.pop("choices", None) or {})}
    groups = {str(group): str(choice) for group, choice in written.items() if choice is not None}
    # An empty section is none, and one whose group was typed is composed again.
    found = {k: v for k, v in leaves(tree) if not (k in SECTIONS and not v) and k.partition(".")[0] not in typed.groups}
    try:
        refuse_unknown(found)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    for group, choice in groups.items():
        if group not in GROUPS:
            raise RequestError(f"{path}: unknown group {group} in its choices.{did_you_mean(group, list(GROUPS))}")
        # A run's own file is whole without the choices that made it; without its preset, if nothing is composed again.
        whole = group in typed.groups or f"{group}.name" in found
        if group == "experiment":
            whole = not typed.groups and "model.name" in found
        if choice not in available[group] and not whole:
            near = did_you_mean(choice, available[group])
            raise RequestError(f"{path}: {group}={choice}: no such choice.{near} Your own needs --config-dir.")
    return Asked(groups, found | {key: how for key, how in opened.items() if key in found})


def _hydra(groups: dict[str, str], typed: Asked, config_dir: Path | None) -> tuple[Tree, dict[str, str], list[str]]:
    """The composed tree, the choices made, and a sentence for each group whose preset settings do not apply."""
    tree, chosen = map(dict, _composed(tuple(groups.items()), config_dir))
    notes = []
    others = [group for group in typed.groups if group in _BELONG_TO_CHOICE]
    if others and chosen["experiment"] != "demo":
        _, preset = _composed((("experiment", chosen["experiment"]),), config_dir)
        bare, _ = _composed(tuple({**groups, "experiment": "demo"}.items()), config_dir)
        for group in others:
            if chosen[group] != preset[group] and tree[group] != bare[group]:
                tree[group] = bare[group]
                instead = f"{group}={chosen[group]} instead of {preset[group]}"
                notes.append(f"{instead}: the preset's {group} settings do not apply.")
    return tree, chosen, notes


@cache
def _composed(groups: tuple[tuple[str, str], ...], config_dir: Path | None) -> tuple[Tree, dict[str, str]]:
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
        tree: Any = OmegaConf.to_container(config)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError, RecursionError) as error:
        asked = ", ".join(f"{group}={choice}" for group, choice in groups)
        raise RequestError(f"the configuration ({asked}) does not compose: {_one_line(error)}") from error
    if isinstance(tree.get("experiment"), dict):
        missing = "its first line must be `# @package _global_`"
        raise RequestError(f"{config_dir}/experiment/{chosen['experiment']}.yaml: {missing}, or it sets nothing.")
    del tree["hydra"]
    return tree, chosen


def _layered(tree: Tree, keys: Values) -> Values:
    """The tree's values with the keys over them, and Hydra's `${other.key}` resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.create(tree)
        for key, value in keys.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RequestError(f"the configuration does not resolve: {_one_line(error)}") from error
    sentences = resolved.get("cannot_match") or []  # a preset writes a mapping, which another can add to
    resolved["cannot_match"] = list(sentences.values()) if isinstance(sentences, dict) else sentences
    return dict(leaves(resolved))


def _one_line(error: Exception) -> str:
    """Without the places where Hydra looked, which are many."""
    text = re.split(r"\.?\s*(?:Available options in|Config search path)", str(error) or str(error.__cause__))[0]
    return textwrap.shorten(text, 300, placeholder="...") + "."
