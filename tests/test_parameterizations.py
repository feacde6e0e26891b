"""Every parameterization with every optimizer, from the config to the routing table, against its documented formula."""

from collections.abc import Callable, Iterator
from functools import cache
from math import isclose, sqrt
from typing import Any

import pytest
import torch

from abovemup.config import resolve
from abovemup.config.compose import compose
from abovemup.config.schema import Experiment
from abovemup.geometry import parameterization as rules
from abovemup.model import layers, llama
from abovemup.model.llama import Llama
from abovemup.model.roles import Tag, specs
from abovemup.optim import routing
from abovemup.optim.routing import Route, routing_table
from tests import tiny
from tests.geometry.exponents import exponents

PARAMETERIZATIONS = ("standard", "mup", "above_mup")
OPTIMIZERS = ("adam", "adamw", "muon", "scion", "scion_constrained", "above_mup", "signsgd")
PAIRS = [(p, o) for p in PARAMETERIZATIONS for o in OPTIMIZERS]
WIDTH, DEPTH, BASE_DEPTH = 64, 4, 2
SCALES = {"muon": dict.fromkeys(("embedding", "head", "gain", "bias"), 0.2)}


@cache
def experiment(parameterization: str, optimizer: str, n: int, *more: str) -> Experiment:
    """Gains and biases, twice the base's depth, all widths n times the base's, among them head_dim."""
    shape = [f"model.width={WIDTH * n}", f"model.head_dim={16 * n}", "model.gains=true", "model.biases=true"]
    depth = [f"model.depth={DEPTH}", "model.residual=completep", f"parameterization.base_depth={BASE_DEPTH}"]
    pair = [f"parameterization={parameterization}", f"optimizer={optimizer}", "model.vocab_size=4096"]
    settings = [*pair, *shape, *depth, *more]
    return compose([f"{k}={v}" for k, v in dict(s.split("=") for s in settings).items()])


def build(e: Experiment) -> tuple[Llama, list[Route]]:
    with torch.device("meta"):
        net = Llama(e.model, e.parameterization)
    return net, routing_table(specs(net), e)


# ---- the formulas ----


def std(init: str, role: str, shape: tuple[int, ...]) -> float:
    """Entries of weights of norm one (THEORY 2; DESIGN 1)."""
    if role == "hidden" and init == "exact":
        return sqrt(min(shape)) / shape[1]
    if role == "hidden":
        return sqrt(shape[0] / shape[1]) / (sqrt(shape[0]) + sqrt(shape[1]))
    return {"embedding": 1.0, "head": 1 / shape[-1]}.get(role, 0.0)


UPDATE = {  # the role's norm of one step of lr 1, by rule, for (d_out, d_in); THEORY 3.2
    "adam": {"embedding": lambda o, i: 1.0, "hidden": lambda o, i: i, "head": lambda o, i: i},
    "max_abs": {"embedding": lambda o, i: 1.0},
    "one_to_rms": {"embedding": lambda o, i: 1.0},
    "rms_to_rms": {"hidden": lambda o, i: 1.0},
    "rms_to_inf": {"head": lambda o, i: 1.0},
    "keller_jordan": {"hidden": lambda o, i: max(1.0, sqrt(i / o))},
    "sign": {"hidden": lambda o, i: 1.0, "head": lambda o, i: 1.0},
}


