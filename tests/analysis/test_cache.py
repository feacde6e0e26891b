"""What was read once is not parsed again, is never stale, and a damaged entry is read anew."""

import os
from pathlib import Path

import pytest

from abovemup.analysis import cache, runs
from abovemup.analysis.cache import cached
from tests.analysis.directories import write


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ABOVEMUP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def old(path: Path, text: str, seconds: int = 100) -> Path:
    path.write_text(text)
    os.utime(path, (seconds, seconds))
    return path


def test_a_file_is_read_once_until_it_changes(place: Path) -> None:
    file, read = old(place / "a", "one"), []

    def get(what: str = "x") -> bytes:
        return cached(file, what, lambda: read.append(what) or file.read_bytes())  # type: ignore[func-returns-value]

    assert [get(), get(), get("y"), get()] == [b"one"] * 4
    assert read == ["x", "y"]
    old(file, "two", 101)  # of the same size
    assert [get(), get()] == [b"two"] * 2
    old(file, "longer", 101)
    assert [get(), get()] == [b"longer"] * 2
    assert read == ["x", "y", "x", "x"]
    for entry in (place / "cache" / "read").iterdir():
        data = entry.read_bytes()
        entry.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [get(), get()] == [b"longer"] * 2
    for entry in (place / "cache" / "read").iterdir():
        entry.write_bytes(b"torn")
    assert get() == b"longer"
    assert read == ["x", "y", *"xxxx"]


def test_a_file_that_is_being_written_is_not_kept(place: Path) -> None:
    """Within a tick of the clock it may change, and have the size and time that it had."""
    file = place / "a"
    file.write_text("one")
    assert cached(file, "", file.read_bytes) == b"one"
    stat = file.stat()
    file.write_text("two")
    os.utime(file, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    assert cached(file, "", file.read_bytes) == b"two"
    old(file, "one")
    assert cached(file, "", lambda: old(file, "two", 200).read_bytes()) == b"two"  # while it is read
    assert not (place / "cache").exists()


def test_without_a_folder_that_can_be_written_it_is_read_each_time(place: Path) -> None:
    (place / "cache").write_text("no folder")
    file = old(place / "a", "one")
    assert [cached(file, "", file.read_bytes) for _ in range(2)] == [b"one"] * 2


def test_a_run_is_not_parsed_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place / "run", ["optimizer.lr=0.125"])
    for path in (place / "run").iterdir():
        os.utime(path, (100, 100))
    keys = ["loss", "norm/head/rms_to_inf"]
    first, config = runs.trajectory(place / "run", keys), runs.record(place / "run")
    monkeypatch.setattr(runs, "_columns", lambda *_: pytest.fail("parsed again"))
    monkeypatch.setattr(runs, "_config", lambda *_: pytest.fail("parsed again"))
    assert runs.trajectory(place / "run", keys).equals(first)
    assert runs.record(place / "run") == config
    assert config["optimizer.lr"] == 0.125
    monkeypatch.undo()
    monkeypatch.setattr(cache, "SETTLED", 0.0)
    assert runs.trajectory(place / "run", keys[:1])["loss"].equals(first["loss"])


@pytest.mark.parametrize(
    "text", ["a: 1\nb:\n- x\n- y: [1,\n  2]\n", "a: &x [1]\nb: *x\n", "# c\n---\na: 1\n", "a: |\n  b\n"]
)
def test_sections_are_the_file(text: str) -> None:
    assert runs._config(text) == runs.yaml.safe_load(text)
