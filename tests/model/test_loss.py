"""What saves memory changes nothing: the loss in chunks, blocks that are computed again."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from abovemup.model.llama import Llama
from abovemup.model.loss import IGNORE, chunked_loss
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


def test_no_logits_are_kept_for_the_way_back() -> None:
    net, kept = tiny.llama(), []

    def keep(t: Tensor) -> Tensor:
        kept.extend(t.shape[-1:])
        return t

    for net.loss_chunk in (0, 7):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss_and_gradients(net, tiny.tokens(seed=1))
        assert (61 in kept) == (net.loss_chunk == 0)


def test_chunks_in_bfloat16_sum_their_gradients_in_float32() -> None:
    W, x = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (128, 2048))
    targets, gradients = torch.arange(2048)[None] % 128, {}
    for size, dtype in ((2048, torch.float32), (2048, torch.bfloat16), (8, torch.bfloat16)):
        head = W.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            chunked_loss(lambda x, head=head: F.linear(x, head), x[None], targets, size).backward()
        assert head.grad is not None
        gradients[size, dtype] = head.grad
    exact, whole, chunks = gradients.values()
    assert (chunks - exact).norm() < 1.2 * (whole - exact).norm()


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
