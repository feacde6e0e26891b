"""`abovemup show`: the resolved configuration and the routing table."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from abovemup.cli.options import Config, ConfigDir, Json, Overrides

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment


def show(overrides: Overrides = None, config: Config = None, config_dir: ConfigDir = None, json: Json = False) -> None:
    """Print the resolved configuration and the routing table: how every parameter starts and steps."""
    from abovemup.cli.output import print_json, print_table
    from abovemup.cli.routes import decay, rows, vocabulary
    from abovemup.config.compose import compose
    from abovemup.config.keys import flatten
    from abovemup.config.values import shown
    from abovemup.training.routes import sizes, table

    e = compose(list(overrides or []), config_file=config, config_dir=config_dir)
    routes, base = table(e), _base(e)
    count = sizes(routes)["parameters"]
    if json:
        routing = [asdict(route) | {"weight_decay": decay(route)} for route in routes]
        print_json({"config": asdict(e), "base": base, "parameters": count, "routing": routing})
        return
    for sentence in e.cannot_match:
        print(f"# {e.experiment} cannot match: {sentence}")
    for key, value in flatten(e).items():
        derived = f"  # from {shown(e.derived[key])}" if key in e.derived else ""
        # A group's name is its choice: printed as one types it.
        print(f"{key.removesuffix('.name') if key != 'run.name' else key}={shown(value)}{derived}")
    ratios = base["ratio"]
    print("\nbase: " + ", ".join(f"{name} {size} (x {ratios[name]:g})" for name, size in base["base"].items()))
    if all(ratio == 1 for name, ratio in ratios.items() if name != "depth"):
        print(f"The model is its own base: parameterization={e.parameterization.name} has no effect.")
    print(f"attention scale: {base['attention_scale']:g}")
    print(f"residual: {base['residual']['stream']:g} x stream + {base['residual']['block']:g} x block\n")
    lines = rows(e, routes)
    print_table(list(lines[0]), (line.values() for line in lines))
    print(f"\n{count:,} parameters, vocabulary {vocabulary(e)}")


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
