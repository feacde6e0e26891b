"""`abovemup explain`: what a layer, a parameterization or an optimizer is: the page to read next to the post."""

import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abovemup.cli.options import Config, ConfigDir, Json, Overrides
from abovemup.cli.output import print_json, print_table
from abovemup.cli.routes import rows as table_rows
from abovemup.config.conf import choices, conf_dir
from abovemup.config.errors import RequestError

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment, RoleRule
    from abovemup.optim.routing import Route

Page = dict[str, Any]  # name, text (lines), and tables (lists of rows)


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A layer, its kind, a parameterization or an optimizer.")],
    overrides: Overrides = None,
    config: Config = None,
    config_dir: ConfigDir = None,
    json: Json = False,
) -> None:
    """Print formula, layout, source and numbers: abovemup explain head model=pocket optimizer=adam"""
    from abovemup.config.compose import compose
    from abovemup.config.io import read_yaml

    texts = read_yaml(conf_dir() / "explain.yaml")
    if "=" in name:
        kinds = ", ".join(texts["layers"])
        raise RequestError(f"NAME is missing before {name}: a layer, a kind ({kinds}), mup, scion, ...")
    typed, available = list(overrides or []), choices(config_dir)
    pages = [
        _choice_page(group, compose([*typed, f"{group}={name}"], config, config_dir), config_dir, texts)
        for group in ("parameterization", "optimizer")  # above_mup is both
        if name in available[group] and not any(o.startswith(f"{group}=") for o in typed)
    ]
    others = [*available["parameterization"], *available["optimizer"]]
    pages = pages or [_layer_page(name, compose(typed, config, config_dir), others, texts["layers"])]
    if json:
        print_json(pages)
        return
    for page in pages:
        print(f"{page.pop('name')}\n\n" + "\n".join(page.pop("text")))
        for title, rows in page.items():
            print(f"\n{title}:" if rows else f"\n{title}: none in this model")
            print_table(list(rows[0]) if rows else [], (row.values() for row in rows))


def _choice_page(group: str, e: "Experiment", config_dir: Path | None, texts: dict[str, str]) -> Page:
    """Of a parameterization or an optimizer: what its YAML file begins with, how each role steps, and the numbers."""
    from abovemup.training.routes import table

    file = Path(group, f"{e.choices[group]}.yaml")
    folder = next(folder for folder in (conf_dir(), config_dir) if folder and (folder / file).is_file())
    comment = itertools.takewhile(lambda line: line.startswith("#"), (folder / file).read_text("utf-8").splitlines())
    text = [line.lstrip("# ") for line in comment] + texts.get(group, "").splitlines()
    roles = [_role(e, role, rule) for role, rule in vars(e.optimizer.roles).items()]
    return {"name": f"{group}={e.choices[group]}", "text": text, "roles": roles, "parameters": _rows(e, table(e))}


def _layer_page(name: str, e: "Experiment", others: list[str], texts: dict[str, str]) -> Page:
    """Of a kind of layer (one of `texts`), a parameter, or all of a module. `others`: what a typo may have meant."""
    from abovemup.config.keys import did_you_mean
    from abovemup.geometry.parameterization import attention_scale
    from abovemup.training.routes import table

    routes = table(e)
    if name in texts:
        found, kinds = [r for r in routes if r.role == name or f".{name}." in r.name], [name]
    else:
        found = [r for r in routes if r.name == name or r.name.startswith(f"{name}.")]
        kinds = ["attention"] * name.endswith(".attention") + list(dict.fromkeys(r.role for r in found))
    if not kinds:
        layers = [r.name.removesuffix(".weight") for r in routes]
        hint = did_you_mean(name, list(dict.fromkeys([*texts, *others, *layers])))
        hint = hint or f" A layer is {layers[1]}, a kind {', '.join(texts)}."
        raise RequestError(f"no layer, parameterization or optimizer is called {name}.{hint}")
    scale = attention_scale(e.parameterization.name, e.model.head_dim, e.parameterization.base_head_dim)
    text = "\n".join(texts[kind].replace("SCALE", f"{scale:g}") for kind in kinds)
    return {"name": name, "text": text.splitlines(), "parameters": _rows(e, found)}


def _role(e: "Experiment", role: str, rule: "RoleRule") -> Page:
    """How a role steps, and the powers of the width that init std and lr follow while all widths grow together."""
    from abovemup.geometry.parameterization import init_norm, init_std, lr_multiplier

    name, d, rows = e.parameterization.name, e.parameterization.base_width, e.model.vocab_size
    powers = [0.0, 0.0]  # of the depth there are none
    if role not in ("gain", "bias"):
        base, grown = ((n if role == "hidden" else rows, n) for n in (d, 4 * d))
        start = init_std("exact", role, grown) / init_std("exact", role, base)
        ratios = start * init_norm(name, "exact", role, grown, base), lr_multiplier(name, role, rule.norm, grown, base)
        powers = [round(math.log(ratio, 4), 6) + 0.0 for ratio in ratios]
    scales = {"scale": rule.scale, "lr_scale": getattr(e.optimizer.lr_scale, role)}
    return {"role": role, "rule": rule.norm, **scales, "init std ~ n^": powers[0], "lr ~ n^": powers[1]}


def _rows(e: "Experiment", routes: "list[Route]") -> list[Page]:
    """The numbers of each parameter, of layers that are alike those of the first."""
    first: dict[str, Page] = {}
    for row in table_rows(e, routes):
        rest = [value for name, value in row.items() if name != "parameter"]
        first.setdefault(re.sub(r"[.][0-9]+[.]", "..", row["parameter"]) + str(rest), row)
    return list(first.values())
