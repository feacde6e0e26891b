"""What the decoder computes: against its definition, and properties that any wrong detail breaks."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from abovemup.model.layers import Linear, RMSNorm, rope_angles, rotate
from abovemup.model.llama import NORM_SITES, Llama
from abovemup.model.roles import Tag
from tests import tiny

# width, depth, heads, parameters: "Optimal Scaling Needs Optimal Norm" (arXiv:2510.03871), A.2
PAPER = [
    (256, 4, 4, 68_878_336),
    (1024, 4, 16, 314_048_512),
    (3072, 4, 48, 1_250_426_880),
    (256, 32, 4, 91_357_184),
    (256, 128, 4, 168_427_520),
]


@pytest.mark.parametrize(("width", "depth", "heads", "parameters"), PAPER)
def test_the_papers_parameter_counts(width: int, depth: int, heads: int, parameters: int) -> None:
    shape = {"width": width, "depth": depth, "heads": heads, "kv_heads": heads, "head_dim": 64, "ffn": width * 11 // 4}
    with torch.device("meta"):
        net = Llama(tiny.model(**shape, vocab_size=128_256), tiny.parameterization(width=256))
    assert sum(p.numel() for p in net.parameters()) == parameters


def test_loss_at_initialisation_is_log_vocabulary_plus_half_the_logit_variance() -> None:
    # Averaged over all targets, so that only the variance of the logits is left to chance.
    net = tiny.llama(width=64, head_dim=16, ffn=176, vocab_size=2048, p=tiny.parameterization(width=64, head_dim=16))
    logits = net(tiny.tokens(8, 32, vocab=2048))
    loss = (logits.logsumexp(-1) - logits.mean(-1)).mean().item()
    assert loss == pytest.approx(math.log(2048) + 1 / (2 * 64), abs=0.1 / (2 * 64))


def test_a_future_token_does_not_alter_past_logits() -> None:
    net = tiny.llama(dtype=torch.float64)
    a = tiny.tokens()
    b = a.clone()
    b[:, 7] = (b[:, 7] + 1) % 61
    with torch.no_grad():
        x, y = net(a), net(b)
    torch.testing.assert_close(x[:, :7], y[:, :7], rtol=0, atol=1e-12)
    assert (x[:, 7:] - y[:, 7:]).abs().amax(-1).min() > 1e-6


def test_rope_turns_each_pair_by_its_own_frequency() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    y = rotate(x, *rope_angles(5, 8, 100.0, x))
    for t in range(5):
        for i in range(4):
            turned = torch.complex(x[:, t, :, i], x[:, t, :, i + 4]) * complex(
                math.cos(t * 100 ** (-i / 4)), math.sin(t * 100 ** (-i / 4))
            )
            torch.testing.assert_close(torch.complex(y[:, t, :, i], y[:, t, :, i + 4]), turned)


def test_rope_makes_attention_a_function_of_the_distance() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = rope_angles(16, 8, 10000.0, q)
    queries = rotate(q.expand(1, 16, 1, 8), cos, sin)[0, :, 0]
    keys = rotate(k.expand(1, 16, 1, 8), cos, sin)[0, :, 0]
    logits = queries @ keys.T
    for distance in range(-15, 16):
        diagonal = logits.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert logits[0].std() > 1e-3


def test_rope_angles_stay_float32_under_bfloat16() -> None:
    cos, _ = rope_angles(4096, 64, 10000.0, torch.zeros(1, dtype=torch.bfloat16))
    expected = math.cos(4095)
    assert cos.dtype == torch.float32
    assert cos[4095, 0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_grouped_queries_are_full_attention_with_repeated_keys_and_values() -> None:
    grouped, full = tiny.llama(dtype=torch.float64), tiny.llama(kv_heads=4, dtype=torch.float64)
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).view(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tiny.tokens()), full(tiny.tokens()))


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def normed_inputs(net: Llama) -> dict[str, bool]:
    """For each place of layer 1 and the head: is every vector that arrives there of RMS 1?"""
    seen: dict[str, Tensor] = {}
    attention, ffn = net.layers[1].attention, net.layers[1].feed_forward
    places = {"residual": attention.wq, "residual ffn": ffn.w1, "o": attention.wo, "mlp": ffn.w2, "output": net.head}
    for name, module in places.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    original = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.update(q=q, k=k, v=v)  # the last layer's are what is left
        return original(q, k, v, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", spy)
        net(tiny.tokens())
    return {name: bool(((x.square().mean(-1) - 1).abs() < 1e-5).all()) for name, x in seen.items()}


@pytest.mark.parametrize(
    ("placement", "qk", "vo", "mlp", "residual", "output"),
    [
        ("everywhere", 1, 1, 1, 1, 1),
        ("everywhere_no_output", 1, 1, 1, 1, 0),
        ("standard", 1, 0, 0, 1, 1),
        ("residual_and_output", 0, 0, 0, 1, 1),
        ("residual_only", 0, 0, 0, 1, 0),
        ("qk_only", 1, 0, 0, 0, 0),
        ("output_only", 0, 0, 0, 0, 1),
        ("none", 0, 0, 0, 0, 0),
    ],
)
def test_norms_stand_where_the_placement_puts_them(
    placement: str, qk: bool, vo: bool, mlp: bool, residual: bool, output: bool
) -> None:
    net = tiny.llama(norm_placement=placement, gains=True)
    assert sum(isinstance(m, RMSNorm) for m in net.modules()) == 2 * (2 * qk + 2 * vo + mlp + 2 * residual) + output
    expected = {"q": qk, "k": qk, "v": vo, "o": vo, "mlp": mlp, "output": output}
    expected |= {"residual": residual, "residual ffn": residual}
    assert normed_inputs(net) == expected
    assert len(NORM_SITES) == 8


def test_queries_and_keys_are_normed_before_rope_and_per_head() -> None:
    # RoPE keeps the RMS of a head, so the order shows only with a gain that RoPE does not commute with.
    net = tiny.llama(gains=True, dtype=torch.float64)
    attention = net.layers[0].attention
    gains = {"q": torch.arange(1, 9), "k": torch.arange(9, 1, -1)}
    with torch.no_grad():
        attention.q_norm.weight.copy_(gains["q"])
        attention.k_norm.weight.copy_(gains["k"])
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    original = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.update(q=q, k=k)
        return original(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", watched)
        cos, sin = rope_angles(6, 8, 10000.0, x)
        attention(x, cos, sin)
    for name, linear in (("q", attention.wq), ("k", attention.wk)):
        y = (x @ linear.weight.T).view(1, 6, -1, 8)
        y = y / y.square().mean(-1, keepdim=True).sqrt() * gains[name]
        torch.testing.assert_close(seen[name], rotate(y, cos, sin).transpose(1, 2))


def test_gains_of_one_and_biases_of_zero_change_nothing() -> None:
    plain = tiny.llama()
    full = tiny.llama(gains=True, biases=True)
    assert len(list(full.parameters())) == len(list(plain.parameters())) + 2 * 7 + 2 * 7 + 1
    assert torch.equal(plain(tiny.tokens()), full(tiny.tokens()))


def test_every_gain_and_bias_has_an_effect() -> None:
    net = tiny.llama(gains=True, biases=True)
    before = net(tiny.tokens())
    for name, parameter in net.named_parameters():
        if parameter.ndim == 1:
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(torch.linspace(0, 1, len(parameter)))
                assert (net(tiny.tokens()) - before).abs().max() > 1e-4, name
                parameter.copy_(kept)


@pytest.mark.parametrize(
    ("residual", "alpha", "beta"),
    [
        ("identity", 1, 1),
        ("depth_normalized", 5 / 6, 1 / 6),
        ("completep_paper", 1, 1 / 6),
        ("completep", 1, 2 / 3),  # base depth over depth
    ],
)
def test_each_half_of_a_block_is_alpha_x_plus_beta_f(residual: str, alpha: float, beta: float) -> None:
    net = tiny.llama(residual=residual, depth=3, dtype=torch.float64)
    block = net.layers[1]
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    rope = rope_angles(6, 8, 10000.0, x)
    h = alpha * x + beta * block.attention(F.rms_norm(x, (32,), eps=1e-20), *rope)
    y = alpha * h + beta * block.feed_forward(F.rms_norm(h, (32,), eps=1e-20))
    torch.testing.assert_close(block(x, *rope), y)


def test_swiglu_gates_with_w1() -> None:
    ffn = tiny.llama(norm_placement="none", dtype=torch.float64).layers[0].feed_forward
    x = torch.randn(5, 32, dtype=torch.float64)
    gate, up = x @ ffn.w1.weight.T, x @ ffn.w3.weight.T
    torch.testing.assert_close(ffn(x), (gate * torch.sigmoid(gate) * up) @ ffn.w2.weight.T)


def logit_of_ones(name: str, head_dim: int) -> float:
    """The attention logit of q = k = ones, as SDPA gets it."""
    p = tiny.parameterization(name, head_dim=16)
    net = tiny.llama(p=p, width=4 * head_dim, head_dim=head_dim, norm_placement="none")
    scales: list[float] = []
    original = F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda *a, scale, **k: scales.append(scale) or original(*a, scale=scale, **k),
        )
        net(tiny.tokens())
    return scales[0] * head_dim


@pytest.mark.parametrize("name", ["above_mup", "mup"])
def test_attention_logit_of_aligned_ones_does_not_grow_with_head_dim(name: str) -> None:
    assert [logit_of_ones(name, d) for d in (16, 32, 64)] == [4.0, 4.0, 4.0]
    assert [logit_of_ones("standard", d) for d in (16, 32, 64)] == pytest.approx([4, 4 * 2**0.5, 8])


@pytest.mark.parametrize("init", ["exact", "gaussian"])
@pytest.mark.parametrize("other", ["standard", "mup"])
def test_parameterizations_coincide_at_the_base(other: str, init: str) -> None:
    ours, theirs = tiny.llama(init=init), tiny.llama(init=init, p=tiny.parameterization(other))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(ours(tiny.tokens()), theirs(tiny.tokens()))


def test_rmsnorm_of_zero_is_zero_and_differentiable() -> None:
    layer = RMSNorm(16, 1e-20)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2, 16, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, torch.zeros_like(y))
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_rmsnorm_normalises_any_scale_far_above_its_eps() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for scale in (1e-6, 1e-3, 1e3, 1e15):
        assert rms(RMSNorm(16, 1e-20)(x * scale)) == pytest.approx(1, abs=1e-5)
    y = RMSNorm(16, 1e-20)(x.bfloat16() * 2.0**-20)
    assert y.dtype == torch.bfloat16
    assert rms(y.float()) == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("full", [False, True])
def test_bfloat16_autocast_gives_float32_logits_near_the_float32_ones(full: bool) -> None:
    net = tiny.llama(gains=full, biases=full, tie_embeddings=full)
    exact = net(tiny.tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(tiny.tokens())
    assert logits.dtype == torch.float32
    assert 0 < (logits - exact).abs().max() < 0.03 * max(exact.abs().max().item(), 0.1)
    logits.logsumexp(-1).mean().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters()
    )


def test_a_linear_scales_its_product_and_not_its_bias() -> None:
    layer = Linear(3, 2, Tag("hidden", 1.0, (2, 3), forward=0.25), bias=True)
    nn.init.ones_(layer.weight)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, 5.0)
    assert layer(torch.ones(3)).tolist() == [5.75, 5.75]
