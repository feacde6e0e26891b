"""`abovemup bench`."""

from typing import TYPE_CHECKING

import typer

from abovemup.cli.options import Debug, Json

if TYPE_CHECKING:
    from abovemup.bench.ratio import Ratio


def bench(json: Json = False, debug: Debug = False) -> None:
    """Time the training loop, its norms, the optimizer and the start-up side by side with their peers.

    Exit 1 if a target is missed. Takes about three minutes and a machine that has little else to do.
    """
    from dataclasses import asdict

    from abovemup.bench.loop import loop
    from abovemup.bench.norms import norms
    from abovemup.bench.startup import startup
    from abovemup.bench.step import steps
    from abovemup.cli.output import print_json, print_table

    ratios = [loop(), *norms(), *steps(), startup()]
    if json:
        print_json([asdict(ratio) | {"ratio": ratio.value, "met": ratio.met} for ratio in ratios])
    else:
        print_table(["", "ratio", "target", "", "ours", "beside it", "unit"], map(_row, ratios))
    raise typer.Exit(0 if all(ratio.met for ratio in ratios) else 1)


def _row(ratio: "Ratio") -> tuple[str, ...]:
    sign = ">=" if ratio.at_least else "<="
    verdict = "met" if ratio.met else "MISSED"
    figures = f"{ratio.ours:.4g}", f"{ratio.peer:.4g}"
    return ratio.name, f"{ratio.value:.3g}", f"{sign} {ratio.target:g}", verdict, *figures, ratio.unit
