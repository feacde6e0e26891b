"""The initial weights: each role's norm, reproducibility, and the depth factors."""

import math

import pytest
import torch
from torch import Tensor

from abovemup.model.llama import Llama
from abovemup.model.roles import specs
from tests import tiny


def norm_of(role: str, W: Tensor) -> float:
    """The norm of a role, written out."""
    W = W.detach().double()
    if role == "embedding":
        return W.square().mean(1).sqrt().max().item()
    if role == "head":
        return math.sqrt(W.shape[1]) * W.norm(dim=1).max().item()
    if role == "hidden":
        return math.sqrt(W.shape[1] / W.shape[0]) * torch.linalg.svdvals(W)[0].item()
    return W.abs().max().item() if role == "gain" else W.square().mean().sqrt().item()


@pytest.mark.parametrize("name", ["above_mup", "standard", "mup"])
@pytest.mark.parametrize("width", [32, 128])
def test_exact_norms_are_what_specs_say(width: int, name: str) -> None:
    net = tiny.llama(
        width=width, heads=width // 8, ffn=width * 11 // 4, gains=True, biases=True, p=tiny.parameterization(name)
    )
    parameters = dict(net.named_parameters())
    for spec in specs(net):
        assert norm_of(spec.role, parameters[spec.name]) == pytest.approx(spec.init, rel=2e-6), spec.name
    head = norm_of("head", net.head.weight)
    assert head == pytest.approx(math.sqrt(width / 32) if name == "standard" else 1, rel=2e-6)


def test_with_the_papers_settings_every_norm_is_1_and_the_last_of_each_block_1_over_sqrt_2L() -> None:
    net = tiny.llama(depth=3)
    for spec in specs(net):
        last = ".wo." in spec.name or ".w2." in spec.name
        expected = 1 / math.sqrt(6) if last else 1
        assert norm_of(spec.role, net.get_parameter(spec.name)) == pytest.approx(expected, rel=2e-6), spec.name


def test_exact_matrices_are_semi_orthogonal_and_every_row_of_the_vocabulary_has_its_length() -> None:
    net = tiny.llama(vocab_size=67)
    for name, p in net.named_parameters():
        W = p.detach().double()
        if name == "embedding.weight":
            values, expected = W.norm(dim=1), math.sqrt(32)
        elif name == "head.weight":
            values, expected = W.norm(dim=1), 1 / math.sqrt(32)
        else:
            values = torch.linalg.svdvals(W)
            expected = math.sqrt(W.shape[0] / W.shape[1]) * (0.5 if ".wo." in name or ".w2." in name else 1)
        torch.testing.assert_close(values, torch.full_like(values, expected), rtol=2e-6, atol=0)


def depth_factors(init: str, **settings: object) -> list[float]:
    """The norm of wo, w2, wo, w2, ... over that of a matrix without a depth factor and of the same shape."""
    net, plain = tiny.llama(init=init, **settings), tiny.llama(init=init, **{**settings, "depth_init": "identity"})
    pairs = zip(net.layers, plain.layers, strict=True)
    return [
        norm_of("hidden", a.weight) / norm_of("hidden", b.weight)
        for x, y in pairs
        for a, b in ((x.attention.wo, y.attention.wo), (x.feed_forward.w2, y.feed_forward.w2))
    ]


@pytest.mark.parametrize("init", ["exact", "gaussian"])
@pytest.mark.parametrize("depth", [2, 8])
def test_depth_factors(depth: int, init: str) -> None:
    total = depth_factors(init, depth=depth, depth_init="total_depth")
    assert total == pytest.approx([1 / math.sqrt(2 * depth)] * (2 * depth), rel=1e-5)
    relative = depth_factors(init, depth=depth, depth_init="relative_depth")
    assert relative == pytest.approx([1 / math.sqrt(2 * i) for i in range(1, 2 * depth + 1)], rel=1e-5)


