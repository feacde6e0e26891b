"""`abovemup fit`: from runs, ours or the paper's, to the optimal norm, the rules of lr and batch, the norm's growth."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from abovemup.cli.options import Json
from abovemup.cli.output import print_json, print_table
from abovemup.config.errors import RequestError

_SOURCE = "A run, a folder of runs, a study, or a CSV of the paper's public toolkit."


def fit(
    what: Annotated[Literal["norm", "rule", "growth"], typer.Argument(metavar="norm|rule|growth")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help=_SOURCE)],
    loss: Annotated[str | None, typer.Option(metavar="paper|val|window", help="Which loss; val, else window.")] = None,
    norm: Annotated[str, typer.Option(metavar="LAYER/NORM", help="Which norm.")] = "head/rms_to_inf",
    all: Annotated[bool, typer.Option("--all", help="Rank every norm, and lr itself.")] = False,
    where: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only such runs: key<value too.")] = None,
    json: Json = False,
) -> None:
    """norm: where the loss is lowest over a layer's norm, at each horizon and batch size, and over all of them.
    rule: the best lr over batch and tokens, and the best batch over tokens. growth: how the norm grows with tokens.

    Batch sizes are in tokens. Exit code 1: the fit refuses, and says why.
    """
    from abovemup.analysis import results, sentences
    from abovemup.analysis.norm_fit import FitRefused
    from abovemup.analysis.sources import open_source

    if all and what != "norm":
        raise RequestError("--all ranks norms: abovemup fit norm SOURCE --all")
    opened = open_source(source, loss, where or (), None if all else norm)
    try:
        answer = results.ranking(opened) if all else getattr(results, what)(opened, norm)
    except FitRefused as error:
        answer = {"refusal": {"reason": error.reason, "advice": str(error)}}
    if json:
        print_json(answer)
    elif len(answer) > 1:
        {"norm": _ranking if all else _norm, "rule": _rule, "growth": _growth}[what](answer)
        print("", *sentences.findings(answer), sep="\n")
    if refusal := answer.get("refusal"):
        typer.echo(f"abovemup: refused ({refusal['reason']}): {refusal['advice']}", err=True)
        raise typer.Exit(1)


def _norm(answer: dict[str, Any]) -> None:
    from abovemup.analysis.figures import power

    print(f"x is log2 of {answer['norm']}; errors are standard errors, that of lr over the ways to fit.")
    columns = ["model", "tokens", "batch", "runs", "x", "x_error", "loss", "loss_error", "lr", "lr_error", "reason"]
    _print(answer["optima"], columns)
    refused = [row for row in answer["optima"] + answer["best"] if row["advice"]]
    told = (f"{r['model']}, {power(r['tokens'])} tokens, batch {power(r['batch'])}: {r['advice']}" for r in refused)
    print("\n".join(dict.fromkeys(told)))


def _ranking(answer: dict[str, Any]) -> None:
    _print(answer["ranking"], ["norm", "groups", "regret", "spread", "error", "refused"])
    print("\nregret: nats that one optimum for all horizons or models costs, on average; spread and error in octaves.")


def _rule(answer: dict[str, Any]) -> None:
    from abovemup.analysis.rules import lines

    laws = lines(answer["rules"])
    _print(laws, [*laws[0]])


def _growth(answer: dict[str, Any]) -> None:
    from abovemup.analysis.figures import power
    from abovemup.analysis.rules import interval

    for curve in answer["curves"]:
        pairs = zip(curve["slopes"], curve["slope_intervals"], strict=True)
        curve["slopes (95 %)"] = ", ".join(f"{slope:.2f} ({interval(ends)})" for slope, ends in pairs)
        breaks = (f"{power(b['tokens'])} (norm 2^{b['log2_norm']:.2f})" for b in curve["breaks"])
        curve["breaks at tokens"] = ", ".join(breaks)
    _print(answer["curves"], ["lr", "batch", "slopes (95 %)", "breaks at tokens"])
    if at := answer["offset"]:
        print(f"\nAt step {at['step']:.0f} the norm ~ lr^{at['slope']:.2f} (95 %: {interval(at['interval'])}).")
    for row in answer["parting"]:
        when = f"at step {row['step']:.0f}, norm 2^{row['log2_norm']:.2f}" if "step" in row else "not in these runs"
        print(f"lr {row['lr']:.4g}: {row['batches']} batch sizes part by a quarter octave {when}.")


def _print(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """tokens and batch as powers of two, what is not there empty."""
    from abovemup.analysis.figures import power

    told = (row | {name: power(row[name]) for name in ("tokens", "batch") if name in row} for row in rows)
    values = ([row.get(name, math.nan) for name in columns] for row in told)
    print_table(columns, (["" if value != value else value for value in row] for row in values))
