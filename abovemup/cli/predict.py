"""`abovemup predict`: the lr and the batch size that a fit advises for a number of tokens."""

from typing import Annotated

import typer

from abovemup.cli.options import Config, Json, Overrides


def predict(
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens to train on: 10B, 2^33.")],
    overrides: Overrides = None,
    batch_size: Annotated[str | None, typer.Option(metavar="N", help="In tokens; the best, by default.")] = None,
    source: Annotated[
        str, typer.Option("--from", metavar="FIT|paper", help="What `fit rule --json` wrote, or a source.")
    ] = "paper",
    config: Config = None,
    json: Json = False,
) -> None:
    """Advise lr and batch size for a run; say what of it (KEY=VALUE, --config) is not as in the fit."""
    from abovemup.analysis.predict import differences, read_fit, stretched
    from abovemup.analysis.predict import predict as advise
    from abovemup.cli.output import print_json, print_table
    from abovemup.config.cadence import parse_tokens
    from abovemup.config.compose import compose
    from abovemup.config.keys import flatten

    fit = read_fit(source)
    answer = advise(fit, float(parse_tokens(tokens)), float(parse_tokens(batch_size)) if batch_size else None)
    asked = flatten(compose(list(overrides or []), config_file=config))
    answer |= {"conditions": fit["conditions"], "differences": differences(fit["conditions"], asked)}
    if json:
        print_json(answer)
        return
    rows = []
    for of, name in (("batch", "best batch (tokens)"), ("lr", f"lr at batch {answer['batch_used']:,.0f}")):
        if of in answer:
            at, mean, single = (answer[of][key] for key in ("log2", "interval", "single"))
            spans = [f"{2**low:.4g} to {2**high:.4g}" for low, high in (mean, single)]
            rows.append([name, f"{2**at:.4g} = 2^{at:.2f}", *spans])
    print_table(["", "advice", "95 %", "95 %, one more optimum"], rows)
    if "batch" in answer:
        print("Beyond the best batch more devices buy no better loss at these tokens: it is the most they can share.")
    if (band := answer["log2_norm"]) and batch_size is None:  # that of the best batch
        norm = f"2^({band['log2_norm']:.2f} +- {band['half_width']:.2f})"
        print(f"{answer['norm']} to expect at the end if lr is right, which it does not prove: {norm}.")
    for row in answer.get("on_the_way", []):
        print(f"On the way, at {row['tokens']:.4g} tokens: 2^{row['log2']:.2f}")
    for row in answer["low_sensitivity"]:
        print(f"Within 0.5 % of the best at {row['tokens']:.4g} tokens: lr {row['lr']:.4g}, batch {row['batch']:,.0f}")
    said = stretched(answer["beyond"])
    if answer["differences"]:
        said += [f"Not the {'paper' if source == 'paper' else 'fit'}'s conditions: {'; '.join(answer['differences'])}."]
    print(*said, f"Holds for: {', '.join(f'{key}={value}' for key, value in answer['conditions'].items())}.", sep="\n")
