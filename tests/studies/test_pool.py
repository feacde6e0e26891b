"""The study as a command: nothing runs twice, and what was ended goes on."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.slow.process import ended, rows_in, run, started, until
from tests.training.tiny import rows

pytestmark = pytest.mark.slow

SMALL = [
    *("model.width=16,32", "model.base.width=16", "model.head_dim=8", "model.base.head_dim=8"),
    *("data=synthetic", "train.batch_size=4", "train.seq_len=32", "train.tokens=2^10", "eval.tokens=512"),
    *("optimizer=scion", "parameterization=standard,above_mup", "optimizer.lr=2^-5,2^-4", "train.seed=1"),
]
ONE = [*SMALL, "model.width=16", "parameterization=above_mup", "optimizer.lr=2^-5"]


def command(*overrides: str, jobs: int = 2) -> list[str]:
    """A later override of a key wins."""
    settings = dict(override.split("=", 1) for override in overrides)
    return ["ablate", "parameterization", f"--jobs={jobs}", *(f"{key}={value}" for key, value in settings.items())]


def states(study: Path) -> dict[str, str]:
    return {p.parent.name: json.loads(p.read_text())["status"] for p in study.glob("runs/*/summary.json")}


def test_two_studies_share_the_cells_and_a_third_runs_nothing(tmp_path: Path) -> None:
    study = tmp_path / "studies" / "parameterization"
    with started(tmp_path, *command(*SMALL, jobs=1)) as one, started(tmp_path, *command(*SMALL, jobs=1)) as two:
        ends = [ended(one), ended(two)]
    assert [end.code for end in ends] == [0, 0], ends
    assert set(states(study).values()) == {"finished"}
    assert len(states(study)) == 2 + 4  # at the base the two arms are one
    told = [line for end in ends for line in end.out.split("\n") if re.match(r"\d/6 ", line)]
    assert len(told) == 6
    assert "cells: 6 finished" in ends[0].out
    assert "cells: 6 finished" in ends[1].out
    logs = {path: path.read_text() for path in study.glob("logs/*.log")}
    assert len(logs) == 6
    assert all(text.count("step 0/8") == text.count("finished:") == 1 for text in logs.values())

    before = {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*")}
    third = run(tmp_path, *command(*SMALL), "--json")
    assert third.code == 0, third
    assert json.loads(third.out)["cells"] == {"finished": 6}
    assert before == {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*")}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_a_signal_ended_goes_on(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    long = command(*ONE, "train.tokens=2^16")
    study = tmp_path / "studies" / "parameterization"
    with started(tmp_path, *long) as process:
        assert until(process, lambda: any(rows_in(folder) > 20 for folder in study.glob("runs/*")))
        process.send_signal(signum)
        end = ended(process)
    assert end.code == code, end
    (name,) = states(study)
    assert states(study)[name] == "interrupted"
    assert run(tmp_path, *long).code == 0
    assert states(study)[name] == "finished"
    assert (study / "logs" / f"{name}.log").read_text().count("step 0/512") == 1  # it did not start again
    alone = run(tmp_path, *long, "--dir=alone")
    assert alone.code == 0
    assert rows(study / "runs" / name) == rows(tmp_path / "alone" / "runs" / name)


def test_a_killed_cell_goes_on_and_a_torn_one_starts_again(tmp_path: Path) -> None:
    study = tmp_path / "studies" / "parameterization"
    assert run(tmp_path, *command(*ONE)).code == 0
    (name,) = states(study)
    cell = study / "runs" / name
    wanted = rows(cell)
    summary = json.loads((cell / "summary.json").read_text())
    (cell / "summary.json").write_text(json.dumps({**summary, "status": "running"}))  # as SIGKILL leaves it
    assert run(tmp_path, *command(*ONE)).code == 0
    assert rows(cell) == wanted
    lines = (cell / "metrics.jsonl").read_text().split("\n")
    (cell / "metrics.jsonl").write_text("\n".join(lines[:-3]))
    assert run(tmp_path, *command(*ONE)).code == 0
    assert rows(cell) == wanted


def test_a_divergence_is_a_result(tmp_path: Path) -> None:
    study = tmp_path / "studies" / "parameterization"
    wild = command(*ONE, "optimizer.lr=2^-20,1e6", "optimizer.weight_decay=1e6")
    assert run(tmp_path, *wild).code == 3
    assert "diverged" in states(study).values()
    before = {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*")}
    assert run(tmp_path, *wild).code == 3
    assert before == {path: path.stat().st_mtime_ns for path in study.glob("runs/*/*")}
