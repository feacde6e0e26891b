"""The wheel, in an environment that has never seen the source tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.slow.process import PATIENCE, tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def command(*arguments: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, arguments)), cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("abovemup", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    # The build backend of this environment: nothing is downloaded.
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist"]
    command(sys.executable, "-m", "pip", "wheel", ".", *options, cwd=source)
    (built,) = (source / "dist").iterdir()
    return built


def test_everything_is_in_it(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = (path for end in ("py", "sh", "html") for path in (ROOT / "abovemup").rglob(f"*.{end}"))
    code = {str(path.relative_to(ROOT)) for path in ours}
    choices = {str(Path("abovemup") / path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml")}
    assert names == code | choices


def test_it_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    command(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    command(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", "--ignore-installed", wheel),
        cwd=tmp_path,
    )
    # The dependencies from this environment; its own .pth files, an editable install among them, are not read.
    site = Path(command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = tmp_path / "work"
    work.mkdir()
    where = command(python, "-P", "-c", "import abovemup; print(abovemup.__file__)", cwd=work)
    assert Path(where.strip()).is_relative_to(site)
    out = command(tmp_path / "env/bin/abovemup", "train", *tiny("run.name=one"), cwd=work)
    assert "finished: 6 steps" in out
    assert [path.name for path in work.iterdir()] == ["runs"]
    assert "one_to_rms" in command(tmp_path / "env/bin/abovemup", "show", cwd=work)
    again = command(tmp_path / "env/bin/abovemup", "train", "--config", "runs/one/config.yaml", cwd=work)
    assert "finished: 6 steps" in again
