"""Run directories become tables, whatever state they are in."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import abovemup
from abovemup.analysis.export import TOOLKIT, table, toolkit
from abovemup.analysis.runs import LOGGED, find, load_runs, plain, records
from abovemup.analysis.select import columns, ordered, select
from abovemup.config.errors import RequestError
from abovemup.studies.cells import result
from abovemup.tracking import jsonl
from abovemup.tracking.records import Record
from tests.analysis.directories import rows, write

COLUMNS = ["loss", "val/loss", "norm/head/rms_to_inf", "norm/not/there"]


def summaries(place: str | Path) -> pd.DataFrame:
    found, skipped = records([place])
    frame = pd.DataFrame(map(plain, found), columns=None if found else ["run", "dir", "status", *LOGGED])
    frame.attrs["skipped"] = skipped
    return frame


def by_hand(folders: list[Path], names: list[str]) -> pd.DataFrame:
    """The readable twin of `load_runs`: row by row, through the reader of the tracking room."""
    lines: list[dict[str, Any]] = []
    for folder in folders:
        for row in jsonl.read(folder / "metrics.jsonl"):
            values = {name: float(row.get(name, math.nan)) for name in names}
            lines.append({"run": folder.name, "step": row["step"], "tokens": row["tokens"], **values})
    return pd.DataFrame(lines, columns=["run", "step", "tokens", *names])


def states(folder: Path) -> list[Path]:
    """A whole run, one that diverged, one that is being written, one that has just begun."""
    write(folder / "a")
    gone: Record = {"step": 3, "tokens": 3 * 2048, "loss": math.nan, "grad_norm": math.inf}
    write(folder / "b", logged=[*rows(2), gone], status="diverged", loss=math.nan)
    open_run = dict.fromkeys(("loss", "val_loss", "output_norm"))
    newest: Record = {"step": 7, "tokens": 7 * 2048, "loss": 0.5}
    write(folder / "c", logged=[*rows(6), newest], status="running", steps=0, tokens=0, **open_run)
    with open(folder / "c" / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "tokens": 16384, "lo')
    write(folder / "d", logged=[], status="running")
    return [folder / name for name in "abcd"]


@pytest.mark.parametrize("names", [COLUMNS, None, [], ["step", "loss", "loss"]])
def test_rows_are_those_that_were_written(names: list[str] | None, tmp_path: Path) -> None:
    """Of four runs in different states; asked for by name (through Arrow, where it can) and all at once."""
    folders = states(tmp_path)
    frame = load_runs(tmp_path, names)
    wanted = list(dict.fromkeys(names)) if names is not None else [str(name) for name in frame][3:]
    wanted = [name for name in wanted if name != "step"]
    pd.testing.assert_frame_equal(frame, by_hand(folders, wanted))
    assert frame.attrs["skipped"] == {}
    if names is None:
        assert {key for row in jsonl.read(tmp_path / "b" / "metrics.jsonl") for key in row} <= {*frame}


def test_a_run_a_folder_a_study_and_a_name(elsewhere: Path) -> None:
    for name in ("x", "y"):
        write(Path("study/runs") / name)
    write(Path("runs/z"))
    Path("runs/.removing-z").mkdir()
    Path("study/runs/conf").mkdir()
    Path("study/runs/conf/config.yaml").write_text("a: 1\n")  # somebody's folder, no run
    Path("study/logs").mkdir()
    for place, names in {"study": "xy", "study/runs": "xy", "study/runs/x": "x", "z": "z", "runs": "z"}.items():
        assert [run.name for run in find(place)] == list(names)
        assert sorted(summaries(place)["run"]) == list(names)
        assert sorted({*load_runs(place, ["loss"])["run"]}) == list(names)
    for place in ("study/logs", "nowhere"):
        with pytest.raises(RequestError, match=place):
            load_runs(place)


def test_what_is_damaged_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    states(tmp_path)
    breakages = {
        "half a summary": ("summary.json", '{"status": "fini'),
        "another summary": ("summary.json", "[1]"),
        "no status": ("summary.json", "{}"),
        "half a config": ("config.yaml", "model: {width: "),
        "another config": ("config.yaml", "just text"),
        "a torn middle": ("metrics.jsonl", '{"step": 1, "tokens": 5}\n{"step": 2, "to\n{"step": 3, "tokens": 9}\n'),
        "a repeated step": ("metrics.jsonl", '{"step": 1, "tokens": 5}\n{"step": 1, "tokens": 5}\n'),
        "a row without step": ("metrics.jsonl", '{"tokens": 5, "loss": 1.0}\n{"step": 1, "tokens": 9}\n'),
        "a row without tokens": ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "tokens": 9}\n'),
        "bytes": ("metrics.jsonl", "\0" * 64 + '\n{"step": 2, "tokens": 9}\n'),
        "no metrics": ("metrics.jsonl", ""),
        "no summary": ("summary.json", ""),
    }
    for name, (file, text) in breakages.items():
        write(tmp_path / name)
        (tmp_path / name / file).write_text(text)
        if not text:
            (tmp_path / name / file).unlink()
    for frame, files in (
        (summaries(tmp_path), ("summary.json", "config.yaml")),
        (load_runs(tmp_path), ("metrics.jsonl",)),
        (load_runs(tmp_path, COLUMNS), ("metrics.jsonl",)),
    ):
        broken = {name: file for name, (file, _) in breakages.items() if file in files}
        assert {Path(run).name for run in frame.attrs["skipped"]} == {*broken}
        assert all(broken[Path(run).name] in why for run, why in frame.attrs["skipped"].items())
        assert {"a", "b", "c"} <= {*frame["run"]}
        assert not {*broken} & {*frame["run"]}


def test_runs_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    for place in ("a", "runs/a", "runs/b"):
        write(tmp_path / place)
    with pytest.raises(RequestError, match="runs of the same name"):
        find(tmp_path)
    assert [run.name for run in find(tmp_path / "runs")] == ["a", "b"]


def test_a_summary_says_how_each_run_stands(tmp_path: Path) -> None:
    """A running (or killed) one by its newest rows, a diverged one with nan; versions and norms may differ."""
    states(tmp_path)
    write(tmp_path / "old", ["optimizer=adam", "model.width=128"], versions={"torch": "1.0"})
    text = (tmp_path / "old" / "config.yaml").read_text()
    (tmp_path / "old" / "config.yaml").write_text(text.replace("  norm_control: decay\n", ""))
    frame = summaries(tmp_path).set_index("run")
    last = rows(6)[-1]
    for run, steps, loss in (("a", 6, last["loss"]), ("c", 7, 0.5), ("old", 6, last["loss"])):
        assert frame.loc[run, ["steps", "tokens", "loss"]].tolist() == [steps, steps * 2048, loss]
        assert frame.loc[run, ["val_loss", "output_norm"]].tolist() == [last["val/loss"], last["norm/head/rms_to_inf"]]
    assert frame["status"].tolist() == ["finished", "diverged", "running", "running", "finished"]
    assert math.isnan(frame.loc["b", "loss"])
    assert frame["model.width"].tolist() == [64, 64, 64, 64, 128]
    assert frame["data.name"].unique().tolist() == ["stdlib"]
    assert "data.source.name" not in frame
    assert frame.loc["old", "optimizer.name"] == "adam"
    assert pd.isna(frame.loc["old", "optimizer.norm_control"])
    assert frame.loc["old", "versions.torch"] == "1.0"
    assert frame["dir"].tolist() == [str(tmp_path / run) for run in frame.index]


def test_conditions(tmp_path: Path) -> None:
    settings = {"p": "2^-4", "q": "2^-4.5", "r": "0.25"}
    for name, lr in settings.items():
        write(tmp_path / name, [f"optimizer.lr={lr}", f"train.batch_size={8 if name == 'r' else 16}"])
    write(tmp_path / "s", ["optimizer=adam"], status="diverged", loss=math.nan)
    found, _ = records([tmp_path])
    for text, names in {
        "optimizer.lr=2^-4": "p",
        "optimizer.lr=0.0625": "p",
        "optimizer.lr=0.04419": "q",  # as a table shows it
        "optimizer.lr<2^-4": "qs",
        "optimizer.lr<=2**-4": "pqs",
        "optimizer.lr>0.1": "r",
        "optimizer.lr>=0.25": "r",
        "optimizer=adam": "s",
        "optimizer.name!=adam": "pqr",
        "status=diverged": "s",
        "train.tokens=12288": "pqs",
        "tokens>1e4": "pqs",
        "loss=nan": "s",
        "loss<10": "pqr",
        "optimizer.clip=null": "pqrs",
        "model.gains=false": "pqrs",
        "norms.which=role": "pqrs",
        "norms.which<3": "",
        "run=p": "p",
    }.items():
        assert [row["run"] for row in select(found, [text])] == list(names), text
    assert [row["run"] for row in select(found, ["optimizer=scion", "train.batch_size=16", "optimizer.lr<0.05"])] == [
        "q"
    ]
    for text, word in {"optimizer.lrr=3": "optimizer.lr?", "stats=x": "status?", "loss<few": "number"}.items():
        with pytest.raises(RequestError, match=word):
            select(found, [text])


@pytest.mark.parametrize(
    "losses",
    [[math.nan, 3.0, 2.9], [3.0, math.nan, 2.9], [2.9, 3.0, math.nan], [math.inf, math.nan], [None, 2.9], [2.9, 3.0]],
)
def test_no_order_puts_a_diverged_or_unfinished_run_first(losses: list[float | None]) -> None:
    """Case 86: nan, inf, no loss, or the lowest loss of a run that diverged or is still running."""
    found: list[dict[str, Any]] = [{"run": str(i), "status": "finished", "loss": v} for i, v in enumerate(losses)]
    found += [{"run": "x", "status": "diverged", "loss": 0.1}, {"run": "y", "status": "running", "loss": 0.0}]
    for turned in (found, found[::-1]):
        first = ordered(turned, "loss")[0]
        assert first["status"] == "finished"
        finite = [v for v in losses if v is not None and math.isfinite(v)]
        assert not finite or first["loss"] == min(finite)
    assert [row["run"] for row in ordered(found, "status")[-1:]] == ["y"]


def test_the_columns_are_what_was_chosen_otherwise(tmp_path: Path) -> None:
    """Not what follows from it: heads and the base shape from the width, Adam's table and eps from its name."""
    write(tmp_path / "a")
    write(tmp_path / "b", ["model.width=128"])
    write(tmp_path / "c", ["optimizer=adam", "train.seed=1"])
    shown = ["run", "status", "tokens", "loss", "val_loss"]
    main = ["optimizer.name", "optimizer.lr", "train.batch_size", "model.width"]
    assert columns(records([tmp_path])[0]) == [*shown, *main, "train.seed"]
    write(tmp_path / "d", ["optimizer.eps=1e-6"])
    assert columns(records([tmp_path])[0]) == [*shown, *main, "optimizer.eps", "train.seed"]
    assert columns([]) == [*shown, *main]


