"""Optimizer state by name: whole, or refused (case 40)."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from abovemup.config.errors import RequestError
from abovemup.optim.build import build_optimizer
from abovemup.optim.routing import routing_table
from abovemup.optim.state import make_room, state_by_name
from tests.optim.make import SHAPES, SPECS, TABLES, Spec, experiment, load_state_by_name, parameters, set_grads


def build(named: dict[str, Parameter], table: str, specs: list[Spec] = SPECS, **options: Any) -> torch.optim.Optimizer:
    e = experiment(table, **options)
    return build_optimizer(named, routing_table(specs, e), e)


def trained(table: str, steps: int = 3, **options: Any) -> tuple[dict[str, Parameter], torch.optim.Optimizer]:
    named = parameters()
    optimizer = build(named, table, **options)
    for step in range(steps):
        set_grads(named, step)
        optimizer.step()
    return named, optimizer


def copied(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {k: v.clone() for k, v in entry.items()} for name, entry in state.items()}


@pytest.mark.parametrize("table", TABLES)
def test_goes_on_bit_for_bit_in_another_order(table: str) -> None:
    """Parameters registered the other way round: momenta follow names, also between matrices of one shape."""
    named, optimizer = trained(table)
    saved = copied(state_by_name(optimizer))
    assert set(saved) == set(SHAPES)

    others = {name: Parameter(named[name].detach().clone()) for name in reversed(named)}
    resumed = build(others, table, SPECS[::-1])
    load_state_by_name(resumed, saved)
    again = state_by_name(resumed)
    for name, entry in saved.items():
        assert entry.keys() == again[name].keys()
        assert all(torch.equal(entry[key], again[name][key]) for key in entry)
    a, b = saved["layers.0.wq.weight"], saved["layers.1.wq.weight"]
    assert not torch.equal(next(reversed(a.values())), next(reversed(b.values())))

    for step in range(3, 6):
        for params, one in ((named, optimizer), (others, resumed)):
            set_grads(params, step)
            one.step()
    assert all(torch.equal(named[name], others[name]) for name in named)


@pytest.mark.parametrize("table", ["scion", "muon", "adam"])
def test_what_is_missing_is_named_and_nothing_is_changed(table: str) -> None:
    _, optimizer = trained(table)
    _, other = trained(table, steps=1)
    before = copied(state_by_name(other))
    name = "head.weight"
    key = list(state_by_name(optimizer)[name])[-1]

    def broken(change: Any) -> str:
        state = copied(state_by_name(optimizer))
        change(state)
        with pytest.raises(RequestError) as error:
            load_state_by_name(other, state)
        return str(error.value)

    assert f"missing: {key} of {name}" in broken(lambda s: s[name].pop(key))
    assert f"missing: {name}" in broken(lambda s: s.pop(name))
    assert "left over: extra" in broken(lambda s: s.update(extra={}))
    assert f"left over: velocity of {name}" in broken(lambda s: s[name].update(velocity=torch.ones(1)))
    assert "shape (8, 11), not (11, 8)" in broken(lambda s: s[name].update({key: s[name][key].mT}))
    assert "and 7 more" in broken(lambda s: s.clear())
    after = state_by_name(other)
    assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])


def test_room_is_made_of_shapes() -> None:
    """Of a user's own optimizer a file alone says what there is; what is no tensor is taken from it."""
    options: dict[str, Any] = {"target": "torch.optim:AdamW", "args": {"amsgrad": True}}
    _, optimizer = trained("adam", **options)
    given = state_by_name(optimizer)
    given["head.weight"] |= {"rows": torch.ones(11, dtype=torch.float64), "low": torch.ones(11, 8).bfloat16()}
    shapes = {name: {k: v.to("meta") for k, v in entry.items()} for name, entry in given.items()}
    shapes["head.weight"]["n"] = [3, "x"]
    _, other = trained("adam", steps=0, **options)
    make_room(other, shapes)
    room = state_by_name(other)
    assert room["head.weight"].pop("n") == [3, "x"]
    for name, entry in given.items():
        assert entry.keys() == room[name].keys()
        for key, value in entry.items():
            made = room[name][key]
            assert (made.shape, made.dtype, made.device) == (value.shape, value.dtype, value.device)
            assert not made.requires_grad


@pytest.mark.parametrize("table", TABLES)
def test_before_the_first_gradient(table: str) -> None:
    """State that does not exist yet is given as what it starts from: a run saved at step 0 goes on as if it had not."""
    named, optimizer = trained(table, steps=0)
    saved = copied(state_by_name(optimizer))
    assert not optimizer.state
    assert set(saved) == set(SHAPES)
    others = parameters()
    resumed = build(others, table)
    load_state_by_name(resumed, saved)
    for params, one in ((named, optimizer), (others, resumed)):
        set_grads(params, 0)
        one.step()
    assert all(torch.equal(named[name], others[name]) for name in named)


def test_without_momentum_there_is_none() -> None:
    _, optimizer = trained("scion", momentum=0.0)
    assert state_by_name(optimizer) == {name: {} for name in SHAPES}
    _, other = trained("scion", momentum=0.0)
    load_state_by_name(other, state_by_name(optimizer))
    assert not other.state
    _, heavy = trained("scion")
    with pytest.raises(RequestError, match="left over: momentum_buffer"):
        load_state_by_name(optimizer, state_by_name(heavy))


def test_a_users_optimizer_is_restored_by_name() -> None:
    options: dict[str, Any] = {"target": "torch.optim:AdamW", "args": {"amsgrad": True}}
    named, optimizer = trained("adam", **options)
    saved = copied(state_by_name(optimizer))
    others = {name: Parameter(named[name].detach().clone()) for name in reversed(named)}
    resumed = build(others, "adam", SPECS[::-1], **options)
    load_state_by_name(resumed, saved)
    for params, one in ((named, optimizer), (others, resumed)):
        set_grads(params, 7)
        one.step()
    assert all(torch.equal(named[name], others[name]) for name in named)
    del saved["head.weight"]
    with pytest.raises(RequestError, match=r"missing: head\.weight"):
        load_state_by_name(resumed, saved)


@pytest.mark.parametrize("value", [object(), np.float64(1.0), [torch.ones(1), {"a": (object(),)}], {np.int64(1): 2.0}])
def test_a_state_that_could_not_be_read_again_is_refused(value: Any) -> None:
    named, optimizer = trained("adam", target="torch.optim:AdamW")
    optimizer.state[named["head.weight"]]["odd"] = value
    with pytest.raises(RequestError, match=r"AdamW keeps a \w+ as odd of head\.weight"):
        state_by_name(optimizer)


@pytest.mark.parametrize(
    "value", [3, 1.5, 1j, True, "x", None, [torch.ones(1), {"a": (1, None)}], Parameter(torch.ones(1))]
)
def test_a_state_that_is_let_through_is_read_again(value: Any) -> None:
    named, optimizer = trained("adam", target="torch.optim:AdamW")
    optimizer.state[named["head.weight"]]["odd"] = value
    torch.save(state_by_name(optimizer), file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=True)["head.weight"]["odd"] == value
