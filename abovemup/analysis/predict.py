"""From a fit's rules to the next run: lr, batch size, what they rest on, and how far they are stretched."""

import json
import math
from pathlib import Path
from typing import Any

from abovemup.analysis import paper
from abovemup.analysis.norm_fit import FitRefused
from abovemup.analysis.results import rule
from abovemup.analysis.rules import read
from abovemup.analysis.sources import open_source
from abovemup.config.errors import RequestError


def read_fit(source: str) -> dict[str, Any]:
    """{rules, conditions, and what else there is} of the paper, of a file that `fit rule --json` wrote, or of a source.

    Raises RequestError.
    """
    path = Path(source)
    try:
        if source == "paper":
            fit = paper.FIT
        else:
            fit = json.loads(path.read_text()) if path.is_file() and path.suffix != ".csv" else rule(open_source(path))
        found = {of: read(law) for of, law in fit["rules"].items()}
        return fit | {"rules": found, "conditions": dict(fit["conditions"]), "norm": fit["norm"]}
    except FitRefused as refusal:
        raise RequestError(f"--from {source}: no law can be fitted: {refusal}") from refusal
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        hint = "Write it with: abovemup fit rule SOURCE --json > FILE"
        raise RequestError(f"--from {source} is neither paper nor a fit. {hint}") from error


def predict(fit: dict[str, Any], tokens: float, batch: float | None) -> dict[str, Any]:
    """Recommended lr (log2) and batch (log2 tokens), each with 95 % intervals of the law and of one more observation.

    Without `batch` lr is that at B*(tokens). `beyond`: octaves outside what was fitted, by law and name. RequestError
    when the fit lacks a law that is needed, and for a batch of more than all tokens.
    """
    if batch and batch > tokens:
        raise RequestError(f"a batch of {batch:.4g} tokens is more than the {tokens:.4g} of the whole run.")
    laws, at = fit["rules"], {"tokens": tokens} | ({"batch": batch} if batch else {})
    answer: dict[str, Any] = {"beyond": {}, "norm": fit["norm"], "log2_norm": fit.get("band"), "low_sensitivity": []}
    for of in ("batch", "lr"):
        if of in laws:
            value, mean, single = laws[of].predict(at)
            answer[of] = {"log2": value, "interval": mean, "single": single}
            answer["beyond"][of] = laws[of].beyond(at)
            at = {of: 2**value} | at
        elif of not in at:
            hint = "give --batch-size" if of == "batch" else "fit a grid of batch sizes and horizons"
            raise RequestError(f"the fit has no law of {of}: {hint}.")
    if pairs := [row for row in fit.get("low_sensitivity", []) if isinstance(row["tokens"], int | float)]:
        nearest = min((row["tokens"] for row in pairs), key=lambda t: abs(math.log2(t / tokens)))
        answer["low_sensitivity"] = [row for row in pairs if row["tokens"] == nearest]
    if "norm" in laws:
        way = [at | {"tokens": tokens * part} for part in (1 / 16, 1 / 4, 1)]
        answer["on_the_way"] = [{"tokens": each["tokens"], "log2": laws["norm"].predict(each)[0]} for each in way]
    return answer | {"batch_used": at["batch"]}


def stretched(beyond: dict[str, dict[str, float]]) -> list[str]:
    """A sentence for each octave count of `beyond`."""
    return [
        f"Extrapolated: {name} is {octaves:.2g} octaves outside what the law of {of} was fitted on."
        for of, each in beyond.items()
        for name, octaves in each.items()
    ]


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The conditions of a fit that a run has otherwise: optimizer.momentum=0.9 instead of 0.0."""
    return [f"{key}={ours[key]} instead of {value}" for key, value in theirs.items() if ours.get(key, value) != value]
