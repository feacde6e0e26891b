"""A sweep: every combination of the values that were typed is a cell."""

from pathlib import Path

from abovemup.config.compose import compose
from abovemup.studies.axes import grid, typed, values
from abovemup.studies.budget import load
from abovemup.studies.cells import Cell, cell


def cells_of(overrides: list[str], config_dir: Path | None, budget: str | None = None) -> list[Cell]:
    """Each once, in the order of the grid; a budget's horizons and what it fixes give way to what was typed. Raises
    RequestError if one is no run."""
    axes, fixed = {key: values(key, text, config_dir) for key, text in typed(overrides).items()}, {}
    if budget:
        limits = load(budget, config_dir)
        fixed = {key: value for key, value in limits.fixed.items() if key.partition(".")[0] not in axes}
        if not {"train.tokens", "train.steps"} & {*axes}:
            axes["train.tokens"] = [str(n) for n in limits.tokens]
    found: dict[tuple[str, int], Cell] = {}
    for _, settings in grid(axes, fixed):
        asked = [f"{key}={value}" for key, value in settings.items()]
        one = cell(compose(asked, config_dir=config_dir), asked)
        found.setdefault(one.id, one)
    return list(found.values())
