"""Which layers a Llama has, what stands in front of them, and bounds of its blocks and the whole from both sides."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.geometry import stability as theory
from abovemup.geometry.norms import NORMS
from abovemup.geometry.roles import ROLE_NORM
from abovemup.geometry.stability import Affine
from abovemup.model import stability
from abovemup.model.composed import ascend, half_bound, half_change, heads, lower_bounds, mixed_change
from abovemup.model.layers import Embedding, Linear, rope_angles
from abovemup.model.llama import NORM_SITES, Llama
from abovemup.model.roles import specs
from abovemup.model.stability import Row, effective, report
from abovemup.optim.steepest import SteepestDescent
from tests import tiny

PLACEMENTS = list(NORM_SITES)


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def table(rows: list[Row]) -> dict[tuple[str, str], Row]:
    found: dict[tuple[str, str], Row] = {(row.layer, row.metric): row for row in rows}
    assert len(found) == len(rows)
    return found


def rough(net: Llama, size: float = 0.3, seed: int = 7) -> Llama:
    """Every parameter moved at random, gains and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(size * p.abs().mean().clamp_min(0.3) * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def weights(net: Llama) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


# ---- the rows ----


def test_every_layer_has_its_metrics() -> None:
    net = tiny.llama(gains=True, biases=True)
    rows = table(report(net, weights(net)))
    forward = {layer for layer, metric in rows if metric == "forward"}
    parameters = {spec.name.removesuffix(".weight") for spec in specs(net) if spec.role != "bias"}
    composed = {f"layers.{i}.{x}" for i in (0, 1) for x in ("attention.output", "feed_forward.output", "residual")}
    worst = {f"layers.{i}.{x}" for i in (0, 1) for x in ("attention.logits", "feed_forward.middle")}
    assert forward == parameters | composed | worst | {"model", "head.M", "head.R"}
    middle = {f"layers.{i}.feed_forward.middle" for i in (0, 1)}
    outputs = {layer for layer in composed if layer.endswith("output")}
    assert {layer for layer, metric in rows if metric == "update"} == parameters | worst | outputs | {"model"}
    assert {layer for layer, metric in rows if metric == "dependency"} == parameters - {"embedding"} | middle
    assert not any(metric == "update" for _, metric in table(report(net)))
    assert all(rows[layer, "update"].value == 0 for layer in parameters | middle)


def test_at_exact_initialisation_the_metrics_are_the_norms_of_the_specs() -> None:
    net = tiny.llama(gains=True, depth_init="total_depth")
    rows = table(report(net))
    for spec in specs(net):
        row = rows[spec.name.removesuffix(".weight"), "forward"]
        if spec.role == "head":
            assert 1 < row.value <= 2
        else:
            assert row.value == pytest.approx(spec.init, rel=1e-6), spec.name
        assert row.exact
        assert row.in_norm
        assert row.input_rms is None
    assert rows["layers.1.attention.logits", "forward"].value == pytest.approx(8 / math.sqrt(8))
    residual = [rows[f"layers.{i}.residual", "forward"].value for i in (0, 1)]
    assert residual == pytest.approx([2, 3], rel=1e-6)  # 1, and four halves of 1/sqrt(2L) = 1/2
    assert rows["model", "forward"].value == rows["head", "forward"].value


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_in_norm_is_what_arrives(placement: str) -> None:
    """Against RMS 1 of every vector that arrives; where none stands, the largest RMS is reported."""
    net = rough(tiny.llama(norm_placement=placement))
    seen: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: rms(args[0])}))
    net(tiny.tokens())
    inputs = {layer: x.max().item() for layer, x in seen.items()}
    rows = table(report(net, inputs=inputs))
    for layer, x in seen.items():
        row = rows[layer, "forward"]
        assert row.in_norm == bool(((x - 1).abs() < 1e-5).all()), layer
        assert row.input_rms == (None if row.in_norm else inputs[layer])
    sites = NORM_SITES[placement]  # type: ignore[index]
    for layer, metric in rows:
        if layer.endswith((".output", ".middle")):
            assert rows[layer, metric].in_norm == ("residual" in sites)
            first = layer.rpartition(".")[0] + (".wq" if "attention" in layer else ".w1")
            assert rows[layer, metric].input_rms == rows[first, "forward"].input_rms
        if layer.endswith(".logits"):
            assert rows[layer, metric].in_norm == bool({"qk", "residual"} & sites)
            assert rows[layer, metric].exact == ("qk" in sites)  # no gains here
    assert all(rows[layer, "forward"].in_norm for layer in ("embedding", "model", "layers.0.residual"))
    assert len(inputs) == 15