def test_the_table_holds_summaries_and_norms_and_can_be_parquet(tmp_path: Path) -> None:
    states(tmp_path / "runs")
    write(tmp_path / "runs/z", ["norms.every=pow2", "norms.which=[frobenius]"])
    frame = table(records([tmp_path])[0])
    frame.to_parquet(tmp_path / "x.parquet")
    back = pd.read_parquet(tmp_path / "x.parquet").set_index("run")
    assert back.loc[["a", "b", "z"], "norm/head/rms_to_inf"].tolist() == [7.0, 3.0, 7.0]
    assert back.loc[["a", "b", "z"], "norm_tokens"].tolist() == [6 * 2048, 2 * 2048, 6 * 2048]
    assert back.loc[["a", "z"], "norms.every"].tolist() == ["10", "pow2"]
    assert back.loc["z", "norms.which"] == "[frobenius]"
    assert back["optimizer.lr"].dtype == float


def test_the_toolkit_gets_its_own_columns_and_counts_the_same_tokens(tmp_path: Path) -> None:
    """bs * step * 4096 is our tokens, whatever the length of our sequences; momentum is the complement of ours."""
    write(tmp_path / "a", ["train.batch_size=64", "train.seq_len=1024"])
    write(tmp_path / "b", ["train.batch_size=16", "train.seq_len=4096", "optimizer.momentum=0", "train.seed=3"])
    frame = toolkit(records([tmp_path])[0])
    extra = ["run_name", "bs", "seed", "momentum", "lr", "lr_hidden", "lr_in", "lr_out"]
    assert list(frame) == [*TOOLKIT, *extra]
    assert frame["run_name"].unique().tolist() == ["lr-0.5-bs-16-momentum-0.1-seed-0", "lr-0.5-bs-16-seed-3"]
    assert frame["momentum"].unique().tolist() == [0.1, 1.0]
    ours = load_runs(tmp_path, ["loss", "norm/head/rms_to_inf"]).dropna().reset_index(drop=True)
    assert (frame["bs"] * frame["_step"] * 4096).tolist() == ours["tokens"].tolist()
    assert frame["loss_metrics/global_avg_loss"].tolist() == ours["loss"].tolist()
    norm = "track_param_rms_to_l1/model_part_0/output"
    assert frame[norm].tolist() == ours["norm/head/rms_to_inf"].tolist()


