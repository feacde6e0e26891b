"""`abovemup bench`."""

import typer

from abovemup.cli.options import Json


def bench(json: Json = False) -> None:
    """Time the training loop, its norms, the optimizer, the data, fits and the start-up side by side with their peers.

    Exit 1 if a target is missed. Takes about five minutes and a machine that has little else to do.
    """
    from dataclasses import asdict

    from abovemup.bench.data import data
    from abovemup.bench.fits import fits
    from abovemup.bench.loop import loop
    from abovemup.bench.loss import loss
    from abovemup.bench.norms import norms
    from abovemup.bench.ranks import ranks
    from abovemup.bench.startup import startup
    from abovemup.bench.step import steps
    from abovemup.cli.output import print_json, print_table

    ratios = [loop(), *norms(), *steps(), *data(), *fits(), *ranks(), loss(), startup()]
    if json:
        print_json([asdict(ratio) | {"ratio": ratio.value, "met": ratio.met} for ratio in ratios])
    else:
        columns = ["", "ratio", "target", "", "ours", "beside it", "unit"]
        targets = [f"{'>=' if r.at_least else '<='} {r.target:g}" for r in ratios]
        verdicts = ["met" if r.met else "MISSED" for r in ratios]
        rows = zip(ratios, targets, verdicts, strict=True)
        print_table(columns, ([r.name, r.value, target, met, r.ours, r.peer, r.unit] for r, target, met in rows))
    raise typer.Exit(0 if all(ratio.met for ratio in ratios) else 1)
