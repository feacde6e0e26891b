"""`abovemup explain`: what a layer, a parameterization or an optimizer is: the page to read next to the post."""

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abovemup.cli.options import Config, ConfigDir, Debug, Json, Overrides
from abovemup.cli.routes import print_rows
from abovemup.cli.routes import rows as table_rows

if TYPE_CHECKING:
    from abovemup.config.schema import Experiment
    from abovemup.optim.routing import Route

Page = dict[str, Any]  # name, text (lines), and tables (lists of rows)
TEXTS = {
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
    "standard": """Std of hidden and head falls as 1/sqrt(fan_in), the embedding's does not change; lr and forward
multipliers stay what they were at the base; attention scale 1/sqrt(head_dim). No power of the depth.""",
    "mup": """Tensor Programs V (arXiv:2203.03466), table 3. Std falls as 1/sqrt(fan_in) where fan_in and d_out grow, as
1/fan_in where only fan_in does (the head). lr as n^-e, where the norm of a step grows as n^e in the limit.
Forward multiplier 1 (a tied head: 1/d). No power of the depth.""",
    "above_mup": """"Above MuP", parts 2 and 3: a role's norm is 1 at the start, and that of a step stays what it was.
lr is multiplied by (norm of a step at the base) / (norm of a step here), for these very shapes.
Forward multiplier 1 (a tied head: 1/d). No power of the depth.""",
    "optimizer": """Each role steps by W <- (1 - lr decay) W - lr x scale x step, with its own rule.
one_to_rms: G[i] / rms(G[i]); rms_to_inf: that over d; rms: G / rms(G); max_abs: sign(G); sign: sign(G) / d_in;
adam: its entries, of size about one; spectral: msign(G), and times sqrt(d_out/d_in) rms_to_rms,
times sqrt(max(1, d_out/d_in)) keller_jordan, times 0.2 sqrt(max(d_out, d_in)) moonlight.""",
}
KINDS = ("embedding", "hidden", "head", "gain", "bias", "attention")


def explain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A layer, its kind, a parameterization or an optimizer.")],
    overrides: Overrides = None,
    config: Config = None,
    config_dir: ConfigDir = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print formula, layout, source and numbers: abovemup explain head model=pocket optimizer=adam"""
    from abovemup.cli.output import print_json
    from abovemup.config.compose import compose
    from abovemup.config.conf import choices
    from abovemup.config.errors import RequestError

    if "=" in name:
        raise RequestError(f"NAME is missing before {name}: a layer, a kind ({', '.join(KINDS)}), mup, scion, ...")
    typed, available = list(overrides or []), choices(config_dir)
    groups = [
        group
        for group in ("parameterization", "optimizer")  # above_mup is both
        if name in available[group] and not any(o.startswith(f"{group}=") for o in typed)
    ]
    asked = [f"{group}={name}" for group in groups] or [name]
    experiments = [compose([*typed, *([a] if groups else [])], config, config_dir) for a in asked]
    others = [*available["parameterization"], *available["optimizer"]]
    pages = [_page(a, e, others) for a, e in zip(asked, experiments, strict=True)]
    if json:
        print_json(pages)
        return
    for page in pages:
        print(f"{page.pop('name')}\n\n" + "\n".join(page.pop("text")))
        for title, rows in page.items():
            print(f"\n{title}:" if rows else f"\n{title}: none in this model")
            print_rows(rows)


def _page(name: str, e: "Experiment", others: list[str]) -> Page:
    """Of a choice (group=name), a kind of layer, a parameter, or all that a module holds."""
    from abovemup.config.errors import RequestError
    from abovemup.config.keys import did_you_mean
    from abovemup.geometry.parameterization import attention_scale
    from abovemup.training.routes import table

    routes, p = table(e), e.parameterization
    group, _, choice = name.rpartition("=")
    if group:
        text = TEXTS["optimizer" if group == "optimizer" else choice]
        return {"name": name, "text": text.splitlines(), "roles": _roles(e), "parameters": _rows(e, routes)}
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
    scale = attention_scale(p.name, e.model.head_dim, p.base_head_dim)
    text = "\n".join(TEXTS[kind].replace("SCALE", f"{scale:g}") for kind in kinds)
    return {"name": name, "text": text.splitlines(), "parameters": _rows(e, found)}


def _roles(e: "Experiment") -> list[Page]:
    """How each role steps, and the powers of the width that init std and lr follow while all widths grow together."""
    rows = []
    for role, rule in vars(e.optimizer.roles).items():
        std, lr = _powers(e, role, rule.norm)
        scales = {"scale": rule.scale, "lr_scale": getattr(e.optimizer.lr_scale, role)}
        rows.append({"role": role, "rule": rule.norm, **scales, "init std ~ n^": std, "lr ~ n^": lr})
    return rows


def _powers(e: "Experiment", role: str, rule: str) -> tuple[float, float]:
    """Of the width ratio n, from four times the base width; powers of the depth there are none."""
    from abovemup.geometry.parameterization import init_norm, init_std, lr_multiplier

    if role in ("gain", "bias"):
        return 0.0, 0.0
    name, d = e.parameterization.name, e.parameterization.base_width
    base, grown = (
        ((d, d), (4 * d, 4 * d)) if role == "hidden" else ((e.model.vocab_size, d), (e.model.vocab_size, 4 * d))
    )
    std = init_norm(name, "exact", role, grown, base) * init_std("exact", role, grown) / init_std("exact", role, base)
    powers = (math.log(ratio, 4) for ratio in (std, lr_multiplier(name, role, rule, grown, base)))
    first, second = (round(power, 6) + 0.0 for power in powers)
    return first, second


def _rows(e: "Experiment", routes: "list[Route]") -> list[Page]:
    """The numbers of each parameter, of layers that are alike those of the first."""
    first: dict[str, Page] = {}
    for row in table_rows(e, routes):
        rest = [value for name, value in row.items() if name != "parameter"]
        first.setdefault(re.sub(r"[.][0-9]+[.]", "..", row["parameter"]) + str(rest), row)
    return list(first.values())
