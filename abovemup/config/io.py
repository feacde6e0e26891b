"""config.yaml: the whole experiment as plain YAML, to the last bit of every float."""

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import yaml

from abovemup.config.errors import RequestError
from abovemup.config.keys import leaves
from abovemup.config.schema import Experiment
from abovemup.config.values import build, coerce


def save(experiment: Experiment, path: Path) -> None:
    """Writes the experiment, its choices and its open keys included, as YAML of plain types."""
    write_whole(path, yaml.safe_dump(dataclasses.asdict(experiment), sort_keys=False, allow_unicode=True, width=1000))


def write_whole(path: Path, text: str) -> None:
    """Replace `path` at once: a reader, or a crash, finds the old file or the new one, never a part."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.aside")  # each writer has its own
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def sha256(path: Path) -> str:
    """Of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path) -> Experiment:
    """The experiment that `save` wrote, exactly. Raises RequestError when the file is missing, broken or incomplete."""
    tree = read_yaml(path)
    try:
        return build(coerce(dict(leaves(tree))))
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


class _Strict(yaml.SafeLoader):
    def mapping(self, node: Any) -> dict[Any, Any]:
        """PyYAML's own keeps the last of two equal keys, and makes one that holds itself (not when it is `deep`)."""
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is given twice")
        return self.construct_mapping(node, deep=True)


_Strict.add_constructor("tag:yaml.org,2002:map", _Strict.mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises RequestError when there is none, or when a key is in it twice."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2020-99-99
        raise RequestError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise RequestError(f"{path}: keys and values are expected, as in a run's config.yaml.")
    return tree
