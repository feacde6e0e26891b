"""Complete or absent, the newest by number, damage found by checksum (cases 40 and 42)."""

import json
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from abovemup.config.errors import RequestError
from abovemup.config.io import sha256
from abovemup.training import checkpoint
from abovemup.training.checkpoint import State
from tests.training.tiny import read

FILES = ("__0_0.distcp", ".metadata", "state.pt")


def state(step: int, **changes: object) -> State:
    values = {
        "step": step,
        "tokens": 64 * step,
        "model": {"a.weight": torch.full((3, 5), float(step))},
        "optimizer": {"a.weight": {"momentum": torch.arange(15.0).view(3, 5), "step": torch.tensor(2.0)}},
        "rng": torch.get_rng_state(),
        "last_row": step,
    }
    return State(**{**values, **changes})  # type: ignore[arg-type]


def seal(path: Path) -> None:
    """Make the manifest one of the files as they are now."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in FILES:
        file = path / name
        manifest["files"][name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damage(path) is None


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    saved = state(7, pending={"step": 7, "loss": 1.5})
    own = {"low": torch.arange(6).bfloat16().view(2, 3), "many": [torch.ones(2), {"a": (1, None)}], "lr": 0.1}
    saved.optimizer["b"], saved.optimizer["c"] = own, {}  # a user's own optimizer may keep anything
    loaded = read(checkpoint.save(tmp_path / "checkpoints", saved))
    assert torch.equal(loaded.model["a.weight"], saved.model["a.weight"])
    for key in ("momentum", "step"):
        assert torch.equal(loaded.optimizer["a.weight"][key], saved.optimizer["a.weight"][key])
    low, many = loaded.optimizer["b"].pop("low"), loaded.optimizer["b"].pop("many")
    assert low.equal(own.pop("low"))
    assert many[0].equal(torch.ones(2))
    assert many[1] == {"a": (1, None)}
    assert loaded.optimizer["b"] == {"lr": 0.1}
    assert loaded.optimizer["c"] == {}
    assert torch.equal(loaded.rng, saved.rng)
    assert (loaded.step, loaded.tokens, loaded.last_row, loaded.pending) == (7, 448, 7, {"step": 7, "loss": 1.5})


def test_the_same_state_is_the_same_files(tmp_path: Path) -> None:
    """No path, no time, nothing of chance is in them."""
    one, other = (checkpoint.save(tmp_path / name, state(7)) for name in ("a", "b"))
    assert [(one / name).read_bytes() for name in FILES] == [(other / name).read_bytes() for name in FILES]
    assert {path.name for path in one.iterdir()} == {*FILES, "manifest.json"}
    assert json.loads((one / "manifest.json").read_text())["files"].keys() == {*FILES}


def test_a_copy_is_left_alone(tmp_path: Path) -> None:
    saved = state(7, pending={"step": 7})
    saved.optimizer["a.weight"]["many"] = [1, {"a": 2}]
    copy = saved.copied()
    saved.model["a.weight"].zero_()
    saved.optimizer["a.weight"]["step"].zero_()
    saved.optimizer["a.weight"]["many"][1]["a"] = 3
    assert saved.pending is not None
    saved.pending["loss"] = 1.0
    loaded = read(checkpoint.save(tmp_path / "checkpoints", copy))
    assert loaded.model["a.weight"].eq(7).all()
    assert loaded.optimizer["a.weight"].pop("step") == 2
    assert loaded.optimizer["a.weight"]["many"] == [1, {"a": 2}]
    assert loaded.pending == {"step": 7}


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


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
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


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_write_cut_short_is_an_error_of_the_disk(tmp_path: Path, size: int) -> None:
    """Of a large tensor torch says that its own container is inconsistent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        with pytest.raises(OSError, match="could not be written whole" if size > 100 else "File too large"):
            checkpoint.save(tmp_path, state(2, model={f"{i}": torch.ones(size) for i in range(9)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_rewriting_a_damaged_step_makes_it_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = checkpoint.save(folder, state(3))
    (path / "__0_0.distcp").write_bytes(b"torn")
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
    seal(path)
    with pytest.raises(RequestError, match="lacks rng"):
        checkpoint.load(path)
    del rest["norms"]  # as in a checkpoint from before there were any
    torch.save(rest | {"rng": torch.get_rng_state()}, path / "state.pt")
    assert checkpoint.load(path).norms == {}


class Call:
    """Anything, called when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


def test_no_file_can_call_anything(tmp_path: Path) -> None:
    """Whoever writes .metadata writes the manifest too."""
    path, called = checkpoint.save(tmp_path / "checkpoints", state(3)), tmp_path / "called"
    tensors = {"model/a.weight": torch.empty(3, 5)}
    honest = pickle.loads((path / ".metadata").read_bytes())
    for where in ("planner_data", "storage_data", "storage_meta"):
        metadata = pickle.loads(pickle.dumps(honest))
        setattr(metadata, where, Call(called))
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        seal(path)
        with pytest.raises(RequestError, match=r"has no place in a \.metadata"):
            checkpoint.fill(path, dict(tensors))
        assert not called.exists()
    # An entry of another kind would be unpickled from the tensors' file, with no check.
    honest.state_dict_metadata["model/a.weight"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(honest))
    seal(path)
    with pytest.raises(RequestError, match=r"BytesStorageMetadata has no place"):
        checkpoint.fill(path, dict(tensors))
    checkpoint.save(path.parent, state(3))
    (path / "__0_0.distcp").write_bytes(pickle.dumps(Call(called), protocol=2) * 200)  # in the place of tensors
    seal(path)
    with pytest.raises(RequestError, match="cannot be read"):
        checkpoint.fill(path, dict(tensors))
    assert not called.exists()


def test_what_it_does_not_hold_is_said(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "checkpoints", state(3))
    with pytest.raises(RequestError, match=r"model/b\.weight"):
        checkpoint.fill(path, {"model/b.weight": torch.empty(3, 5)})
    with pytest.raises(RequestError, match=r"Size mismatch .* for model/a\.weight"):
        checkpoint.fill(path, {"model/a.weight": torch.empty(5, 3)})
    checkpoint.fill(path, {"model/a.weight": torch.empty(3, 5)})  # the optimizer's are not asked for


def test_an_earlier_version_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints/step_00000002"
    path.mkdir(parents=True)
    for name in ("model.pt", "optimizer.pt", "state.pt"):
        torch.save({}, path / name)
    files = {file.name: {"sha256": sha256(file)} for file in path.iterdir()}
    (path / "manifest.json").write_text(json.dumps({"step": 2, "tokens": 8, "files": files}))
    for step in (None, 2):
        with pytest.raises(RequestError, match=r"step_00000002 is of an earlier version") as error:
            checkpoint.choose(tmp_path, step, pytest.fail)
        assert "\n" not in str(error.value)


def test_prune_keeps_the_newest_and_the_marked(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4, 8, 9, 10):
        checkpoint.save(folder, state(step))
    checkpoint.prune(folder, 2, lambda step: step.bit_count() == 1)
    assert list(checkpoint.steps(folder)) == [1, 2, 4, 8, 9, 10]
    checkpoint.prune(folder, 2, lambda step: False)
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000009", "step_00000010"]


def test_what_a_kill_left_behind_is_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        checkpoint.save(folder, state(step))
    for left in ("writing", "deleting", "replaced"):
        (folder / f".{left}-step_00000001").mkdir()
    checkpoint.forget_after(folder, 1)
    assert [p.name for p in folder.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_state_is_seen(value: float) -> None:
    assert state(1).finite()
    assert not state(1, model={"w": torch.tensor([1.0, value])}).finite()
    assert not state(1, optimizer={"w": {"momentum": torch.tensor([value])}}).finite()
