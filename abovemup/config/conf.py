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


def choices(config_dir: Path | None = None) -> Choices:
    """Group -> names, those of the user's folder included. Raises RequestError if it adds nothing or hides ours."""
    found = _listing(conf_dir())
    if config_dir is None:
        return found
    if not config_dir.is_dir():
        raise RequestError(f"--config-dir {config_dir}: no such folder.")
    theirs = _listing(config_dir)
    if not any(theirs.values()) and not any((config_dir / kind).is_dir() for kind in ("ablation", "budget")):
        raise RequestError(f"--config-dir {config_dir}: no YAML file in a group's folder ({', '.join(GROUPS)}).")
    for group, names in theirs.items():
        if twice := {*names} & {*found[group]}:
            file = config_dir / group / f"{min(twice)}.yaml"
            raise RequestError(f"{file}: {group}={min(twice)} exists already. Give the file another name.")
        found[group] += names
    return found


def defaults() -> dict[str, str]:
    """Group -> default choice, read from the defaults list of config.yaml."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE))


def _listing(folder: Path) -> Choices:
    for file in folder.glob("*/*.yml"):
        raise RequestError(f"{file}: the name of a choice's file ends in .yaml.")
    return {group: sorted(file.stem for file in (folder / group).glob("[!_.]*.yaml")) for group in GROUPS}
