"""What is true of a place and not of a run: ~/.config/abovemup/site.yaml. None of it is in a config, or in a hash."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError
from abovemup.config.io import read_yaml
from abovemup.config.keys import did_you_mean


@dataclass(frozen=True)
class Site:
    cache: str | None = None  # the folder of prepared data and of what fits have read; ABOVEMUP_CACHE wins
    entity: str | None = None  # W&B's; tracking.entity wins
    launcher: dict[str, Any] = field(default_factory=dict)  # of --launcher slurm: partition, account, ...


def site_file() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config"), "abovemup", "site.yaml")


def site() -> Site:
    """What the file says; nothing where there is none. Raises RequestError that names the file."""
    path = site_file()
    if not path.is_file():
        return Site()
    tree, known = read_yaml(path), ["cache", "entity", "launcher"]
    for key, value in tree.items():
        if key not in known or not isinstance(value, dict if key == "launcher" else str | None):
            hint = "" if key in known else did_you_mean(key, known)
            raise RequestError(f"{path}: {key}={value}.{hint} cache and entity are texts, launcher is keys and values.")
    return Site(**tree)


def cache_folder() -> Path:
    """Raises RequestError for the home of nobody."""
    try:
        return Path(os.environ.get("ABOVEMUP_CACHE") or site().cache or "~/.cache/abovemup").expanduser()
    except RuntimeError as error:
        raise RequestError(f"no folder for prepared data: {error} Set ABOVEMUP_CACHE to a folder.") from error
