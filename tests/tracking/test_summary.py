import json
import os
import subprocess
from pathlib import Path

import pytest

from abovemup.tracking import summary
from abovemup.tracking.summary import environment, write_summary


def test_strict_json_that_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"status": "running"})
    write_summary(path, {"status": "diverged", "loss": float("nan"), "best": {"val_loss": float("inf")}})
    assert json.loads(path.read_text()) == {"status": "diverged", "loss": "nan", "best": {"val_loss": "inf"}}
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"status": "running"})

    def full(fd: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_summary(path, {"status": "finished", "much": "x" * 100_000})
    assert json.loads(path.read_text()) == {"status": "running"}


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_commits_of_the_package_and_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    assert environment()["git"]["cwd"] is None
    (tmp_path / "my.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert environment()["git"]["cwd"] == head
    (tmp_path / "my.py").write_text("a = 2\n")
    assert environment()["git"]["cwd"] == f"{head}-dirty"
    # An installed package inside somebody's checkout does not have that checkout's commit.
    installed = tmp_path / ".venv" / "abovemup" / "tracking" / "summary.py"
    installed.parent.mkdir(parents=True)
    (tmp_path / ".venv" / "abovemup" / "__init__.py").touch()
    monkeypatch.setattr(summary, "__file__", str(installed))
    assert environment()["git"]["abovemup"] is None


def test_environment_is_plain_and_knows_the_versions() -> None:
    facts = json.loads(json.dumps(environment()))
    import torch

    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"]
