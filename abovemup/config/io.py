"""config.yaml: the whole experiment as plain YAML, to the last bit of every float."""

import dataclasses
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError
from abovemup.config.schema import Experiment
from abovemup.config.values import build, coerce


def save(experiment: Experiment, path: Path) -> None:
    """Writes the experiment, its choices and its open keys included, as YAML of plain types."""
    import yaml

    text = yaml.safe_dump(dataclasses.asdict(experiment), sort_keys=False, allow_unicode=True, width=1000)
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> Experiment:
    """The experiment that `save` wrote, exactly. Raises RequestError when the file is missing, broken or incomplete."""
    try:
        experiment: Experiment = build(Experiment, coerce(Experiment, read_yaml(path), opened=False))
    except RequestError as error:
        raise error if str(path) in str(error) else RequestError(f"{path}: {error}") from error
    return experiment


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises RequestError when there is none."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise RequestError(f"{path} cannot be read: {reason}.") from error
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise RequestError(f"{path}: keys and values are expected, as in a run's config.yaml.")
    return tree
