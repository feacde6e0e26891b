"""Documents packed into one window and kept apart are as each alone; rows that pad a vocabulary are as if not there."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.model.composed import lower_bounds
from abovemup.model.layers import document_mask
from abovemup.model.llama import Llama
from abovemup.model.stability import report
from tests import tiny

END = 60
# The end of a document, an empty one, one of one token, and a last one that the window cuts.
WINDOWS = torch.tensor(
    [
        [3, 9, 9, END, 5, 6, 7, 8, END, END, 4, END, 11, 12, 13, 14, 15],
        [END, 9, 9, 3, 5, 6, 7, 8, 20, 21, 4, 30, 11, END, 13, END, 15],
    ]
)


def loss_sum(net: Llama, windows: Tensor) -> Tensor:
    return F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


def loss_and_gradients(net: Llama, *windows: Tensor) -> tuple[float, dict[str, Tensor]]:
    net.zero_grad()
    loss = torch.stack([loss_sum(net, w) for w in windows]).sum()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def alone(window: list[int]) -> list[Tensor]:
    """Windows of one document each, that begin with the end of the one before; together they score every target."""
    starts = [0, *(i for i, token in enumerate(window[:-1]) if token == END and i > 0), len(window) - 1]
    return [torch.tensor([window[a : b + 1]]) for a, b in pairwise(starts)]


@pytest.mark.parametrize("heads", [{"kv_heads": 2}, {"kv_heads": 4}])
@pytest.mark.parametrize("placement", ["everywhere", "none"])
def test_packed_documents_are_as_each_alone(heads: dict[str, int], placement: str) -> None:
    net = tiny.llama(dtype=torch.float64, norm_placement=placement, **heads)
    documents = [part for window in WINDOWS.tolist() for part in alone(window)]
    assert sum(part.shape[1] - 1 for part in documents) == WINDOWS[:, 1:].numel()
    loss, gradients = loss_and_gradients(net, *documents)
    joined, _ = loss_and_gradients(net, WINDOWS)
    assert abs(joined - loss) > 1e-4  # attention over the ends is another loss
    net.eot = END
    packed, packed_gradients = loss_and_gradients(net, WINDOWS)
    assert packed == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-12, atol=1e-12)


def test_a_mask_written_out() -> None:
    mask = document_mask(torch.tensor([[1, END, 2, END]]), END)
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def test_a_window_of_one_document_is_what_it_was() -> None:
    net, x = tiny.llama(dtype=torch.float64), tiny.tokens(vocab=END)
    plain = net(x)
    net.eot = END
    torch.testing.assert_close(net(x), plain, rtol=1e-12, atol=1e-12)


def padded(net: Llama, rows: int, tied: bool) -> Llama:
    """The same model in `rows` rows of embedding and head, those beyond its own full of noise."""
    ids = net.cfg.vocab_size
    placement = net.cfg.norm_placement
    other = tiny.llama(seed=1, dtype=torch.float64, vocab_size=rows, tie_embeddings=tied, norm_placement=placement)
    with torch.no_grad():
        for p, q in zip(other.parameters(), net.parameters(), strict=True):
            p[: len(q)] = q
    other.ids = ids
    return other


@pytest.mark.parametrize("tied", [False, True])
def test_padded_rows_take_no_part_in_the_loss(tied: bool) -> None:
    net = tiny.llama(dtype=torch.float64, tie_embeddings=tied)
    other = padded(net, 80, tied)
    loss, gradients = loss_and_gradients(net, WINDOWS)
    padded_loss, padded_gradients = loss_and_gradients(other, WINDOWS)
    assert padded_loss == pytest.approx(loss, rel=1e-13)
    for name, gradient in gradients.items():
        found = padded_gradients[name]
        torch.testing.assert_close(found[: len(gradient)], gradient, rtol=1e-11, atol=1e-13)
        assert (found[len(gradient) :] == 0).all()


@pytest.mark.parametrize("tied", [False, True])
def test_padded_rows_take_no_part_in_the_metrics(tied: bool) -> None:
    """Zeros in them would be a logit to differ from, and move the mean row."""
    settings = {"dtype": torch.float64, "tie_embeddings": tied, "norm_placement": "residual_only"}
    net, moved = tiny.llama(**settings), tiny.llama(**settings, seed=5)
    with torch.no_grad():
        for one in (net, moved):
            one.head.weight += 3
    plain, wide = ({n: p.detach() for n, p in m.named_parameters()} for m in (moved, padded(moved, 80, tied)))
    other = padded(net, 80, tied)
    assert report(other, wide) == report(net, plain)
    with torch.no_grad():
        for table in (other.embedding, other.head):
            table.weight[61:] = 0
    assert report(other, wide) == report(net, plain)
    found, expected = (lower_bounds(m, b, 2, 1) for m, b in ((other, wide), (net, plain)))
    assert found == pytest.approx(expected, rel=1e-9)


def test_padded_rows_start_as_zeros_and_the_others_as_ever() -> None:
    net, plain = Llama(tiny.model(vocab_size=80), tiny.parameterization()), tiny.llama(vocab_size=80)
    net.ids = 61
    net.init_weights(0)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        rows = 61 if name in ("embedding.weight", "head.weight") else len(q)
        assert torch.equal(p[:rows], q[:rows]), name
        assert (p[rows:] == 0).all()


def test_without_padding_not_a_bit_is_different() -> None:
    net = tiny.llama()
    loss, gradients = loss_and_gradients(net, WINDOWS)
    net.ids = 61
    again, others = loss_and_gradients(net, WINDOWS)
    assert loss == again
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
