"""`abovemup fit`: from runs, ours or the paper's, to the optimal norm, the rules of lr and batch, the norm's growth."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from abovemup.cli.options import Debug, Json
from abovemup.cli.output import print_json, print_table
from abovemup.config.errors import RequestError

_SOURCE = "A folder of runs, a study, points.csv of an ablation, or a CSV in the paper's columns."


def fit(
    what: Annotated[Literal["norm", "rule", "growth"], typer.Argument(metavar="norm|rule|growth")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help=_SOURCE)],
    loss: Annotated[str | None, typer.Option(metavar="paper|val|window", help="Which loss; val, else window.")] = None,
    norm: Annotated[str, typer.Option(metavar="LAYER/NORM", help="Which norm.")] = "head/rms_to_inf",
    all: Annotated[bool, typer.Option("--all", help="Rank every norm, and lr itself.")] = False,
    where: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only runs with this.")] = None,
    horizons: Annotated[str, typer.Option(metavar="A,B,..", help="Exact token counts; powers of two, ends.")] = "",
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg, .pdf.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """norm: where the loss is lowest over a layer's norm, at each horizon and batch size, and over all of them.
    rule: the best lr over batch and tokens, and the best batch over tokens. growth: how the norm grows with tokens.

    Batch sizes are in tokens. Exit code 1: the fit refuses, and says why.
    """
    from abovemup.analysis import plots, results
    from abovemup.analysis.norm_fit import FitRefused
    from abovemup.analysis.sources import open_source
    from abovemup.config.cadence import parse_tokens

    if loss not in (None, "paper", "val", "window"):
        raise RequestError(f"--loss {loss}: choose paper, val or window.")
    if figure is not None and (figure.suffix not in (".png", ".svg", ".pdf") or not figure.parent.is_dir() or all):
        raise RequestError(f"--figure {figure}: one fit as .png, .svg or .pdf, into a folder that is there.")
    if all and what != "norm":
        raise RequestError("--all ranks norms: abovemup fit norm SOURCE --all")
    opened = open_source(source, loss, where or (), [parse_tokens(text) for text in horizons.split(",") if text])
    try:
        answer = results.ranking(opened) if all else getattr(results, what)(opened, norm)
    except FitRefused as error:
        answer = {"refusal": {"reason": error.reason, "advice": str(error)}}
    if figure and len(answer) > 1:
        rows = opened.points(norm)["smoothed"] if what == "norm" else opened.rows
        getattr(plots, what)(answer, opened.curves(norm) if what == "growth" else rows, figure)
    if json:
        print_json(answer)
    elif len(answer) > 1:
        {"norm": _ranking if all else _norm, "rule": _rule, "growth": _growth}[what](answer)
        _basis(answer)
    if refusal := answer.get("refusal"):
        typer.echo(f"abovemup: refused ({refusal['reason']}): {refusal['advice']}", err=True)
        raise typer.Exit(1)


def _basis(answer: dict[str, Any]) -> None:
    said = [f"loss {answer['loss']}", f"{answer['runs']} runs", f"models {', '.join(answer['models'])}"]
    said += [f"batch sizes {', '.join(map(_tokens, answer['batch_sizes']))}"]
    said += [f"{answer['horizons'][2]} horizons, {' to '.join(map(_tokens, answer['horizons'][:2]))} tokens"]
    print(f"Rests on: {'; '.join(said + [f'{k}={v}' for k, v in answer['conditions'].items()])}.")
    for why in dict.fromkeys(answer["excluded"].values()):
        runs = [run for run, reason in answer["excluded"].items() if reason == why]
        print(f"Left out, {why}: {len(runs)} ({', '.join(runs[:3])}{', ...' if len(runs) > 3 else ''}).")


def _norm(answer: dict[str, Any]) -> None:
    columns = ("model", "tokens", "batch", "runs", "x", "x_error", "loss", "loss_error", "lr", "lr_std", "reason")
    heads = ["model", "tokens", "batch", "runs", "log2 norm", "+-", "loss", "+-", "lr", "+-", ""]
    print_table(heads, (_cells(row, columns) for row in answer["optima"]))
    for row in answer["optima"] + answer["best"]:
        if row["advice"]:
            print(f"{row['model']}, {_tokens(row['tokens'])} tokens, batch {_tokens(row['batch'])}: {row['advice']}")
    if not (band := answer["band"]):
        return
    middle = f"2^({band['log2_norm']:.3f} +- {band['half_width']:.3f})"
    print(f"\nOptimal {answer['norm']}: {middle}, over {band['groups']} horizons or models.")
    print("The norm is necessary, not sufficient. Losses of the (lr, batch) pairs inside the band:")
    for row in band["losses_inside"]:
        spread = f"{row['lowest']:.4g} to {row['highest']:.4g}"
        print(f"  {row['model']}, {_tokens(row['tokens'])} tokens: {spread} ({row['pairs']} pairs)")


def _ranking(answer: dict[str, Any]) -> None:
    columns = ("norm", "groups", "regret", "spread", "error", "refused")
    heads = ("norm", "groups", "regret (nats)", "spread (octaves)", "error (octaves)", "refused")
    print_table(heads, (_cells(row, columns) for row in answer["ranking"]))
    print("\nRegret: what one optimum for all horizons or models costs, on average. The lr lines are the dull rivals.")


def _rule(answer: dict[str, Any]) -> None:
    rows = []
    for name, law in answer["rules"].items():
        for of, value in law["exponents"].items():
            intervals = (law["ols"][of], law["bootstrap"].get(of))
            shown = [f"{each[0]:.3g} to {each[1]:.3g}" if each else "cannot tell" for each in intervals]
            rows.append([name, of, value, law["errors"][of], *shown, law["r2"], law["n"]])
    print_table(["law", "of", "exponent", "+-", "95 %, OLS", f"95 %, bootstrap {answer['bootstrap']}", "R2", "n"], rows)
    if law := answer.get("lr_over_tokens"):
        print(f"\nlr at the best batch ~ tokens^({law['exponent']:.3f} +- {law['error']:.3f})")
    for name, why in answer["refused"].items():
        print(f"{name}: refused: {why}")


def _growth(answer: dict[str, Any]) -> None:
    rows = []
    for curve in answer["curves"]:
        breaks = [f"{_tokens(b['tokens'])} (norm 2^{b['log2_norm']:.2f})" for b in curve["breaks"]]
        pairs = zip(curve["slopes"], curve["slope_intervals"], strict=True)
        slopes = [f"{slope:.2f} ({low:.2f} to {high:.2f})" for slope, (low, high) in pairs]
        rows.append([curve["lr"], _tokens(curve["batch"]), ", ".join(slopes), ", ".join(breaks)])
    print_table(["lr", "batch", "slopes (95 %)", "breaks at tokens"], rows)
    if at := answer["offset"]:
        low, high = at["interval"]
        print(f"\nAt step {at['step']:.0f} the norm ~ lr^{at['slope']:.2f} (95 %: {low:.2f} to {high:.2f}).")
    for row in answer["parting"]:
        when = f"at step {row['step']:.0f}, norm 2^{row['log2_norm']:.2f}" if "step" in row else "not in these runs"
        print(f"lr {row['lr']:.4g}: {row['batches']} batch sizes part by a quarter octave {when}.")


def _cells(row: dict[str, Any], columns: tuple[str, ...]) -> list[Any]:
    told = row | {name: _tokens(row[name]) for name in ("tokens", "batch") if name in row}
    return ["" if told.get(name) is None or told[name] != told[name] else told[name] for name in columns]


def _tokens(count: float) -> str:
    """A power of two as one."""
    if not math.isfinite(count):
        return "-"
    return f"2^{math.log2(count):.4g}" if count > 0 else f"{count:.0f}"
