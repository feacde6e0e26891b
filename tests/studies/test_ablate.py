"""What an ablation's file and its overrides ask for, and which of its points are one run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from abovemup.cli.main import run
from abovemup.config.conf import files
from abovemup.config.errors import RequestError
from abovemup.studies.ablate import Ablation, Point, load, points
from abovemup.studies.findings import draw, layout, measured, report, same_runs, scan_of, sentence, verdicts
from tests.studies.test_cells import written
from tests.studies.test_transfer import law

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
    assert ablation.tokens == [2**12]
    assert ablation.axes["parameterization"] == ["standard", "mup", "above_mup"]
    with pytest.raises(RequestError, match="not KEY=VALUE"):
        load("parameterization", ["scion"], None)
    with pytest.raises(RequestError, match="no ablation depht"):
        load("depht", [], None)
    assert ablation.axes["optimizer"] != load("parameterization", [], None).axes["optimizer"]
    more = load("parameterization", ["model.ffn=2/1,8/3"], None)
    assert (more.arms[-1], more.axes["model.ffn"]) == ("model.ffn", ["2/1", "8/3"])
    with pytest.raises(RequestError, match="no budget poket"):
        load("parameterization", [], None, "poket")
    with pytest.raises(RequestError, match="msign=svd: it is one of newton_schulz-5"):
        load("msign", ["msign=svd"], None)
    assert load("msign", ["msign=exact"], None).axes["msign"] == ["exact"]
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
            logged(folder, {p.cell.steps: p.cell.tokens})
    out = report(ablation, got, tmp_path)
    assert out["cells"] == {"finished": 3, "missing": 21}
    assert len(out["table"]) == 12
    assert all(row["missing"] for row in out["table"])
    assert {move["verdict"] for move in out["verdicts"]} == {"cannot tell"}
    assert (tmp_path / "points.csv").read_text().count("finished") == 9
    assert json.loads((tmp_path / "result.json").read_text())["verdict"] == out["verdict"]
    assert (tmp_path / "figure.png").stat().st_size


def logged(folder: Path, tokens: dict[int, int]) -> None:
    """Gives the rows of a written run their tokens."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"tokens": tokens.get(row["step"], row["step"])} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_same_runs_are_told(tmp_path: Path) -> None:
    ablation = load("parameterization", [*SMALL, "train.seed=1"], None)
    same = same_runs(measured(ablation, list(points(ablation, None)), tmp_path))
    assert same[("scion", "above_mup"), "64"] == ("scion", "standard")
    assert same[("scion", "above_mup"), "128"] == ("scion", "mup")
    assert not {(("scion", "standard"), "64"), (("scion", "mup"), "128")} & same.keys()


