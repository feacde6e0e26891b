"""`abovemup train --dry-run`: what would run, from the configuration alone."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from abovemup.cli.output import print_json
from abovemup.cli.routes import Sizes, sizes

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment


def print_plan(experiment: "Experiment", json: bool) -> None:
    """The essentials: parameters, tokens, steps, memory of weights, gradients and optimizer state. Nothing on disk."""
    from abovemup.training.routes import table

    size = sizes(table(experiment))
    if json:
        print_json({"config": asdict(experiment), **asdict(size)})
        return
    plan = _plan(experiment, size)
    for sentence in experiment.cannot_match:
        print(f"{experiment.experiment} cannot match: {sentence}")
    width = max(map(len, plan))
    for name, text in plan.items():
        print(f"{name:{width}}  {text}")


def _plan(e: "Experiment", size: Sizes) -> dict[str, Any]:
    t, m = e.train, e.model
    known = size.weights + size.gradients + (size.state or 0)
    state = "the optimizer's own not counted" if size.state is None else f"optimizer state {decimal(size.state)}"
    shape = f"width {m.width}, depth {m.depth}, vocabulary {m.vocab_size:,}"
    rates = f"lr {e.optimizer.lr:g}, momentum {e.optimizer.momentum:g}"
    lasting = f"warmup {e.schedule.warmup}, decay {e.schedule.decay} steps"
    return {
        "experiment": e.experiment,
        "model": f"{m.name}: {size.parameters:,} parameters, {shape}",
        "optimizer": f"{e.optimizer.name} under {e.parameterization.name}: {rates}",
        "schedule": f"{e.schedule.name}: {lasting}",
        "data": e.data.name if e.data.path is None else f"{e.data.name}: {e.data.path}",
        "batch": f"{t.batch_size} x {t.seq_len} = {t.batch_size * t.seq_len:,} tokens",
        "steps": f"{t.steps:,}",
        "tokens": f"{t.tokens:,}",
        "memory": f"{decimal(known)} before activations: weights {decimal(size.weights)}, "
        f"gradients {decimal(size.gradients)}, {state}",
    }
