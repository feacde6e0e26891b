"""What a person types and sees: exit codes, one-line errors, whole tables. In process, but for what needs a pipe."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from abovemup.cli import main as cli
from abovemup.cli.main import run
from abovemup.config.conf import GROUPS, choices
from abovemup.config.errors import RequestError, RunFailed

ESCAPE = "\x1b"


def shell(command: str, where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line with `abovemup` on it, in a folder, by bash with pipefail."""
    script = f'set -o pipefail; abovemup() {{ {sys.executable} -m abovemup "$@"; }}; {command}'
    package = str(Path(cli.__file__).parents[2])
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    env |= {"PYTHONPATH": package, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", "-c", script], cwd=where, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--sed", "3"], ["--sed", "train.seed"]),
        (["train", "--lr", "0.1"], ["--lr", "optimizer.lr"]),
        (["train", "--resum", "x"], ["--resum", "--resume"]),
        (["train", "--dry-rum"], ["--dry-run"]),
        (["--verson"], ["--version"]),
        (["generate", "x", "--promt", "y"], ["--prompt"]),
        (["trian"], ["trian", "train"]),
        (["runs", "psh"], ["psh", "push"]),
        (["generate"], ["RUN"]),
        (["generate", "x", "--tokens", "many"], ["--tokens"]),
        (["train", "--resume"], ["--resume"]),
        (["train", "optimizer.lrr=1"], ["optimizer.lrr", "optimizer.lr?"]),
        (["train", "optimizer=scoin"], ["scoin", "scion"]),
        (["train", "foo"], ["foo", "KEY=VALUE"]),
        (["train", "+optim.rl=1e-3"], ["optim.rl", "optimizer.lr"]),
        (["train", "++optim.rl=1e-3"], ["optim.rl", "optimizer.lr"]),
        (["train", "optim.rl=1e-3"], ["optim.rl", "optimizer.lr"]),
        (["train", "--config", "typo.yaml"], ["typo.yaml", "optim.rl", "optimizer.lr"]),
        (["train", "--config", "nope.yaml"], ["nope.yaml"]),
        (["train", "model.heads=3"], ["64", "2 or 4"]),
        (["train", "train.steps=5", "train.tokens=2^20"], ["train.steps=5", "train.tokens=1048576"]),
        (["train", "--config", "typo.yaml", "--resume", "x"], ["--config", "--resume"]),
        (["generate", "x", "--temperature", "1e-320"], ["--temperature", "0.001"]),
        (["train", "--resume", "nope"], ["nope"]),
        (["train", "--dry-run", "--resume", "nope"], ["nope"]),
        (["train", "--dry-run", "--branch", "nope@2^20"], ["nope"]),
        (["show", "optimizer.roles.hidden.norm=rms_to_rm"], ["rms_to_rm", "rms_to_rms"]),
        (["generate", "nope"], ["nope"]),
        (["generate", "x", "--seed", str(2**63)], ["--seed", str(2**63 - 1)]),
        (["generate", 300 * "x"], ["File name too long: xxx"]),
        (["train", "run.name=\udcff"], ["UTF-8"]),
        (["runs", "push", "nope"], ["nope"]),
        (["--debug", "train", "--lr", "0.1"], ["--lr", "optimizer.lr=..."]),
    ],
)
def test_a_wrong_request(
    arguments: list[str], words: list[str], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, one or two lines on stderr that name the thing and the nearest right one, nothing on disk. Case 63."""
    (elsewhere / "typo.yaml").write_text("optim: {rl: 1e-3}\n")
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(word in err for word in words), err
    assert err.startswith("abovemup: ")
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err
    assert not re.search("[╭╰│]", err)
    assert [path.name for path in elsewhere.iterdir()] == ["typo.yaml"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError("the thing [lr] in [/some/path]"), 2, "abovemup: the thing [lr] in [/some/path]\n"),
        (RunFailed("the disk is full"), 4, "abovemup: the disk is full\n"),
        (ValueError("two\nlines"), 4, "abovemup: ValueError: two lines (--debug shows the traceback)\n"),
        (OSError(errno.EACCES, "Denied", "/a b"), 4, "abovemup: Denied: /a b (--debug shows the traceback)\n"),
        (OSError("odd"), 4, "abovemup: OSError: odd (--debug shows the traceback)\n"),
        (OSError(errno.ENOTDIR, "Not a folder", "/x/y"), 2, "abovemup: Not a folder: /x/y\n"),
        (KeyboardInterrupt(), 130, "abovemup: interrupted\n"),
        (SystemExit(143), 143, "abovemup: terminated\n"),
        (typer.Exit(3), 3, ""),
        (typer.Exit(143), 143, ""),
        (RequestError("a\x1b[31mb"), 2, "abovemup: a\ufffd[31mb\n"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        secret = "-".join(["do", "not", "print", "locals"])  # noqa: F841
        raise error

    monkeypatch.setattr("abovemup.config.compose.compose", fail)
    assert run(["show"]) == code
    assert capsys.readouterr() == ("", said)
    if isinstance(error, Exception) and said:
        assert run(["show", "--debug"]) == code
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "do-not-print-locals" not in err


def test_train_ends_with_the_code_of_its_outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from abovemup.training import run as training

    asked: dict[str, object] = {}

    def train(overrides: list[str], **options: object) -> training.Outcome:
        asked.update(options, overrides=overrides)
        return training.Outcome("diverged", Path("runs/x"), {"status": "diverged", "loss": float("nan")}, 3)

    monkeypatch.setattr(training, "train", train)
    assert run(["train", "model=pocket", "--config", "f.yaml", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"dir": "runs/x", "status": "diverged", "loss": "nan"}
    assert asked == {
        **{"overrides": ["model=pocket"], "config_file": Path("f.yaml"), "config_dir": None},
        **{"resume": None, "branch": None, "json_output": True},
    }


def test_help_names_every_group_and_choice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["train", "--help"]) == 0
    out = capsys.readouterr().out
    words = set(re.split(r"[\s,│]+", out))
    assert words >= {*GROUPS, *(name for names in choices().values() for name in names)}
    assert {"lr", "momentum", "norm_placement", "micro_batch", "allow_repeat", "keep"} <= words
    assert "--resume" in out
    assert "…" not in out


def test_version_and_bare(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"abovemup \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run([]) == 2
    assert "train" in capsys.readouterr().out


def table(out: str) -> dict[str, list[str]]:
    """Parameter -> its cells, from the printed routing table."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("parameter "))
    rows = lines[start + 1 : lines.index("", start)]
    return {cells[0]: cells for cells in (re.split(r" {2,}", row.strip()) for row in rows)}


def test_show_prints_the_config_and_every_parameter(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["show", "model=pocket", "model.width=128", "optimizer=adamw", "parameterization=mup"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert {"model=pocket", "model.heads=8  # from null", "model.kv_heads=4  # from 1/2"} <= set(out.splitlines())
    assert "base: width 64 (x 2), depth 4 (x 1), head_dim 16 (x 1)" in out
    rows = table(out)
    assert len(rows) == 2 + 4 * 7
    assert rows["layers.3.feed_forward.w2.weight"] == [
        *("layers.3.feed_forward.w2.weight", "128 x 352", "64 x 176", "hidden", "rms_to_rms", "0.3536", "0.01136", "1"),
        *("adam", "1", "0.5", "176", "0.1", "0.9", "adamw"),
    ]
    assert rows["embedding.weight"][10] == "1"
    assert not list(elsewhere.iterdir())
    assert run([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["routing"]] == list(rows)
    assert shown["parameters"] == 2 * 1024 * 128 + 4 * (128 * 128 * 3 + 3 * 128 * 352)
    assert shown["routing"][1]["lr_mult"] == 0.5
    assert shown["config"]["choices"]["parameterization"] == "mup"


def test_show_says_when_a_parameterization_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show"]) == 0
    assert "parameterization=above_mup has no effect" in capsys.readouterr().out
    assert run(["show", "model.width=128"]) == 0
    assert "no effect" not in capsys.readouterr().out


def test_what_show_prints_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of `show` are overrides of the same run."""
    from abovemup.config.compose import compose
    from abovemup.config.keys import differences

    typed = ["model=pocket", "model.heads=8", "schedule=wsd", "optimizer=scion_constrained", "tracking.tags=[a,b]"]
    assert run(["show", *typed]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    settings = [line.partition("  # from")[0] for line in lines]
    typed_again = [line for line in settings if not line.startswith("train.tokens")]
    assert differences(compose(typed), compose(typed_again)) == []


def test_dry_run_counts_and_builds_nothing(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = ["train", "--dry-run", "experiment=paper_adam", f"data.path={elsewhere}"]
    assert run(paper) == 2
    assert "has no file of .txt" in capsys.readouterr().err
    paper[-1] = f"data.path={Path(__file__).parents[2] / 'constraints.txt'}"
    assert run(paper) == 0
    out = capsys.readouterr().out
    assert "68,878,336 parameters" in out
    assert "8,589,934,592" in out
    assert "cannot match" in out
    assert run([*paper, "--json"]) == 0
    size = json.loads(capsys.readouterr().out)
    assert (size["parameters"], size["weights"], size["state"]) == (68_878_336, 4 * 68_878_336, 8 * 68_878_336)
    assert run(["train", "--dry-run", "--json", "optimizer.momentum=0"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == 0
    assert run(["train", "--dry-run", "--nproc", "2"]) == 0
    assert "2, parallel=ddp" in capsys.readouterr().out
    for typed, told in (([], []), (["--nodes=8", "--nproc=8"], ["H100", "sent"]), (["train.device=cuda"], ["H100"])):
        assert run(["train", "--dry-run", *typed]) == 0
        out = capsys.readouterr().out
        assert [word for word in ("H100", "sent") if word in out] == told
        assert ("64, parallel=ddp" in out) is bool(typed and typed[0] == "--nodes=8")
    assert run(["train", "--dry-run", "--nproc", "2", "parallel=single"]) == 2
    assert not list(elsewhere.iterdir())


def test_doctor_never_prints_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HF_TOKEN", f"hf_{key}")
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert key not in out
    assert "logged in: runs go online" in out
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert key not in str(found)
    assert {"python", "torch", "devices", "bf16", "compile", "threads", "cache", "W&B", "hub"} <= found.keys()


def test_doctor_names_a_cpu_torch_on_a_gpu_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr("abovemup.cli.doctor.shutil.which", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    run(["doctor"])
    assert "torch is a CPU build" in capsys.readouterr().out


def test_tables_are_whole_in_a_pipe(elsewhere: Path) -> None:
    """Case 73, for the one table of this issue."""
    done = shell("abovemup show model.depth=12 | cat", elsewhere)
    assert done.returncode == 0
    assert ESCAPE not in done.stdout
    forced = shell("abovemup show model.depth=12 | cat", elsewhere, TERM="dumb", FORCE_COLOR="1", COLUMNS="40")
    for out in (done.stdout, forced.stdout):
        rows = table(re.sub(r"\x1b\[[0-9;]*m", "", out))
        assert "layers.11.feed_forward.w2.weight" in rows
        assert all(cells[-1] == "steepest_descent" for cells in rows.values())
        assert "…" not in out


def test_a_reader_who_leaves(elsewhere: Path) -> None:
    done = shell("abovemup show model.depth=200 | head -1", elsewhere)
    assert (done.stdout, done.stderr) == ("experiment=demo\n", "")
    assert done.returncode == 141


def test_and_echo_ok(elsewhere: Path) -> None:
    done = shell("abovemup train optimizer.lr=-1 && echo ok", elsewhere)
    assert (done.returncode, done.stdout) == (2, "")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("verb", ["show", "train", "doctor"])
def test_the_working_directory_is_gone(verb: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere.rmdir()
    assert run([verb]) == 2
    assert capsys.readouterr() == ("", "abovemup: the working directory is gone.\n")


def test_a_terminal_in_ascii(elsewhere: Path) -> None:
    done = shell("abovemup show run.name=é", elsewhere, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "run.name=\\xe9" in done.stdout


def test_dry_run_refuses_a_step_that_is_not_there(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from abovemup.config import io
    from abovemup.config.compose import compose

    (elsewhere / "a").mkdir()
    io.save(compose([]), elsewhere / "a" / "config.yaml")
    assert run(["train", "--resume", "a@7", "--dry-run"]) == 2
    assert "no checkpoint of step 7" in capsys.readouterr().err
    assert run(["train", "--resume", "a", "--dry-run"]) == 0
