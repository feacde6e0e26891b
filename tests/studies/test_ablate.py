"""What an ablation's file and its overrides ask for, and which of its points are one run."""

import json
from pathlib import Path

import pytest

from abovemup.config.errors import RequestError
from abovemup.studies.ablate import Point, curves, files, load, points, report
from abovemup.studies.cells import Result
from tests.studies.test_cells import written

SMALL = ["model.width=64,128", "optimizer.lr=log2range(-4,-3,1)"]


def asked(*overrides: str) -> list[Point]:
    one = [] if any(o.startswith(("train.seed", "data.seed")) for o in overrides) else ["train.seed=1"]
    keys = [o.partition("=")[0] for o in overrides]
    small = [o for o in SMALL if o.partition("=")[0] not in keys]
    return list(points(load("parameterization", [*small, *one, *overrides], None), None))


def test_overrides_replace_an_axis_or_hold_everywhere() -> None:
    ablation = load("parameterization", ["optimizer=scion", "data.seed=4,5", "model=pocket", "train.tokens=2^12"], None)
    assert ablation.axes["optimizer"] == ["scion"]
    assert ablation.axes["train.seed,data.seed"] == ["4", "5"]
    assert ablation.fixed["model"] == "pocket"
    assert ablation.fixed["train.tokens"] == "2^12"
    assert ablation.axes["parameterization"] == ["standard", "mup", "above_mup"]
    with pytest.raises(RequestError, match="not KEY=VALUE"):
        load("parameterization", ["scion"], None)
    with pytest.raises(RequestError, match="no ablation depht"):
        load("depht", [], None)
    with pytest.raises(RequestError, match="no lr grid for optimizer=muon"):
        list(points(load("parameterization", ["optimizer=muon"], None), None))
    with pytest.raises(RequestError, match="unknown key"):
        asked("model.widht=3")
    with pytest.raises(RequestError, match="twice"):
        load("parameterization", ["optimizer=adam", "optimizer=scion"], None)
    with pytest.raises(RequestError, match="--dir"):
        load("parameterization", ["run.dir=x"], None)
    with pytest.raises(RequestError, match="1000"):
        load("parameterization", ["optimizer.lr=log2range(-5,-4,1e-9)"], None)


def test_points_come_by_seed_then_by_size() -> None:
    got = asked("train.seed=1,2")
    assert list(dict.fromkeys((p.seed, p.size) for p in got)) == [("1", "64"), ("1", "128"), ("2", "64"), ("2", "128")]
    assert all("train.seed=2" in p.cell.overrides and "data.seed=2" in p.cell.overrides for p in got if p.seed == "2")


def test_arms_that_are_the_same_run_share_a_cell() -> None:
    """At the base all three; above it mup and above_mup, while every width grows with the model's."""
    got = asked()
    assert len(got) == 24
    for optimizer in ("adam", "scion"):
        own = {(p.arm[1], p.size, p.lr): p.cell.name for p in got if p.arm[0] == optimizer}
        for lr in (1 / 16, 1 / 8):
            assert own["standard", "64", lr] == own["mup", "64", lr] == own["above_mup", "64", lr]
            assert own["standard", "128", lr] != own["mup", "128", lr] == own["above_mup", "128", lr]
    assert len({p.cell.name for p in got}) == 2 * 2 * (1 + 2)


def test_the_report_of_a_study_that_has_hardly_begun(tmp_path: Path) -> None:
    ablation = load("parameterization", [*SMALL, "train.seed=1,2"], None)
    got = list(points(ablation, None))
    (tmp_path / "runs").mkdir()
    for p in got[:7]:
        if not (folder := tmp_path / "runs" / p.cell.name).exists():
            written(folder, "finished", p.cell.steps + 1, {p.cell.steps: 3.5})
    out = report(ablation, got, tmp_path)
    assert out["cells"] == {"finished": 3, "missing": 21}
    assert len(out["table"]) == 12
    assert all(row["missing"] for row in out["table"])
    assert {move["verdict"] for move in out["transfer"]} == {"cannot tell"}
    assert (tmp_path / "points.csv").read_text().count("finished") == 9
    assert json.loads((tmp_path / "result.json").read_text())["verdict"] == out["verdict"]


def test_curves_say_which_arms_are_the_same_runs() -> None:
    ablation = load("parameterization", [*SMALL, "train.seed=1"], None)
    got = list(points(ablation, None))
    results = {p.cell.id: Result("finished", 4.0) for p in got}
    same = {(c.arm, c.size): c.same_as for c in curves(ablation, got, results)}
    assert same[("scion", "standard"), "64"] is None
    assert same[("scion", "above_mup"), "64"] == ("scion", "standard")
    assert same[("scion", "above_mup"), "128"] == ("scion", "mup")
    assert same[("scion", "mup"), "128"] is None


def test_an_ablation_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "ablation").mkdir()
    mine = tmp_path / "ablation" / "mine.yaml"
    ours = files(None)["parameterization"].read_text()
    mine.write_text(ours.replace("parameterization: [", "model.norm_eps: [").replace("standard, mup, above_mup", "0.1"))
    ablation = load("mine", [*SMALL, "train.seed=1"], tmp_path)
    assert ablation.arms == ["optimizer", "model.norm_eps"]
    assert {p.arm for p in points(ablation, tmp_path)} == {("adam", "0.1"), ("scion", "0.1")}
    mine.write_text("question: why")
    with pytest.raises(RequestError, match="expected question, fixed, arms"):
        load("mine", [], tmp_path)
    mine.rename(tmp_path / "ablation" / "parameterization.yaml")
    with pytest.raises(RequestError, match="exists already"):
        files(tmp_path)


def test_a_typed_path_is_one_more_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    small = ["model.width=16", "optimizer.lr=0.1", "train.seed=1"]
    assert {p.arm for p in points(load("dataset", small, None), None)} == {("python",), ("synthetic",)}
    asked = list(points(load("dataset", [*small, f"data.path={tmp_path}"], None), None))
    assert [p.arm for p in asked] == [("python",), ("synthetic",), ("text",)]
    assert [f"data.path={tmp_path}" in p.cell.overrides for p in asked] == [False, False, True]
    plain = {p.arm: p.cell.name for p in points(load("dataset", small, None), None)}
    assert all(p.cell.name == plain.get(p.arm, p.cell.name) for p in asked)  # the other arms are the same cells


def test_steps_replace_the_tokens_of_the_file() -> None:
    fixed = load("dataset", ["train.steps=5"], None).fixed
    assert fixed["train.steps"] == "5"
    assert "train.tokens" not in fixed
    with pytest.raises(RequestError, match="both given"):
        asked("train.steps=5", "train.tokens=2^12")
