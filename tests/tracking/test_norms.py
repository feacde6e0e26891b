"""The tracker against norms written out, and what it must not do."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import Parameter

from abovemup.geometry.msign import msign
from abovemup.geometry.norms import NORMS
from abovemup.model.roles import specs
from abovemup.tracking import norms
from abovemup.tracking.norms import NormTracker
from tests import tiny


@dataclass
class Route:
    name: str
    role: str
    norm: str


def tracker(**weights: Tensor) -> NormTracker:
    return NormTracker(weights, [Route(name, "hidden", "rms_to_rms") for name in weights])


def written_out(norm: str, W: Tensor) -> float:
    W = W.detach().double()
    return {
        "one_to_rms": lambda: W.square().mean(1).sqrt().max().item(),
        "rms_to_inf": lambda: math.sqrt(W.shape[1]) * W.norm(dim=1).max().item(),
        "rms_to_rms": lambda: math.sqrt(W.shape[1] / W.shape[0]) * torch.linalg.svdvals(W)[0].item(),
        "max_abs": lambda: W.abs().max().item(),
        "rms": lambda: W.square().mean().sqrt().item(),
    }[norm]()


def scattered(seed: int = 0, **changes: object) -> dict[str, Tensor]:
    """The parameters of a model with every role, pushed away from the initialisation."""
    net = tiny.llama(gains=True, biases=True, **changes)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5).add_(torch.randn(p.shape, generator=g))
    return dict(net.named_parameters())


def test_every_norm_of_a_model_and_its_key() -> None:
    named, table = scattered(), specs(tiny.llama(gains=True, biases=True))
    result = NormTracker(named, table).weights()
    assert len(result) == len(named)
    for spec in table:
        key = f"norm/{spec.name.removesuffix('.weight')}/{spec.norm}"
        assert isinstance(result[key], float)
        assert result[key] == pytest.approx(written_out(spec.norm, named[spec.name]), rel=1e-6), key
    for key in (
        "norm/head/rms_to_inf",
        "norm/layers.0.feed_forward.w2/rms_to_rms",
        "norm/layers.0.attention.wq.bias/rms",
    ):
        assert key in result


@pytest.mark.parametrize("shape", [(7, 7), (1, 13), (13, 1), (1, 1), (40, 10), (10, 40), (600, 512)])
def test_spectral_norm_is_exact_on_any_shape(shape: tuple[int, int]) -> None:
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert tracker(a=W).weights() == {"norm/a/rms_to_rms": pytest.approx(written_out("rms_to_rms", W), rel=1e-12)}


def test_one_shape_in_several_stacks_keeps_each_value_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "BATCH", 30)  # two matrices of 3 x 5 at once
    g = torch.Generator().manual_seed(0)
    weights = {f"w{i}": torch.randn((3, 5) if i % 3 else (5, 3), generator=g) for i in range(8)}
    result = tracker(**weights).weights()
    assert list(result) == [f"norm/w{i}/rms_to_rms" for i in range(8)]
    for name, W in weights.items():
        assert result[f"norm/{name}/rms_to_rms"] == pytest.approx(written_out("rms_to_rms", W), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_spectral_norm_at_any_scale(scale: float) -> None:
    W = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    assert tracker(a=W * scale).weights()["norm/a/rms_to_rms"] == pytest.approx(
        written_out("rms_to_rms", W) * scale, rel=1e-6
    )


def test_a_broken_matrix_is_not_finite_alone_and_zero_is_zero() -> None:
    healthy = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    broken, infinite = healthy.clone(), healthy.clone()
    broken[2, 3], infinite[1, 1] = math.nan, math.inf
    result = tracker(a=broken, b=healthy, c=torch.zeros(4, 6), d=infinite).weights()
    values = [result[f"norm/{name}/rms_to_rms"] for name in "abcd"]
    assert math.isnan(values[0])
    assert values[2] == 0
    assert not math.isfinite(values[3])
    assert values[1] == pytest.approx(written_out("rms_to_rms", healthy), rel=1e-6)


@pytest.mark.parametrize("norm", ["one_to_rms", "rms_to_inf", "max_abs", "rms"])
def test_nan_and_zero_of_the_other_norms(norm: str) -> None:
    shape = (4, 6) if "_to_" in norm else (6,)
    zero, broken = torch.zeros(shape), torch.ones(shape)
    broken[0] = math.nan
    result = NormTracker({"a": zero, "b": broken}, [Route(n, "gain", norm) for n in "ab"]).weights()
    assert result[f"norm/a/{norm}"] == 0
    assert math.isnan(result[f"norm/b/{norm}"])


def test_bfloat16_weights() -> None:
    named = {name: p.detach().bfloat16() for name, p in scattered().items()}
    table = specs(tiny.llama(gains=True, biases=True))
    result = NormTracker(named, table).weights()
    for value, spec in zip(result.values(), table, strict=True):
        assert value == pytest.approx(written_out(spec.norm, named[spec.name]), rel=1e-6), spec.name


@pytest.mark.parametrize("shape", [(8192, 256), (256, 8192), (4099, 257)])
def test_a_sum_over_many_rows_keeps_its_digits(shape: tuple[int, int]) -> None:
    W = torch.full(shape, 0.01)
    result = NormTracker(
        {"a": W}, [Route("a", "embedding", "one_to_rms")], which=["frobenius", "stable_rank"]
    ).weights()
    assert result["norm/a/frobenius"] == pytest.approx(W.double().norm().item(), rel=1e-6)
    assert result["norm/a/stable_rank"] == pytest.approx(1, rel=1e-6)


def test_sharded_tensors_have_the_norms_of_the_whole(tmp_path: Path) -> None:
    named, table = scattered(), specs(tiny.llama(gains=True, biases=True))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = {
            name: Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for name, p in named.items()
        }
        found = []
        for parameters in (named, sharded):
            watch = NormTracker(parameters, table, vocab_size=50, which="all")
            watch.before_step()
            with torch.no_grad():
                for p in parameters.values():
                    p.grad = p.detach() * 3
                    p.mul_(0.5)
            found.append(watch.weights() | watch.updates() | watch.gradients())
    finally:
        dist.destroy_process_group()
    assert found[0] == found[1]


def test_padded_rows_take_no_part() -> None:
    named, table = scattered(), specs(tiny.llama(gains=True, biases=True))
    with torch.no_grad():
        for name in ("embedding.weight", "head.weight"):
            named[name][50:] *= 100
    result = NormTracker(named, table, vocab_size=50).weights()
    assert result["norm/embedding/one_to_rms"] == pytest.approx(
        written_out("one_to_rms", named["embedding.weight"][:50])
    )
    assert result["norm/head/rms_to_inf"] == pytest.approx(written_out("rms_to_inf", named["head.weight"][:50]))
    hidden = "layers.0.feed_forward.w1"  # 88 rows: not a vocabulary
    assert result[f"norm/{hidden}/rms_to_rms"] == pytest.approx(written_out("rms_to_rms", named[f"{hidden}.weight"]))
    watch = NormTracker(named, table, vocab_size=50)
    watch.before_step()
    with torch.no_grad():
        named["head.weight"][55] += 1
    assert watch.updates()["update/head/rms_to_inf"] == 0


def test_an_update_is_the_difference_of_the_weights_around_the_step() -> None:
    named, table = scattered(), specs(tiny.llama(gains=True, biases=True))
    watch = NormTracker(named, table)
    for seed in (1, 2):  # the second time over the kept copies
        watch.before_step()
        before = {name: p.detach().clone() for name, p in named.items()}
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in named.values():
                p.mul_(0.9).add_(torch.randn(p.shape, generator=g), alpha=0.1)
        result = watch.updates()
        for spec in table:
            key = f"update/{spec.name.removesuffix('.weight')}/{spec.norm}"
            expected = written_out(spec.norm, named[spec.name].detach() - before[spec.name])
            assert result[key] == pytest.approx(expected, rel=1e-6), key


def test_updates_without_a_copy_are_refused() -> None:
    with pytest.raises(IndexError):
        tracker(a=torch.ones(2, 2)).updates()


def test_neither_weights_nor_gradients_nor_random_state_change() -> None:
    named = scattered()
    for p in named.values():
        p.grad = torch.ones_like(p)
    kept = {name: (p.detach().clone(), p._version) for name, p in named.items()}
    state = torch.random.get_rng_state()
    watch = NormTracker(named, specs(tiny.llama(gains=True, biases=True)))
    watch.before_step()
    watch.weights()
    watch.updates()
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, p in named.items():
        assert torch.equal(p, kept[name][0])
        assert p._version == kept[name][1]
        assert bool((p.grad == 1).all())


# ---- more norms than the role's ----


def of_operator(A: Tensor) -> dict[str, float]:
    """Every norm of a matrix A (d_out, d_in) that acts as y = A x, written out."""
    A = A.detach().double()
    sigma = torch.linalg.svdvals(A)
    p = sigma / sigma.sum()
    return {
        "rms_to_rms": math.sqrt(A.shape[1] / A.shape[0]) * sigma[0].item(),
        "rms_to_inf": max(math.sqrt(A.shape[1]) * row.norm().item() for row in A),
        "one_to_rms": max(column.square().mean().sqrt().item() for column in A.T),
        "max_abs": A.abs().max().item(),
        "frobenius": A.norm().item(),
        "stable_rank": (A.norm() / sigma[0]).item() ** 2,
        "effective_rank": math.exp(-(p * p.log()).sum().item()),
        "condition_number": (sigma[0] / sigma[-1]).item(),
    }


def test_all_norms_of_a_model() -> None:
    named, table = scattered(), specs(tiny.llama(gains=True, biases=True))
    watch = NormTracker(named, table, which="all")
    result = watch.weights()
    watch.before_step()
    with torch.no_grad():
        for p in named.values():
            p.mul_(0.5)
    updates = watch.updates()
    expected = {}
    for spec in table:
        layer, W = spec.name.removesuffix(".weight"), named[spec.name].detach() * 2
        own = {spec.norm: written_out(spec.norm, W)}
        if W.ndim == 2:
            own |= of_operator(W.T if spec.role == "embedding" else W)
        else:
            own |= {"max_abs": W.abs().max().item(), "frobenius": W.norm().item()}
        expected |= {f"norm/{layer}/{name}": value for name, value in own.items()}
    assert list(result) == list(expected)  # the role's norm first
    assert result == pytest.approx(expected, rel=2e-6)
    scale_free = ("stable_rank", "effective_rank", "condition_number")
    for key, value in expected.items():
        half = value if key.endswith(scale_free) else value / 2
        assert updates[key.replace("norm/", "update/", 1)] == pytest.approx(half, rel=2e-6), key


def test_a_list_adds_to_the_roles_norm_and_says_nothing_twice() -> None:
    W = {"a": torch.ones(3, 5), "b": torch.ones(5)}
    routes = [Route("a", "hidden", "rms_to_rms"), Route("b", "gain", "max_abs")]
    watch = NormTracker(W, routes, which=["frobenius", "rms_to_rms", "stable_rank"])
    keys = ["a/rms_to_rms", "a/frobenius", "a/stable_rank", "b/max_abs", "b/frobenius"]
    assert list(watch.weights()) == [f"norm/{key}" for key in keys]
    assert list(NormTracker(W, routes).weights()) == ["norm/a/rms_to_rms", "norm/b/max_abs"]


def test_all_norms_of_zero_and_of_nan() -> None:
    zero, broken = torch.zeros(4, 6), torch.ones(4, 6)
    broken[1, 2] = math.nan
    result = NormTracker({"a": zero, "b": broken}, [Route(n, "hidden", "rms_to_rms") for n in "ab"], which="all")
    values = result.weights()
    assert all(value == 0 for key, value in values.items() if key.startswith("norm/a/"))
    assert all(math.isnan(value) for key, value in values.items() if key.startswith("norm/b/"))
    assert len(values) == 16


def test_gradients_in_the_dual_norm_without_the_padding() -> None:
    """<G, D> of the step D of norm one."""
    named, table = scattered(), specs(tiny.llama(gains=True, biases=True))
    g = torch.Generator().manual_seed(3)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=g)
    result = NormTracker(named, table, vocab_size=50).gradients()
    assert len(result) == len(table)
    for spec in table:
        p = named[spec.name]
        assert p.grad is not None
        G = p.grad[:50].double() if spec.role in ("embedding", "head") else p.grad.double()
        gain = (G * NORMS[spec.norm].dual(G)).sum().item()
        assert result[f"grad/{spec.name.removesuffix('.weight')}/{spec.norm}_dual"] == pytest.approx(gain, rel=1e-6)


# ---- matrices too large for the Gram matrix ----


def test_above_the_exact_size_within_1e3_warm_and_cold() -> None:
    g = torch.Generator().manual_seed(0)
    weights = {f"w{i}": torch.randn(shape, generator=g) for i, shape in enumerate([(520, 530), (520, 530), (530, 520)])}
    watch = tracker(**weights)
    for t in range(3):
        watch.before_step()
        for name, W in weights.items():
            step = msign(torch.randn(W.shape, generator=g), "newton_schulz", 5)
            W += (0.1 * t - 0.1) * step if name != "w2" else -W  # w2: zero from here on
        measured, updates = watch.weights(), watch.updates()
        for i, (name, W) in enumerate(weights.items()):
            key, change = f"{name}/rms_to_rms", W - watch.before[i]
            assert measured[f"norm/{key}"] == pytest.approx(written_out("rms_to_rms", W), rel=1e-3)
            assert updates[f"update/{key}"] == pytest.approx(written_out("rms_to_rms", change), rel=1e-3)
    assert watch.blocks.keys() == weights.keys()


def test_a_block_is_state_of_weights_only_and_the_random_part_is_the_names() -> None:
    W = torch.randn(600, 600, generator=torch.Generator().manual_seed(0))
    first, second, other = tracker(a=W), tracker(a=W), tracker(b=W)
    state = torch.random.get_rng_state()
    assert first.weights() == second.weights()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.blocks["a"], second.blocks["a"])
    assert not torch.equal(first.blocks["a"], other.weights() and other.blocks["b"])
    kept = first.blocks["a"].clone()
    first.before_step()
    W += 0.1
    first.updates()
    assert torch.equal(first.blocks["a"], kept)
    second.blocks = {"a": kept}
    assert first.weights() == second.weights()
