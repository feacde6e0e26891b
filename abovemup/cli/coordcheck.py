"""`abovemup coordcheck`."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abovemup.cli.options import Debug, Json, Overrides

if TYPE_CHECKING:
    from abovemup.studies.coordcheck import Check, Row

WIDTHS = "64,128,256,512"  # unless depths are asked for
LETTERS = {  # the columns, in the order of `coordcheck.QUANTITIES`
    "norm": "|W|",
    "update": "|dW|",
    "forward": "forward",
    "dependency": "depend.",
    "stability": "update",
    "change": "d output",
    "rms": "output",
    "logit": "logit",
}


def coordcheck(
    overrides: Overrides = None,
    widths: Annotated[str | None, typer.Option(metavar="A,B,..", help=f"Widths to compare; {WIDTHS}.")] = None,
    depths: Annotated[str | None, typer.Option(metavar="A,B,..", help="Depths to compare.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps before the comparison.")] = 10,
    expect: Annotated[str | None, typer.Option(metavar="flat", help="Exit with 1 when a pair is not flat.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw every layer: .png, .svg, .pdf.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the steepest layers in the terminal.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a few steps at several widths or depths, and say which numbers of each layer depend on the size.

    Several pairs at once: abovemup coordcheck parameterization=standard,above_mup optimizer=adam,scion
    """
    from abovemup.cli.output import print_json
    from abovemup.config.errors import RequestError
    from abovemup.studies import coordplot
    from abovemup.studies.coordcheck import check, pairs

    if expect not in (None, "flat"):
        raise RequestError(f"--expect {expect}: the one expectation is flat.")
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise RequestError(f"--figure {figure}: write .png, .svg or .pdf.")
    asked = {"width": widths if widths or depths else WIDTHS, "depth": depths}
    sizes = {over: numbers(f"--{over}s", text) for over, text in asked.items() if text is not None}
    checks = []
    for pair, over in itertools.product(pairs(list(overrides or [])), sizes):
        checks.append(check(pair, over, sizes[over], steps, lambda text: typer.echo(text, err=True)))
        if not json:
            print_check(checks[-1])
            if plot:
                print("\n".join(coordplot.curves(checks[-1])))
    if figure is not None:
        coordplot.save_figure(checks, figure)
    if json:
        print_json({"checks": [result.json() for result in checks]})
    if expect == "flat" and not all(result.flat for result in checks):
        raise typer.Exit(1)


def numbers(option: str, text: str) -> list[int]:
    """64,128 as integers above 0. Raises RequestError."""
    from abovemup.config.errors import RequestError

    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise RequestError(f"{option} {text}: write whole numbers with commas, such as 64,128,256.")
    return values


def print_check(result: "Check") -> None:
    """The slopes, a line a layer; then what is not sound, and one sentence."""
    from abovemup.cli.output import print_table

    by_layer: dict[str, dict[str, Row]] = {}
    for row in result.rows:
        by_layer.setdefault(row.layer, {})[row.quantity] = row
    over = f"log2({result.over}), {result.over} {', '.join(map(str, result.sizes))}"
    pair = f"{result.parameterization} x {result.optimizer}, lr {result.lr:g}"
    print(f"{pair}: slopes of log2(value at step {result.steps}) over {over}")
    lines = [[layer, *(cell(rows.get(q)) for q in LETTERS)] for layer, rows in by_layer.items()]
    print_table(["layer", *LETTERS.values()], lines)
    print("! outside the tolerance; brackets: shown, not judged; <= the value is an upper bound.")
    print_conditions(result)
    for size in result.diverged:
        print(f"diverged at {result.over} {size}")
    print(sentence(result))


def cell(row: "Row | None") -> str:
    if row is None:
        return ""
    slope = f"{row.slope:+.2f}" + ("" if row.exact else "<=")
    return f"({slope})" if not row.judged else slope if row.sound else f"{slope}!"


def print_conditions(result: "Check") -> None:
    loose = {row.layer: row.input_rms for row in result.rows if row.input_rms is not None}
    if loose:
        largest = max(loose, key=lambda layer: loose[layer] or 0)
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for layer in loose}))
        print(
            f"No norm in front of {kinds}: their metrics are conditional on RMS(x) = 1 "
            f"(the largest input RMS measured: {loose[largest]:.3g}, {largest})."
        )


def sentence(result: "Check") -> str:
    from abovemup.studies.coordcheck import NORM_TOLERANCE, RMS_TOLERANCE

    tolerance = (
        f"role norms within {NORM_TOLERANCE:g}; RMS of residual stream, FFN middle and output < {RMS_TOLERANCE:g}"
    )
    name = f"{result.parameterization} x {result.optimizer}"
    if result.flat:
        return f"flat: {name} ({tolerance})"
    wrong = sorted((row for row in result.rows if not row.sound), key=lambda row: -abs(row.slope))
    worst = ", ".join(f"{LETTERS[row.quantity]} of {row.layer} {row.verdict} {row.slope:+.2f}" for row in wrong[:3])
    return f"not flat: {name}: {len(wrong)} slopes; {worst or 'it diverged'} ({tolerance})"
