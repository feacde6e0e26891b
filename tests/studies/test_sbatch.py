"""The script of a Slurm job, run by bash with a srun, scontrol and scancel that write down what they were given."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from abovemup.cli.main import run
from abovemup.training.launch import LAST_CHECKPOINT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d"]
TORCHRUN += [
    "--rdzv-id=54321",
    "--rdzv-endpoint=node7:24321",
    f"--shutdown-timeout={LAST_CHECKPOINT}",
    "-m",
    "abovemup",
]
WARNED = "kill -USR2 $PPID; until [ -e cancelled ]; do sleep 0.01; done; exit {}"

Job = Callable[..., tuple[int, list[str], list[list[str]]]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Runs a script, of which `srun` does what is asked: its exit code, srun's arguments, and other commands."""
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    does = {
        "srun": "",
        "scontrol": '[ "$1" = show ] && printf "node7\\nnode8\\n"',
        "scancel": "touch cancelled",
    }

    def execute(script: str, legs: int | None = None, srun: str = "") -> tuple[int, list[str], list[list[str]]]:
        log.write_text("")
        for name, body in (does | {"srun": srun}).items():
            text = f'#!/bin/bash\nprintf "%q " {name} "$@" >>{log}\necho >>{log}\n{body}\n'
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "54321", "SLURM_JOB_NUM_NODES": "2"}
        env |= {"SLURM_JOB_NODELIST": "node[7-8]"} | ({} if legs is None else {"SLURM_RESTART_COUNT": str(legs)})
        code = subprocess.run(["bash"], input=script, text=True, env=env, cwd="/", timeout=60).returncode
        lines = [shlex.split(line) for line in log.read_text().splitlines()]
        (started,) = [line[1:] for line in lines if line[0] == "srun"]
        return code, started, [line for line in lines if line[0] != "srun" and line[1] != "show"]

    return execute


def script(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    slurm = ["--launcher=slurm", "--nodes=2", "--nproc=8", "--dry-run"]
    assert run(["train", *slurm, "data=synthetic", *arguments]) == 0
    return capsys.readouterr().out


def test_a_job_starts_and_goes_on(elsewhere: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run.name=a b", "tracking.project=it's", "launcher.partition=gpu"]
    text = script(capsys, *asked)
    first = [*TORCHRUN, "train", "data=synthetic", *asked[:2]]
    again = [*TORCHRUN, "train", "--resume=runs/a b"]
    assert job(text) == (0, first, [])
    assert job(text, legs=1) == (0, first, [])  # it was ended before it had begun
    (elsewhere / "runs" / "a b").mkdir(parents=True)
    (elsewhere / "runs" / "a b" / "config.yaml").touch()
    assert job(text, legs=1) == (0, again, [])
    assert job(text) == (0, first, [])  # which says that the folder is another run's
    assert job(text, srun="exit 3")[::2] == (3, [])


def test_a_warning_ends_with_a_checkpoint_and_queues_it_again(
    elsewhere: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(capsys, "run.name=a", "launcher.max_num_timeout=2")
    term, requeue = ["scancel", "--signal=TERM", "54321"], ["scontrol", "requeue", "54321"]
    for legs, ends, code, said in (
        (None, 143, 143, [term, requeue]),
        (1, 143, 143, [term, requeue]),
        (2, 143, 143, [term]),
        (None, 0, 0, [term]),  # it was over meanwhile
    ):
        (elsewhere / "cancelled").unlink(missing_ok=True)
        assert job(text, legs, WARNED.format(ends))[::2] == (code, said)


def test_what_slurm_is_asked(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["launcher.timeout_min=90", "launcher.mem_gb=4", "launcher.setup=[module load x, ulimit -c 0]"]
    text = script(capsys, "run.dir=deep/a", *more, "launcher.additional_parameters={exclusive: true, comment: a b}")
    head, _, body = text.partition("\nmodule load x\nulimit -c 0\n")
    assert body
    assert head.splitlines() == [
        "#!/bin/bash",
        *(
            f"#SBATCH --{flag}"
            for flag in (
                "job-name=a", "nodes=2", "ntasks-per-node=1", "open-mode=append", "requeue", "cpus-per-task=8",
                "signal=B:USR2@180", "time=90", "mem=4G", "exclusive", "comment='a b'",
            )
        ),
    ]  # fmt: skip


def test_a_run_that_is_resumed(elsewhere: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    from abovemup.config import io
    from abovemup.config.compose import compose

    (elsewhere / "runs" / "a").mkdir(parents=True)
    io.save(compose(["data=synthetic"]), elsewhere / "runs" / "a" / "config.yaml")
    longer = "train.steps=2000"
    assert run(["train", "--launcher=slurm", "--dry-run", "--resume=a", longer]) == 0
    text = capsys.readouterr().out
    assert job(text)[1][-2:] == ["--resume=a", longer]
    assert job(text, legs=1)[1][-2:] == ["--resume=runs/a", longer]


def test_what_is_refused(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "taken").mkdir()
    monkeypatch.setenv("PATH", str(elsewhere))
    for arguments, said in (
        (["--launcher=slurm"], "run.name=NAME"),
        (["--launcher=slurm", "run.dir=taken"], "taken exists already"),
        (["--launcher=slurm", "run.name=a"], "no sbatch here"),
        (["--launcher=slurm", "run.name=a", "launcher.partitoin=x"], "Did you mean partition?"),
        (["--launcher=slurm", "run.name=a", "--nproc=4", "launcher.gpus_per_node=2"], "is too few"),
        (["--nodes=2"], "--nodes 2: that is for --launcher slurm"),
    ):
        assert run(["train", "data=synthetic", *arguments]) == 2
        assert said in capsys.readouterr().err
    refuses = elsewhere / "sbatch"
    refuses.write_text("#!/bin/sh\necho 'sbatch: error: no such\n account' >&2\nexit 1\n")
    refuses.chmod(0o755)
    assert run(["train", "--launcher=slurm", "data=synthetic", "run.name=a"]) == 2
    assert "sbatch: error: no such account (launcher.*, site file)" in capsys.readouterr().err
    refuses.write_text("#!/bin/sh\necho '77;cluster'\n")
    assert run(["train", "--launcher=slurm", "data=synthetic", "run.name=a"]) == 0
    assert capsys.readouterr() == ("77\n", "")
