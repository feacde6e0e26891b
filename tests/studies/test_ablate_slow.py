"""Every ablation from its file to its sentence, at the budget that concludes nothing."""

import csv
import json
from pathlib import Path

import pytest

from abovemup.cli.main import run
from abovemup.config.conf import files


@pytest.mark.slow
@pytest.mark.parametrize("name", files("ablation", None))
def test_an_ablation_end_to_end(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, so that all cells of all of them are forked from one server."""
    folder = tmp_path / name
    assert run(["ablate", name, "--budget=smoke", f"--dir={folder}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cells"].keys() == {"finished"}
    assert "Nothing is concluded" in said["verdict"]
    assert json.loads((folder / "result.json").read_text())["question"] == said["question"]
    assert (folder / "figure.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader((folder / "points.csv").open()))
    assert {"size", "tokens", "batch", "lr", "seed", "val_loss", "head/rms_to_inf", "step_limited", "cell"} <= rows[
        0
    ].keys()
    assert all(0 < float(row["val_loss"]) < 10 and float(row["head/rms_to_inf"]) > 1 for row in rows)
    for row in said["table"]:
        assert row["missing"] == 0
        losses = [float(point["val_loss"]) for point in rows if _in(point, row)]
        assert min(losses) <= row["lowest"] <= max(losses)


def _in(point: dict[str, str], row: dict[str, object]) -> bool:
    return row["group"] == f"{point['size']} {int(point['tokens']):,}".strip()
