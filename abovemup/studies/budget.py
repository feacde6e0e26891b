"""How much a study may cost: the horizons, batch sizes and learning rates of its grid, and the model they are for."""

from dataclasses import dataclass
from pathlib import Path

from abovemup.config.conf import conf_dir
from abovemup.config.errors import RequestError
from abovemup.config.io import read_yaml
from abovemup.config.numbers import parse_float
from abovemup.config.values import shown
from abovemup.studies.axes import Axes, values


@dataclass(frozen=True)
class Budget:
    """`tokens` are the horizons and `batch` the tokens a step, both ascending; `lr` is optimizer -> its grid."""

    name: str
    verdicts: bool  # whether anything may be concluded
    tokens: list[int]
    batch: list[int]
    lr: Axes
    seeds: list[str]
    fixed: dict[str, str]


def budgets(config_dir: Path | None) -> dict[str, Path]:
    """Name -> YAML file, the user's own included."""
    folders = [conf_dir(), *([config_dir] if config_dir else [])]
    return {path.stem: path for folder in folders for path in sorted((folder / "budget").glob("*.yaml"))}


def load(name: str, config_dir: Path | None = None) -> Budget:
    """Raises RequestError for one that does not exist, or lacks something."""
    known = budgets(config_dir)
    if name not in known:
        raise RequestError(f"no budget {name}. There are: {', '.join(known)}.")
    try:
        tree = read_yaml(known[name])
        tokens, batch = (sorted(int(parse_float(n)) for n in values(key, tree[key])) for key in ("tokens", "batch"))
        lr = {str(optimizer): values("optimizer.lr", grid) for optimizer, grid in tree["lr"].items()}
        fixed = {str(key): shown(value) for key, value in tree["fixed"].items()}
        return Budget(name, bool(tree["verdicts"]), tokens, batch, lr, values("seeds", tree["seeds"]), fixed)
    except (LookupError, AttributeError, ValueError, TypeError) as error:
        expected = "verdicts, tokens, batch, lr (optimizer: grid), seeds, fixed"
        raise RequestError(f"{known[name]}: expected {expected}. ({type(error).__name__}: {error})") from error
