"""Which runs are one cell, up to which horizon, and what a run directory says about it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from abovemup.config.compose import compose
from abovemup.studies.cells import Cell, Result, cell, place, result
from abovemup.studies.pool import ends
from tests.training.tiny import rows, run


def made(*overrides: str) -> Cell:
    asked = ["data=synthetic", *overrides]
    return cell(compose(asked), asked)


def name(*overrides: str) -> str:
    return made(*overrides).name


def written(folder: Path, status: str, rows: int, losses: dict[int, float] | None = None) -> Path:
    """A run of steps 0 .. rows - 1, evaluated at some."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("a: 1")
    (folder / "summary.json").write_text(json.dumps({"status": status, "steps": rows - 1}))
    lines = [{"step": n} | ({"val/loss": losses[n]} if n in (losses or {}) else {}) for n in range(rows)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_cell_is_what_the_run_is() -> None:
    one = name()
    same = [
        "parameterization=mup",
        "parameterization.base_width=32",
        "tracking.every=5",
        "run.name=x",
        "checkpoint.every=3",
        "model.base.width=64",
        "tracking=local",
    ]
    assert {name(override) for override in same} == {one}
    other = [
        *(
            "optimizer.lr=0.3",
            "train.seed=1",
            "data.seed=1",
            "train.batch_size=7",
            "eval.tokens=4096",
            "optimizer=muon",
        ),
        *("model.residual=completep", "model.depth_init=identity", "optimizer.lr_scale.head=2", "train.threads=2"),
        *("parameterization=standard model.width=128", "model.width=128", "optimizer.momentum=0.5", "norms.every=5"),
    ]
    assert len({one, *(name(*override.split()) for override in other)}) == 1 + len(other)
    # Of the same weights, another scale of the attention.
    at = ["model.head_dim=32", "model.base.head_dim=16"]
    assert name(*at, "parameterization=standard") != name(*at, "parameterization=above_mup")


def test_a_constant_run_serves_every_horizon() -> None:
    short, long = "train.steps=100", "train.steps=400"
    for same in ([], ["schedule.warmup=10"], ["schedule.warmup=2^15tok"]):
        assert name(*same, short) == name(*same, long)
    for other in (["schedule=cosine"], ["schedule=wsd", "schedule.decay=50"], ["schedule.warmup=0.1"]):
        assert name(*other, short) != name(*other, long)
    assert name("schedule.warmup=0.1", short) == name("schedule.warmup=10", long)  # 10 steps, both
    # What is prepared of a remote source, and what of it is held out, follows the length of the run.
    assert cell(compose(["data=fineweb", short]), []).name != cell(compose(["data=fineweb", long]), []).name


def test_a_decayed_run_knows_the_constant_one_that_it_could_branch_from() -> None:
    e = compose([])
    batch = e.train.batch_size * e.train.seq_len
    for warmup in ([], ["schedule.warmup=10"]):
        tail = made(*warmup, "schedule=wsd", "schedule.decay=30", "train.steps=100")
        assert tail.trunk == f"{name(*warmup, 'schedule=constant', 'train.steps=70')}@{70 * batch}"
    for schedule in ("constant", "cosine"):
        assert made(f"schedule={schedule}").trunk == ""
    assert cell(compose(["schedule=wsd", "data=fineweb"]), []).trunk == ""


def test_only_the_longest_is_trained_where_it_measures_on_its_way() -> None:
    cadence = ["eval.every=pow2", "norms.every=pow2", "train.batch_size=16", "train.seq_len=32"]
    cells = [made(*cadence, f"train.steps={n}", f"optimizer.lr={lr}") for n in (4, 6, 8, 9) for lr in (0.1, 0.2)]
    assert [c.steps for c in ends(cells)] == [6, 6, 9, 9]
    assert [c.steps for c in ends(cells[:2])] == [4, 4]


def test_a_setting_that_is_added_later_leaves_old_cells_valid() -> None:
    experiment = compose([])
    longer = dataclasses.make_dataclass(
        "Schedule", [("new", int, 3)], bases=(type(experiment.schedule),), frozen=True, kw_only=True
    )
    settings = dataclasses.asdict(experiment.schedule)
    added = dataclasses.replace(experiment, schedule=longer(**settings))
    changed = dataclasses.replace(experiment, schedule=longer(**settings, new=4))
    assert cell(added, []).name == cell(experiment, []).name != cell(changed, []).name


def test_finished_means_present_and_whole(tmp_path: Path) -> None:
    assert result(tmp_path, 5).status == "missing"
    a = written(tmp_path / "a", "finished", 6, {5: 3.5})
    assert result(a, 5).loss == 3.5
    assert result(written(tmp_path / "b", "finished", 6), 5).status == "damaged"
    assert result(written(tmp_path / "d", "diverged", 3, {2: 9.0}), 5) == Result("diverged", math.inf)
    assert result(written(tmp_path / "e", "failed", 3), 5).status == "failed"
    assert result(written(tmp_path / "f", "interrupted", 3), 5).status == "unfinished"
    assert result(written(tmp_path / "g", "running", 6, {5: 3.5}), 5).status == "unfinished"  # no checkpoint yet
    lines = (a / "metrics.jsonl").read_text().splitlines(keepends=True)
    (a / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert result(a, 5).status == "damaged"
    (a / "metrics.jsonl").write_text("".join([*lines[:2], "{", *lines[2:]]))
    assert result(a, 5).status == "damaged"
    (a / "summary.json").write_text("{")
    assert result(a, 5).status == "damaged"
    (a / "summary.json").unlink()
    assert result(a, 5).status == "damaged"


@pytest.mark.parametrize("status", ["finished", "running", "diverged", "failed"])
def test_a_shorter_horizon_is_read_where_it_was_measured(tmp_path: Path, status: str) -> None:
    folder = written(tmp_path / "runs" / "x", status, 11, {0: 9.0, 4: 4.0, 10: 3.0})
    assert result(folder, 4).loss == 4.0
    assert result(folder, 20).status == {"finished": "unfinished", "running": "unfinished"}.get(status, status)
    # Where it was not, it is trained in a folder of its own.
    cells = {n: dataclasses.replace(made(), name="x", steps=n) for n in (4, 6, 20)}
    assert place(tmp_path, cells[4]) == place(tmp_path, cells[20]) == folder
    assert place(tmp_path, cells[6]) == tmp_path / "runs" / "x-at6"


def test_a_horizon_has_the_bits_of_a_run_of_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from a longer one, and reached by continuing a shorter one."""
    monkeypatch.chdir(tmp_path)
    cadence = ("eval.every=0", "norms.every=0")
    short, whole = run("run.dir=short", "train.steps=3", *cadence), run("run.dir=whole", "train.steps=6", *cadence)
    measured = run("run.dir=measured", "train.steps=6", "eval.every=3", "norms.every=3")
    assert result(measured.dir, 3) == result(short.dir, 3)
    assert result(measured.dir, 6) == result(whole.dir, 6)
    run("train.tokens=768", resume="short")
    assert result(Path("short"), 6) == result(whole.dir, 6)
    assert result(Path("short"), 3) == result(measured.dir, 3)
    assert [row["step"] for row in rows(Path("short"))] == list(range(7))
