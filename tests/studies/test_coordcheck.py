"""The coordinate check: what it measures equals what is written out, and it sees what is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from abovemup.cli.main import run
from abovemup.config.errors import RequestError
from abovemup.model.composed import lower_bounds
from abovemup.model.stability import report
from abovemup.studies import coordcheck
from abovemup.studies.coordcheck import (
    Check,
    Key,
    Measured,
    Trainer,
    activations,
    by_kind,
    check,
    compare,
    experiment,
    judge,
    log_slope,
    measure,
    open_corpus,
    pairs,
)
from tests import tiny

QUICK = ["train.seq_len=16", "train.batch_size=2", "model.base.width=16", "model.head_dim=8", "model.base.head_dim=8"]
EXACT = ["optimizer.msign.method=exact"]


def quick(*overrides: str, over: str = "width", sizes: tuple[int, ...] = (16, 32, 64), steps: int = 2) -> Check:
    return check(over, [experiment([*QUICK, *overrides], over, size, steps) for size in sizes], lambda text: None)


def values(**found: float) -> dict[Key, Measured]:
    """`layer__quantity=value`"""
    keys = [tuple(name.split("__")) for name in found]
    return {(a, b): Measured(a, b, value) for (a, b), value in zip(keys, found.values(), strict=True)}


def slopes(result: Check, quantity: str) -> dict[str, float]:
    return {row.layer: row.slope for row in result.rows if row.quantity == quantity}


@pytest.mark.parametrize("power", [-2.5, -1.0, 0.0, 0.1, 1.0])
def test_the_slope_of_a_power_law_is_its_power(power: float) -> None:
    sizes = [16, 32, 48, 100]
    assert log_slope(sizes, [3 * size**power for size in sizes]) == pytest.approx(power, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -1.0])
def test_no_slope_without_a_logarithm(value: float) -> None:
    assert math.isnan(log_slope([1, 2, 3], [1.0, value, 2.0]))


def test_verdicts() -> None:
    assert judge(0.09, 0.1, both=True) == ("flat", True)
    assert judge(0.11, 0.1, both=True) == ("grows", False)
    assert judge(-0.11, 0.1, both=True) == ("shrinks", False)
    assert judge(-0.9, 0.35, both=False) == ("shrinks", True)
    assert judge(0.36, 0.35, both=False) == ("grows", False)
    assert judge(9.0, None, both=True) == ("none", True)
    assert judge(math.nan, 0.1, both=True) == ("no slope", False)


def test_pairs_are_the_product_and_other_values_keep_their_commas() -> None:
    assert pairs(["parameterization=standard,mup", "optimizer=adam,scion", "data.path=a,b"]) == [
        [f"parameterization={p}", f"optimizer={o}", "data.path=a,b"]
        for p in ("standard", "mup")
        for o in ("adam", "scion")
    ]
    assert pairs([]) == [[]]


def test_kinds_are_the_largest_of_their_layers() -> None:
    found = {
        ("layers.0.attention.wq", "norm"): 1.0,
        ("layers.11.attention.wq", "norm"): 3.0,
        ("layers.2.attention.wq", "norm"): 2.0,
        ("head", "norm"): 5.0,
        ("layers.0", "rms"): 1.0,
        ("layers.1", "rms"): math.nan,
        ("layers.2", "rms"): 2.0,
    }
    kinds = by_kind({(layer, quantity): Measured(layer, quantity, x) for (layer, quantity), x in found.items()})
    assert kinds["attention.wq", "norm"].value == 3
    assert kinds["head", "norm"].value == 5
    assert math.isnan(kinds["", "rms"].value)


@pytest.mark.parametrize("placement", ["everywhere", "none"])
def test_activations_are_those_of_the_model(placement: str) -> None:
    """Each watched output against the layers called by hand; the hooks are gone afterwards."""
    model, tokens = tiny.llama(norm_placement=placement), tiny.tokens()
    outputs, inputs, largest = activations(model, tokens)
    x = model.embedding(tokens)
    assert torch.equal(outputs["embedding"], x)
    block = model.layers[0]
    attention, ffn = block.attention, block.feed_forward
    cos, sin = coordcheck.rope_angles(tokens.shape[1], attention.head_dim, model.cfg.rope_theta, x)
    inside = block.attention_norm(x)
    assert inputs["layers.0.attention.wq"] == pytest.approx(inside.square().mean(-1).sqrt().max().item())
    heads = (*inside.shape[:-1], -1, attention.head_dim)
    q = coordcheck.rotate(attention.q_norm(attention.wq(inside).view(heads)), cos, sin)
    k = coordcheck.rotate(attention.k_norm(attention.wk(inside).view(heads)), cos, sin)
    logits = [
        abs(attention.scale * (q[b, t, h] @ k[b, s, h // 2]).item())
        for b in range(tokens.shape[0])
        for t in range(tokens.shape[1])
        for s in range(t + 1)
        for h in range(4)
    ]
    assert largest["layers.0.attention.logits"] == pytest.approx(max(logits), rel=1e-5)
    y = attention(inside, cos, sin)
    assert torch.equal(outputs["layers.0.attention.output"], y)
    x = block.add(x, y)
    inside = block.feed_forward_norm(x)
    middle = torch.nn.functional.silu(ffn.w1(inside)) * ffn.w3(inside)
    assert torch.equal(outputs["layers.0.feed_forward.middle"], middle)
    assert torch.equal(outputs["layers.0.residual"], block.add(x, ffn(inside)))
    assert torch.equal(outputs["head"], model(tokens))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.ids = 50
    assert torch.equal(activations(model, tokens)[0]["head"], model(tokens))


def test_a_logit_between_documents_is_none() -> None:
    model, tokens = tiny.llama(norm_placement="none"), torch.tensor([[1, 2, 60, 4, 60, 6, 7]])
    model.eot = 60
    apart = activations(model, tokens)[2]
    model.eot = None
    alone = [activations(model, part)[2] for part in (tokens[:, :2], tokens[:, 2:4], tokens[:, 4:])]
    name = "layers.0.attention.logits"
    assert apart[name] == pytest.approx(max(logits[name] for logits in alone), rel=1e-5)
    assert activations(model, tokens)[2][name] > 1.01 * apart[name]


def test_an_exact_step_has_the_norm_lr_in_every_layer_at_every_width() -> None:
    result = quick("optimizer=above_mup", "optimizer.lr=0.03125", *EXACT, steps=2)
    updates = [row for row in result.rows if row.quantity == "update" and row.layer != "embedding"]
    assert len(updates) == 15
    for row in updates:
        assert row.values == pytest.approx([0.03125] * 3, rel=1e-4), row.layer


def test_the_metrics_of_linear_layers_are_their_role_norms() -> None:
    result = quick("optimizer=above_mup")
    values = {(row.layer, row.quantity): row.values for row in result.rows}
    for layer, quantity in list(values):
        if layer.endswith((".wq", ".w2", "embedding")) and quantity == "norm":
            assert values[layer, "forward"] == pytest.approx(values[layer, "norm"], rel=1e-5), layer
            assert values[layer, "stability"] == pytest.approx(values[layer, "update"], rel=1e-4), layer
    assert values["layers.0.attention.wq", "dependency"] == values["layers.0.attention.wq", "forward"]
    assert ("embedding", "dependency") not in values


def test_a_wrong_update_norm_is_found_where_activations_say_nothing() -> None:
    """Moonlight's radius grows as sqrt(width), and `standard` corrects nothing: the step's slope is 1/2."""
    result = quick("parameterization=standard", "optimizer.roles.hidden.norm=moonlight", "optimizer.lr=2^-9", *EXACT)
    wrong = slopes(result, "update")
    for layer, slope in wrong.items():
        if "layers" in layer:
            assert slope == pytest.approx(0.5, abs=1e-3), layer
    assert not result.flat
    assert all(row.sound for row in result.rows if row.quantity == "rms")


def test_wo_and_w2_are_not_judged_over_depth_where_their_init_follows_it() -> None:
    judged = {
        (row.layer, row.quantity): row.verdict != "none"
        for row in quick("model.residual=completep", over="depth", sizes=(1, 2), steps=1).rows
    }
    assert not judged["attention.wo", "norm"]
    assert judged["attention.wo", "update"]
    assert judged["attention.wq", "norm"]
    same = quick("model.depth_init=identity", over="depth", sizes=(1, 2), steps=1)
    assert {(row.layer, row.quantity): row.verdict != "none" for row in same.rows}["attention.wo", "norm"]


def test_a_layer_without_a_norm_in_front_is_conditional_on_its_input() -> None:
    standard = quick("model.norm_placement=standard", sizes=(16, 32), steps=1)
    rows = {(row.layer, row.quantity): row for row in standard.rows}
    assert rows["layers.0.feed_forward.w2", "forward"].input_rms is not None
    assert rows["layers.0.feed_forward.w1", "forward"].input_rms is None
    everywhere = quick(sizes=(16, 32), steps=1)
    linear = [row for row in everywhere.rows if row.quantity == "forward" and ".w" in row.layer]
    assert linear
    assert all(row.input_rms is None for row in linear)


def test_what_is_measured_is_what_a_training_by_hand_gives() -> None:
    """Two steps: outputs and largest inputs after the last, their change from the start, the last step's metrics."""
    exp = experiment([*QUICK, "model.norm_placement=standard", "optimizer=above_mup"], "width", 16, 2)
    measured, model, _ = measure(exp)
    trainer = Trainer(exp, open_corpus(exp, lambda text: None))
    tokens = trainer.validation[: coordcheck.PROBE, :-1]
    start, arriving, _ = activations(trainer.model, tokens)
    trainer.advance()
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    trainer.advance()
    end, inputs, logits = activations(trainer.model, tokens)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trainer.model.parameters(), strict=True))
    for layer, output in end.items():
        assert measured[layer, "rms"].value == pytest.approx(output.square().mean().sqrt().item(), rel=1e-5)
        change = (output - start[layer]).square().mean().sqrt().item()
        assert measured[layer, "change"].value == pytest.approx(change, rel=1e-5)
    for layer, logit in logits.items():
        assert measured[layer, "logit"].value == logit
    for row in report(trainer.model, before, inputs):
        assert measured[row.layer, "stability" if row.metric == "update" else row.metric].value == row.value
        if not row.in_norm:
            name = row.layer.replace("middle", "w1").replace("feed_forward.output", "feed_forward.w1")
            assert measured[row.layer, row.metric.replace("update", "stability")].input_rms == inputs[name]
            assert inputs[name] != arriving[name]


