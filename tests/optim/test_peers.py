"""SteepestDescent is torch's Muon, Scion and plain Adam where it claims to be."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import routing_table
from abovemup.optim.steepest import SteepestDescent
from tests.optim.make import SPECS, experiment, parameters, set_grads

SHAPES = [(64, 64), (64, 176), (176, 64), (32, 64), (37, 53), (53, 37), (1, 64), (64, 1), (64, 64), (37, 53)]


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("norm", "adjust"), [("keller_jordan", "original"), ("moonlight", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_muon_bit_for_bit(norm: str, adjust: str, nesterov: bool) -> None:
    """Its work dtype is always bfloat16; ours is batched, scale-free, and the same to the last bit."""
    ours = [Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    theirs = [Parameter(p.detach().clone()) for p in ours]
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "nesterov": nesterov, "weight_decay": 0.1}
    mine = SteepestDescent(ours, norm=norm, msign_dtype="bfloat16", **options)
    muon = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options)
    for step in range(5):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = gaussian(*p.shape, seed=100 * step + i) * 10.0 ** (i - 3)
            q.grad = p.grad.clone()
        mine.step()
        muon.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(mine.state[p]["momentum_buffer"], muon.state[q]["momentum_buffer"])


@pytest.mark.parametrize(("norm", "adjust"), [("keller_jordan", "original"), ("moonlight", "match_rms_adamw")])
def test_torch_muon_in_float32_is_near(norm: str, adjust: str) -> None:
    p, q = Parameter(torch.zeros(64, 176)), Parameter(torch.zeros(64, 176))
    p.grad = gaussian(64, 176, seed=0)
    q.grad = p.grad.clone()
    SteepestDescent([p], lr=1.0, norm=norm).step()
    torch.optim.Muon([q], lr=1.0, adjust_lr_fn=adjust, momentum=0.0, weight_decay=0.0).step()
    assert 1e-4 < (p - q).norm() / q.norm() < 0.05


# ---- Scion, from LIONS-EPFL's formulas (THEORY 4.1) ----


def scion_lmo(kind: str, G: Tensor) -> Tensor:
    """The linear minimization oracles for torch's layouts, up to the sign."""
    if kind == "Spectral":  # normalized=True, max=False
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        return sqrt(G.shape[0] / G.shape[1]) * (U @ Vh)
    if kind == "ColNorm":  # normalized=False, transpose=True, of an embedding (V, d)
        columns = G.T
        rms = (columns.square().sum(0, keepdim=True) / columns.shape[0]).sqrt()
        return (columns / rms).T
    if kind == "RowNorm":  # normalized=True
        return G / (G.square().sum(-1, keepdim=True).sqrt() * sqrt(G.shape[-1]))
    if kind == "Sign":  # normalized=True
        return G.sign() / G.shape[1]
    assert kind == "BiasRMS"
    return G / G.square().mean().sqrt()


ORACLES = {"Spectral": "rms_to_rms", "ColNorm": "one_to_rms", "RowNorm": "rms_to_inf", "Sign": "sign", "BiasRMS": "rms"}


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("constrained", [True, False])
def test_scion(kind: str, constrained: bool) -> None:
    """Its momentum argument is the complement of ours; constrained, it takes W <- (1 - lr) W + lr * scale * lmo."""
    shape = (12,) if kind == "BiasRMS" else (12, 20)
    p = Parameter(gaussian(*shape, seed=1).double())
    W, M = p.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = SteepestDescent(
        [p],
        lr=2**-4,
        norm=ORACLES[kind],
        scale=50.0,
        momentum=0.9,
        weight_decay=1.0 if constrained else 0.0,
        msign_method="exact",
        msign_dtype="float64",
    )
    for step in range(5):
        p.grad = gaussian(*shape, seed=10 + step).double()
        optimizer.step()
        M = (1 - 0.1) * M + 0.1 * p.grad
        W = ((1 - 2**-4) * W if constrained else W) - 2**-4 * 50 * scion_lmo(kind, M)
        torch.testing.assert_close(p.detach(), W, rtol=0, atol=1e-12)


# ---- Adam ----


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torch_bit_for_bit(weight_decay: float) -> None:
    """Without decay torch.optim.Adam, with it torch.optim.AdamW."""
    ours, theirs = parameters(), parameters()
    e = experiment("adam", lr=2**-8, weight_decay=weight_decay)
    mine = build_optimizer(ours, routing_table(SPECS, e), e)
    options: dict[str, Any] = {"lr": 2**-8, "betas": (0.9, 0.95), "eps": 1e-8}
    torchs = (
        torch.optim.AdamW(theirs.values(), weight_decay=weight_decay, **options)
        if weight_decay
        else torch.optim.Adam(theirs.values(), **options)
    )
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        mine.step()
        torchs.step()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
