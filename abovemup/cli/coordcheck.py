"""`abovemup coordcheck`."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from abovemup.cli.options import Debug, Json, Overrides
from abovemup.config.errors import RequestError

if TYPE_CHECKING:
    from abovemup.studies.coordcheck import Check, Row

WIDTHS = "64,128,256,512"  # unless depths are asked for


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
    from abovemup.cli.output import FIGURES, check_file, print_json
    from abovemup.studies import coordplot
    from abovemup.studies.coordcheck import check, experiment, pairs

    if expect not in (None, "flat"):
        raise RequestError(f"--expect {expect}: the one expectation is flat.")
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
        checks.append(check(over, experiments, lambda text: typer.echo(text, err=True)))
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
    """64,128 as at least two integers above 0, rising."""
    from abovemup.config.numbers import parse_int

    try:
        values = sorted({parse_int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if len(values) < 2 or values[0] < 1:
        raise RequestError(f"{option} {text}: a slope needs two or more integers above 0 with commas: 64,128,256.")
    return values


def print_check(result: "Check") -> None:
    """The slopes, a line a layer; then what is not sound, and one sentence."""
    from abovemup.cli.output import print_table
    from abovemup.studies.coordcheck import QUANTITIES

    by_layer: dict[str, dict[str, Row]] = {}
    for row in result.rows:
        by_layer.setdefault(row.layer, {})[row.quantity] = row
    over = f"log2({result.over}), {result.over} {', '.join(map(str, result.sizes))}"
    pair = f"{result.parameterization} x {result.optimizer}, lr {result.lr:g}"
    print(f"{pair}: slopes of log2(value at step {result.steps}) over {over}")
    lines = [[layer, *(cell(rows.get(q)) for q in QUANTITIES)] for layer, rows in by_layer.items()]
    print_table(["layer", *(column for column, _ in QUANTITIES.values())], lines)
    print("! outside the tolerance; brackets: shown, not judged; <= the value is an upper bound.")
    print_notes(result)
    for size in result.diverged:
        print(f"diverged at {result.over} {size}")
    print(sentence(result))


def cell(row: "Row | None") -> str:
    if row is None:
        return ""
    slope = f"{row.slope:+.2f}" + ("" if row.exact else "<=")
    return f"({slope})" if row.verdict == "none" else slope if row.sound else f"{slope}!"


def print_notes(result: "Check") -> None:
    """What the metrics are conditional on; at the smallest size both bounds of what is composed, and M, R, P."""
    if loose := [(r.input_rms, r.layer) for r in result.rows if r.input_rms is not None and r.layer[:5] != "head."]:
        kinds = ", ".join(sorted({layer.rpartition(".")[2] for _, layer in loose}))
        largest, layer = max(loose)
        print(f"No norm in front of {kinds}: their metrics are conditional on RMS(x) = 1 ", end="")
        print(f"(the largest input RMS measured: {largest:.3g}, {layer}).")
    from abovemup.studies.coordcheck import QUANTITIES

    values = {row.layer: row.values[0] for row in result.rows if row.quantity == "forward"}
    if values:
        print(f"At the smallest {result.over}, found by gradient ascent <= the metric <= composed of the layers:")
        for layer, metrics in result.bounds.items():
            named = ((QUANTITIES[name][0], *pair) for name, pair in metrics.items())
            print(f"  {layer}: " + ", ".join(f"{low:.3g} <= {name} <= {high:.3g}" for name, low, high in named))
        largest, centred, pair = (values[layer] for layer in ("head.M", "head.R", "head"))
        print(f"  head: M {largest:.3g} (largest logit), R {centred:.3g} <= P {pair:.3g} <= 2R (difference of two)")


def sentence(result: "Check") -> str:
    from abovemup.studies.coordcheck import NORM_TOLERANCE, QUANTITIES, RMS_TOLERANCE

    held = f"role norms within {NORM_TOLERANCE:g}; RMS of residual stream, FFN middle and output < {RMS_TOLERANCE:g}"
    name = f"{result.parameterization} x {result.optimizer}"
    if result.flat:
        return f"flat: {name} ({held})"
    wrong = sorted((row for row in result.rows if not row.sound), key=lambda row: -abs(row.slope))
    worst = ", ".join(f"{QUANTITIES[w.quantity][0]} of {w.layer} {w.verdict} {w.slope:+.2f}" for w in wrong[:3])
    return f"not flat: {name}: {len(wrong)} slopes; {worst or 'it diverged'} ({held})"
