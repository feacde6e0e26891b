import torch
from torch import Tensor, nn

from abovemup.model.sample import sample
from tests import tiny


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Fixed(nn.Module):
    """Always the same logits; remembers the lengths it was asked for."""

    def __init__(self, logits: list[float]):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.lengths.append(tokens.shape[1])
        return self.logits.expand(*tokens.shape, -1)


def test_greedy_is_the_likeliest_token_of_each_prefix() -> None:
    net = tiny.llama()
    ids = sample(net, [3, 1, 4], 6, 0.0, generator(), context=64)
    whole = net(torch.tensor([[3, 1, 4, *ids]]))
    assert ids == whole[0, 2:-1].argmax(-1).tolist()


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    net = Fixed([0.0, 1.0, 2.0])
    ids = torch.tensor(sample(net, [0], 4000, 2.0, generator(), context=1))
    expected = (torch.tensor([0.0, 1.0, 2.0]) / 2).softmax(0)
    torch.testing.assert_close(ids.bincount() / 4000, expected, atol=0.03, rtol=0)


def test_padded_rows_are_never_drawn() -> None:
    net = tiny.llama()
    net.ids = 2
    net.head.weight.data[2:] *= 1e6
    for temperature in (0.0, 1.0, 100.0):
        assert set(sample(net, [0], 50, temperature, generator(), context=8)) <= {0, 1}


def test_only_the_context_is_seen() -> None:
    net = Fixed([1.0, 0.0])
    sample(net, [0, 1, 0], 4, 0.0, generator(), context=5)
    assert net.lengths == [3, 4, 5, 5]


def test_the_generator_alone_decides() -> None:
    net = tiny.llama()
    state = torch.random.get_rng_state()
    a, b, c = (sample(net, [1], 20, 1.0, generator(s), context=64) for s in (0, 0, 1))
    assert a == b != c
    assert len(a) == 20
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