@pytest.mark.parametrize("init", ["exact", "gaussian"])
@pytest.mark.parametrize("depth", [2, 8])
def test_wo_and_w2_have_the_same_norm(depth: int, init: str) -> None:
    """Case 22, at an ffn of 2.75 widths: each matrix by its own fan_in."""
    # Wide enough that the finite-size error of a Gaussian's largest singular value is below 3 %.
    near = 2e-6 if init == "exact" else 0.03
    shape = {"width": 256, "heads": 16, "kv_heads": 8, "head_dim": 16, "ffn": 704}
    net = Llama(tiny.model(depth=depth, init=init, **shape), tiny.parameterization(width=256, head_dim=16))
    net.init_weights(0)
    for layer in (net.layers[0], net.layers[-1]):
        matrices = layer.attention.wo.weight, layer.feed_forward.w2.weight
        o, down = (norm_of("hidden", W) for W in matrices)
        assert o == pytest.approx(down, rel=near)
        assert o == pytest.approx(1 / math.sqrt(2 * depth), rel=near)
        # std * sqrt(fan_in), over what norm 1 makes of it
        for W in matrices:
            d_out, d_in = W.shape
            spread = math.sqrt(d_out) / (math.sqrt(d_in) + math.sqrt(d_out))
            law = math.sqrt(min(d_in, d_out) / d_in) if init == "exact" else spread
            statistic = W.square().mean().sqrt().item() * math.sqrt(d_in) / law
            assert statistic == pytest.approx(1 / math.sqrt(2 * depth), rel=near)


def test_gaussian_norms() -> None:
    # THEORY section 2: hidden about 1 from below; the largest of V rows lies at 1 + sqrt(ln V / d).
    p = tiny.parameterization(width=128)
    net = tiny.llama(
        init="gaussian", width=128, ffn=352, heads=8, head_dim=16, vocab_size=4096, depth_init="identity", p=p
    )
    tail = 1 + math.sqrt(math.log(4096) / 128)
    assert norm_of("embedding", net.embedding.weight) == pytest.approx(tail, rel=0.05)
    assert norm_of("head", net.head.weight) == pytest.approx(tail, rel=0.05)
    for name, weight in net.named_parameters():
        if name.startswith("layers"):
            assert 0.9 < norm_of("hidden", weight) < 1.06, name
            d_out, d_in = weight.shape
            std = math.sqrt(d_out / d_in) / (math.sqrt(d_in) + math.sqrt(d_out))
            assert weight.std().item() == pytest.approx(std, rel=0.055), name  # 5 sigma of 4,096 entries


def test_init_is_bitwise_reproducible_and_leaves_the_global_random_state() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a = tiny.llama(gains=True, biases=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    b = tiny.llama(gains=True, biases=True)
    a.init_weights(0)  # again: nothing is left of what was there
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_parameter_depends_on_seed_and_name_only() -> None:
    net, deeper = (
        tiny.llama(depth_init="identity"),
        tiny.llama(depth=5, depth_init="identity", gains=True, vocab_size=70),
    )
    for name, p in net.named_parameters():
        if name.startswith("layers"):
            assert torch.equal(p, deeper.get_parameter(name)), name
    weights = [p.detach().flatten() for p in net.parameters() if tuple(p.shape) in ((32, 32), (61, 32), (88, 32))]
    directions = torch.stack([w[:1024] / w[:1024].norm() for w in weights])
    overlap = directions @ directions.T - torch.eye(len(weights))
    assert overlap.abs().max() < 0.2  # two layers never start from the same numbers
    other = tiny.llama(seed=1)
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_init_is_the_same_in_every_dtype() -> None:
    net = tiny.llama()
    for dtype in (torch.float64, torch.bfloat16):
        for a, b in zip(net.parameters(), tiny.llama(dtype=dtype).parameters(), strict=True):
            assert b.dtype == dtype
            assert torch.equal(a.to(dtype), b)
