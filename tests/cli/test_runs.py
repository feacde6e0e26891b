"""`abovemup runs`, as typed."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from abovemup.cli.main import run
from abovemup.tracking.records import Record
from abovemup.training.run import lock
from tests.analysis.directories import checkpoint, rows, write


@pytest.fixture
def here(elsewhere: Path) -> Path:
    """Three runs with long names in runs/, of which one diverged and is the lowest before that."""
    for name, lr, status in (("one", "2^-4", "finished"), ("two", "2^-3", "finished"), ("three", "2^0", "diverged")):
        write(Path(f"runs/{name}-{30 * 'x'}"), [f"optimizer.lr={lr}"], status=status, val_loss=len(name) / 2)
    return elsewhere


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_list(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 73: nothing is cut. Conditions, an order in which a diverged run is last, columns."""
    assert run(["runs", "list", "--sort", "val_loss"]) == 0
    head, *found = lines(capsys.readouterr().out)
    assert head[:6] == ["run", "status", "tokens", "loss", "val_loss", "optimizer.name"]
    assert [line[0] for line in found] == [f"{name}-{30 * 'x'}" for name in ("one", "two", "three")]
    assert [line[head.index("optimizer.lr")] for line in found] == ["0.0625", "0.125", "1"]
    assert run(["runs", "list", "runs", "optimizer.lr<2^-2", "status=finished"]) == 0
    _, *told = lines(capsys.readouterr().out)
    assert [line[:2] for line in told] == [[f"{n}-{30 * 'x'}", "finished"] for n in ("one", "two")]
    assert run(["runs", "list", "status=failed"]) == 0
    assert len(lines(capsys.readouterr().out)) == 1


def test_a_pipe_gets_all_of_it(here: Path) -> None:
    command = [sys.executable, "-m", "abovemup", "runs", "list"]
    for extra in ({}, {"TERM": "dumb", "FORCE_COLOR": "1", "COLUMNS": "40"}):
        env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")} | extra
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        assert all(f"{name}-{30 * 'x'}" in out for name in ("one", "two", "three"))
        assert "…" not in out
        assert extra or "\x1b" not in out