@pytest.mark.parametrize("optimizer", ["scion", "above_mup"])
def test_gains_and_biases_are_flat_where_their_step_is_that_of_their_role(optimizer: str) -> None:
    """Scion's gains step by RMS: their largest entry is chance, shown and not judged."""
    result = quick(f"optimizer={optimizer}", "model.gains=true", "model.biases=true", "model.depth=1", *EXACT)
    assert result.flat
    verdicts = {(row.layer, row.quantity): row.verdict for row in result.rows}
    own = "flat" if optimizer == "above_mup" else "none"
    for layer in ("final_norm", "layers.0.attention_norm", "layers.0.attention.q_norm", "layers.0.feed_forward.norm"):
        assert (verdicts[layer, "norm"], verdicts[layer, "update"]) == ("none", own)
    for layer in ("layers.0.attention.wq.bias", "layers.0.feed_forward.w2.bias"):
        assert (verdicts[layer, "norm"], verdicts[layer, "update"]) == ("none", "flat")


def test_the_bounds_are_those_of_the_smallest_size() -> None:
    result = quick("optimizer=above_mup", "model.depth=1", sizes=(16, 32), steps=1)
    _, model, before = measure(experiment([*QUICK, "optimizer=above_mup", "model.depth=1"], "width", 16, 1))
    lower = {(layer, coordcheck.STABILITY.get(m, m)): low for (layer, m), low in lower_bounds(model, before).items()}
    assert {(layer, q): low for layer, both in result.bounds.items() for q, (low, _) in both.items()} == lower
    for row in result.rows:
        if (row.layer, row.quantity) in lower:
            low, high = result.bounds[row.layer][row.quantity]
            assert low < high == row.values[0]


