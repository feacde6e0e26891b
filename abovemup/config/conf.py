"""Where the YAML files are, and which choices each Hydra group has. Reads file names only, so `--help` stays fast."""

import re
from pathlib import Path

from abovemup.config.errors import RequestError

GROUPS = (
    *("experiment", "model", "parameterization", "optimizer", "schedule"),
    *("data", "tokenizer", "tracking", "parallel"),
)

Choices = dict[str, list[str]]


def conf_dir() -> Path:
    """The folder of our YAML files: inside the package when it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise RequestError(f"the configuration folder is missing from {package}: reinstall abovemup.")


def files(kind: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Name -> YAML file of a group, or of the ablations or budgets, the user's own included. RequestError if one hides
    ours."""
    paths = [p for folder in (conf_dir(), config_dir) if folder for p in sorted((folder / kind).glob("[!_.]*.yaml"))]
    known: dict[str, Path] = {}
    for path in paths:
        if known.setdefault(path.stem, path) != path:
            raise RequestError(f"{path}: {kind}={path.stem} exists already. Give the file another name.")
    return known


def choices(config_dir: Path | None = None) -> Choices:
    """Group -> names, those of the user's folder included. Raises RequestError if it adds nothing or hides ours."""
    if config_dir is not None:
        if not config_dir.is_dir():
            raise RequestError(f"--config-dir {config_dir}: no such folder.")
        for file in config_dir.glob("*/*.yml"):
            raise RequestError(f"{file}: the name of a choice's file ends in .yaml.")
        if not {file.parent.name for file in config_dir.glob("*/*.yaml")} & {*GROUPS, "ablation", "budget"}:
            raise RequestError(f"--config-dir {config_dir}: no YAML file in a group's folder ({', '.join(GROUPS)}).")
    return {group: [*files(group, config_dir)] for group in GROUPS}


def defaults() -> dict[str, str]:
    """Group -> default choice, read from the defaults list of config.yaml."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))
