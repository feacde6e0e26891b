"""summary.json: how a run stands, and with what it was made."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from abovemup.config.io import write_whole
from abovemup.tracking.records import Summary, dumps

PACKAGES = ("abovemup", "torch", "numpy", "tokenizers", "datasets", "hydra-core", "wandb")


def write_summary(path: Path, summary: Summary) -> None:
    """Replace `path` by `summary`, whole."""
    write_whole(path, dumps(summary, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Versions, machine and git commits, as plain types. Imports none of the packages it names.

    `git`: the commit of abovemup's own checkout (None for an installed wheel) and of the working directory, where
    a user's own optimizer may live; "-dirty" marks uncommitted changes.
    """
    package = Path(__file__).parents[1]
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        # A wheel inside a virtual environment may lie in somebody else's checkout: its commit says nothing about us.
        "git": {
            "abovemup": _commit(package) if _git(package, "ls-files", "__init__.py") else None,
            "cwd": _commit(Path.cwd()),
        },
        "machine": {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
