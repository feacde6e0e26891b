"""Several processes are one run: its numbers, its checkpoints, and its end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slow.process import PATIENCE, Ended, ended, rows_in, run, shell, started, tiny, until
from tests.training.tiny import rows
from tests.training.tiny import run as alone

pytestmark = pytest.mark.slow

ENDLESS = tiny("train.steps=100000", "eval.every=50", "checkpoint.every=1", "checkpoint.keep=2", "run.name=one")
# The command, as one that waits 8 s for another rank.
HASTY = """
import sys
from abovemup.training import ranks
ranks.TIMEOUT = 8.0
from abovemup.cli.main import main
main()
"""
NAN = """
import os
from abovemup.model import llama
plain = llama.loss_sum
def loss_sum(logits, targets):
    return plain(logits, targets) * (float("nan") if os.environ["RANK"] == "1" else 1)
llama.loss_sum = loss_sum
from abovemup.cli.main import main
main()
"""
# The second checkpoint finds no room on rank 1.
FULL = """
import os
from abovemup.training.tensors import Writer
plain, saved = Writer.write_data, []
def write_data(self, *args):
    saved.append(self)
    if os.environ["RANK"] == "1" and len(saved) == 2:
        raise OSError(28, "No space left on device")
    return plain(self, *args)
Writer.write_data = write_data
from abovemup.cli.main import main
main()
"""


def torchrun(folder: Path, ranks: int, *arguments: str) -> Ended:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(2, ["ddp", "fsdp", "fsdpt2"]), (3, ["ddp", "fsdp"]), (4, ["fsdpx2", "fsdpt2"])]
)
def test_every_layout_is_the_single_process(ranks: int, layouts: list[str], tmp_path: Path) -> None:
    end = torchrun(Path.cwd(), ranks, "-m", "tests.slow.ranks", str(tmp_path), *layouts)
    assert end.code == 0, end.err[-3000:]
    assert end.out.count("equal") == len(layouts)


def close(a: Path, b: Path) -> None:
    for one, other in zip(rows(a), rows(b), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_run_moves_from_one_to_three_to_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone("run.name=straight")
    alone("run.name=moved", "train.steps=2")
    beside = ("checkpoint.asynchronous=true", "parallel=fsdp")
    end = run(tmp_path, "train", "--resume", "moved", "train.steps=4", *beside, "--nproc", "3")
    assert end.code == 0, end
    assert not end.err, end
    files = [*(tmp_path / "runs/moved/checkpoints/step_00000004").glob("*.distcp")]
    assert len(files) == 3
    one = (tmp_path / "runs/straight/checkpoints/step_00000004/__0_0.distcp").stat().st_size
    assert all(file.stat().st_size < 0.6 * one for file in files)
    assert end.out.count("finished") == end.out.count("step 4/4") == 1, "only rank 0 prints"
    end = run(tmp_path, "train", "--resume", "moved", "train.steps=6", "parallel=ddp", "--nproc", "2", "--json")
    assert end.code == 0, end
    summary = json.loads(end.out)
    assert (summary["status"], summary["processes"]) == ("finished", 2)
    close(tmp_path / "runs/moved", tmp_path / "runs/straight")
    assert "name: ddp" in (tmp_path / "runs/moved/config.yaml").read_text()


def test_a_request_that_cannot_be_met(tmp_path: Path) -> None:
    """One message, exit code 2, and nothing on the disk."""
    absent = tiny("data=text", "data.path=/nowhere", "tokenizer=byte")
    end = shell(tmp_path, '"$@" && echo ok', "train", *absent, "--nproc", "2")
    assert end.code == 2, end
    assert "/nowhere" in end.err
    assert len(end.err.splitlines()) == 1, end
    assert not end.out
    assert not [*tmp_path.iterdir()]


def workers(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """rank -> process id."""
    found = {}
    for pid in subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(entry[5:]): int(pid) for entry in environment if entry.startswith(b"RANK=")}
    return found


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize(
    ("signum", "rank", "code", "status"),
    [(signal.SIGTERM, 1, 143, "interrupted"), (signal.SIGKILL, 1, 4, "failed"), (signal.SIGKILL, 0, 4, "running")],
)
def test_a_signal_to_one_rank_ends_all(
    signum: signal.Signals,
    rank: int,
    code: int,
    status: str,
    asynchronous: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = f"checkpoint.asynchronous={asynchronous}"
    with started(tmp_path, "train", *ENDLESS, beside, "--nproc", "2") as launcher:
        assert until(launcher, lambda: rows_in(tmp_path / "runs/one") > 5), ended(launcher)
        pids = workers(launcher)
        os.kill(pids[rank], signum)
        end = ended(launcher)
    assert end.code == code, end
    gone = f"abovemup: rank {rank} does not answer: it was killed, or it hangs: continue with --resume runs/one"
    assert end.err.splitlines() == ([gone] if code == 4 else []), end
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["status"] == status
    step = rows(tmp_path / "runs/one")[-1]["step"]
    monkeypatch.chdir(tmp_path)
    assert alone(f"train.steps={step + 2}", resume="one").status == "finished"
    assert [row["step"] for row in rows(tmp_path / "runs/one")] == list(range(step + 3))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all(signum: signal.Signals, tmp_path: Path) -> None:
    """Also one that it cannot pass on: its processes see that it is gone."""
    with started(tmp_path, "train", *ENDLESS, "--nproc", "2") as launcher:
        assert until(launcher, lambda: rows_in(tmp_path / "runs/one") > 5), ended(launcher)
        pids = workers(launcher).values()
        launcher.send_signal(signum)
        assert ended(launcher).code == 128 + signum
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["status"] == "interrupted"


def test_a_rank_that_stalls(tmp_path: Path) -> None:
    (tmp_path / "hasty.py").write_text(HASTY)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "hasty.py", "train", *ENDLESS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert until(launcher, lambda: rows_in(tmp_path / "runs/one") > 5), ended(launcher)
        stalled, summary = workers(launcher)[1], tmp_path / "runs/one/summary.json"
        os.kill(stalled, signal.SIGSTOP)
        assert until(launcher, lambda: '"failed"' in summary.read_text()), ended(launcher)
        os.kill(stalled, signal.SIGCONT)  # the launcher would kill it after 30 s
        end = ended(launcher)
    assert end.code == 1, end  # torchrun's own
    assert end.err.count("abovemup: rank 1 does not answer: it was killed, or it hangs: continue with --resume") == 1
    assert "rank 1 does not answer" in json.loads(summary.read_text())["reason"]


def test_a_nan_on_one_rank(tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text(NAN)
    end = torchrun(tmp_path, 2, "nan.py", "train", *tiny("run.name=one"))
    assert end.code == 1, end
    assert end.out.count("diverged: step 1: loss nan (rank 1), gradient norm nan. The step was not taken.") == 1, end
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert summary["status"] == "diverged"
    assert (tmp_path / "runs/one/checkpoints/step_00000000").is_dir()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_disk_that_is_full_for_one_rank(asynchronous: str, tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    settings = tiny("run.name=one", "train.steps=4", f"checkpoint.asynchronous={asynchronous}")
    end = torchrun(tmp_path, 2, "full.py", "train", *settings)
    assert end.code == 1, end
    assert end.err.count("abovemup: No space left on device in runs/one: free some space") == 1, end
    assert [path.name for path in (tmp_path / "runs/one/checkpoints").iterdir()] == ["step_00000002"]
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["status"] == "failed"


def test_the_code_of_a_diverged_run_is_passed_on(tmp_path: Path) -> None:
    wild = tiny("optimizer.lr=1e6", "optimizer.weight_decay=1e6")
    end = shell(tmp_path, '"$@" && echo ok', "train", *wild, "--nproc", "2", "parallel=fsdp")
    assert end.code == 3, end
    assert not end.out.endswith("ok\n")
