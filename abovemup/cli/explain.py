"""`abovemup explain`: what a layer, a parameterization or an optimizer is: the page to read next to the post."""

import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abovemup.cli.options import Config, ConfigDir, Debug, Json, Overrides
from abovemup.cli.routes import rows as table_rows

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment, RoleRule
    from abovemup.optim.routing import Route

Page = dict[str, Any]  # name, text (lines), and tables (lists of rows)
KINDS = {
    "embedding": """E (V, d): row i is token i. Norm 1->RMS: max_i rms(E[i]). "Above MuP", part 3.
Start: Gaussian rows scaled to RMS 1. Step of norm 1 for a gradient G: G[i] / rms(G[i]).
F = max_i rms(E[i]). D: none, ids cannot be subtracted. U = max_i rms(dE[i]). Exact.""",
    "hidden": """W (d_out, d_in), y = W x. Norm RMS->RMS: sqrt(d_in/d_out) sigma_max(W). "Above MuP", part 2.
Start: semi-orthogonal times sqrt(d_out/d_in). Step of norm 1: sqrt(d_out/d_in) msign(G).
F = D = the norm, U = the norm of dW. Exact for inputs of RMS 1, at the top right singular vector.""",
    "head": """W (V, d), logits = W x. Norm RMS->inf: sqrt(d) max_i |W[i]| = d max_i rms(W[i]). "Above MuP", part 3.
Start: Gaussian rows scaled to length 1/sqrt(d). Step of norm 1: G[i] / (d rms(G[i])).
F of the loss is at most ln V + P and D at most P = d max_{i,t} rms(W[i] - W[t]) <= 2 norm; U <= P(dW) <= 2 norm of dW.
Tied to the embedding it has its tensor, and logits = x E^T / d.""",
    "gain": """g (d), y = g * x: a diagonal matrix. Norm max_i |g_i|. "Above MuP", parts 3 and 4.
Start: ones. Step of norm 1: sign(G).
F = D = max |g_i|, U = max |dg_i|. Exact, at x = sqrt(d) e_i.""",
    "bias": """b (d_out), y = W x + b. Norm rms(b). "Above MuP", part 3.
Start: zeros. Step of norm 1: G / rms(G).
F <= F(W) + rms(b) and U <= U(W) + rms(db): the exact value solves a secular equation. D is that of W.""",
    "attention": """Logit scale * q.k. Scale: 1/sqrt(head_dim) under standard, else base x base / head_dim; here SCALE.
F = max |logit| <= scale head_dim F_q F_k in every head, with F_q = F_k = 1 behind a norm. "Above MuP", part 3.""",
}
OPTIMIZER = """Each role steps by W <- (1 - lr decay) W - lr x scale x step, with its own rule.
one_to_rms: G[i] / rms(G[i]); rms_to_inf: that over d; rms: G / rms(G); max_abs: sign(G); sign: sign(G) / d_in;
adam: its entries, of size about one; spectral: msign(G), and times sqrt(d_out/d_in) rms_to_rms,
times sqrt(max(1, d_out/d_in)) keller_jordan, times 0.2 sqrt(max(d_out, d_in)) moonlight."""


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A layer, its kind, a parameterization or an optimizer.")],
    overrides: Overrides = None,
    config: Config = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print formula, layout, source and numbers: abovemup explain head model=pocket optimizer=adam"""
    from abovemup.cli.output import print_json, print_table
    from abovemup.config.compose import compose
    from abovemup.config.conf import choices
    from abovemup.config.errors import RequestError

    if "=" in name:
        raise RequestError(f"NAME is missing before {name}: a layer, a kind ({', '.join(KINDS)}), mup, scion, ...")
    typed, available = list(overrides or []), choices(config_dir)
    pages = [
        _choice_page(group, compose([*typed, f"{group}={name}"], config, config_dir), config_dir)
        for group in ("parameterization", "optimizer")  # above_mup is both
        if name in available[group] and not any(o.startswith(f"{group}=") for o in typed)
    ]
    others = [*available["parameterization"], *available["optimizer"]]
    pages = pages or [_layer_page(name, compose(typed, config, config_dir), others)]
    if json:
        print_json(pages)
        return
    for page in pages:
        print(f"{page.pop('name')}\n\n" + "\n".join(page.pop("text")))
        for title, rows in page.items():
            print(f"\n{title}:" if rows else f"\n{title}: none in this model")
            print_table(list(rows[0]) if rows else [], (row.values() for row in rows))


def _choice_page(group: str, e: "Experiment", config_dir: Path | None) -> Page:
    """Of a parameterization or an optimizer: what its YAML file begins with, how each role steps, and the numbers."""
    from abovemup.config.conf import conf_dir
    from abovemup.training.routes import table

    file = Path(group, f"{e.choices[group]}.yaml")
    folder = next(folder for folder in (conf_dir(), config_dir) if folder and (folder / file).is_file())
    comment = itertools.takewhile(lambda line: line.startswith("#"), (folder / file).read_text("utf-8").splitlines())
    text = [line.lstrip("# ") for line in comment] + (OPTIMIZER.splitlines() if group == "optimizer" else [])
    roles = [_role(e, role, rule) for role, rule in vars(e.optimizer.roles).items()]
    return {"name": f"{group}={e.choices[group]}", "text": text, "roles": roles, "parameters": _rows(e, table(e))}


def _layer_page(name: str, e: "Experiment", others: list[str]) -> Page:
    """Of a kind of layer, a parameter, or all that a module holds. `others` are names that a typo may have meant."""
    from abovemup.config.errors import RequestError
    from abovemup.config.keys import did_you_mean
    from abovemup.geometry.parameterization import attention_scale
    from abovemup.training.routes import table

    routes = table(e)
    if name in KINDS:
        found, kinds = [r for r in routes if r.role == name or f".{name}." in r.name], [name]
    else:
        found = [r for r in routes if r.name == name or r.name.startswith(f"{name}.")]
        kinds = ["attention"] * name.endswith(".attention") + list(dict.fromkeys(r.role for r in found))
    if not kinds:
        layers = [r.name.removesuffix(".weight") for r in routes]
        hint = did_you_mean(name, list(dict.fromkeys([*KINDS, *others, *layers])))
        hint = hint or f" A layer is {layers[1]}, a kind {', '.join(KINDS)}."
        raise RequestError(f"no layer, parameterization or optimizer is called {name}.{hint}")
    scale = attention_scale(e.parameterization.name, e.model.head_dim, e.parameterization.base_head_dim)
    text = "\n".join(KINDS[kind].replace("SCALE", f"{scale:g}") for kind in kinds)
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
