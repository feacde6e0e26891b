"""The package and the plain file train the same model: twenty steps of Scion, loss by loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.config import schema
from abovemup.model import llama
from abovemup.model.llama import Llama
from abovemup.model.roles import specs
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import routing_table
from tests import reference, tiny

LR, MOMENTUM, STEPS = 2**-4, 0.9, 20


def experiment(msign_dtype: Any, momentum: float) -> schema.Experiment:
    unused: Any = None  # neither model nor optimizer reads the other groups
    rule = schema.RoleRule
    roles = schema.Roles(
        embedding=rule(norm="one_to_rms"),
        hidden=rule(norm="rms_to_rms"),
        head=rule(norm="rms_to_inf"),
        gain=rule(norm="rms"),
        bias=rule(norm="rms"),
    )
    optimizer = schema.Optimizer(
        name="scion",
        lr=LR,
        momentum=momentum,
        nesterov=False,
        weight_decay=0.0,
        eps=1e-20,
        clip=None,
        beta2=0.95,
        target=None,
        args={},
        msign=schema.Msign(method="newton_schulz", steps=5, dtype=msign_dtype),
        lr_scale=schema.PerRole(),
        roles=roles,
    )
    return schema.Experiment(
        experiment="demo",
        cannot_match=[],
        model=tiny.model(),
        parameterization=tiny.parameterization(),
        optimizer=optimizer,
        schedule=unused,
        data=unused,
        tokenizer=unused,
        train=unused,
        eval=unused,
        norms=unused,
        checkpoint=unused,
        tracking=unused,
        run=unused,
    )


def batches() -> list[Tensor]:
    """Each token is one of three successors of the last: something to learn, and a third of the tokens absent."""
    result = []
    for step in range(STEPS):
        ids = [tiny.tokens(4, 1, seed=step)]
        for choice in tiny.tokens(16, 4, vocab=3, seed=1000 + step):
            ids.append((5 * ids[-1] + choice[:, None]) % 61)
        result.append(torch.cat(ids, dim=1))
    return result


def weights(net: Llama) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def cross_entropy(net: Llama, batch: Tensor) -> Tensor:
    return F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def ours(dtype: torch.dtype, momentum: float = MOMENTUM) -> tuple[list[float], dict[str, Tensor]]:
    exp = experiment(str(dtype).removeprefix("torch."), momentum)
    net = tiny.llama(dtype=dtype)
    optimizer = build_optimizer(dict(net.named_parameters()), routing_table(specs(net), exp), exp)
    losses = []
    for batch in batches():
        loss = cross_entropy(net, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(net)


def theirs(dtype: torch.dtype, momentum: float = MOMENTUM) -> tuple[list[float], dict[str, Tensor]]:
    start = weights(tiny.llama(dtype=dtype))
    return reference.train(start, batches(), layers=2, head_dim=8, lr=LR, momentum=momentum)


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_loss_and_gradients_of_one_batch() -> None:
    net = tiny.llama(dtype=torch.float64)
    batch = batches()[0]
    w = {name: W.requires_grad_() for name, W in weights(net).items()}
    expected = reference.loss(w, batch, layers=2, head_dim=8)
    loss = cross_entropy(net, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    loss.backward()
    for name, G in zip(w, torch.autograd.grad(expected, list(w.values())), strict=True):
        torch.testing.assert_close(net.get_parameter(name).grad, G, rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.parametrize("momentum", [MOMENTUM, 0.0])
def test_twenty_steps_in_float64(momentum: float) -> None:
    # The same numbers up to the order of sums: five steps of Newton-Schulz widen a rounding error 3.4^5 = 500 times.
    (a, x), (b, y) = ours(torch.float64, momentum), theirs(torch.float64, momentum)
    assert apart(a, b) < 1e-12
    for name in x:
        torch.testing.assert_close(x[name], y[name], rtol=0, atol=1e-12, msg=name)
    assert b[-1] < b[0] - 0.5  # it trains


def test_twenty_steps_in_float32() -> None:
    # Twenty units in the last place of a loss of 4.
    assert apart(ours(torch.float32)[0], theirs(torch.float32)[0]) < 1e-5


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (llama, "rotate", interleaved),
        (llama, "rotate", lambda x, cos, sin: x),
        (llama.Block, "add", lambda self, x, y: x + 0.99 * y),
        (llama, "attention_scale", lambda *_: 0.35),
    ],
    ids=["rope pairs neighbours", "no rope", "residual 1 % off", "attention scale 1 % off"],
)
def test_a_small_mistake_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert apart(ours(torch.float32)[0], theirs(torch.float32)[0]) > 1e-4
