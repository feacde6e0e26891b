"""What an answer says, in sentences: for the terminal, and for a report."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from abovemup.analysis import rules
from abovemup.analysis.figures import numbered, power
from abovemup.analysis.norm_fit import NEAREST
from abovemup.analysis.results import Answer
from abovemup.analysis.select import BY_THE_WAY
from abovemup.analysis.sources import Source
from abovemup.config.keys import fields
from abovemup.config.values import shown


def findings(answer: Answer) -> list[str]:
    """The optimal norm and what it leaves open, the laws, what was refused; then what it all rests on."""
    said = []
    if band := answer.get("band"):
        middle = f"2^({band['log2_norm']:.3f} +- {band['half_width']:.3f})"
        said.append(f"Optimal {answer['norm']}: {middle}, over {band['groups']} horizons or models.")
        inside = ", ".join(
            f"{row['lowest']:.4g} to {row['highest']:.4g} ({row['model']}, {power(row['tokens'])} tokens)"
            for row in band["losses_inside"]
        )
        losses = f"losses inside the band are {inside}" if inside else "no run lies inside the band"
        said.append(f"The norm is necessary, not sufficient: {losses}.")
    elif refusal := answer.get("refusal"):
        said.append(f"Optimal {answer.get('norm', 'norm')}: refused: {refusal['advice']}")
    for of, law in answer.get("rules", {}).items():
        errors = ((k, v, law["errors"][k]) for k, v in law["exponents"].items() if k != "constant")
        terms = " ".join(f"{k}^({v:.3f} +- {error:.3f})" for k, v, error in errors)
        said.append(f"Law of {of.replace('_', ' ')}: {law['of']} ~ {terms}, {law['n']} points, R2 {law['r2']:.3f}.")
    if law := answer.get("lr_over_tokens"):
        said.append(f"lr at the best batch ~ tokens^({law['exponent']:.3f} +- {law['error']:.3f}).")
    refused = answer.get("refused", {}) if "band" in answer else {}  # those of growth are single runs
    for why in dict.fromkeys(refused.values()):
        names = ", ".join(name.replace("_", " ") for name, own in refused.items() if own == why)
        said.append(f"Law of {names}: refused: {why}")
    return said + basis(answer)


def basis(answer: Answer) -> list[str]:
    low, high, count = answer["horizons"]
    said = {"loss": answer["loss"], "runs": answer["runs"], "models": ", ".join(answer["models"])}
    said |= {"batch sizes": ", ".join(map(power, answer["batch_sizes"]))}
    said |= {"horizons": f"{count}, {power(low)} to {power(high)} tokens"} | answer["conditions"]
    lines = [f"Rests on: {'; '.join(f'{key}={value}' for key, value in said.items())}."]
    for why in dict.fromkeys(answer["excluded"].values()):
        runs = [run for run, reason in answer["excluded"].items() if reason == why]
        lines.append(f"Left out, {why}: {len(runs)} ({', '.join(runs[:3])}{', ...' if len(runs) > 3 else ''}).")
    return lines


def _told(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def methods(sources: Iterable[Source]) -> str:
    """A paragraph with every setting: what all runs share, what varies over what, hashes and versions, and the fit."""
    sources = list(sources)
    runs, first = pd.concat([source.runs for source in sources]), sources[0]
    values = {str(key): list(dict.fromkeys(map(_told, runs[key].dropna()))) for key in runs}
    settings = {key: found for key, found in values.items() if key in fields() and not key.startswith(BY_THE_WAY)}
    settings = settings or {key: [shown(value)] for key, value in first.conditions.items()}
    marks = ("data_hash", "tokenizer_hash", "versions.", "git.", "machine.cpu")
    facts = [f"{key}={', '.join(found)}" for key, found in values.items() if key.startswith(marks) and found]
    same = [f"{key}={found[0]}" for key, found in settings.items() if len(found) == 1]
    varied = [f"{key}={', '.join(sorted(found, key=numbered))}" for key, found in settings.items() if len(found) > 1]
    fixed = [shown({m: round(c, 3) for m, c in (source.fixed() or {}).items()} or "free") for source in sources]
    parts: dict[str, Any] = {"Shared by all runs": same, "Varied": varied, "Contents and versions": facts}
    told = " ".join(f"{name}: {'; '.join(found)}." for name, found in parts.items() if found)
    return (
        f"{told} The loss ({first.loss}) at exact token counts, seeds of one lr averaged, was fitted over log2 of the "
        f"norm by a parabola through the {NEAREST} points nearest to the lowest, weighted by 1/std^2 where stds are "
        f"known; intercept: {', '.join(dict.fromkeys(fixed))}. lr is the mean over lowest point, fixed and free "
        "intercept, smoothed and single steps. The band of the optimal norm is the mean +- the population std over the "
        "best batch of each horizon or model. Laws are least squares in log2 with 95 % intervals by Student's t and by "
        f"a bootstrap over the runs ({rules.DRAWS} draws, seed 0). Batch sizes and horizons are in tokens."
    )
