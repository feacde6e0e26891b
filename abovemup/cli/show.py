"""`abovemup show`: the resolved configuration and the routing table."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from abovemup.cli.options import Config, ConfigDir, Debug, Json, Overrides

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment


def show(
    overrides: Overrides = None,
    config: Config = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration and the routing table: how every parameter starts and steps."""
    from abovemup.cli.output import print_json
    from abovemup.cli.routes import decay, print_rows, rows, sizes
    from abovemup.config.compose import compose
    from abovemup.training.routes import table

    experiment = compose(list(overrides or []), config_file=config, config_dir=config_dir)
    routes = table(experiment)
    count = sizes(routes).parameters
    if json:
        routing = [asdict(route) | {"weight_decay": decay(route)} for route in routes]
        print_json({"config": asdict(experiment), "base": _base(experiment), "parameters": count, "routing": routing})
        return
    _print_settings(experiment)
    print()
    _print_base(experiment)
    print()
    print_rows(rows(experiment, routes))
    print(f"\n{count:,} parameters")


def _print_settings(experiment: "Experiment") -> None:
    from abovemup.cli.output import shown
    from abovemup.config.diff import flatten

    for sentence in experiment.cannot_match:
        print(f"# {experiment.experiment} cannot match: {sentence}")
    for key, value in flatten(experiment):
        derived = f"  # from {shown(experiment.derived[key])}" if key in experiment.derived else ""
        # A group's name is its choice: printed as one types it.
        name = key.removesuffix(".name") if key.removesuffix(".name") in experiment.choices else key
        print(f"{name}={shown(value)}{derived}")


def _base(e: "Experiment") -> dict[str, Any]:
    """The base shape, the ratios to it, and the multipliers that are not a parameter's own."""
    from abovemup.geometry.parameterization import attention_scale, residual_multipliers

    m, p = e.model, e.parameterization
    alpha, beta = residual_multipliers(m.residual, m.depth, p.base_depth)
    base = {name: getattr(p, f"base_{name}") for name in ("width", "depth", "head_dim", "kv_heads", "ffn")}
    return {
        "base": base,
        "ratio": {name: getattr(m, name) / size for name, size in base.items()},
        "attention_scale": attention_scale(p.name, m.head_dim, p.base_head_dim),
        "residual": {"stream": alpha, "block": beta},
    }


def _print_base(e: "Experiment") -> None:
    base = _base(e)
    ratios = ", ".join(f"{name} {size} (x {base['ratio'][name]:g})" for name, size in base["base"].items())
    print(f"base: {ratios}")
    if all(ratio == 1 for name, ratio in base["ratio"].items() if name != "depth"):
        print(f"The model is its own base: parameterization={e.parameterization.name} has no effect.")
    residual = base["residual"]
    print(f"attention scale: {base['attention_scale']:g}")
    print(f"residual: {residual['stream']:g} x stream + {residual['block']:g} x block")
