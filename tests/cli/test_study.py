"""`abovemup sweep` and `study` before, and without, a run."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from abovemup.cli.main import run
from abovemup.cli.study import apart
from abovemup.config.cadence import due
from abovemup.config.errors import RequestError
from abovemup.studies.board import announce, announced, look, rows, until
from abovemup.studies.local import Local
from abovemup.studies.plan import often
from abovemup.studies.slurm import options
from abovemup.studies.sweep import cells_of
from abovemup.training.run import train
from tests.slow.test_studies import TINY


def test_a_dry_run_says_what_there_is_and_what_it_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study = [*TINY, "train.steps=6,64", "optimizer.lr=0.1,0.2"]
    first = cells_of(study, None)[0]
    train([*first.overrides, f"run.dir={tmp_path}/s/runs/{first.name}"])
    capsys.readouterr()
    assert run(["sweep", *study, "--dir=s", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["cells"], said["done"], said["runs left"]) == (4, 1, 3)
    assert said["tokens left"] == (6 + 2 * 64) * 4 * 32
    assert said["minutes left, about"] > 0
    assert [row["status"] for row in said["table"]] == ["finished", "missing", "unfinished", "missing"]
    last = json.loads(Path("s/runs", first.name, "metrics.jsonl").read_text().splitlines()[-1])
    assert said["table"][0]["loss"] == last["loss"]
    assert {path.name for path in Path("s").iterdir()} == {"runs"}  # nothing was written
    kept = sum(file.stat().st_size for file in Path("s/runs").glob("*/checkpoints/*/*.distcp"))
    assert kept < cells_of(study, None)[0].kept < 2.5 * kept  # of two, one was made

    assert run(["sweep", *study, "--dir=s", "--dry-run"]) == 0
    assert "cells: 1 finished, 2 missing, 1 unfinished; best: val loss" in capsys.readouterr().out


def test_how_often_something_is_measured() -> None:
    for cadence, steps in itertools.product((0, 3, "100tok", "64tok", "pow2"), (1, 2, 9, 100)):
        exact = sum(due(cadence, t, 64) for t in range(1, steps)) + 2
        assert abs(often(cadence, steps, 64) - exact) <= (7 if cadence == "pow2" else 0)
    assert often("pow2", 2**50, 64) < 100


def test_status_reads_the_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = cells_of(["data=synthetic", "optimizer.lr=0.1,0.2", "train.seed,data.seed=1,2"], None)
    announce(tmp_path, cells)
    (tmp_path / "logs").mkdir()
    other = replace(cells[0], steps=9)
    first = f"$ x{until(cells[0])}\nabovemup: no room\n$ x{until(cells[0])}\n"
    for cell, said in zip(cells, ("the thing\n  and", "terminated"), strict=False):
        (tmp_path / "logs" / f"{cell.name}.log").write_text(
            f"{first}abovemup: {said}\n$ x{until(other)}\nabovemup: no\n"
        )
    assert run(["study", "status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["optimizer.lr", "train.seed", "data.seed"]
    assert lines[1].split()[:4] == ["0.1", "1", "1", "failed"]
    assert "the thing" in lines[1]
    assert "no room" not in lines[1] + lines[2]
    assert lines[2].split()[3] == "missing"
    assert lines[-1] == "cells: 1 failed, 3 missing"
    assert look(tmp_path, other).error == "no"
    assert look(tmp_path, replace(cells[0], steps=7)).status == "missing"  # another horizon has not been tried
    assert [row["train.seed"] for row in rows(tmp_path, cells)] == ["1", "2", "1", "2"]


def test_text_that_has_changed_is_no_part_of_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {n} of a text\n\n" for n in range(3000)))
    study = [text for text in TINY if not text.startswith("data")]
    study += ["data=text", f"data.path={file}", "tokenizer=byte", "train.steps=2", "optimizer.lr=0.1,0.2"]
    first = cells_of(study, None)[0]
    train([*first.overrides, f"run.dir={tmp_path}/s/runs/{first.name}"])
    assert run(["sweep", *study, "--dir=s", "--dry-run"]) == 0
    file.write_text(file.read_text()[::-1])
    assert run(["sweep", *study, "--dir=s", "--dry-run"]) == 2
    assert f"the text of {first.name} has changed since it was trained" in capsys.readouterr().err
    assert run(["sweep", *study[:-1], "optimizer.lr=0.1", "--dir=s", "--dry-run"]) == 0  # nothing is left to train


def test_what_is_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study", "status", str(tmp_path)]) == 2
    assert "is no study" in capsys.readouterr().err
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    for place, said in (("file", "cannot create"), ("file/in", "cannot create"), ("run", "is a run")):
        assert run(["sweep", "data=synthetic", f"--dir={tmp_path / place}"]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "study.json").write_text('{"cells": []}')
    assert run(["study", "status", str(tmp_path)]) == 2
    assert run(["sweep", "optimizer.lr"]) == 2
    assert run(["sweep", "optimizer.lr=range(2,1)"]) == 2


def test_a_folder_keeps_the_cells_of_all_who_share_it(tmp_path: Path) -> None:
    first, second = (cells_of(["data=synthetic", f"optimizer.lr={lr}"], None) for lr in ("0.1,0.2", "0.2,0.3"))
    announce(tmp_path, first)
    announce(tmp_path, second)
    assert announced(tmp_path) == [*first, second[1]]
    (tmp_path / "study.json").write_text("{")
    announce(tmp_path, second)
    assert announced(tmp_path) == second


def test_a_launcher_gets_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apart(["a=1", "launcher.partition=x=y", "b=2"]) == (["a=1", "b=2"], {"partition": "x=y"})
    assert options({"timeout_min": "90", "setup": "[a, b]", "partition": "gpu"}, "") == {
        "timeout_min": 90,
        "setup": ["a", "b"],
        "partition": "gpu",
    }
    sweep = ["sweep", "data=synthetic", f"--dir={tmp_path / 's'}"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    for asked, said in (
        (["launcher.partition=gpu"], "launcher.partition is for --launcher slurm"),
        (["--launcher=slurm"], "there is no squeue here"),
        (["--cells-per-gpu=2", "train.device=cpu"], "have no GPU here"),
    ):
        assert run([*sweep, *asked]) == 2
        assert said in capsys.readouterr().err
    assert run([*sweep, "--launcher=slurm", "launcher.partition=a", "launcher.partition=b"]) == 2
    assert "launcher.partition is given twice" in capsys.readouterr().err
    for unfit in (["parallel=single"], ["train.micro_batch=auto"]):
        assert run([*sweep, *unfit, "--nproc=2"]) == 2
        assert "and there are 2" in capsys.readouterr().err
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert run([*sweep, "--launcher=slurm", "--nproc=4", "launcher.gpus_per_node=2"]) == 2
    assert "launcher.gpus_per_node=2 is too few" in capsys.readouterr().err
    for asked, said in (
        ("launcher.partitoin=gpu", "Did you mean partition?"),
        ("launcher.array_parallelism=x", "launcher.array_parallelism=x: expected a whole number"),
        ("launcher.additional_parameters=3", "launcher.additional_parameters=3: expected a mapping"),
        ("launcher.setup=[", "launcher.setup: "),
        ("launcher.cells_per_gpu=2", "no option of --launcher slurm"),
    ):
        assert run([*sweep, "--launcher=slurm", asked]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_cells_that_run_at_once_share_the_gpus_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of(["data=synthetic"], None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (Local(tmp_path, None, 1, cells, None).gpus, Local(tmp_path, None, 1, cells, None).jobs) == (["0", "1"], 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    local = Local(tmp_path, None, 1, cells, 3)
    assert (local.gpus, local.jobs) == (["3", "5"], 6)
    seen: list[str] = []
    monkeypatch.setattr(
        "abovemup.studies.local.warm", lambda: SimpleNamespace(Process=lambda target, args: started(args))
    )

    def started(args: Any) -> Any:
        seen.append(args[0]["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for nproc, per_gpu, jobs, groups in (
        (1, None, 4, ["0", "1", "2", "3"]),
        (2, None, 2, ["0,1", "2,3"]),
        (3, None, 1, ["0,1,2"]),
        (2, 2, 4, ["0,1", "2,3", "0,1", "2,3"]),
        (4, 1, 1, ["0,1,2,3"]),
    ):
        local = Local(tmp_path, None, nproc, cells, per_gpu)
        seen.clear()
        for number in range(local.jobs):
            local.start(cells[0], number)
        assert (local.jobs, seen) == (jobs, groups)
    with pytest.raises(RequestError, match="--nproc 5: each process takes a GPU, of 4"):
        Local(tmp_path, None, 5, cells, None)
    assert Local(tmp_path, None, 1, cells_of(["data=synthetic", "train.device=cpu"], None), None).gpus == []


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Of several processes each writes a whole file."""
    script = "import pathlib, sys; from abovemup.config.io import write_whole\nfor _ in range(200): "
    script += "write_whole(pathlib.Path(sys.argv[1]), sys.argv[2] * 5000)"
    both = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "x"), letter]) for letter in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / "x").read_text() in ("a" * 5000, "b" * 5000)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
