"""A sweep: every combination of the values that were typed is a cell."""

from pathlib import Path

from abovemup.config.compose import compose
from abovemup.studies.axes import grid, typed, values
from abovemup.studies.cells import Cell, cell


def cells_of(overrides: list[str], config_dir: Path | None) -> list[Cell]:
    """Each once, in the order of the grid. Raises RequestError if one is no run."""
    axes = {key: values(key, text, config_dir) for key, text in typed(overrides).items()}
    found: dict[tuple[str, int], Cell] = {}
    for _, settings in grid(axes, {}):
        asked = [f"{key}={value}" for key, value in settings.items()]
        one = cell(compose(asked, config_dir=config_dir), asked)
        found.setdefault(one.id, one)
    return list(found.values())
