"""A cell that is forked has the bits of a run that is started by hand, wherever its study was started from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow.process import BIN, PATIENCE, run
from tests.slow.test_studies import TINY
from tests.training.tiny import rows

pytestmark = pytest.mark.slow

# Large enough for sums that are split over threads.
WIDE = {"model.vocab_size": "8192", "model.width": "128", "train.steps": "2", "eval.every": "2", "norms.every": "2"}
CELLS = [f"{key}={value}" for key, value in (dict(text.split("=", 1) for text in TINY) | WIDE).items()]
UNGUARDED = f"from abovemup.cli.main import run\ncode = run(['sweep', *{CELLS}, 'train.threads=1,2', '--dir=s'])\n"


def test_a_cell_has_the_bits_of_a_run_by_hand(tmp_path: Path) -> None:
    """The study is a script without `if __name__ == "__main__"`, which a cell must not run again."""
    (tmp_path / "script.py").write_text(UNGUARDED + "open('told', 'a').write(f'{code}\\n')\n")
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=PATIENCE, capture_output=True)
    assert (tmp_path / "told").read_text() == "0\n"
    cells = {("threads: 2" in (run / "config.yaml").read_text()) + 1: run for run in tmp_path.glob("s/runs/*")}
    assert {*cells} == {1, 2}
    for threads, cell in cells.items():
        assert run(tmp_path, "train", *CELLS, f"train.threads={threads}", f"run.dir=t{threads}").code == 0
        assert rows(cell) == rows(tmp_path / f"t{threads}")
        place = Path("checkpoints", "step_00000002", "__0_0.distcp")
        weights = [folder / place for folder in (cell, tmp_path / f"t{threads}")]
        assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("streams", ["<&-", f"< /dev/null | {sys.executable} -c 'input()'"])
def test_a_study_without_its_streams(streams: str, tmp_path: Path) -> None:
    command = ["sweep", *TINY, "train.steps=3", "optimizer.lr=0.1,0.2", "--dir=s"]
    script = f'"$@" {streams}'
    subprocess.run(["bash", "-c", script, "bash", str(BIN), *command], cwd=tmp_path, timeout=PATIENCE, check=False)
    logs = [path.read_text() for path in tmp_path.glob("s/logs/*.log")]
    assert len(logs) == 2
    assert all("finished: 3 steps" in log for log in logs)


def test_nothing_that_is_imported_before_the_fork_asks_for_a_gpu_or_starts_a_thread() -> None:
    asks = "\n".join(
        (
            "import importlib, os, torch",
            "def refuse(*args, **kwargs): raise AssertionError('a GPU was asked for')",
            "for name in ('is_available', 'device_count', 'init', '_lazy_init', 'current_device'):",
            "    setattr(torch.cuda, name, refuse)",
            "from abovemup.studies.local import IMPORTED",
            "for name in IMPORTED: importlib.import_module(name)",
            "assert len(os.listdir('/proc/self/task')) == 1, 'a thread'",
        )
    )
    subprocess.run([sys.executable, "-c", asks], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
