"""`abovemup watch`: a run at lr*(B, D) is consistent at every token count, one at another lr is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from abovemup.analysis import paper, rules
from abovemup.analysis.predict import read_fit
from abovemup.analysis.watch import cost, watch
from abovemup.cli.main import run
from abovemup.config.errors import RequestError
from tests.analysis.test_sources import best_lr, write, write_grid


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_grid(tmp_path_factory.mktemp("grid"), step=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "DRAWS", 5)
        return read_fit(str(folder))


def running(folder: Path, lr: float, tokens: int, batch: int = 16, **changes: Any) -> Path:
    """A run to 2^20 tokens that has come to `tokens`."""
    write(folder, lr, batch, "running", end=2**20, **changes)
    rows = [row for line in (folder / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))]
    kept = [json.dumps(row) + "\n" for row in rows if row["tokens"] <= tokens]
    (folder / "metrics.jsonl").write_text("".join(kept))
    return folder


@pytest.mark.parametrize("tokens", [2**17, 2**19, 2**20])
def test_the_norm_of_the_best_lr_is_consistent_and_twice_or_half_of_it_is_not(
    tmp_path: Path, fit: dict[str, Any], tokens: int
) -> None:
    """The best lr of the run's end, not of its present: at a quarter of the tokens that would be twice as high."""
    best = best_lr(2**20, 16 * 256)
    for off, verdict in ((0, "consistent"), (2, "too high"), (-2, "too low")):
        answer = watch(running(tmp_path / f"r{off}", best + off, tokens), fit)
        assert answer["verdict"] == verdict
        assert answer["off"] == pytest.approx(0.8 * off, abs=0.15)  # norm ~ lr^0.8 in these runs
        assert answer["best_lr"] == pytest.approx(best, abs=0.15)
        assert answer["tokens"] == tokens
        text = " ".join(answer["sentences"])
        assert "on track" not in text
        assert ("necessary, not sufficient" in text) == (off == 0)
        assert (f"lr is 2^{best + off:.2f}" in text) == (off != 0)


def test_an_lr_that_does_not_explain_the_norm_is_said(tmp_path: Path, fit: dict[str, Any]) -> None:
    folder = running(tmp_path / "run", best_lr(2**20, 16 * 256), 2**20)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["norm/head/rms_to_inf"] *= 8
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = watch(folder, fit)
    assert answer["off"] == pytest.approx(3, abs=0.15)
    assert "This lr does not explain it" in answer["sentences"][-1]


def test_a_batch_off_the_best_one_is_told_with_what_it_costs(tmp_path: Path, fit: dict[str, Any]) -> None:
    """Of the runs the loss at the vertex is 0.05 nats times the squared octaves from B*."""
    close = watch(running(tmp_path / "a", best_lr(2**20, 32 * 256), 2**20, 32), fit)
    assert not [text for text in close["sentences"] if "B*(D)" in text]
    far = watch(running(tmp_path / "b", best_lr(2**20, 4 * 256), 2**20, 4), fit)
    assert far["verdict"] == "consistent"
    assert "batch is 2^-2." in far["sentences"][-1]
    assert far["batch_cost"] == pytest.approx(0.05 * 9, abs=0.1)
    assert cost(fit, 2**30, 2**20) is None


def test_conditions_and_norms_that_the_fit_has_not_seen_are_no_verdict(tmp_path: Path, fit: dict[str, Any]) -> None:
    other = watch(running(tmp_path / "a", -3, 2**20, optimizer__momentum=0.9), fit)
    assert other["verdict"] == "cannot tell"
    assert "optimizer.momentum=0.9 instead of 0.0" in other["sentences"][-1]
    early = watch(running(tmp_path / "b", -6, 2**12), fit | {"band": {"log2_norm": 12.0, "half_width": 0.1}})
    assert early["verdict"] == "cannot tell"
    assert "outside of those that the law was fitted on" in " ".join(early["sentences"])
    folder = running(tmp_path / "c", -3, 2**14)
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 4096, "loss": 5.0}\n')
    with pytest.raises(RequestError, match="has not logged norm/head/rms_to_inf"):
        watch(folder, fit)
    with pytest.raises(RequestError, match="no law of lr"):
        watch(folder, fit | {"rules": {}})


def test_what_the_paper_says_of_a_batch() -> None:
    known = {"optima": paper.OPTIMA}
    assert cost(known, 2.0**19, 2.0**33) == 0
    assert cost(known, 2.0**17, 2.0**33) == pytest.approx(4.591 - 4.149)
    assert cost(known, 2.0**17.5, 2.0**32.9) == pytest.approx((4.591 + 4.284) / 2 - 4.149)
    expected, *_ = paper.NORM.predict({"lr": 2.0**-4.5, "batch": 2.0**19, "tokens": 2.0**33})
    assert expected == pytest.approx(7.29, abs=2 * paper.NORM.residual)  # the vertex in Fig. 17a, not fitted with it


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = running(tmp_path / "run", -3, 2**20)
    assert run(["watch", str(folder), "--json"]) == 1  # of another vocabulary than the paper's
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "cannot tell"
    assert (answer["beyond"]["lr"]["tokens"], answer["beyond"]["norm"]["tokens"]) == (11, 6)  # 2^31 and 2^26, of 2^20
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "diverged"}))
    assert run(["watch", str(folder)]) == 3
    assert "diverged: lr is" in capsys.readouterr().out
    assert run(["watch", str(folder), "--from", "nowhere.json"]) == 2
    assert run(["watch", str(tmp_path / "none")]) == 2
