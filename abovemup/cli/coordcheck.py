"""`abovemup coordcheck`."""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from abovemup.cli.options import Json, Overrides
from abovemup.cli.output import FIGURES, check_file, print_json, print_table
from abovemup.config.errors import RequestError
from abovemup.config.numbers import parse_int

WIDTHS = "64,128,256,512"  # unless depths are asked for


def coordcheck(
    overrides: Overrides = None,
    widths: Annotated[str | None, typer.Option(metavar="A,B,..", help=f"Widths to compare; {WIDTHS}.")] = None,
    depths: Annotated[str | None, typer.Option(metavar="A,B,..", help="Depths to compare.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps before the comparison.")] = 10,
    expect: Annotated[Literal["flat"] | None, typer.Option(help="Exit with 1 when a pair is not flat.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw every layer: .png, .svg, .pdf.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the steepest layers in the terminal.")] = False,
    json: Json = False,
) -> None:
    """Train a few steps at several widths or depths, and say which numbers of each layer depend on the size.

    Several pairs at once: abovemup coordcheck parameterization=standard,above_mup optimizer=adam,scion
    """
    from abovemup.studies import coordplot
    from abovemup.studies.coordcheck import check, experiment, pairs

    if figure is not None:
        check_file("--figure", figure, FIGURES)
    asked = {"width": WIDTHS if widths is depths is None else widths, "depth": depths}
    sizes = {over: numbers(f"--{over}s", text) for over, text in asked.items() if text is not None}
    todo = [  # all of them, before the first is trained
        (over, [experiment(pair, over, size, steps) for size in sizes[over]])
        for pair, over in itertools.product(pairs(list(overrides or [])), sizes)
    ]
    checks = []
    for over, experiments in todo:
        result = check(over, experiments, lambda text: typer.echo(text, err=True))
        checks.append(result)
        if not json:
            print(coordplot.heading(result))
            print_table(*coordplot.table(result))
            print("\n".join([*coordplot.notes(result), *(coordplot.curves(result) if plot else ())]))
    if figure is not None:
        coordplot.save_figure(checks, figure)
    if json:
        print_json({"checks": [result.json() for result in checks]})
    if expect and not all(result.flat for result in checks):
        raise typer.Exit(1)


def numbers(option: str, text: str) -> list[int]:
    """64,128 as at least two integers above 0, rising."""
    with suppress(ValueError):
        values = sorted({parse_int(part) for part in text.split(",")})
        if len(values) > 1 and values[0] > 0:
            return values
    raise RequestError(f"{option} {text}: a slope needs two or more integers above 0 with commas: 64,128,256.")
