"""Complete or absent, the newest by number, damage found by checksum (cases 40 and 42)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from abovemup.config.errors import RequestError
from abovemup.training import checkpoint
from abovemup.training.checkpoint import State


def state(step: int, **changes: object) -> State:
    values = {
        "step": step,
        "tokens": 64 * step,
        "model": {"a.weight": torch.full((3, 5), float(step))},
        "optimizer": {"a.weight": {"momentum": torch.arange(15.0).view(3, 5)}},
        "rng": torch.get_rng_state(),
        "last_row": step,
    }
    return State(**{**values, **changes})  # type: ignore[arg-type]


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    saved = state(7, pending={"step": 7, "loss": 1.5})
    loaded = checkpoint.load(checkpoint.save(tmp_path / "checkpoints", saved))
    assert torch.equal(loaded.model["a.weight"], saved.model["a.weight"])
    assert torch.equal(loaded.optimizer["a.weight"]["momentum"], saved.optimizer["a.weight"]["momentum"])
    assert torch.equal(loaded.rng, saved.rng)
    assert (loaded.step, loaded.tokens, loaded.last_row, loaded.pending) == (7, 448, 7, {"step": 7, "loss": 1.5})


def test_newest_is_the_highest_number(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    written = checkpoint.save(folder, state(9))
    written.rename(folder / "step_9")
    for step in (10, 100):
        checkpoint.save(folder, state(step)).rename(folder / f"step_{step}")
    for other in ("best", "step_20.bak", ".writing-step_00000200"):
        (folder / other).mkdir()
    warnings: list[str] = []
    chosen = checkpoint.choose(tmp_path, None, warnings.append)
    assert chosen is not None
    assert chosen.name == "step_100"
    nine = checkpoint.choose(tmp_path, 9, warnings.append)
    assert nine is not None
    assert nine.name == "step_9"
    assert warnings == []
    with pytest.raises(RequestError, match=r"no checkpoint of step 11. It has: 9, 10, 100"):
        checkpoint.choose(tmp_path, 11, warnings.append)


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "absent"])
def test_damage_is_found_and_skipped(tmp_path: Path, name: str, how: str) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, state(1))
    victim = checkpoint.save(folder, state(2)) / name
    content = victim.read_bytes()
    if how == "truncated":
        victim.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        middle = content.index(b"sha256") + 12 if name == "manifest.json" else len(content) // 2
        victim.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        victim.unlink()
    warnings: list[str] = []
    chosen = checkpoint.choose(tmp_path, None, warnings.append)
    assert chosen is not None
    assert chosen.name == "step_00000001"
    assert len(warnings) == 1
    assert "step_00000002" in warnings[0]
    with pytest.raises(RequestError, match="is damaged"):
        checkpoint.choose(tmp_path, 2, warnings.append)


def test_failed_write_leaves_the_others_and_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, state(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(folder, state(2))
    assert [p.name for p in folder.iterdir()] == ["step_00000001"]


def test_rewriting_a_damaged_step_makes_it_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = checkpoint.save(folder, state(3))
    (path / "model.pt").write_bytes(b"torn")
    assert checkpoint.damage(path)
    checkpoint.save(folder, state(3))
    assert checkpoint.damage(path) is None


def test_a_step_is_whole_while_it_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while folders are deleted, which takes time, must not find it gone."""
    path = checkpoint.save(tmp_path / "checkpoints", state(3))
    damages, rmtree = [], shutil.rmtree

    def watched(*arguments: Any, **options: Any) -> None:
        damages.append(checkpoint.damage(path))
        rmtree(*arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    checkpoint.save(tmp_path / "checkpoints", state(3, pending={"step": 3}))
    assert set(damages) == {None}
    assert checkpoint.load(path).pending == {"step": 3}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_whole_but_lacking_state_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "checkpoints", state(3))
    rest = torch.load(path / "state.pt")
    del rest["rng"]
    torch.save(rest, path / "state.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.pt"] = {
        "bytes": (path / "state.pt").stat().st_size,
        "sha256": checkpoint._sha256(path / "state.pt"),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damage(path) is None
    with pytest.raises(RequestError, match="lacks rng"):
        checkpoint.load(path)
    del rest["norms"]  # as in a checkpoint from before there were any
    torch.save(rest | {"rng": torch.get_rng_state()}, path / "state.pt")
    assert checkpoint.load(path).norms == {}


def test_prune_keeps_the_newest_and_the_marked(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4, 8, 9, 10):
        checkpoint.save(folder, state(step))
    (folder / ".writing-step_00000011").mkdir()
    checkpoint.prune(folder, 2, lambda step: step.bit_count() == 1)
    assert list(checkpoint.steps(folder)) == [1, 2, 4, 8, 9, 10]
    checkpoint.prune(folder, 2, lambda step: False)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000009", "step_00000010"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_state_is_seen(value: float) -> None:
    assert state(1).finite()
    assert not state(1, model={"w": torch.tensor([1.0, value])}).finite()
    assert not state(1, optimizer={"w": {"momentum": torch.tensor([value])}}).finite()
