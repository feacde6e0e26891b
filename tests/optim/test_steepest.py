"""SteepestDescent: the step of every norm, decay, momentum, missing and zero gradients, batching."""

from copy import deepcopy
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from abovemup.geometry.msign import msign
from abovemup.geometry.norms import NORMS
from abovemup.optim.steepest import CACHED, STACK, SteepestDescent, stacks

EXACT: dict[str, Any] = {"msign_method": "exact", "msign_dtype": "float64"}
SHAPES = [(256, 64), (64, 256), (64, 64), (1, 64), (64, 1)]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def one_step(G: Tensor, W: Tensor | None = None, lr: float = 0.125, **options: Any) -> Tensor:
    """The change of W by one step."""
    p = Parameter(torch.zeros_like(G) if W is None else W.clone())
    p.grad = G.clone()
    before = p.detach().clone()
    SteepestDescent([p], lr=lr, **{**EXACT, **options}).step()
    return p.detach() - before


# ---- one step, every rule ----


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_to_rms_norm_of_the_step(shape: tuple[int, int]) -> None:
    """Case 9: sqrt(in/out) sigma_max(dW) / lr of each named rule, for tall and wide."""
    d_out, d_in = shape
    documented = {
        "rms_to_rms": 1.0,
        "spectral": sqrt(d_in / d_out),
        "keller_jordan": max(1, sqrt(d_in / d_out)),
        "moonlight": 0.2 * (sqrt(d_in) if d_out >= d_in else d_in / sqrt(d_out)),
    }
    G = gaussian(*shape, dtype=torch.float32)
    for norm, value in documented.items():
        dW = one_step(G, norm=norm, msign_dtype="float32")
        measured = sqrt(d_in / d_out) * torch.linalg.svdvals(dW.double())[0].item() / 0.125
        assert measured == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_the_step_is_lr_times_scale_times_the_dual(norm: str) -> None:
    G = gaussian(6, 10) if NORMS[norm].ndim == 2 else gaussian(10)
    torch.testing.assert_close(one_step(G, norm=norm), -0.125 * NORMS[norm].dual(G), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(one_step(G, norm=norm, scale=3.0), -0.375 * NORMS[norm].dual(G), rtol=1e-12, atol=1e-15)
    gain = -(G * one_step(G, norm=norm)).sum()
    torch.testing.assert_close(gain, 0.125 * NORMS[norm].dual_norm(G), rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm", ["max_abs", "rms"])
def test_norms_of_vectors_take_a_matrix_as_one_vector(norm: str) -> None:
    G = gaussian(6, 10)
    expected = -0.125 * NORMS[norm].dual(G.flatten()).view(6, 10)
    torch.testing.assert_close(one_step(G, norm=norm), expected, rtol=1e-12, atol=0)


def test_sign_steps_on_integers_are_exact() -> None:
    G = torch.tensor([[3.0, -1, 0, 2], [-5, 0, 0, 1]])
    assert torch.equal(one_step(G, norm="sign"), -G.sign() / 32)
    assert torch.equal(one_step(G[0], norm="max_abs"), -G[0].sign() / 8)


@pytest.mark.parametrize("norm", ["rms_to_rms", "keller_jordan"])
def test_not_along_the_gradient_and_flat(norm: str) -> None:
    """Case 2, single process: it is not SGD, and the singular values are flat."""
    U, _, Vh = torch.linalg.svd(gaussian(40, 40))
    G = U @ torch.logspace(0, -3, 40, dtype=torch.float64).diag() @ Vh
    dW = one_step(G, norm=norm)
    assert torch.cosine_similarity(dW.flatten(), -G.flatten(), dim=0) < 0.99
    sigma = torch.linalg.svdvals(dW)
    assert sigma[0] / sigma[-1] < 1.01


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("factor", [2.0**-66, 2.0**10, 1e3, 1e-6])
def test_scale_of_the_loss_changes_nothing(norm: str, factor: float) -> None:
    """THEORY test 15; bit for bit where the factor is a power of two."""
    G = gaussian(6, 10, dtype=torch.float32) if NORMS[norm].ndim == 2 else gaussian(10, dtype=torch.float32)
    for method in ("newton_schulz", "polar_express"):
        options: dict[str, Any] = {
            "norm": norm,
            "msign_method": method,
            "msign_dtype": "float32",
            "momentum": 0.5,
            "eps": 0.0,
        }
        scaled, plain = one_step(G * factor, **options), one_step(G, **options)
        if factor in (1e3, 1e-6):
            torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-5)
        else:
            assert torch.equal(scaled, plain)


def test_first_steps_from_scratch() -> None:
    """THEORY test 9: gains are 1 +- lr exactly, no norm grows by more than lr a step, head losses by 2 lr."""
    lr = 2**-5
    weights = {"rms_to_rms": (16, 8), "one_to_rms": (30, 8), "rms_to_inf": (30, 8), "max_abs": (8,)}
    named = {norm: Parameter(torch.zeros(shape, dtype=torch.float64)) for norm, shape in weights.items()}
    for norm, p in named.items():
        NORMS[norm].init_(p, torch.Generator().manual_seed(1))
    x = gaussian(200, 8)
    x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    targets = torch.arange(200) % 30

    def losses() -> Tensor:
        return torch.nn.functional.cross_entropy(x @ named["rms_to_inf"].mT, targets, reduction="none")

    groups = [{"params": [p], "norm": norm, **EXACT} for norm, p in named.items()]
    optimizer = SteepestDescent(groups, lr=lr)
    for step in range(1, 6):
        before = losses().detach()
        for i, (norm, p) in enumerate(named.items()):
            p.grad = torch.autograd.grad(losses().mean(), p)[0] if norm == "rms_to_inf" else gaussian(*p.shape, seed=i)
        optimizer.step()
        assert (losses() - before).abs().max() <= 2 * lr * (1 + 1e-12)
        for norm, p in named.items():
            assert NORMS[norm].norm(p) <= (1 + step * lr) * (1 + 1e-12)
        assert torch.equal((named["max_abs"] - 1).abs(), torch.full((8,), step * lr, dtype=torch.float64))


# ---- decay: the constrained form ----


@pytest.mark.parametrize("norm", NORMS)
def test_constrained_form(norm: str) -> None:
    """Case 10: at lr 1 the weights are radius * dual(-G), whatever they were; later they stay inside the radius."""
    radius = 3.0
    ball = NORMS[norm]
    shape = (6, 10) if ball.ndim == 2 else (10,)
    G, W = gaussian(*shape, seed=1), 100 * gaussian(*shape, seed=2)
    options: dict[str, Any] = {"norm": norm, "scale": radius, "weight_decay": 1.0}
    dW = one_step(G, W, lr=1.0, **options)
    torch.testing.assert_close(W + dW, -radius * ball.dual(G), rtol=0, atol=1e-12)

    p = Parameter(radius * ball.dual(W))
    optimizer = SteepestDescent([p], lr=0.1, momentum=0.9, **options, **EXACT)
    for step in range(50):
        p.grad = gaussian(*shape, seed=step)
        optimizer.step()
        assert ball.norm(p) <= radius * (1 + 1e-12)


def test_decay_is_lr_times_weight_decay_of_the_old_weights() -> None:
    W, G = gaussian(4, 5), gaussian(4, 5, seed=1)
    expected = (1 - 0.125 * 0.5) * W - 0.125 * NORMS["rms_to_rms"].dual(G)
    torch.testing.assert_close(W + one_step(G, W, weight_decay=0.5), expected, rtol=0, atol=1e-14)


# ---- momentum ----


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_a_running_average(nesterov: bool) -> None:
    p = Parameter(torch.zeros(4))
    optimizer = SteepestDescent([p], lr=1.0, norm="max_abs", momentum=0.5, nesterov=nesterov)
    weights, m = torch.zeros(4), torch.zeros(4)
    for g in torch.tensor([[4.0, -8, 2, 0], [-8, 4, -1, 2], [4, 4, 0, -4], [0, 0, 0, 0]]):
        p.grad = g.clone()
        optimizer.step()
        m = 0.5 * m + 0.5 * g
        weights = weights - (0.5 * m + 0.5 * g if nesterov else m).sign()
        assert torch.equal(optimizer.state[p]["momentum_buffer"], m)
        assert torch.equal(p.detach(), weights)


def test_without_momentum_there_is_no_buffer() -> None:
    p = Parameter(gaussian(3, 3))
    p.grad = gaussian(3, 3, seed=1)
    optimizer = SteepestDescent([p], lr=0.1)
    optimizer.step()
    assert not optimizer.state


# ---- missing and zero gradients ----


@pytest.mark.parametrize("norm", ["rms_to_rms", "one_to_rms", "sign", "max_abs", "rms"])
def test_missing_and_zero_gradients(norm: str) -> None:
    """Case 4."""
    first, second = Parameter(gaussian(5, 5)), Parameter(gaussian(5, 5, seed=1))
    before = second.detach().clone()
    options: dict[str, Any] = {"norm": norm, "momentum": 0.5, "weight_decay": 0.1}
    optimizer = SteepestDescent([first, second], lr=0.1, **options)
    for step in range(3):
        first.grad = gaussian(5, 5, seed=step)
        optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state

    old, buffer = first.detach().clone(), optimizer.state[first]["momentum_buffer"].clone()
    first.grad = torch.zeros(5, 5, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(optimizer.state[first]["momentum_buffer"], buffer / 2)
    flat = buffer if NORMS[norm].ndim == 2 else buffer.flatten()
    step = NORMS[norm].direction(flat, msign) * NORMS[norm].radius(flat.shape)
    torch.testing.assert_close(first.detach(), 0.99 * old - 0.1 * step.view(5, 5), rtol=0, atol=1e-6)

    fresh = SteepestDescent([first], lr=0.1, **options | {"momentum": 0.0})
    old = first.detach().clone()
    fresh.step()
    assert torch.equal(first.detach(), old * (1 - 0.1 * 0.1))


@pytest.mark.parametrize("norm", ["one_to_rms", "max_abs"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_absent_rows_rest(norm: str, nesterov: bool) -> None:
    """A token that is not in the batch is not moved; its momentum fades, and the others step as if alone."""
    p = Parameter(torch.ones(4, 6))
    optimizer = SteepestDescent([p], lr=0.1, norm=norm, momentum=0.5, nesterov=nesterov, absent_rows_rest=True)
    p.grad = gaussian(4, 6, dtype=torch.float32)
    optimizer.step()
    before, buffer = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    p.grad = gaussian(4, 6, seed=1, dtype=torch.float32)
    p.grad[[1, 3]] = 0
    optimizer.step()
    assert torch.equal(p[[1, 3]], before[[1, 3]])
    moved = (p - before)[[0, 2]].pow(2).mean(-1).sqrt()
    torch.testing.assert_close(moved, torch.full((2,), 0.1), rtol=1e-5, atol=0)
    assert torch.equal(optimizer.state[p]["momentum_buffer"][[1, 3]], buffer[[1, 3]] / 2)


def test_absent_rows_without_momentum_rest_anyway() -> None:
    G = gaussian(4, 6)
    G[2] = 0
    dW = one_step(G, torch.ones_like(G), norm="one_to_rms")
    assert torch.equal(dW[2], torch.zeros_like(dW[2]))


def test_dense_gradients_do_not_notice_absent_rows_rest() -> None:
    """A tied embedding: the head's part of the gradient reaches every row."""
    results = []
    for rest in (False, True):
        p = Parameter(gaussian(4, 6))
        optimizer = SteepestDescent([p], lr=0.1, norm="one_to_rms", momentum=0.9, absent_rows_rest=rest)
        for step in range(3):
            p.grad = gaussian(4, 6, seed=step)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


# ---- batching ----


def slow_step(weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict[str, Any]) -> None:
    """The same step, one matrix at a time and from the formulas of the posts only."""
    lr, mu, scale = group["lr"], group["momentum"], group["scale"]
    for W, G, M in zip(weights, grads, moments, strict=True):
        M.copy_(mu * M + (1 - mu) * G)
        D = mu * M + (1 - mu) * G if group["nesterov"] else M
        if group["norm"] == "rms_to_rms":
            U, _, Vh = torch.linalg.svd(D, full_matrices=False)
            u = sqrt(W.shape[0] / W.shape[1]) * U @ Vh
        elif group["norm"] in ("one_to_rms", "rms_to_inf"):
            u = D / D.pow(2).mean(-1, keepdim=True).sqrt()
            u = u / W.shape[1] if group["norm"] == "rms_to_inf" else u
        elif group["norm"] == "rms":
            u = D / D.pow(2).mean().sqrt()
        else:
            u = D.sign()
        W.copy_((1 - lr * group["weight_decay"]) * W - lr * scale * u)


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_a_slow_twin(nesterov: bool) -> None:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "rms_to_rms": [(8, 8), (22, 8), (8, 22), (8, 8), (22, 8), (8, 8), (1, 7), (7, 1)],
        "one_to_rms": [(30, 8)],
        "rms_to_inf": [(30, 8)],
        "max_abs": [(8,), (8,), (5,)],
        "rms": [(8,), (8,), (5,)],
    }
    groups: list[dict[str, Any]] = [
        {"params": [Parameter(gaussian(*s, seed=i)) for i, s in enumerate(sizes)], "norm": norm, "scale": 2.0**-i}
        for i, (norm, sizes) in enumerate(shapes.items())
    ]
    optimizer = SteepestDescent(groups, lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.1, **EXACT)
    twins = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    moments = [[torch.zeros_like(w) for w in twin] for twin in twins]
    for step in range(5):
        for group, twin, moment in zip(optimizer.param_groups, twins, moments, strict=True):
            for i, p in enumerate(group["params"]):
                p.grad = gaussian(*p.shape, seed=100 * step + i)
            slow_step(twin, [p.grad for p in group["params"]], moment, group)
        optimizer.step()
    for group, twin in zip(optimizer.param_groups, twins, strict=True):
        for p, w in zip(group["params"], twin, strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-12)


def test_same_shapes_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def spy(G: Tensor, *options: Any) -> Tensor:
        shapes.append(tuple(G.shape))
        return msign(G, *options)

    monkeypatch.setattr("abovemup.optim.steepest.msign", spy)
    params = [Parameter(gaussian(*shape)) for shape in [(8, 8), (8, 22), (8, 8), (8, 22), (8, 8)]]
    for p in params[:4]:
        p.grad = torch.ones_like(p)
    SteepestDescent(params, lr=0.1).step()
    assert shapes == [(2, 8, 8), (2, 8, 22)]


@pytest.mark.parametrize(("device", "most"), [("cpu", CACHED), ("meta", STACK)])
def test_stacks_are_bounded(device: str, most: int) -> None:
    huge = torch.empty(1, device=device).expand(most // 2 + 1, 1)
    half = torch.empty(1, device=device).expand(most // 2, 1)
    assert list(stacks([huge, half, huge, half, half])) == [[0], [2], [1, 3], [4]]


# ---- a real torch optimizer ----


@pytest.mark.parametrize("norm", ["rms_to_rms", "one_to_rms", "rms"])
def test_bfloat16_parameters(norm: str) -> None:
    p = Parameter(gaussian(16, 24, dtype=torch.bfloat16))
    before = p.detach().float()
    optimizer = SteepestDescent([p], lr=0.5, norm=norm, momentum=0.9, msign_method="exact")
    p.grad = gaussian(16, 24, seed=1, dtype=torch.bfloat16)
    optimizer.step()
    assert p.dtype == optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16
    G = p.grad.double() if NORMS[norm].ndim == 2 else p.grad.double().flatten()
    expected = before - 0.5 * NORMS[norm].dual(G).view(16, 24).float()
    torch.testing.assert_close(p.detach().float(), expected, rtol=0.01, atol=0.01)


def test_closure_and_scheduler_and_state_dict() -> None:
    def make() -> tuple[list[Parameter], SteepestDescent]:
        params = [Parameter(gaussian(4, 4, seed=i, dtype=torch.float32)) for i in range(2)]
        groups = [{"params": [params[0]]}, {"params": [params[1]], "lr": 0.5, "norm": "one_to_rms"}]
        return params, SteepestDescent(groups, lr=0.25, momentum=0.9)

    params, optimizer = make()

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step(closure)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25]

    saved = deepcopy(optimizer.state_dict())
    others, copy = make()
    copy.load_state_dict(saved)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
        q.grad = p.grad
    optimizer.step()
    copy.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("norm", ["spectral", "one_to_rms"])
def test_vectors_are_no_matrix(norm: str) -> None:
    """A stack of three would be one matrix of three rows."""
    vectors = [Parameter(torch.ones(2)) for _ in range(3)]
    for vector in vectors:
        vector.grad = torch.ones(2)
    with pytest.raises(ValueError, match="matrices"):
        SteepestDescent(vectors, lr=0.1, norm=norm).step()
    assert all(vector.equal(torch.ones(2)) for vector in vectors)
