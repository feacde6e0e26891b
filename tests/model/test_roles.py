"""Roles are tags on modules: one spec per tensor, whatever the names and the order."""

import pytest
import torch
from torch import nn

from abovemup.model.llama import Llama
from abovemup.model.roles import specs
from tests import tiny


def test_specs_name_every_parameter_once() -> None:
    net = tiny.llama(gains=True, biases=True)
    table = {s.name: s for s in specs(net)}
    assert list(table) == [s.name for s in specs(net)]
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == {n: s.shape for n, s in table.items()}
    roles = {
        "embedding.weight": ("embedding", "one_to_rms", 1.0),
        "layers.0.attention_norm.weight": ("gain", "max_abs", 1.0),
        "layers.0.attention.wq.weight": ("hidden", "rms_to_rms", 1.0),
        "layers.1.attention.wk.bias": ("bias", "rms", 0.0),
        "layers.1.attention.wo.weight": ("hidden", "rms_to_rms", 0.5),
        "layers.1.attention.q_norm.weight": ("gain", "max_abs", 1.0),
        "layers.1.feed_forward.w1.weight": ("hidden", "rms_to_rms", 1.0),
        "layers.1.feed_forward.w2.weight": ("hidden", "rms_to_rms", 0.5),
        "layers.1.feed_forward.w3.weight": ("hidden", "rms_to_rms", 1.0),
        "final_norm.weight": ("gain", "max_abs", 1.0),
        "head.weight": ("head", "rms_to_inf", 1.0),
    }
    for name, (role, norm, init) in roles.items():
        assert (table[name].role, table[name].norm, table[name].init) == (role, norm, pytest.approx(init)), name


def test_specs_work_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = Llama(tiny.model(gains=True), tiny.parameterization())
    assert specs(net) == specs(tiny.llama(gains=True))


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_tensor_is_an_embedding_whichever_module_comes_first(head_first: bool) -> None:
    net = Llama(tiny.model(tie_embeddings=True), tiny.parameterization())
    if head_first:
        net._modules = {"head": net.head} | {name: m for name, m in net._modules.items() if name != "head"}
        assert next(iter(dict(net.named_parameters()))) == "head.weight"
    net.init_weights(0)
    assert net.head.weight.data_ptr() == net.embedding.weight.data_ptr()
    table = specs(net)
    assert [(s.name, s.role) for s in table if s.shape == (61, 32)] == [("embedding.weight", "embedding")]
    assert table == specs(tiny.llama(tie_embeddings=True))
    assert torch.equal(net(tiny.tokens()), tiny.llama(tie_embeddings=True)(tiny.tokens()))


def test_the_order_of_specs_does_not_depend_on_where_the_head_is_registered() -> None:
    net = tiny.llama()
    table = specs(net)
    net._modules = {"head": net.head} | {name: m for name, m in net._modules.items() if name != "head"}
    assert specs(net) == table


def test_tied_logits_are_the_embedding_over_d() -> None:
    net = tiny.llama(tie_embeddings=True, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    net.final_norm.register_forward_hook(lambda _, __, out: seen.append(out))
    logits = net(tiny.tokens())
    torch.testing.assert_close(logits, seen[0] @ net.embedding.weight.T / 32)


def test_the_tie_outlives_to_empty_and_a_state_dict() -> None:
    with torch.device("meta"):
        net = Llama(tiny.model(tie_embeddings=True), tiny.parameterization())
    net.to_empty(device="cpu").init_weights(0)
    assert net.head.weight.data_ptr() == net.embedding.weight.data_ptr()
    net.load_state_dict(tiny.llama(seed=1, tie_embeddings=True).state_dict())
    assert net.head.weight.data_ptr() == net.embedding.weight.data_ptr()
    assert torch.equal(net(tiny.tokens()), tiny.llama(seed=1, tie_embeddings=True)(tiny.tokens()))


def test_a_parameter_without_a_role_is_refused() -> None:
    net = tiny.llama()
    net.layers[0].extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers\.0\.extra\.weight has no role"):
        specs(net)