@pytest.mark.parametrize(
    "overrides",
    [["optimizer=adam", "train.seq_len=4096"], ["train.seq_len=1000"], ["train.batch_size=8", "train.seq_len=256"]],
)
def test_what_the_toolkit_cannot_say_is_refused(overrides: list[str], tmp_path: Path) -> None:
    write(tmp_path / "a", overrides)
    with pytest.raises(RequestError, match="toolkit"):
        toolkit(records([tmp_path])[0])


def test_two_runs_are_not_one_in_the_toolkit(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / f"{seed}", [f"data.seed={seed}", "train.seq_len=4096"])
    with pytest.raises(RequestError, match="not the only"):
        toolkit(records([tmp_path])[0])


def test_load_runs_is_at_hand_and_costs_nothing_before(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert len(abovemup.load_runs(tmp_path)) == 7
    code = "import abovemup, sys; assert not {'pandas', 'numpy', 'yaml'} & set(sys.modules); abovemup.load_runs"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    with pytest.raises(AttributeError, match="nothing"):
        abovemup.nothing  # noqa: B018


def test_the_output_norm_of_a_tied_run_is_its_embeddings(tmp_path: Path) -> None:
    row: Record = {"step": 1, "tokens": 2048, "loss": 2.0, "val/loss": 2.5, "norm/embedding/one_to_rms": 1.5}
    write(tmp_path / "a", logged=[row, {"step": 2, "tokens": 4096, "loss": 1.0}], status="running", output_norm=None)
    assert records([tmp_path / "a"])[0][0]["output_norm"] == 1.5
    assert result(tmp_path / "a", 1).output_norm == 1.5


def test_a_run_that_was_really_trained(elsewhere: Path) -> None:
    from abovemup.training.run import train

    text = "train.steps=3 norms.every=1 eval.every=3 eval.tokens=2048 tracking=local model.width=32 data=synthetic"
    done = train([*text.split(), "run.name=x"])
    row = summaries("x").iloc[0]
    frame = load_runs("x")
    assert row[["status", "steps"]].tolist() == ["finished", 3]
    assert row["val_loss"] == frame["val/loss"].iloc[-1] == done.summary["val_loss"]
    assert row["output_norm"] == frame["norm/head/rms_to_inf"].iloc[-1]
    assert np.isfinite(frame[["loss", "lr/hidden"]][1:]).all(axis=None)
    assert json.loads(Path("runs/x/summary.json").read_text())["parameters"] == row["parameters"]
