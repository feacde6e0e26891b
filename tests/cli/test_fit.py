"""`abovemup fit` and `predict`: what they print, JSON that is whole, exit codes, figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from abovemup.analysis import rules
from abovemup.cli.main import run
from tests.analysis.test_sources import VERTEX, write, write_grid


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("grid"), step=0.5)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(map(str, arguments)))
    return code, *capsys.readouterr()


def whole(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_norm_says_what_it_rests_on(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "fit", "norm", str(grid))
    assert code == 0
    for part in (
        "Optimal head/rms_to_inf: 2^(3.",
        "necessary, not sufficient",
        "loss=val; runs=90",
        "optimizer.name=scion",
    ):
        assert part in out
    code, out, _ = said(capsys, "fit", "norm", str(grid), "--json")
    answer = whole(out)
    assert answer["band"]["log2_norm"] == pytest.approx(VERTEX, abs=0.1)
    assert {"optima", "best", "conditions", "excluded", "horizons", "intercept"} <= answer.keys()


def test_a_refusal_is_exit_1_with_reason_and_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lr in (-7, -6, -5):
        write(tmp_path / f"lr{lr}", lr)
    code, out, err = said(capsys, "fit", "norm", str(tmp_path), "--json")
    assert code == 1
    assert whole(out)["refusal"]["reason"] == "edge"
    assert "extend lr to 0.125" in err
    assert err.count("\n") <= 2


def test_rule_growth_and_predict(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "DRAWS", 20)
    code, out, _ = said(capsys, "fit", "rule", str(grid), "--json")
    assert code == 0
    law = whole(out)["rules"]["lr"]
    assert law["exponents"]["tokens"] == pytest.approx(-0.5, abs=0.1)
    low, high = law["ols"]["batch"]
    assert low < 0.5 < high
    (tmp_path / "fit.json").write_text(out)
    code, out, _ = said(
        capsys, "predict", "--tokens", "2^24", "--from", str(tmp_path / "fit.json"), "--json", "model=tiny"
    )
    answer = whole(out)
    assert answer["beyond"]["lr"]["tokens"] == pytest.approx(4)
    assert any(text.startswith("optimizer.momentum=0.9 instead of 0.0") for text in answer["differences"])
    assert answer["low_sensitivity"]
    code, out, _ = said(capsys, "fit", "growth", str(grid), "--where", "optimizer.lr=2^-3")
    assert code == 0
    assert "slopes (95 %)" in out
    assert said(capsys, "fit", "rule", str(grid))[0] == 0
    assert said(capsys, "fit", "norm", str(grid), "--all")[0] == 0


def test_the_papers_rule_is_marked_where_its_conditions_end(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys, "predict", "--tokens", "2^33", "--batch-size", "2^19", "experiment=paper_main", "data=stdlib"
    )
    assert code == 0
    assert "= 2^-4.3" in out  # 0.62 x 19 - 0.56 x 33 + 2.32
    assert "to expect at the end" not in out  # that norm is the one of the best batch
    assert "Extrapolated" not in out
    told = next(line for line in out.splitlines() if line.startswith("Not the paper's conditions"))
    assert "optimizer" not in told
    assert "data.name=stdlib instead of nemotron_cc" in told
    _, out, _ = said(capsys, "predict", "--tokens", "2^33")  # for a run as it is without any setting
    assert "to expect at the end if lr is right, which it does not prove: 2^(7.01" in out
    assert "Not the paper's conditions: optimizer.momentum=0.9 instead of 0.0" in out
    _, out, _ = said(capsys, "predict", "--tokens", "1T", "model=tiny", "optimizer=adam")
    assert "Not the paper's conditions: optimizer.name=adam instead of scion" in out
    assert "Extrapolated: tokens is 2.9 octaves" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("fit", "norm", "nowhere"),
        ("fit", "norm", "nowhere", "--loss", "mine"),
        ("fit", "rule", "nowhere", "--all"),
        ("predict", "--tokens", "many"),
        ("predict", "--tokens", "2^20", "--from", "nowhere.json"),
    ],
)
def test_a_wrong_request_is_exit_2_in_two_lines(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, *arguments)
    assert code == 2
    assert 0 < err.count("\n") <= 2
