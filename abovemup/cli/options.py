"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="What differs from the defaults: choices (model=pocket) and keys."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A run's config.yaml, or a YAML file with some of its keys."),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", metavar="DIR", help="Your own choices: optimizer/mine.yaml, ..."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or its name under runs/.")]