def test_gains_and_multipliers_are_fused_exactly() -> None:
    """sigma_max(W diag(g)), not max|g| sigma_max(W); and a tied head's 1/d."""
    net = rough(tiny.llama(gains=True, biases=True, tie_embeddings=True, dtype=torch.float64))
    before = weights(net)
    rough(net, 0.01, seed=8)
    rows = table(report(net, before))
    block = net.layers[1]
    pairs = [
        ("attention.wq", block.attention_norm, block.attention.wq),
        ("attention.wo", block.attention.o_norm, block.attention.wo),
        ("feed_forward.w3", block.feed_forward_norm, block.feed_forward.w3),
        ("feed_forward.w2", block.feed_forward.norm, block.feed_forward.w2),
    ]
    names = {id(p): name for name, p in net.named_parameters()}
    for name, norm, linear in pairs:
        W, g, b = (p.detach() for p in (linear.weight, norm.weight, linear.bias))
        fused = theory.linear(W * g, b).value.item()
        assert rows[f"layers.1.{name}", "forward"].value == pytest.approx(fused, rel=1e-12)
        plain = theory.linear(W * g).value.item()
        assert rows[f"layers.1.{name}", "dependency"].value == pytest.approx(plain, rel=1e-12)
        assert plain < 0.99 * g.abs().max().item() * theory.linear(W).value.item()
        V, h, c = (before[names[id(p)]] for p in (linear.weight, norm.weight, linear.bias))
        moved = theory.linear(W * g - V * h, b - c).value.item()
        assert rows[f"layers.1.{name}", "update"].value == pytest.approx(moved, rel=1e-12)
    head = theory.head_pair(net.embedding.weight.detach() * net.final_norm.weight.detach() / 32).value.item()
    assert rows["head", "forward"].value == pytest.approx(head, rel=1e-12)