def disagreements(pairs: list[tuple[str, str]], *more: str, widths: tuple[int, ...] = (1, 4, 16)) -> list[str]:
    """What the code makes of each pair and role at these multiples of the base, where it is not what is documented."""
    found = []

    def check(what: str, value: float, formula: float) -> None:
        if not isclose(value, formula, rel_tol=1e-11):
            found.append(f"{what}: {value}, not {formula}")

    for parameterization, optimizer in pairs:
        for n in widths:
            e = experiment(parameterization, optimizer, n, *more)
            net, routes = build(e)
            where = f"{parameterization} x {optimizer} at {n}"
            standard, block = parameterization == "standard", net.layers[1]
            check(f"{where}: attention", block.attention.scale, 1 / 4 / (sqrt(n) if standard else n))
            check(f"{where}: stream", block.alpha, 1)
            check(f"{where}: block", block.beta, BASE_DEPTH / DEPTH)
            for r in routes:
                name = f"{where}: {r.name}"
                power = exponents(parameterization, r.role, r.rule)
                base = tuple(d if i == 0 and r.role in ("embedding", "head") else d // n for i, d in enumerate(r.shape))
                if r.base != base:
                    found.append(f"{name}: base {r.base}, not {base}")
                last = 1 / sqrt(2 * DEPTH) if ".wo.w" in r.name or ".w2.w" in r.name else 1
                at_base = std(e.model.init, r.role, base)
                now = r.init * std(e.model.init, r.role, r.shape)
                check(f"{name}: init std", now, last * at_base * n**power.init_std)
                if len(r.shape) == 1:
                    check(f"{name}: init", r.init, 1 if r.role == "gain" else 0)
                scale = SCALES.get(optimizer, {}).get(r.role, 1.0)
                check(f"{name}: lr", r.lr_mult, scale * n**power.lr * (DEPTH / BASE_DEPTH) ** power.lr_depth)
                check(f"{name}: forward", r.forward, n**power.forward)
                update = UPDATE[r.rule][r.role](*r.shape) if len(r.shape) == 2 else 1.0
                check(f"{name}: update", rules.step_norm(r.rule, r.role, r.shape) * r.lr_mult, update * r.lr_mult)
                if not standard and len(r.shape) == 2:
                    check(f"{name}: kept", update * r.lr_mult, scale * UPDATE[r.rule][r.role](*base))
                if r.rule == "adam":
                    width = 1 if standard or r.role == "head" else 1 / n
                    depth = BASE_DEPTH / DEPTH if r.name.startswith("layers.") else 1
                    check(f"{name}: eps", r.eps, e.optimizer.eps * width * depth)
    return found


@pytest.mark.parametrize("init", ["exact", "gaussian"])
@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_every_pair_is_what_is_documented(parameterization: str, init: str) -> None:
    assert disagreements([(p, o) for p, o in PAIRS if p == parameterization], f"model.init={init}") == []


def test_at_the_base_the_three_are_one() -> None:
    for optimizer in OPTIMIZERS:
        tables = [build(experiment(p, optimizer, 1)) for p in PARAMETERIZATIONS]
        assert tables[0][1] == tables[1][1] == tables[2][1]
        assert len({net.layers[0].attention.scale for net, _ in tables}) == 1


# ---- each rule, made wrong ----


def wrong_for(role: str, place: int, function: Callable[..., float]) -> Callable[..., float]:
    """The function, a third larger for one role, which is its argument number `place`."""
    return lambda *args: function(*args) * (4 / 3 if args[place] == role else 1)


def wrong_tag(role: str) -> Callable[..., Tag]:
    def tag(name: Any, init: float, base: tuple[int, ...], forward: float = 1.0) -> Tag:
        return Tag(name, init + (0.5 if name == role else 0), base, forward)

    return tag


def mutations() -> Iterator[tuple[str, Any, str, Any]]:
    for role in ("embedding", "hidden", "head"):
        yield f"init {role}", llama, "init_norm", wrong_for(role, 2, llama.init_norm)
    for role in ("embedding", "hidden", "head", "gain", "bias"):
        yield f"lr {role}", routing, "lr_multiplier", wrong_for(role, 1, routing.lr_multiplier)
        yield f"eps {role}", routing, "eps_multiplier", wrong_for(role, 1, routing.eps_multiplier)
    yield "init gain", llama, "Tag", wrong_tag("gain")
    yield "init bias", layers, "Tag", wrong_tag("bias")
    yield "forward", llama, "Tag", lambda role, init, base: Tag(role, init, base, forward=0.5)
    yield "attention, reverted", llama, "attention_scale", lambda name, d, base: 1 / sqrt(d)
    yield "attention, always", llama, "attention_scale", lambda name, d, base: sqrt(base) / d
    yield "residual", llama, "residual_multipliers", lambda *_: (1.0, 1.0)
    yield "eps by depth", routing, "residual_multipliers", lambda *_: (1.0, 1.0)
    yield "depth init", llama, "depth_init", lambda *_: 1.0
    yield "std", rules, "init_std", lambda init, role, shape: 1 / sqrt(shape[-1])
    for role in ("embedding", "hidden", "head"):
        yield (
            f"step {role}",
            rules,
            "step_norm",
            lambda rule, r, s, role=role, f=rules.step_norm: f(rule, r, s) * (s[-1] if r == role else 1),
        )
    yield "snap", rules, "_snap", lambda factor: factor**2


MUTATIONS = list(mutations())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_a_wrong_rule_is_seen(mutation: tuple[str, Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule alone; unchanged, the same check finds nothing (above)."""
    _, module, name, wrong = mutation
    pairs = [("standard", "adam"), ("mup", "adam"), ("above_mup", "adam")]
    monkeypatch.setattr(module, name, wrong)
    assert disagreements(pairs, widths=(4,))


@pytest.mark.parametrize(("name", "wrong"), [("_ffn", lambda v, w: 100), ("_kv_heads", lambda v, h: 1)])
def test_a_wrong_base_is_seen(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = getattr(resolve, name), []
    monkeypatch.setattr(resolve, name, lambda *a: calls.append(a) or (wrong if len(calls) == 2 else right)(*a))
    assert disagreements([("above_mup", "adam")], "train.seed=77", f"run.name={name}", widths=(4,))


# ---- the base ----


def base_of(*overrides: str) -> tuple[int, int]:
    p = compose(list(overrides)).parameterization
    return p.base_kv_heads, p.base_ffn


def test_the_base_is_written_like_the_model() -> None:
    """What is open or a ratio is the same ratio there; a number is the same number: tiny has 4 heads of 16."""
    assert base_of("model.width=256") == (2, 176)
    assert base_of("model.width=256", "model.kv_heads=null", "model.ffn=8/3") == (4, 171)
    assert base_of("model.width=256", "model.kv_heads=2", "model.ffn=704") == (2, 704)
    assert base_of("model.width=256", "model.head_dim=32") == (2, 176)
    assert base_of("model.width=256", "model.heads=8", "model.head_dim=16") == (1, 176)  # half as wide as the stream
    assert base_of("model.width=256", "parameterization.base_width=8") == (1, 22)  # no head of 16 fits: one
    assert base_of("model.width=256", "parameterization.base_kv_heads=3", "parameterization.base_ffn=5") == (3, 5)


def test_a_config_knows_how_its_base_was_written(tmp_path: Any) -> None:
    from abovemup.config.io import save

    e = compose(["model.width=256", "model.ffn=704"])
    save(e, tmp_path / "config.yaml")
    assert compose([], config_file=tmp_path / "config.yaml") == e
    wider = compose(["model.kv_heads=2", "parameterization.base_width=32"], config_file=tmp_path / "config.yaml")
    assert (wider.parameterization.base_kv_heads, wider.parameterization.base_ffn) == (2, 704)


def test_keys_of_a_fixed_number_of_heads_are_a_class_of_their_own() -> None:
    """At 4 times the width with 2 kv heads still: fan_in grows and d_out does not."""
    for parameterization, gaussian_norm in (("mup", (16 + sqrt(32)) / (8 + sqrt(32)) / 2), ("above_mup", 1.0)):
        fixed = ["model.kv_heads=2", "model.head_dim=16", "model.init=gaussian"]
        _, routes = build(experiment(parameterization, "adam", 4, *fixed))
        key = next(r for r in routes if r.name == "layers.0.attention.wk.weight")
        assert (key.shape, key.base, key.lr_mult) == ((32, 256), (32, 64), 1 / 4)
        assert key.init == pytest.approx(gaussian_norm, rel=1e-13)
        assert key.eps == pytest.approx(1e-8 / 2)  # the block's multiplier alone


# ---- case 19: two parameterizations differ in what is listed and nothing else ----


def test_mup_and_standard_differ_by_their_factors_only() -> None:
    pairs = [experiment(p, "adam", 4, "model.vocab_size=1024", "model.depth=2") for p in ("mup", "standard")]
    nets = [Llama(e.model, e.parameterization) for e in pairs]
    for net in nets:
        net.init_weights(0)
    differ: dict[str, float] = {}
    for name, weight in nets[0].named_parameters():
        other = nets[1].get_parameter(name)
        if not torch.equal(weight, other):
            torch.testing.assert_close(weight / other, torch.full_like(weight, (weight / other).mean().item()))
            differ[f"init {name}"] = (weight / other).mean().item()
    for x, y in zip(*(net.layers for net in nets), strict=True):
        assert (x.alpha, x.beta, x.feed_forward.w1.multiplier) == (y.alpha, y.beta, y.feed_forward.w1.multiplier)
        assert x.attention.scale == y.attention.scale / 2 == 1 / 16  # head_dim is 64, four times the base's
    assert nets[0].head.multiplier == nets[1].head.multiplier == 1
    tables = [{r.name: r for r in routing_table(specs(net), e)} for net, e in zip(nets, pairs, strict=True)]
    lr = {name: r.lr_mult / tables[1][name].lr_mult for name, r in tables[0].items()}
    eps = {name: r.eps / tables[1][name].eps for name, r in tables[0].items()}
    assert differ == {"init head.weight": pytest.approx(1 / 2, rel=1e-6)}
    assert lr == {name: 1 / 4 if r.role in ("hidden", "head") else 1 for name, r in tables[0].items()}
    assert eps == {name: pytest.approx(1 if r.role == "head" else 1 / 4) for name, r in tables[0].items()}


# ---- case 21: the scale that reaches the attention kernel ----


@pytest.mark.parametrize(("parameterization", "power"), [("standard", 0.5), ("mup", 0.0), ("above_mup", 0.0)])
def test_the_logit_of_queries_and_keys_of_ones(
    parameterization: str, power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **_: Any) -> torch.Tensor:
        seen.append((torch.ones_like(q[0, 0, 0]) @ torch.ones_like(k[0, 0, 0])).item() * scale)
        return q

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", kernel)
    for head_dim in (16, 32, 64):
        p = tiny.parameterization(parameterization, width=128, head_dim=16)
        tiny.llama(p=p, width=128, heads=128 // head_dim, kv_heads=1, head_dim=head_dim, ffn=352, depth=1)(
            tiny.tokens()
        )
    assert seen == pytest.approx([4 * (h / 16) ** power for h in (16, 32, 64)], rel=1e-6)
