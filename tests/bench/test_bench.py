"""What the bench compares is comparable, and its verdict is its exit code. Nothing is timed here."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from abovemup.bench import data, fits, loop, norms, ranks, startup, step
from abovemup.bench import loss as memory
from abovemup.bench.ratio import Ratio
from abovemup.cli.main import run
from abovemup.config.compose import compose
from abovemup.data.corpus import open_corpus
from abovemup.tracking.norms import NormTracker
from abovemup.training.trainer import Trainer
from tests.training.tiny import TINY

SMALL = [o for o in TINY if not o.startswith(("train.steps", "eval.every", "checkpoint.every"))]
SMALL += ["eval.every=0", "checkpoint.every=0"]


def test_the_bare_loop_trains_the_same_model() -> None:
    exp = compose([*SMALL, "train.steps=3", "train.device=cpu"])
    corpus = open_corpus(exp)
    ours, peer = (Trainer(exp, corpus) for _ in range(2))
    for t in (1, 2, 3):
        ours.advance()
        loop.bare_step(peer, t)
    for name, weight in ours.parameters.items():
        torch.testing.assert_close(peer.parameters[name], weight, rtol=0, atol=1e-5)


def test_measuring_the_norms_leaves_the_run_alone() -> None:
    exp = compose([*SMALL, "train.steps=9", "train.device=cpu"])
    corpus = open_corpus(exp)
    ours, straight = (Trainer(exp, corpus) for _ in range(2))
    for _ in range(2):
        ours.advance()
        straight.advance()
        norms.measure_norms(ours)
    for name, weight in ours.parameters.items():
        assert torch.equal(straight.parameters[name], weight)


def test_a_whole_comparison(elsewhere: Path) -> None:
    speed = loop.loop(blocks=1, run=SMALL)
    assert speed.at_least
    assert min(speed.ours, speed.peer) > 0
    assert not list(elsewhere.iterdir())


def test_a_block_has_the_step_with_the_norms_in_it() -> None:
    warm = [100.0] * loop.BLOCK
    usual = [1.0] * (loop.BLOCK - 1)
    assert loop.block([*warm, *usual, 3.0, *usual, 5.0, *usual, 70.0]) == loop.BLOCK - 1 + 5


def test_the_share_of_the_norms() -> None:
    ratio = norms.share("tiny", 1)
    assert ratio.ours > 0
    assert ratio.peer > 0
    assert not ratio.at_least


def test_the_error_is_that_of_every_logged_spectral_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SMALL, "train.steps=3", "train.device=cpu"]
    monkeypatch.setattr(norms, "PLAIN", ())
    good = norms.error(settings)
    assert good.value < 1e-6
    assert "84 spectral norms" in good.name  # 14 matrices: 3 rows of weights and updates
    assert 1e-9 < norms.error(settings, exact=4).value < 1e-3
    original = NormTracker.updates

    def off(self: NormTracker) -> dict[str, float]:
        return original(self) | {"update/layers.1.feed_forward.w2/rms_to_rms": 1.0}

    monkeypatch.setattr(NormTracker, "updates", off)
    assert not norms.error(settings).met


def test_both_optimizers_take_the_same_steps() -> None:
    shapes = step.blocks(16, 1, 8)
    assert len(shapes) == 7
    for peer, dtype in ((step.single, "float32"), (step.muon, "bfloat16")):
        assert step.compare("", shapes, 2, 1.0, dtype, peer).value > 0
    with pytest.raises(AssertionError, match="same steps"):
        step.compare("", shapes, 1, 1.0, "float32", step.muon)


def test_a_study_of_the_bench_has_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "STEPS", 20)
    files = fits.write(tmp_path / "study", 8)
    rows = [json.loads(line) for line in files[3].open()]
    assert [len([key for key in row if key.startswith("norm/")]) for row in rows[8:10]] == [0, fits.NORMS]
    took, before, after = fits.fit(tmp_path / "study", tmp_path)
    assert took > 0
    assert after >= before > 0


def test_both_start_ups_run() -> None:
    assert startup.startup(pairs=1).value > 0


@pytest.mark.parametrize(("last", "code"), [(3.0, 0), (3.1, 1)])
def test_a_missed_target_is_exit_code_1(
    last: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Ratio("speed", 99.0, 100.0, "tokens/s", 0.97, at_least=True), Ratio("norms", 1.0, 100.0, "s", 0.03)
    monkeypatch.setattr(loop, "loop", lambda: good[0])
    monkeypatch.setattr(norms, "norms", lambda: [good[1]])
    monkeypatch.setattr(step, "steps", list)
    monkeypatch.setattr(data, "data", list)
    monkeypatch.setattr(fits, "fits", list)
    monkeypatch.setattr(ranks, "ranks", list)
    monkeypatch.setattr(memory, "loss", lambda: Ratio("loss", 0.0, 1.0, "MB", 0.5))
    monkeypatch.setattr(startup, "startup", lambda: Ratio("help", last, 1.0, "s", 3))
    assert run(["bench"]) == code
    table = capsys.readouterr().out
    assert ("MISSED" in table) == (code == 1)
    assert table.count("met") == 4 - code
    assert run(["bench", "--json"]) == code
    rows = json.loads(capsys.readouterr().out)
    assert [row["met"] for row in rows] == [True, True, True, code == 0]
    assert [row["ratio"] for row in rows] == [0.99, 0.01, 0.0, last]
    assert {k: rows[0][k] for k in asdict(good[0])} == asdict(good[0])


def test_a_ratio_that_is_not_a_number_is_missed() -> None:
    assert not Ratio("", float("nan"), 1.0, "", 1.0, True).met
    assert not Ratio("", float("nan"), 1.0, "", 1.0, False).met