def test_the_head_has_its_three_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond ALL_PAIRS rows P is known up to a factor of 2; D of the loss is never known better than P."""
    net = rough(tiny.llama(dtype=torch.float64))
    W, rows = net.head.weight.detach(), table(report(net, weights(net)))
    P, M, R = (rows[layer, "forward"] for layer in ("head", "head.M", "head.R"))
    assert M.value == pytest.approx(theory.head_logit(W).value.item(), rel=1e-12)
    assert R.value == pytest.approx(theory.head_centred(W).value.item(), rel=1e-12)
    assert P.value == pytest.approx(theory.head_pair(W).value.item(), rel=1e-12)
    assert P.exact
    assert not rows["head", "dependency"].exact
    monkeypatch.setattr(stability, "ALL_PAIRS", 60)
    rows = table(report(net))
    assert rows["head", "forward"].value == rows["head", "dependency"].value == 2 * R.value
    assert not rows["head", "forward"].exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_parameters_are_measured_in_float32(dtype: torch.dtype) -> None:
    net = tiny.llama(gains=True, biases=True, dtype=dtype)
    wide = tiny.llama(gains=True, biases=True, dtype=torch.float64)
    wide.load_state_dict(net.state_dict())
    expected = report(wide, weights(wide))
    for a, b in zip(report(net, weights(net)), expected, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-5), a


def test_a_broken_layer_is_nan_and_the_others_are_measured() -> None:
    net = tiny.llama(biases=True)
    with torch.no_grad():
        net.layers[0].attention.wq.weight[1, 2] = math.nan
    rows = table(report(net))
    assert math.isnan(rows["layers.0.attention.wq", "forward"].value)
    assert rows["layers.0.attention.wk", "forward"].value == pytest.approx(1, rel=1e-6)


def test_the_stream_is_the_sum_that_a_block_computes() -> None:
    """depth_normalized scales what arrives too."""
    net = rough(tiny.llama(residual="depth_normalized", dtype=torch.float64))
    rows = table(report(net))
    stream = rows["embedding", "forward"].value
    for i in (0, 1):
        for half in ("attention", "feed_forward"):
            stream = 3 / 4 * stream + 1 / 4 * rows[f"layers.{i}.{half}.output", "forward"].value
        assert rows[f"layers.{i}.residual", "forward"].value == pytest.approx(stream, rel=1e-12)


def test_each_head_may_look_at_a_token_of_its_own() -> None:
    """Heads that each carry one direction of wv, and look at the token in it: sqrt(H) more than F of the whole wv."""
    heads = width = 4
    net = tiny.llama(
        width=8 * width, heads=heads, kv_heads=heads, depth=1, norm_placement="residual_only", dtype=torch.float64
    )
    attention, d = net.layers[0].attention, 8 * width
    with torch.no_grad():
        for p in attention.parameters():
            p.zero_()
        for h in range(heads):  # token h is sqrt(d) e_h, the one that asks is sqrt(d) e_H
            attention.wv.weight[8 * h, h] = 1.0
            attention.wk.weight[8 * h + 3, h] = 100.0  # the slowest rotation
            attention.wq.weight[8 * h + 3, heads] = 100.0
        attention.wo.weight.copy_(torch.eye(d))
    x = math.sqrt(d) * torch.eye(d, dtype=torch.float64)[None, : heads + 1]
    out = attention(x, *rope_angles(heads + 1, 8, net.cfg.rope_theta, x)).detach()
    bound = table(report(net))["layers.0.attention.output", "forward"].value
    assert rms(out[0, -1]).item() == pytest.approx(bound, rel=1e-6)
    assert bound == pytest.approx(math.sqrt(heads) * theory.linear(attention.wv.weight.detach()).value.item())


def test_biases_alone_move_and_fill_the_middle() -> None:
    net = tiny.llama(norm_placement="standard", biases=True, depth=1, dtype=torch.float64)
    ffn = net.layers[0].feed_forward
    with torch.no_grad():
        for layer in (ffn.w1, ffn.w3):
            layer.weight.mul_(1e-3)
    before = weights(net)
    x = theory.sphere(torch.randn(50, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    middle = F.silu(ffn.w1(x)) * ffn.w3(x)
    with torch.no_grad():
        ffn.w1.bias.fill_(2.0)
        ffn.w3.bias.fill_(1.0)
    rows = table(report(net, before))
    moved = rms((F.silu(ffn.w1(x)) * ffn.w3(x) - middle).detach()).max().item()
    assert 1.7 < moved <= rows["layers.0.feed_forward.middle", "update"].value < 2.3
    largest = rms(ffn(x).detach()).max().item()
    assert 0.5 < largest <= rows["layers.0.feed_forward.output", "forward"].value


def test_the_update_of_the_middle_is_that_of_the_gate_before_and_up_after() -> None:
    net = rough(tiny.llama(biases=True, depth=1, dtype=torch.float64))
    before = weights(net)
    rough(net, 0.5, seed=9)
    after, name = weights(net), "layers.0.feed_forward"
    gate, up, new_gate, new_up = (
        theory.Affine(state[f"{name}.{w}.weight"], state[f"{name}.{w}.bias"])
        for state in (before, after)
        for w in ("w1", "w3")
    )
    expected = theory.swiglu_change(gate, new_up, new_gate - gate, new_up - up).value.item()
    assert table(report(net, before))[f"{name}.middle", "update"].value == pytest.approx(expected, rel=1e-12)


def test_without_norms_a_deep_bound_is_infinite_not_nan() -> None:
    rows = table(report(tiny.llama(norm_placement="none", depth=12)))
    assert rows["model", "forward"].value == math.inf
    assert rows["layers.0.residual", "forward"].value < 1e3


# ---- from both sides ----


def test_ascent_reaches_the_exact_value_of_a_linear_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 48), (48, 24), (31, 31), (1, 7)):
        W, b = torch.randn(shape, generator=generator).double(), torch.randn(shape[0], generator=generator).double()
        x0 = torch.randn(2, shape[1], generator=generator).double()
        for bias in (None, b):
            exact = theory.linear(W, bias).value.item()
            value = ascend(lambda x, W=W, bias=bias: F.linear(x, W, bias), x0, 60)
            # A bias makes a second, lower maximum opposite to the first.
            assert value == pytest.approx(exact, rel=1e-6 if bias is None else 0.1)
            assert value <= exact * (1 + 1e-12)


def test_ascent_is_never_below_its_starts() -> None:
    x0 = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = lambda x: (9 * x).sin()  # noqa: E731
    assert ascend(f, x0, 30) >= rms(f(theory.sphere(x0))).max()
    assert ascend(lambda x: 0 * x, x0, 3) == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("residual", ["identity", "completep"])
def test_lower_bounds_stay_below_the_upper_ones(placement: str, residual: str) -> None:
    changes: dict[str, Any] = {"norm_placement": placement, "residual": residual, "depth_init": "identity"}
    plain = residual == "identity"
    net = rough(tiny.llama(gains=plain, biases=plain, p=tiny.parameterization(depth=1), **changes))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) * p.std()
    upper = {(row.layer, row.metric): row.value for row in report(net, before)}
    lower = lower_bounds(net, before, steps=8, starts=1)
    composed = {layer for layer, _ in upper if layer.endswith(".output")} | {"model"}
    assert lower.keys() == {(layer, metric) for layer in composed for metric in ("forward", "update")}
    for (layer, metric), value in lower.items():
        least = 0.02 if metric == "forward" and layer != "model" else 0.0
        assert least * upper[layer, metric] < value <= upper[layer, metric] * (1 + 1e-9), (layer, metric)
        assert upper[layer, "update"] <= 2.5 * upper[layer, "forward"]
    assert lower_bounds(net, steps=1, starts=1).keys() == {(layer, "forward") for layer in composed}


def test_an_update_bound_without_inner_norms_falls_with_the_update() -> None:
    """Of the order of the step; behind a norm, whose input may vanish, it is F + F' however small the step."""
    for placement, ratio in ("residual_and_output", 0.1), ("everywhere", 1.0):
        net = rough(tiny.llama(norm_placement=placement, biases=True, dtype=torch.float64))
        found = []
        for size in 1e-3, 1e-4:
            before = {name: p * (1 + size) for name, p in net.named_parameters()}
            rows = table(report(net, before))
            found.append(torch.tensor([rows[f"layers.0.{half}.output", "update"].value
                                       for half in ("attention", "feed_forward")]))  # fmt: skip
        assert torch.allclose(found[1], ratio * found[0], rtol=2e-2)


