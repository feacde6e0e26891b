"""What saves memory changes nothing: the loss in chunks, blocks that are computed again."""

import weakref

import pytest
import torch
from torch import Tensor

from abovemup.model import loss as module
from abovemup.model.llama import Llama
from abovemup.model.loss import IGNORE
from tests import tiny


def loss_and_gradients(net: Llama, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    loss = net(tiny.tokens(), targets)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 36, 100])
def test_a_loss_in_chunks_is_the_loss(chunk: int, tied: bool) -> None:
    """Value and gradients, also where a chunk has no scored target and where the last one is smaller."""
    net = tiny.llama(dtype=torch.float64, tie_embeddings=tied)
    net.ids = 59
    targets = tiny.tokens(vocab=59, seed=1)
    targets[0, :9] = IGNORE
    whole, gradients = loss_and_gradients(net, targets)
    net.loss_chunk = chunk
    parts, found = loss_and_gradients(net, targets)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)  # cross_entropy is of float32
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_the_logits_of_one_chunk_live_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, alive, most = module.loss_sum, weakref.WeakSet[Tensor](), 0

    def counted(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal most
        alive.add(logits)
        most = max(most, sum(t.shape[0] for t in alive))
        return plain(logits, targets)

    monkeypatch.setattr(module, "loss_sum", counted)
    net = tiny.llama()
    net.loss_chunk = 7
    loss_and_gradients(net, tiny.tokens(seed=1))
    assert most == 7


@pytest.mark.parametrize("document", [False, True])
def test_blocks_computed_again_give_the_same_bits_and_keep_less(document: bool) -> None:
    net = tiny.llama(depth=4)
    net.eot = 0 if document else None
    targets, kept = tiny.tokens(seed=1), []

    def keep(t: Tensor) -> Tensor:
        kept[-1] += t.numel()
        return t

    results = []
    for net.recompute in (False, True):
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            results.append(loss_and_gradients(net, targets))
    (loss, gradients), (again, found) = results
    assert again.equal(loss)
    assert all(found[name].equal(gradient) for name, gradient in gradients.items())
    assert kept[1] < kept[0] / 3
