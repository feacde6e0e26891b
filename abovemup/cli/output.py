"""Tables and numbers that are whole wherever they are printed: no cell is cut, and no markup is read into a text."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from abovemup.config.errors import RequestError

FIGURES = (".png", ".svg", ".pdf")


def print_table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table at its natural width, on a terminal and in a pipe. Numbers stand on the right, floats in four digits."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from abovemup.config.values import shown

    cells = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for i, column in enumerate(columns):
        number = bool(cells) and all(isinstance(row[i], int | float) for row in cells)
        table.add_column(Text(column), justify="right" if number else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(f"{value:.4g}" if isinstance(value, float) else shown(value)) for value in row))
    console = Console(width=10**6, height=100, highlight=False)  # both, or TERM=dumb is 80 wide
    console.width = max(1, console.measure(table).maximum)
    with console.capture() as capture:  # Rich's own print would end the process at a closed pipe
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n")))


def print_json(value: Any) -> None:
    """Non-finite numbers become the strings of metrics.jsonl: the output is JSON whatever happened."""
    from abovemup.tracking.records import dumps

    print(dumps(value, indent=2))


def check_file(option: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """Before any work: raises RequestError where no file can be written, or one that is not ours would be lost."""
    if suffixes and path.suffix not in suffixes:
        raise RequestError(f"{option} {path}: write {', '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {path}: there is no folder {path.parent}.")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RequestError(f"{option} {path} is no regular file.")
    if (path.parent / "metrics.jsonl").exists():
        raise RequestError(f"{option} {path} lies in a run: choose a place of its own.")