def test_a_step_of_the_values_alone_and_of_the_logits_alone_bounds_the_mix() -> None:
    """p'v' - pv against softmax itself: two positions whose logits differ by c before and by -c after reach 2 tanh."""
    for c in 0.1, 1.0, 5.0:
        p, q = torch.softmax(torch.tensor([c / 2, -c / 2]), 0), torch.softmax(torch.tensor([-c / 2, c / 2]), 0)
        assert (p - q).abs().sum().item() == pytest.approx(2 * math.tanh(c / 2), rel=1e-6)
    net = rough(tiny.llama(norm_placement="residual_and_output", dtype=torch.float64))
    now = effective(net, dict(net.named_parameters()))
    for moved in "wv", "wq":
        then = {name: Affine(layer.weight * (1.1 if name.endswith(moved) else 1)) for name, layer in now.items()}
        change = {name: now[name] - layer for name, layer in then.items()}
        bound = mixed_change(net, then, now, change, "layers.0.attention").item()
        size = {w: heads(net, then[f"layers.0.attention.{w}"]).forward.value for w in ("wq", "wk", "wv")}
        if moved == "wv":
            assert bound == pytest.approx(size["wv"].amax().item() / 11, rel=1e-9)
        else:
            k = size["wk"].repeat_interleave(len(size["wq"]) // len(size["wk"]))
            c = net.layers[0].attention.scale * net.cfg.head_dim * (size["wq"] / 11 * k).amax().item()
            assert bound == pytest.approx(2 * math.tanh(c / 2) * size["wv"].amax().item(), rel=1e-9)


def test_gains_of_a_half_and_of_queries_and_keys_count() -> None:
    net = tiny.llama(norm_placement="standard", depth=1, gains=True)
    plain = lower_bounds(net, steps=3, starts=1)
    with torch.no_grad():
        net.layers[0].attention_norm.weight.mul_(10)
        net.layers[0].attention.q_norm.weight[3] = -2
        net.layers[0].attention.k_norm.weight[5] = 3
    key = "layers.0.attention.output", "forward"
    assert lower_bounds(net, steps=3, starts=1)[key] > 5 * plain[key]
    row = table(report(net))["layers.0.attention.logits", "forward"]
    assert row.value == pytest.approx(2 * 3 * 8 / math.sqrt(8))
    assert not row.exact  # no two inputs at one position reach both


def test_streams_and_losses_of_real_tokens_stay_below_their_bounds() -> None:
    for placement in PLACEMENTS:
        net = rough(tiny.llama(norm_placement=placement, gains=True, biases=True, dtype=torch.float64))
        rows = table(report(net))
        streams: list[Tensor] = []
        for block in net.layers:
            block.register_forward_hook(lambda *a, streams=streams: streams.append(a[2]))
        tokens = tiny.tokens(8, 16)
        logits = net(tokens).detach()
        for i, stream in enumerate(streams):
            assert rms(stream).max() <= rows[f"layers.{i}.residual", "forward"].value
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").max().item()
        assert loss <= math.log(61) + rows["model", "forward"].value


# ---- updates ----


def exact_steps(net: Llama, lr: float) -> SteepestDescent:
    """Steepest descent in each role's norm, msign by SVD."""
    groups = [{"params": [net.get_parameter(s.name)], "norm": ROLE_NORM[s.role]} for s in specs(net)]
    return SteepestDescent(groups, lr=lr, msign_method="exact", msign_dtype="float64")


def step(net: Llama, lr: float, tokens: Tensor) -> None:
    net.zero_grad()
    F.cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    exact_steps(net, lr).step()


def test_first_steps_of_a_whole_model() -> None:
    """THEORY test 9: gains 1 +- lr exactly, update metrics lr, each metric at most its first value + k lr."""
    lr = 2**-5
    net = tiny.llama(gains=True, dtype=torch.float64)
    start = {s.name: NORMS[s.norm].norm(net.get_parameter(s.name).detach()).item() for s in specs(net)}
    for k in range(1, 4):
        before = weights(net)
        step(net, lr, tiny.tokens(4, 16, seed=k))
        for s in specs(net):
            now, last = net.get_parameter(s.name).detach(), before[s.name]
            assert NORMS[s.norm].norm(now) <= start[s.name] + k * lr * (1 + 1e-9)
            assert NORMS[s.norm].norm(now - last) == pytest.approx(lr, rel=1e-9)
            if s.role == "gain" and k == 1:
                assert torch.equal((now - 1).abs(), torch.full_like(now, lr))


def test_measured_updates_of_one_layer_stay_below_the_formula() -> None:
    """THEORY test 19: each layer changed alone, on its inputs of a probe batch; equality at the attaining input."""
    tokens = tiny.tokens(4, 16)
    net = tiny.llama(depth=1, gains=True, biases=True, dtype=torch.float64)
    step(net, 2**-6, tokens)  # away from equal gains
    inputs: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, Linear | Embedding):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].detach()}))
    before = weights(net)
    step(net, 2**-6, tokens)
    probes, after = dict(inputs), weights(net)
    for layer, x in probes.items():
        change = after[f"{layer}.weight"] - before[f"{layer}.weight"]
        net.load_state_dict(before)
        old = net.get_submodule(layer)(x).detach()
        net.load_state_dict(before | {name: W for name, W in after.items() if name.startswith(f"{layer}.")})
        new = net.get_submodule(layer)(x).detach()
        row = table(report(net, before))[layer, "update"]
        moved = (new - old).abs().amax(-1) if layer == "head" else rms(new - old)
        assert 0 < moved.max().item() <= row.value * (1 + 1e-9), layer
        if layer not in ("embedding", "head"):
            metric = theory.linear(change)
            assert metric.attained_by is not None
            reached = rms(F.linear(metric.attained_by(), change)).item()
            assert reached == pytest.approx(metric.value.item(), rel=1e-12)
            assert reached == pytest.approx(2**-6, rel=1e-9)


