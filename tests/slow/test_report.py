"""`abovemup report` in a browser: every figure is drawn, nothing is complained of, no request leaves the file."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from abovemup.analysis import rules
from abovemup.cli.main import run
from tests.analysis.test_sources import write_grid
from tests.golden.test_paper import FOLDER, figure

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on PATH")]


def opened(page: Path) -> str:
    """The page as the browser has drawn it. Fails for what its console says, and for a request that the page makes."""
    log = page.with_suffix(".net.json")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    options += ["--disable-component-update", f"--user-data-dir={page.parent / 'profile'}", f"--log-net-log={log}"]
    options += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [str(BROWSER), *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [event.get("params", {}) for event in json.loads(log.read_text(errors="replace"))["events"]]
    asked = {told["url"] for told in events if told.get("initiator", "not an origin") != "not an origin"}
    assert not asked, asked  # what has no origin is the browser's own
    return done.stdout


def drawn(dom: str) -> tuple[int, int]:
    """How many figures there are, and how many of them have points or lines."""
    parts = dom.split("<figure>")[1:]
    return len(parts), sum(bool(re.search(r'class="(point|js-line)"|<path class="js-line', part)) for part in parts)


def test_a_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DRAWS", 10)
    write_grid(tmp_path / "runs")
    assert run(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")]) == 0
    count, full = drawn(opened(tmp_path / "report.html"))
    assert count == full >= 8


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ABOVEMUP_TEST_DATA/paper")
def test_the_papers_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DRAWS", 10)
    table = figure("fig17a_points").rename(columns={"norm": "output_norm"})
    table["step"] = table.tokens // table.batch
    columns = ["bs", "step", "train_loss", "output_norm", "lr_in", "lr_hidden", "lr_out", "run_name"]
    name = "lr-" + table.lr_rank.astype(str) + "-bs-" + table.bs.astype(str)
    table = table.assign(lr_in=np.nan, lr_hidden=np.nan, lr_out=np.nan, run_name=name)  # the figure does not tell them
    pd.DataFrame(table)[columns].to_csv(tmp_path / "scan.csv", index=False)
    assert run(["report", str(tmp_path / "scan.csv"), "--out", str(tmp_path / "report.html")]) == 0
    dom = opened(tmp_path / "report.html")
    count, full = drawn(dom)
    assert count == full >= 3
    assert "Not drawn, norm growth" in dom
