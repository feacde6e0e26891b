"""Whether a run's norm is that of a run with the lr that a fit advises, at its tokens, batch size and horizon."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from abovemup.analysis.predict import differences
from abovemup.analysis.rules import NEAR
from abovemup.analysis.runs import final_norms, record
from abovemup.config.errors import RequestError

GRID = 0.25  # octaves: half a step of the usual grid of lr, closer than which no optimum is known


def watch(folder: Path, fit: dict[str, Any]) -> dict[str, Any]:
    """{verdict, sentences, off, expected, interval, ...} of a run and a fit of `predict.read_fit`; norms in log2.

    verdict: consistent, too high, too low, cannot tell (other conditions than the fit's, or norms outside of it) or
    diverged. The interval (95 %) has the law's scatter and the error of lr*. RequestError without a norm or a law.
    """
    run, last, laws, key = record(folder), final_norms(folder), fit["rules"], f"norm/{fit['norm']}"
    if not {"lr", "norm"} <= {*laws}:
        raise RequestError("the fit has no law of lr, or none of the norm on the way: fit a grid of lr and horizons.")
    if not (last.get(key) or 0) > 0:
        raise RequestError(f"{folder} has not logged {key}: see norms.every and norms.which.")
    batch, horizon, now = run["train.batch_size"] * run["train.seq_len"], run["train.tokens"], last["norm_tokens"]
    lr, (low, high), _ = laws["lr"].predict({"batch": batch, "tokens": horizon})
    at = {"lr": 2.0**lr, "batch": batch, "tokens": max(now, 1)}
    expected, _, scatter = laws["norm"].predict(at)
    doubt = laws["norm"].exponents.get("lr", 0.0) * max(GRID, (high - low) / 2)
    half = math.hypot((scatter[1] - scatter[0]) / 2, doubt)
    norm, own, other = math.log2(last[key]), math.log2(run["optimizer.lr"]), differences(fit["conditions"], run)
    off, far = norm - expected, abs(expected - fit["band"]["log2_norm"]) > NEAR
    verdict = "consistent" if abs(off) <= half else "too high" if off > 0 else "too low"
    verdict = "diverged" if run["status"] == "diverged" else "cannot tell" if other or far else verdict
    said = [f"At {now:.4g} of {horizon:.4g} tokens with batch {batch:,.0f} the norm is 2^{norm:.2f}."]
    said.append(f"With lr*(B, D) = 2^({lr:.2f} +- {high - lr:.2f}) it would be 2^({expected:.2f} +- {half:.2f}).")
    if verdict == "consistent":
        said.append("norm consistent with lr*(B, D): necessary, not sufficient, and no word on the loss.")
    elif verdict == "cannot tell":
        outside = "the norm to expect now is outside of those that the law was fitted on"
        why = f"not the fit's conditions: {'; '.join(other)}" if other else outside
        said.append(f"cannot tell: {why}.")
    else:
        what = verdict if verdict == "diverged" else f"norm {verdict} by 2^{abs(off):.2f}"
        said.append(f"{what}: lr is 2^{own:.2f}.")
        if verdict != "diverged" and ((own - lr) * off <= 0 or low <= own <= high):
            said.append("This lr does not explain it: something else that the fit does not know differs.")
    answer = {"verdict": verdict, "sentences": said, "norm": norm, "expected": expected, "half_width": half, "off": off}
    answer |= {"tokens": now, "horizon": horizon, "batch": batch, "lr": own, "best_lr": lr, "differences": other}
    answer["beyond"] = {"lr": laws["lr"].beyond(at | {"tokens": horizon}), "norm": laws["norm"].beyond(at)}
    if "batch" in laws:
        best, _, (low, high) = laws["batch"].predict({"tokens": horizon})
        answer |= {"best_batch": best, "batch_cost": cost(fit, batch, horizon)}
        if not low <= math.log2(batch) <= high:
            loss = answer["batch_cost"]
            costs = "what the fit cannot tell" if loss is None else f"about {loss:.3g} nats at its best lr"
            said.append(f"batch is 2^{math.log2(batch) - best:.2f} times B*(D) = 2^{best:.2f}: it costs {costs}.")
    return answer


def cost(fit: dict[str, Any], batch: float, tokens: float) -> float | None:
    """Nats above the best batch, of the optima at the horizon nearest to `tokens`; None outside of their batches."""
    rows = [row for row in fit.get("optima", []) if isinstance(row["loss"], int | float) and math.isfinite(row["loss"])]
    if not rows:
        return None
    nearest = min((row["tokens"] for row in rows), key=lambda t: abs(math.log2(t / tokens)))
    at = sorted((math.log2(row["batch"]), row["loss"]) for row in rows if row["tokens"] == nearest)
    batches, losses = np.array(at).T
    loss = float(np.interp(math.log2(batch), batches, losses, left=math.nan, right=math.nan))
    return None if math.isnan(loss) else loss - float(losses.min())