def whole_update(depth: int, residual: str) -> float:
    """The largest RMS of the change that one step of 2^-6 in every role's norm makes to the logits of a probe batch."""
    net = tiny.llama(depth=depth, residual=residual, dtype=torch.float64)
    tokens = tiny.tokens(1, 2)  # few tokens: the step of each layer is aligned with them, and the layers add up
    before = net(tokens).detach()
    step(net, 2**-6, tokens)
    return rms(net(tokens).detach() - before).max().item()


def test_the_update_of_the_whole_is_flat_in_depth_with_a_multiplier_of_1_over_L() -> None:
    """THEORY test 18, by the slope of log U over log L; without the multiplier it grows."""
    depths = torch.tensor([4.0, 8, 16, 32]).double()
    log_L = depths.log2() - depths.log2().mean()

    def slope(rule: str) -> float:
        U = torch.tensor([whole_update(int(depth), rule) for depth in depths]).double().log2()
        return float((log_L * U).sum() / log_L.square().sum())

    assert abs(slope("completep")) < 0.1
    assert abs(slope("completep_paper")) < 0.1
    assert slope("identity") > 0.5


def test_a_step_of_the_last_matrix_alone_moves_its_half_by_what_enters_it() -> None:
    net = rough(tiny.llama(norm_placement="residual_and_output", dtype=torch.float64))
    now = effective(net, dict(net.named_parameters()))
    for half, last in ("layers.1.attention", "wo"), ("layers.1.feed_forward", "w2"):
        then = now | {f"{half}.{last}": Affine(now[f"{half}.{last}"].weight * 0.9)}
        change = {name: now[name] - layer for name, layer in then.items()}
        expected = half_bound(net, now, half, torch.ones(1, dtype=torch.float64)) / 10
        torch.testing.assert_close(half_change(net, then, now, change, half)[None], expected, rtol=1e-9, atol=0)