def horizons(folder: Path) -> tuple[Ablation, list[Point]]:
    """A study of one run that has passed its first horizon of two, and one that diverged behind it."""
    ablation = load("horizon", ["optimizer.lr=0.1,0.2", "train.batch_size=16", "data=synthetic"], None, "smoke")
    got = list(points(ablation, None))
    for p, status, last in zip(got, ("interrupted", "diverged"), (6, 7), strict=True):
        row = {"step": 4, "tokens": 4096, "val/loss": 3.0, "norm/head/rms_to_inf": 1.3, "norm/a/rms_to_rms": 2.0}
        folder_of = folder / "runs" / p.cell.name
        written(folder_of, status, last, {})
        (folder_of / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return ablation, got


def test_shorter_horizons_are_read_from_the_run_of_the_longest(tmp_path: Path) -> None:
    ablation, got = horizons(tmp_path)
    assert (len(got), ablation.tokens, {p.cell.tokens for p in got}) == (2, [2**12, 2**13], {2**13})
    frame = measured(ablation, got, tmp_path)
    assert frame.tokens.tolist() == [4096, 8192] * 2
    assert frame.status.tolist() == ["finished", "unfinished", "finished", "diverged"]
    assert frame.val_loss.tolist()[::2] == [3.0, 3.0]
    assert frame.val_loss[3] == math.inf
    # 4 steps: at most 1 + 4 x 0.1 = 1.4 = 1.3 x 2^0.11
    assert frame.step_limited.tolist() == [True, False, True, False]
    scan = scan_of(frame, "head/rms_to_inf")
    assert scan.groups == ["4,096", "8,192"]
    assert scan.x["head/rms_to_inf"][0, 0, :, 0] == pytest.approx(math.log2(1.3))
    assert scan.x["lr x steps"][0, 0, :, 0] == pytest.approx([math.log2(0.4), math.log2(0.8)])
    assert scan.limited[0].all()
    assert not scan_of(frame, "lr").limited.any()


def test_nothing_is_concluded_at_smoke(tmp_path: Path) -> None:
    out = report(*horizons(tmp_path), tmp_path)
    assert (out["verdicts"], out["layout"]) == ([], None)
    assert "Nothing is concluded" in out["verdict"]


def test_a_decayed_schedule_has_one_horizon() -> None:
    with pytest.raises(RequestError, match="--branch"):
        next(points(load("horizon", ["schedule=wsd"], None, "smoke"), None))
    with pytest.raises(RequestError, match=r"eval\.every=pow2"):
        next(points(load("horizon", ["eval.every=0"], None, "smoke"), None))
    with pytest.raises(RequestError, match="6144 tokens are not, of 512 a step"):  # no power of two
        next(points(load("horizon", ["train.tokens=2^12,6144,2^13"], None, "smoke"), None))
    with pytest.raises(RequestError, match="4096 tokens are not"):
        next(points(load("horizon", ["train.tokens=2^12,9216", "train.batch_size=24"], None, "smoke"), None))
    assert next(points(load("horizon", ["schedule=wsd", "train.tokens=2^12"], None, "smoke"), None)).cell.steps
    sizes = [p.size for p in points(load("decay", ["optimizer.lr=0.1"], None, "smoke"), None)]
    assert sizes == ["5120", "5120", "10240", "10240"]


def test_another_length_of_the_sequences_is_another_batch_size_in_sequences() -> None:
    for length in ("64", "2^7"):
        small = [f"train.seq_len={length}", "optimizer.lr=0.1"]
        assert [p.batch for p in points(load("horizon", small, None, "smoke"), None)] == [2**9, 2**10]


def test_what_a_step_adds_to_the_output_norm() -> None:
    def growth(*overrides: str) -> float | None:
        small = ["optimizer.lr=0.5", "train.tokens=2^12", "train.batch_size=8"]
        return next(points(load("horizon", [*small, *overrides], None, "smoke"), None)).growth

    assert growth() == 0.5
    assert growth("optimizer.lr_scale.head=0.5") == 0.25
    assert growth("optimizer.roles.head.norm=adam") is None


def test_the_gain_of_a_layout_is_over_both_baselines() -> None:
    axes = ["optimizer.lr_scale.embedding,optimizer.lr_scale.head", "optimizer.lr_scale.hidden"]
    losses = {(-1, -3): 4.0, (-1, -1): 5.0, (-2, -2): 4.4, (-3, -3): 4.2, (-2, -3): 4.1, (0, -4): 4.3}
    rows = [{"arm": tuple(f"2^{n}" for n in at), "lowest": loss} for at, loss in losses.items()]
    found = layout(axes, rows)
    assert found is not None
    assert found["over_uniform"] == pytest.approx(1 - 4.0 / 4.2)
    assert found["over_uniform_at_head"] == pytest.approx(1 - 4.0 / 5.0)
    assert not found["edge"]
    assert layout(["model.width"], rows) is None


def test_one_sentence_with_the_verdict_of_every_arm(tmp_path: Path) -> None:
    ablation = load("horizon", [], None)
    scan = law(0.0, -0.3, 0.001)
    scan.x["head/rms_to_inf"] = scan.x.pop("norm")
    few = scan.pick([0, 1])
    found = [*verdicts(ablation, [scan]), {"verdict": "cannot tell", "name": "b", "why": "2 of 4"}]
    said = sentence(ablation, {"verdicts": found}, [])
    assert "The best head/rms_to_inf over horizons (lr step 0.5 octave): transfers: a (spread 0.0" in said
    assert "of lr x sqrt(steps) 0.2" in said
    assert said.endswith("cannot tell: b (2 of 4).")
    assert next(verdicts(ablation, [few]))["why"] == "2 of the 4 that it takes"
    draw(ablation, [scan, few], tmp_path)
    assert (tmp_path / "figure.png").stat().st_size
    axes = {"x": {"head/rms_to_inf": scan.x["head/rms_to_inf"][:, :, :1]}, "lrs": scan.lrs[:1]}
    one = replace(scan, losses=scan.losses[:, :, :1], limited=scan.limited[:, :, :1], **axes)
    draw(ablation, [replace(one, arm=(str(i),)) for i in range(30)], tmp_path)  # points of one panel, as of lr_cube
    assert imread(tmp_path / "figure.png").shape[:2] == (348, 408)


def test_arms_are_compared_beside_the_noise_of_seeds() -> None:
    ablation = load("norm_placement", [], None)
    rows: list[dict[str, object]] = [
        {"arm": ("b",), "group": "8", "lowest": 3.5, "noise": math.nan, "reason": "edge"},
        {"arm": ("a",), "group": "8", "lowest": 3.0, "noise": math.nan, "reason": ""},
    ]
    said = sentence(ablation, {"layout": None, "verdicts": []}, rows)
    assert said == "The best tuned loss at 8 is 3.0000, of a; b (edge) +0.5000; one seed: no claim."
    gains = {"over_uniform": 0.01, "over_uniform_at_head": 0.06, "edge": True}
    noisy = sentence(ablation, {"layout": gains, "verdicts": []}, [row | {"noise": 0.01} for row in rows])
    assert "noise of seeds 0.0100 a, 0.0100 b (edge); it is 1.0% below the best uniform lr, 6.0% below uniform" in noisy


@pytest.mark.parametrize("name", files("ablation", None))
def test_every_ablation_is_a_study_at_every_budget(name: str) -> None:
    for budget in files("budget", None):
        ablation = load(name, [], None, budget)
        assert ablation.question.endswith("?")
        assert ablation.paper
        if budget == "smoke":
            assert len({p.cell.name for p in points(ablation, None)}) <= 12


def test_an_ablation_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ablation").mkdir()
    mine = tmp_path / "ablation" / "mine.yaml"
    ours = files("ablation", None)["parameterization"].read_text()
    mine.write_text(ours.replace("parameterization: [", "model.norm_eps: [").replace("standard, mup, above_mup", "0.1"))
    ablation = load("mine", [*SMALL, "train.seed=1"], tmp_path)
    assert ablation.arms == ["optimizer", "model.norm_eps"]
    assert {p.arm for p in points(ablation, tmp_path)} == {("adam", "0.1"), ("scion", "0.1")}
    mine.write_text("question: why")
    with pytest.raises(RequestError, match="expected question, paper, over"):
        load("mine", [], tmp_path)
    capsys.readouterr()
    assert run(["ablate", "--list", f"--config-dir={tmp_path}", "--json"]) == 0  # and hides no other
    listed = json.loads(capsys.readouterr().out)
    assert listed["mine"].startswith("broken: ")
    assert listed["width"] == "Is the best output norm the same at every width?"
    mine.rename(tmp_path / "ablation" / "parameterization.yaml")
    with pytest.raises(RequestError, match="exists already"):
        files("ablation", tmp_path)


BUDGET = """
verdicts: false
tokens: [2^12]
batch: [2^9]
lr: {adam: "log2range(-8,-5.5,0.5)", scion: "log2range(-3,-0.5,0.5)"}
seeds: [1]
fixed: {model: tiny, data: synthetic, train.seq_len: 64, eval.every: pow2, norms.every: pow2}
"""


@pytest.mark.parametrize(
    ("there", "instead", "said"),
    [
        ("fixed:", "fxied:", "not fxied. Did you mean fixed?"),
        ("[2^12]", "[]", "tokens: no value."),
        ("[2^9]", "[100]", "batch: 100 tokens are no whole number of sequences of train.seq_len=64."),
        ('"log2range(-8,-5.5,0.5)"', "log2range(-8,-5.5,0.5)", "log2range(-8: expected log2range(first"),
        ("seq_len: 64", "seq_len: 0", "sequences of train.seq_len=0"),
        ("seq_len: 64", "seq_len: abc", "train.seq_len=abc: not a finite number."),
    ],
)
def test_a_budget_of_ones_own(there: str, instead: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "budget").mkdir()
    mine = tmp_path / "budget" / "mine.yaml"
    mine.write_text(BUDGET)
    assert load("horizon", [], tmp_path, "mine").lr["scion"][-1] == "2^-0.5"
    mine.write_text(BUDGET.replace(there, instead, 1))
    with pytest.raises(RequestError) as error:
        load("horizon", [], tmp_path, "mine")
    assert said in str(error.value)
    assert "seq" in said or str(error.value).startswith(f"{mine}")


def test_a_part_for_a_budget_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ablation").mkdir()
    ours = files("ablation", None)["depth"].read_text()
    (tmp_path / "ablation" / "mine.yaml").write_text(ours.replace("  smoke:", "  smokey:"))
    with pytest.raises(RequestError, match=r"mine\.yaml: there is no budget smokey"):
        load("mine", [], tmp_path)


def test_a_typed_path_is_one_more_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    small = ["model.width=16", "optimizer.lr=0.1", "train.seed=1"]
    assert {p.arm for p in points(load("dataset", small, None), None)} == {("python",), ("synthetic",)}
    asked = list(points(load("dataset", [*small, f"data.path={tmp_path}"], None), None))
    assert [p.arm for p in asked] == [("python",), ("synthetic",), ("text",)]
    assert [f"data.path={tmp_path}" in p.cell.overrides for p in asked] == [False, False, True]
    plain = {p.arm: p.cell.name for p in points(load("dataset", small, None), None)}
    assert all(p.cell.name == plain.get(p.arm, p.cell.name) for p in asked)  # the other arms are the same cells


def test_seeds_that_go_together_are_not_set_apart() -> None:
    assert load("width", ["data.seed=5"], None).axes["train.seed,data.seed"] == ["5"]
    for both in (["train.seed=1", "data.seed=5"], ["data.seed=5", "train.seed=1"]):
        with pytest.raises(RequestError, match="go together here"):
            load("width", both, None)


def test_steps_replace_the_tokens_of_the_file() -> None:
    assert {p.cell.steps for p in asked("train.steps=5")} == {5}
    with pytest.raises(RequestError, match="both given"):
        asked("train.steps=5", "train.tokens=2^12")
    with pytest.raises(RequestError, match="at each batch size"):
        load("horizon", ["train.steps=5"], None)
