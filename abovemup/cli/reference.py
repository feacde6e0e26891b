"""The part of `abovemup train --help` that says what can be chosen and set. Reads file names, imports no Hydra."""

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from abovemup.config.conf import choices, defaults
from abovemup.config.keys import keys

# Resolved from the model, or rows of an optimizer's table: set in YAML files rather than typed.
_SELDOM = ("model.base.", "optimizer.roles.", "model.rope_theta", "model.norm_eps")


def print_reference() -> None:
    first = defaults()
    groups = {group: ", ".join(dict.fromkeys([first[group], *names])) for group, names in choices().items()}
    sections: dict[str, str] = {}
    for section, _, name in (key.partition(".") for key in keys() if not key.startswith(_SELDOM)):
        sections[f"{section}."] = f"{sections.get(f'{section}.', '')} {name}".strip()
    console = Console(highlight=False)
    console.print(_panel("Groups: GROUP=CHOICE (the first is the default)", groups))
    console.print(_panel("Keys: SECTION.KEY=VALUE", sections))
    numbers = "Integers: 64, 1e6, 10M, 2^20. Floats: 0.1, 2^-4. Cadences: 200 (steps), 2^16tok (tokens), pow2."
    console.print(Text(f" {numbers} null opens a key.\n"))


def _panel(title: str, rows: dict[str, str]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(Text(name), Text(text))
    return Panel(table, title=Text(title), title_align="left", border_style="dim")