def test_json_holds_what_is_damaged_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("runs/bad"))
    Path("runs/bad/summary.json").write_text("{")
    assert run(["runs", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert [row["optimizer.lr"] for row in told["runs"]] == [0.0625, 1.0, 0.125]
    assert list(told["skipped"]) == ["runs/bad"]
    assert "runs/bad/summary.json" in err


def test_show(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("runs/half"), status="interrupted")
    for step in (4, 12):
        checkpoint(Path("runs/half"), step)
    assert run(["runs", "show", "half"]) == 0
    out = capsys.readouterr().out
    assert "abovemup train train.steps=6" in out
    assert "step 4 (8192 tokens), step 12 (24576 tokens)" in out
    assert "abovemup train --resume runs/half" in out
    assert ["hidden", "rms_to_rms", "2", "4", "4.5", "5"] in lines(out)
    assert run(["runs", "show", "runs/half", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["norms"][0] == {"role": "embedding", "norm": "one_to_rms", "layers": 1} | dict.fromkeys(
        ("min", "median", "max"), 3.0
    )
    assert told["checkpoints"][-1] == {"step": 12, "tokens": 24576}
    assert told["optimizer.lr"] == 0.0625


def test_plot(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone: Record = {"step": 3, "tokens": 3 * 2048, "loss": float("nan")}
    write(Path("runs/gone"), logged=[*rows(2), gone], status="diverged")
    assert run(["runs", "plot", "gone", "loss"]) == 0
    out = capsys.readouterr().out
    assert "gone: loss from 6.714 to 6.857, last 6.714" in out
    assert "2048 to 4096 tokens" in out
    assert run(["runs", "plot", "norm/head/rms_to_inf", "--out", "a.png", "status=finished"]) == 0
    assert "2 of 2 runs" in capsys.readouterr().out
    assert imread("a.png").shape[1] > 800


def test_export(here: Path) -> None:
    assert run(["runs", "export", "runs", "--format", "parquet", "--out", "a.parquet", "status=finished"]) == 0
    assert run(["runs", "export", "--format", "csv", "--out", "a.csv"]) == 0
    assert pd.read_parquet("a.parquet")["optimizer.lr"].tolist() == [0.0625, 0.125]
    assert pd.read_csv("a.csv")["norm/head/rms_to_inf"].tolist() == [7.0, 7.0, 7.0]
    write(Path("study/runs/a"), ["train.seq_len=4096"])
    assert run(["runs", "export", "study", "--format", "toolkit", "--out", "t.csv"]) == 0
    assert pd.read_csv("t.csv")["bs"].tolist() == [16, 16, 16]
    assert not list(Path().glob("*.aside"))


def test_rm_takes_whole_runs_that_it_is_given(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three, two = sorted(Path("runs").iterdir())
    assert run(["runs", "rm", one.name, "--yes"]) == 0
    assert sorted(Path("runs").iterdir()) == [three, two]
    monkeypatch.setattr("typer.confirm", lambda text: str(three) not in text)
    assert run(["runs", "rm", str(three)]) == 2
    assert three.is_dir()
    assert run(["runs", "rm", str(two)]) == 0
    assert run(["runs", "rm", "runs", "status=diverged", "--yes"]) == 0
    assert list(Path("runs").iterdir()) == []


def test_rm_refuses(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is being trained, what is no run, a link, and with one of them all the others; nobody to ask."""
    one, two, three = (f"runs/{name}-{30 * 'x'}" for name in ("one", "two", "three"))
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("a: 1\n")
    Path("link").symlink_to(one)
    Path("other").mkdir()
    Path("other/link").symlink_to(Path(one).absolute())
    write(Path("study/runs/only"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = sorted(Path().rglob("*"))
    held = lock(Path(two))
    for names, word in (
        ([one, two, "--yes"], "another process"),
        (["status=finished", "--yes"], "another process"),
        ([three, "mine", "--yes"], "mine"),
        ([three, "runs", "--yes"], "runs"),
        ([three, "study", "--yes"], "study"),
        ([three, "link", "--yes"], "link"),
        ([three, "nope", "--yes"], "nope"),
        ([three, "status=finished", "--yes"], "none of 1"),
        (["status=failed", "--yes"], "none of 3"),
        (["stats=failed", "--yes"], "status?"),
        (["other", "run=link", "--yes"], "link"),
        ([three], "--yes"),
    ):
        assert run(["runs", "rm", *names]) == 2, names
        assert word in capsys.readouterr().err
        assert sorted(Path().rglob("*")) == before
    held.release()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["list", "optimizer.lrr=3"], "optimizer.lr?"),
        (["list", "--sort", "los"], "loss?"),
        (["list", "nowhere"], "nowhere"),
        (["show", "on"], "on is no run"),
        (["show", "runs"], "runs is not a run"),
        (["plot", "los"], "loss?"),
        (["plot", "loss", "status=failed"], "status=failed"),
        (["export", "--format", "csv", "--out", "x.csv", "status=failed"], "status=failed"),
        (["export", "--format", "excel", "--out", "x"], "excel"),
        (["export", "--format", "csv", "--out", "/dev/null"], "no regular file"),
        (["export", "--format", "csv", "--out", "."], "no regular file"),
        (["export", "--format", "csv", "--out", "no/x.csv"], "no folder no"),
        (["export", "--format", "csv", "--out", f"runs/one-{30 * 'x'}/a.csv"], "lies in a run"),
        (["plot", "loss", "--out", "x.txt"], "write .png"),
    ],
)
def test_a_wrong_request(arguments: list[str], word: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert word in err
    assert len(err.splitlines()) <= 2
