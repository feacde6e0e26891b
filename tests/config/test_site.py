"""The site file: what a place says, where a run does not."""

from pathlib import Path

import pytest

from abovemup.cli.main import run
from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.site import Site, cache_folder, site
from abovemup.studies.cells import cell


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site file of a home without one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ABOVEMUP_CACHE", raising=False)
    (tmp_path / "abovemup").mkdir()
    return tmp_path / "abovemup" / "site.yaml"


def test_the_environment_wins_and_no_cell_changes(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site() == Site()
    before = cell(compose(["data=synthetic"]), []).name
    written.write_text("cache: /scratch/me\nentity: lab\nlauncher: {partition: gpu, timeout_min: 600}\n")
    assert site() == Site("/scratch/me", "lab", {"partition": "gpu", "timeout_min": 600})
    assert cell(compose(["data=synthetic"]), []).name == before
    assert cache_folder() == Path("/scratch/me")
    monkeypatch.setenv("ABOVEMUP_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cahce: /x", "cahce=/x. Did you mean cache?"),
        ("launcher: gpu", "launcher=gpu.*launcher is"),
        ("cache: [", "YAML"),
    ],
)
def test_what_is_wrong_names_the_file(
    text: str, said: str, written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written.write_text(text)
    with pytest.raises(RequestError, match=said):
        site()
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/squeue")
    assert run(["sweep", "data=synthetic", f"--dir={written.parent / 's'}", "--launcher=slurm"]) == 2
    assert str(written) in capsys.readouterr().err
