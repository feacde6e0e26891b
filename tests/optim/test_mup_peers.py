"""`mup` is microsoft's mup for Adam, and with CompleteP's residual its table: up to moving a factor (abc-equivalence).

Theirs keep the head's entries as at the base, step them by lr and divide the input by m = width / base width; ours have
no multiplier, 1/m of the entries and 1/m of the lr. An Adam step has no scale, so W = W' / m stays true for ever.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from abovemup.geometry.parameterization import eps_multiplier, init_norm, init_std, lr_multiplier
from abovemup.optim.routing import routing_table
from tests.optim.make import experiment, grown

VOCABULARY, BASE = 40, 32


class Net(nn.Module):
    """Our shapes: embedding, up and down with biases, a gain, and a head that is given."""

    def __init__(self, width: int, head: Any):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.norm = nn.RMSNorm(width)
        self.head = head(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        out: Tensor = self.head(self.norm(x + self.down(self.up(x).relu())))
        return out


ROLES = {
    "embedding.weight": "embedding",
    "up.weight": "hidden",
    "up.bias": "bias",
    "down.weight": "hidden",
    "down.bias": "bias",
    "norm.weight": "gain",
    "head.weight": "head",
}


@pytest.mark.parametrize("m", [1, 4])
def test_microsofts_mup(m: int) -> None:
    mup = pytest.importorskip("mup", reason="the package mup is not installed: make installs it")
    torch.manual_seed(0)
    base, net = Net(BASE, mup.MuReadout), Net(BASE * m, mup.MuReadout)
    mup.set_base_shapes(net, base, delta=Net(2 * BASE, mup.MuReadout))
    optimizer = mup.MuAdamW(net.parameters(), lr=1.0, weight_decay=0.1)
    theirs = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    shapes = {name: tuple(p.shape) for name, p in base.named_parameters()}
    assert net.head.width_mult() == m
    for name, p in net.named_parameters():
        role, shape = ROLES[name], tuple(p.shape)
        multiplier = net.head.width_mult() if role == "head" else 1
        lr = lr_multiplier("mup", role, "adam", shape, shapes[name])
        assert lr == theirs[id(p)]["lr"] / multiplier, name
        if role != "head":  # theirs decays the head by W', which is W times a number: alike
            assert theirs[id(p)]["lr"] * theirs[id(p)]["weight_decay"] == pytest.approx(0.1)
        if len(shape) == 2:
            mup.init.normal_(p, std=1.0)
            std = p.std().item() / multiplier
            norm = init_norm("mup", "gaussian", role, shape, shapes[name])
            ours = norm * init_std("gaussian", role, shape) / init_std("gaussian", role, shapes[name])
            assert ours == pytest.approx(std, rel=0.05), name


def test_microsofts_mup_trains_as_ours() -> None:
    """Ten steps of Adam on one network with their readout and with our head: the same logits."""
    mup = pytest.importorskip("mup", reason="the package mup is not installed: make installs it")
    torch.manual_seed(0)
    m, eps, lr = 4, 1e-3, 2**-7
    base, theirs = Net(BASE, mup.MuReadout).double(), Net(BASE * m, mup.MuReadout).double()
    mup.set_base_shapes(theirs, base)
    ours = Net(BASE * m, nn.Linear).double()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        ours.head.weight /= m
    shapes = {name: tuple(p.shape) for name, p in base.named_parameters()}
    groups = [
        {"params": [p], "lr": lr * lr_multiplier("mup", ROLES[n], "adam", tuple(p.shape), shapes[n]), "eps": eps}
        for n, p in ours.named_parameters()
    ]
    mine, yours = torch.optim.Adam(groups), mup.MuAdam(theirs.parameters(), lr=lr, eps=eps)
    head = theirs.head.weight  # CompleteP's eps for it; their package leaves eps alone
    for group in yours.param_groups:
        group["params"] = [p for p in group["params"] if p is not head]
    yours.add_param_group({"params": [head], "lr": lr, "eps": eps / m})
    tokens = torch.randint(0, VOCABULARY, (8, 12))
    for _ in range(10):
        logits = [net(tokens) for net in (ours, theirs)]
        torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-11)
        for out, optimizer in zip(logits, (mine, yours), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()


def completep(m_N: float, m_L: float, alpha: float = 1.0) -> dict[str, dict[str, float]]:
    """arXiv:2505.01618, table 1, for Adam: lr, std, eps, lr * weight decay, and the head's multiplier."""
    block = m_N**-1 * m_L ** (alpha - 1)
    eps = m_N**-1 * m_L**-alpha
    return {
        "embedding": {"lr": 1.0, "std": 1.0, "eps": m_N**-1, "forward": 1.0},
        "hidden": {"lr": block, "std": m_N**-0.5, "eps": eps, "forward": 1.0},
        "bias": {"lr": m_L ** (alpha - 1), "std": 1.0, "eps": eps, "forward": 1.0},
        "gain": {"lr": m_L ** (alpha - 1), "std": 1.0, "eps": eps, "forward": 1.0},
        "head": {"lr": 1.0, "std": 1.0, "eps": m_N**-1, "forward": m_N**-1},
    }


@pytest.mark.parametrize("parameterization", ["mup", "above_mup"])
def test_completep(parameterization: str) -> None:
    """Its head W' is m_N times ours, with gradients of 1/m_N: lr, std and eps turn by that factor."""
    m_N, depth = 4, 16
    specs = grown(m_N)
    e = experiment("adam", parameterization, residual="completep", depth=depth, eps=1.0, weight_decay=0.1)
    for spec, route in zip(specs, routing_table(specs, e), strict=True):
        row = completep(m_N, depth / 2)[spec.role]
        forward = row["forward"]
        assert route.lr_mult == row["lr"] * forward
        assert route.eps == row["eps"] / forward
        # Its decay is m_N times as large for hidden matrices: lr * decay does not change.
        assert route.lr_mult * route.weight_decay == pytest.approx(0.1)
        if len(spec.shape) == 2:
            norm = init_norm(parameterization, "gaussian", spec.role, spec.shape, spec.base)
            std = norm * init_std("gaussian", spec.role, spec.shape) / init_std("gaussian", spec.role, spec.base)
            assert std == pytest.approx(row["std"] * forward, rel=1e-12)
    assert eps_multiplier("standard", "hidden", (8, 8), (2, 2)) == 1