def test_a_diverged_size_is_no_flat_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(exp: Any) -> tuple[dict[Key, Measured], None, None]:
        if exp.model.width == 64:
            raise coordcheck.Diverged({"step": 1, "loss": math.nan, "grad_norm": math.nan}, ranks=[])
        return values(head__norm=1.0, head__forward=2.0), None, None

    monkeypatch.setattr(coordcheck, "measure", measure)
    monkeypatch.setattr(coordcheck, "lower_bounds", lambda model, before: {("head", "forward"): 1.5})
    result = quick()
    assert result.diverged == [64]
    assert [row.values for row in result.rows] == [[1.0, 1.0], [2.0, 2.0]]
    assert result.bounds == {"head": {"forward": (1.5, 2.0)}}
    assert not result.flat
    assert result.sizes == [16, 32]  # those of the values


def test_values_stay_at_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a size in the middle diverged, those beyond it do not move into its place."""

    def measure(exp: Any) -> tuple[dict[Key, Measured], None, None]:
        if exp.model.width == 32:
            raise coordcheck.Diverged({"step": 1, "loss": math.nan, "grad_norm": math.nan}, ranks=[])
        return values(head__norm=float(exp.model.width)), None, None

    monkeypatch.setattr(coordcheck, "measure", measure)
    monkeypatch.setattr(coordcheck, "lower_bounds", lambda model, before: {})
    result = quick()
    assert dict(zip(result.sizes, result.rows[0].values, strict=True)) == {16: 16.0, 64: 64.0}
    assert result.rows[0].slope == pytest.approx(1)


def test_a_zero_weight_has_no_slope_and_is_said_so() -> None:
    exp = experiment(QUICK, "width", 16, 1)
    [row] = compare({16: values(a__norm=0.0), 32: values(a__norm=1.0)}, "width", exp)
    assert math.isnan(row.slope)
    assert row.verdict == "no slope"
    with pytest.raises(KeyError):  # a layer that vanishes is not left out in silence
        list(compare({16: values(a__norm=1.0, b__norm=1.0), 32: values(a__norm=1.0)}, "width", exp))


def test_refusals() -> None:
    with pytest.raises(RequestError, match="--widths"):
        quick("model.width=64")
    with pytest.raises(RequestError, match="--steps"):
        quick("train.tokens=2^10")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["coordcheck", *QUICK, "--widths", "16,32,64", "--steps", "2"]
    assert run([*line, "optimizer=above_mup", "--expect", "flat", "--figure", "a.png", "--plot"]) == 0
    out = capsys.readouterr().out
    assert "flat: above_mup x above_mup" in out
    assert "⣀" in out or "⠤" in out
    assert Path("a.png").read_bytes()[1:4] == b"PNG"
    assert len([line for line in out.splitlines() if " <= forward <= " in line]) == 5
    assert "R " in next(line for line in out.splitlines() if line.startswith("  head: M "))
    assert run([*line, "optimizer=above_mup", "parameterization=standard,above_mup", "--expect", "flat", "--json"]) == 1
    standard, above = json.loads(capsys.readouterr().out)["checks"]
    assert (standard["parameterization"], standard["flat"]) == ("standard", False)
    assert (above["parameterization"], above["flat"]) == ("above_mup", True)  # one of two is not enough
    lower, upper = above["bounds"]["layers.0.feed_forward.output"]["stability"]
    assert 0 < lower <= upper
    assert standard["tolerance"] == {"norms": 0.1, "rms": 0.35}
    assert {row["quantity"] for row in standard["rows"]} == set(coordcheck.QUANTITIES)
    assert run([*line, "optimizer=adam", "parameterization=standard"]) == 0  # nothing was expected
    for wrong in (
        *(["--widths", "64,x"], ["--widths", "0,16"], ["--depths", "2,2"], ["--widths", ""], ["--expect", "round"]),
        *(["--figure", "a.gif"], ["--figure", "no/a.png"]),
    ):
        assert run(["coordcheck", *QUICK, *wrong]) == 2
        assert wrong[1] in capsys.readouterr().err
    assert run([*line, "parameterization=mup,bogus"]) == 2
    assert capsys.readouterr().out == ""  # refused before the first pair was trained
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
