"""A project on W&B, by an API object in the shape of the paper's logs, and what goes wrong on the way to it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb

from abovemup.analysis.sources import open_arms, open_source
from abovemup.cli.main import run
from abovemup.config.errors import RequestError

LRS = [f"lr/opt_0/group_{i}" for i in range(3)]  # hidden, input, output
NORM, LOSS = "track_param_rms_to_l1/model_part_0/output", "loss_metrics/global_avg_loss"


class Run:
    def __init__(self, lr: float, bs: int, momentum: float = 1.0, group: str = "scan", norm: str = NORM, **more: Any):
        suffix = "" if momentum == 1 else f"-momentum-{momentum}"
        self.name, self.group = f"lr-{lr}-bs-{bs}{suffix}", group
        args = ["--training.global_batch_size", str(bs), "--training.seed=30", f"--optimizer.momentum={momentum}"]
        self.metadata = {"args": args}
        x = 7 + np.log2(lr / 2**-5)
        steps = [2**33 // (bs * 4096) + n for n in (-1, 0, 1)]
        self.rows = [
            {"_step": step, LOSS: 4 + 0.1 * (x - 7) ** 2 + n / 100, norm: 2**x} | dict.fromkeys(LRS, lr) | more
            for n, step in zip((-1, 0, 1), steps, strict=True)
        ]
        self.summary = self.rows[-1] | {"_runtime": 5, "other/metric": 1.0}

    def scan_history(self, keys: list[str]) -> Any:
        assert "_step" in keys
        assert "other/metric" not in keys
        return ({key: row[key] for key in keys} for row in self.rows)


class Api:
    """What wandb.Api does with filters of its own server."""

    runs_there: list[Run]

    def __init__(self, timeout: int):
        pass

    def runs(self, path: str, filters: dict[str, Any]) -> list[Run]:
        assert path == "entity/project"
        assert filters["state"] == "finished"
        pattern = filters.get("display_name", {}).get("$regex", "")
        group = filters.get("group")
        return [run for run in Api.runs_there if pattern in run.name and group in (None, run.group)]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    Api.runs_there = [Run(2.0**e, bs) for e in range(-9, 0) for bs in (32, 64, 128)]
    Api.runs_there += [Run(2.0**-5, 64, 0.1, "momentum"), Run(2.0**-4, 64, 1.0, "layouts", **{LRS[2]: 2.0**-2})]
    monkeypatch.setattr(wandb, "Api", Api)
    return Api.runs_there


def test_a_project_is_read_as_the_toolkit_reads_it(project: list[Run]) -> None:
    source = open_source(Path("wandb:entity/project"), where=["group=scan"])
    assert source.rows.run.nunique() == 27
    assert set(source.rows.batch) == {2**17, 2**18, 2**19}
    points = source.points()
    assert set(points["raw"].tokens) == {2**33}
    assert points["smoothed"]["std"].to_numpy() == pytest.approx(np.std([-0.01, 0, 0.01]))
    assert sorted(set(np.log2(points["raw"].lr))) == list(range(-9, 0))
    assert source.conditions["optimizer.momentum"] == 0.0
    chosen = open_source(Path("wandb:entity/project"), where=["name=bs-64", "group=scan", "lr_out<2^-6"])
    assert set(chosen.rows.run) == {f"lr-{2.0**e}-bs-64" for e in (-9, -8, -7)}


def test_momenta_are_arms_and_layouts_have_no_lr(project: list[Run]) -> None:
    arms = open_arms(Path("wandb:entity/project"))
    assert [*arms] == ["optimizer.momentum=0.0", "optimizer.momentum=0.9"]
    layout = arms["optimizer.momentum=0.0"].rows.query("lr_out != lr_in")
    assert layout.lr.isna().all()
    assert set(zip(layout.lr_in, layout.lr_hidden, layout.lr_out, strict=True)) == {(2**-4, 2**-4, 2**-2)}


@pytest.mark.parametrize("norm", ["track_param_rms_to_inf/output", "track_param_rms_to_inf/model_part_0/output"])
def test_the_norms_other_names_are_known(monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
    Api.runs_there = [Run(2.0**-5, 64, norm=norm)]
    monkeypatch.setattr(wandb, "Api", Api)
    assert open_source(Path("wandb:entity/project")).rows["norm/head/rms_to_inf"].tolist() == [128.0] * 3


def test_runs_of_another_form_are_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    Api.runs_there = [Run(2.0**-5, 64)]
    Api.runs_there[0].summary = {"loss": 3.0}
    monkeypatch.setattr(wandb, "Api", Api)
    with pytest.raises(RequestError, match="no finished run has the paper's metrics"):
        open_source(Path("wandb:entity/project"))


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (wandb.errors.UsageError("No API key configured."), 2, "wandb login"),
        (ValueError("Could not find project a/b"), 2, "wandb:entity/project"),
        (wandb.errors.CommError("timed out"), 4, "was not reached"),
        (wandb.errors.AuthenticationError("Failed to verify credentials"), 4, "refuses the key"),
        (ConnectionError("no route"), 4, "was not reached"),
    ],
)
def test_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, told: str
) -> None:
    def fails(**_: Any) -> SimpleNamespace:
        raise error

    monkeypatch.setattr(wandb, "Api", fails)
    assert run(["fit", "norm", "wandb:a/b"]) == code
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") <= 2
