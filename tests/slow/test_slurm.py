"""A real Slurm on this machine: jobs are preempted, cancelled and found again, and the study comes out the same."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abovemup.studies.board import announced, trained
from tests.slow.process import PATIENCE, ended, rows_in, run, started, until
from tests.slow.test_studies import TINY
from tests.training.tiny import rows

pytestmark = pytest.mark.slow

STEPS = 800
GRID = ["optimizer.lr=2^-5,2^-4", "train.seed=0,1", f"train.steps={STEPS}"]


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout


def answers() -> bool:
    return shutil.which("sinfo") is not None and "idle" in slurm("sinfo", "--noheader", "--format=%T")


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Slurm that answers here, or one that the script beside the test data starts from installed packages."""
    data = os.environ.get("ABOVEMUP_TEST_DATA")
    script = Path(data or "../shared/data").resolve().parent / "scripts" / "one-node-slurm"
    if answers():
        yield
        return
    if os.geteuid() or not script.exists() or shutil.which("slurmctld") is None:
        pytest.skip("no Slurm answers, and to start one takes root, slurmctld, and the script one-node-slurm")
    state = str(tmp_path_factory.mktemp("slurm"))
    if subprocess.run(["munge", "-n"], capture_output=True, timeout=PATIENCE).returncode:
        Path("/run/munge/munge.socket.2").unlink(missing_ok=True)  # what is left of one that is gone
    threads = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # nproc would count them
    subprocess.run([str(script), "start", state], check=True, timeout=PATIENCE, env=threads)
    if not answers():
        pytest.skip(f"Slurm does not start: see {state}")
    yield
    slurm("scancel", "--me")
    subprocess.run([str(script), "stop", state], check=True, timeout=PATIENCE)


def jobs(*states: str) -> dict[str, str]:
    """Name -> number, of those in one of the states."""
    lines = slurm("squeue", "--me", "--noheader", f"--states={','.join(states)}", "--format=%j %i").splitlines()
    return dict(line.split() for line in lines)


def wait(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, slurm("squeue", "--states=all")
        time.sleep(0.2)


def hold(study: Path, held: dict[str, str]) -> dict[str, str]:
    """Stop the jobs that are well under way, so that they last, however slowly a study starts; two at most."""
    for name, job in jobs("RUNNING").items():
        mine = [rows_in(folder) for folder in study.glob("runs/*") if name.startswith(folder.name)]
        if name not in held and len(held) < 2 and max(mine, default=0) > 25:
            slurm("scancel", "--signal=STOP", job)
            held[name] = job
    return held


def test_preempted_cancelled_and_found_again_it_is_the_local_study(tmp_path: Path) -> None:
    """One job is queued again, one is cancelled, and the study that submitted them is killed and started again."""
    command, study = ["sweep", *TINY, *GRID, f"--dir={tmp_path / 'slurm'}", "--json"], tmp_path / "slurm"
    held: dict[str, str] = {}
    ours = [*command, "--launcher=slurm", "launcher.mem_gb=1", "launcher.timeout_min=30"]
    with started(tmp_path, *ours) as first:
        assert until(first, lambda: len(hold(study, held)) == 2)
        (one, preempted), (other, cancelled) = held.items()
        first.kill()
    with started(tmp_path, *ours) as second:
        assert until(second, lambda: all(trained(study, cell) for cell in announced(study)))  # those that wait, too
        for job in (preempted, cancelled):
            slurm("scancel", "--signal=CONT", job)
        slurm("scancel", "--signal=USR2", preempted)
        wait(lambda: one in jobs("PENDING"))
        slurm("scontrol", "update", f"JobId={preempted}", "StartTime=now")  # Slurm lets it wait for two minutes
        slurm("scancel", cancelled)
        end = ended(second)
    found = {row["cell"]: row["status"] for row in json.loads(end.out)["cells"]}
    assert end.code == 4
    assert sorted(found.values()) == ["finished", "finished", "finished", "unfinished"]
    (lost,) = [cell for cell, status in found.items() if status == "unfinished"]
    assert other.startswith(lost)
    assert f"Slurm job {cancelled}: CANCELLED" in end.err
    last = run(tmp_path, *ours)
    assert last.code == 0, last

    local = run(tmp_path, *command, f"--dir={tmp_path / 'local'}")
    assert local.code == 0, local
    names = sorted(folder.name for folder in (tmp_path / "local" / "runs").iterdir())
    assert names == sorted(folder.name for folder in (study / "runs").iterdir())
    for name in names:
        assert rows(study / "runs" / name) == rows(tmp_path / "local" / "runs" / name)
        log = (study / "logs" / f"{name}.log").read_text()
        assert log.count("step 0/") == 1  # no cell began twice
        assert log.count("\n$ ") == (1 if one.startswith(name) or name == lost else 0)


def test_what_sbatch_refuses(tmp_path: Path) -> None:
    command = ["sweep", *TINY, "train.steps=5", "--dir=s", "--launcher=slurm"]
    for option, said in (
        ("launcher.partition=nowhere", "invalid partition"),
        ("launcher.partitoin=main", "Did you mean partition?"),
        ("launcher.timeout_min=soon", "launcher"),
    ):
        end = run(tmp_path, *command, option)
        assert end.code == 2, end
        assert said in end.err
    assert not jobs("PENDING", "RUNNING")


def test_a_run_that_is_out_of_time_goes_on(tmp_path: Path) -> None:
    """Two processes of one job: warned, they keep a checkpoint, and the job is queued again and ends the run."""
    command, folder = ["train", *TINY, f"train.steps={STEPS}", "--nproc=2"], tmp_path / "runs" / "a"

    def status() -> str:
        return str(json.loads((folder / "summary.json").read_text())["status"])

    job = run(tmp_path, *command, "run.name=a", "--launcher=slurm", "launcher.mem_gb=3").out.strip()
    wait(lambda: rows_in(folder) > 25)
    slurm("scancel", "--batch", "--signal=USR2", job)
    wait(lambda: "a" in jobs("PENDING"))
    assert status() == "interrupted"
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait(lambda: status() == "finished")
    assert (tmp_path / f"slurm-{job}.out").read_text().count("step 0/") == 1

    assert run(tmp_path, *command, "run.name=b").code == 0
    assert rows(folder) == rows(tmp_path / "runs" / "b")
