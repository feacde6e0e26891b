"""What a run is and is not influenced by; how it ends (cases 2, 31, 32, 51, 65, 77 in one process)."""

import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError, RunFailed
from abovemup.data.corpus import open_corpus
from abovemup.model import loss as loss_module
from abovemup.model.loss import IGNORE, loss_sum
from abovemup.tracking.jsonl import JsonlSink
from abovemup.training import checkpoint
from abovemup.training import evaluate as evaluate_module
from abovemup.training import run as run_module
from abovemup.training.evaluate import evaluate, scored
from abovemup.training.run import train
from abovemup.training.trainer import Trainer
from tests.training.tiny import TINY, compiled, read, rows, run, same_bits, weights, write_text


def losses(folder: str) -> list[float]:
    return [row["loss"] for row in rows(Path(folder)) if "loss" in row]


def test_a_run_is_a_pure_function_of_its_config(elsewhere: Path) -> None:
    first, second = run(), run()
    assert first.dir != second.dir
    assert rows(first.dir) == rows(second.dir)
    repeated = train([], config_file=first.dir / "config.yaml")
    assert rows(repeated.dir) == rows(first.dir)
    other = run("train.seed=1")
    assert rows(other.dir) != rows(first.dir)


def test_rows_say_what_the_design_says(elsewhere: Path) -> None:
    """Row t: loss of batch t before its update, norms after it, update = W_t - W_{t-1}; row 0: the initialisation."""
    run("run.dir=r", "eval.every=3", "optimizer.momentum=0", "optimizer.msign.method=exact")
    found = rows(Path("r"))
    assert [row["step"] for row in found] == list(range(7))
    assert [row["tokens"] for row in found] == [128 * step for step in range(7)]
    assert [row["step"] for row in found if "val/loss" in row] == [0, 3, 6]
    assert "loss" not in found[0]
    assert all(row["lr/hidden"] == 2**-4 for row in found[1:])
    # At the paper's initialisation every norm is 1 (1/sqrt(2L) for the last matrix of a block), the loss ln V + 1/(2d).
    for key, value in found[0].items():
        if key.startswith("norm/"):
            last_of_block = key.split("/")[1].endswith((".wo", ".w2"))
            assert value == pytest.approx(0.5 if last_of_block else 1.0, abs=1e-5), key
    assert found[0]["val/loss"] == pytest.approx(math.log(257) + 1 / 64, abs=0.02)
    # lr *means* the norm of the step.
    for row in found[1:]:
        updates = {key: value for key, value in row.items() if key.startswith("update/")}
        assert len(updates) == 16
        assert all(value == pytest.approx(2**-4, rel=1e-4) for value in updates.values())


def test_metrics_hold_the_loss_before_the_step(elsewhere: Path) -> None:
    run("run.dir=a", "train.steps=1")
    run("run.dir=b", "train.steps=1", "optimizer.lr=0.5")
    assert losses("a") == losses("b")
    assert rows(Path("a"))[1]["val/loss"] != rows(Path("b"))[1]["val/loss"]


@pytest.mark.parametrize("optimizer", ["scion", "adam"])
@pytest.mark.parametrize("micro", [1, 2])
def test_accumulation_changes_nothing_but_memory(elsewhere: Path, optimizer: str, micro: int) -> None:
    settings = [f"optimizer={optimizer}", "optimizer.lr=0.001", "train.steps=3"]
    run(*settings, "run.dir=whole")
    run(*settings, f"train.micro_batch={micro}", "run.dir=parts")
    assert losses("parts") == pytest.approx(losses("whole"), abs=1e-6)
    whole, parts = weights(Path("whole"), 3), weights(Path("parts"), 3)
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5, rtol=0) for name in whole)


def test_micro_batches_are_weighted_by_their_scored_tokens(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest token is not scored, so that micro-batches have unequal counts; the loop must not average means."""
    exp = compose(TINY)
    token = int(open_corpus(exp).batch(0, 4)[:, 1:].flatten().bincount().argmax())
    for module in (evaluate_module, loss_module):
        monkeypatch.setattr(module, "IGNORE", token)
    settings = ["eval.every=0", "train.steps=3"]
    run(*settings, "run.dir=whole")
    run(*settings, "train.micro_batch=1", "run.dir=parts")
    for whole, parts in zip(rows(Path("whole"))[1:], rows(Path("parts"))[1:], strict=True):
        assert parts["loss"] == pytest.approx(whole["loss"], abs=2e-6)
        assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


def test_a_micro_batch_without_scored_tokens_adds_nothing() -> None:
    logits = torch.randn(1, 5, 11, requires_grad=True)
    targets = torch.full((1, 5), IGNORE)
    loss = loss_sum(logits, targets)
    loss.backward()
    assert scored(targets) == 0
    assert loss.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_evaluation_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    embedding, windows = torch.randn(13, 13), torch.randint(0, 13, (10, 9))

    def at(batch: int) -> float:
        autocast = lambda: torch.autocast("cpu", enabled=False)  # noqa: E731
        loss = lambda x, y: loss_sum(embedding[x], y)  # noqa: E731
        return evaluate(loss, windows, batch, torch.device("cpu"), autocast)

    expected = at(10)
    assert all(at(batch) == pytest.approx(expected, abs=1e-6) for batch in (1, 3, 4))
    assert at(3) == at(3)


def test_evaluation_and_norms_leave_training_alone(elsewhere: Path) -> None:
    run("run.dir=watched", "eval.every=1", "norms.every=1")
    run("run.dir=alone", "eval.every=0", "norms.every=0", "checkpoint.every=0")
    assert losses("watched") == losses("alone")
    assert same_bits(weights(Path("watched"), 6), weights(Path("alone"), 6))


def test_every_optimizer_takes_its_own_step(elsewhere: Path) -> None:
    """Never silently another's: no two optimizers take the same step."""
    steps = {}
    for name in ("scion", "above_mup", "muon", "adam", "signsgd", "scion_constrained"):
        run(f"optimizer={name}", "train.steps=1", "checkpoint.every=1", f"run.dir={name}")
        steps[name] = weights(Path(name), 1)["layers.1.attention.wq.weight"]
    assert len({tuple(step.flatten().tolist()) for step in steps.values()}) == len(steps)


def test_clipping_bounds_what_adam_sees_but_not_what_is_logged(elsewhere: Path) -> None:
    settings = ["train.steps=2", "optimizer=adam", "optimizer.eps=1", "norms.gradients=true"]
    run("run.dir=free", *settings)
    free = rows(Path("free"))[1]
    run("run.dir=half", *settings, f"optimizer.clip={free['grad_norm'] / 2}")
    half = rows(Path("half"))[1]
    raw = ["grad_norm", *(key for key in free if key.startswith("grad/"))]
    assert "grad/head/rms_to_inf_dual" in raw
    assert {key: half[key] for key in raw} == {key: free[key] for key in raw}
    assert half["update/head/rms_to_inf"] < free["update/head/rms_to_inf"]


# ---- endings ----


def poison(monkeypatch: pytest.MonkeyPatch, step: int, loss: float, grad_norm: float) -> None:
    original = Trainer.gradients

    def poisoned(self: Trainer, t: int) -> tuple[float, float]:
        values = original(self, t)
        return (loss, grad_norm) if t == step else values

    monkeypatch.setattr(Trainer, "gradients", poisoned)


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (5.0, math.inf), (math.inf, math.nan)])
def test_nothing_non_finite_is_applied(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, loss: float, grad_norm: float
) -> None:
    run("run.dir=straight", "train.steps=3", "eval.every=0")
    poison(monkeypatch, 4, loss, grad_norm)
    outcome = run("run.dir=r", "eval.every=0", "checkpoint.every=2")
    assert (outcome.status, outcome.exit_code) == ("diverged", 3)
    summary = json.loads(Path("r/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("diverged", 3)
    last = rows(Path("r"))[-1]
    assert (last["step"], last["loss"]) == (4, loss if math.isfinite(loss) else str(loss))
    assert same_bits(weights(Path("r"), 3), weights(Path("straight"), 3))
    assert list(checkpoint.steps(Path("r/checkpoints"))) == [2, 3]


def test_weights_that_overflow_are_never_kept(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.advance

    def overflowing(self: Trainer) -> Any:
        row = original(self)
        if self.t == 4:
            self.parameters["head.weight"].data[0, 0] = math.inf
        return row

    monkeypatch.setattr(Trainer, "advance", overflowing)
    assert run("run.dir=r", "checkpoint.every=1").exit_code == 3
    assert list(checkpoint.steps(Path("r/checkpoints"))) == [1, 2, 3]


def test_a_failure_on_the_way_is_recorded(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Trainer, t: int) -> Any:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Trainer, "gradients", fails)
    with pytest.raises(ZeroDivisionError):
        run("run.dir=r")
    summary = json.loads(Path("r/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "ZeroDivisionError: a mistake")


def test_out_of_memory_says_what_to_do(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.backward

    def small_machine(self: Trainer, windows: Tensor, total: int) -> Tensor:
        if len(windows) > 1:
            raise torch.OutOfMemoryError("no room for more than one")
        return original(self, windows, total)

    monkeypatch.setattr(Trainer, "backward", small_machine)
    with pytest.raises(RunFailed, match=r"train.micro_batch=4.*train.micro_batch=auto"):
        run("run.dir=r")
    outcome = run("train.micro_batch=auto", "run.dir=auto")
    assert outcome.status == "finished"
    assert "micro_batch: 1" in Path("auto/config.yaml").read_text()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("step", [4, 6])
def test_a_full_disk_keeps_the_last_checkpoint(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str, step: int
) -> None:
    """Step 6 is the last: a run that has ended has its checkpoint."""
    original = checkpoint.save

    def full(folder: Path, state: checkpoint.State, group: None) -> Path:
        if state.step == step:
            raise OSError(28, "No space left on device")
        return original(folder, state)

    monkeypatch.setattr(run_module.checkpoint, "save", full)
    with pytest.raises(RunFailed, match=r"No space left on device in r: .* --resume r"):
        run("run.dir=r", f"checkpoint.asynchronous={asynchronous}")
    assert list(checkpoint.steps(Path("r/checkpoints"))) == [2, 4][: step // 2 - 1]
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    assert run(resume="r").status == "finished"


def test_a_run_that_fails_waits_for_its_checkpoint(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, plain, original = threading.Event(), Trainer.advance, checkpoint.save

    def late(folder: Path, state: checkpoint.State, group: None) -> Path:
        assert failing.wait(60)
        return original(folder, state)

    def fails(self: Trainer) -> Any:
        if self.t == 2:
            failing.set()
            raise ZeroDivisionError("a mistake")
        return plain(self)

    monkeypatch.setattr(run_module.checkpoint, "save", late)
    monkeypatch.setattr(Trainer, "advance", fails)
    with pytest.raises(ZeroDivisionError):
        run("checkpoint.asynchronous=true", "run.dir=r")
    assert list(checkpoint.steps(Path("r/checkpoints"))) == [2]


def test_a_checkpoint_beside_the_training(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is of its own step although the next one is trained before it is written, and the next one waits for it."""
    run("run.dir=straight")
    ahead, plain, original, sync = threading.Event(), Trainer.advance, checkpoint.save, JsonlSink.sync
    order: list[object] = []

    def late(folder: Path, state: checkpoint.State, group: None) -> Path:
        order.append(state.step)
        assert state.step == 6 or ahead.wait(60)  # nothing comes after step 6
        ahead.clear()
        return original(folder, state)

    def advance(self: Trainer) -> Any:
        if self.t % 2 == 0:
            assert [*checkpoint.steps(Path("beside/checkpoints"))] == [2, 4][: max(0, self.t // 2 - 1)]
        row = plain(self)
        if self.t % 2 and self.t > 2:
            ahead.set()
        return row

    monkeypatch.setattr(JsonlSink, "sync", lambda self: (order.append("rows"), sync(self)))
    monkeypatch.setattr(run_module.checkpoint, "save", late)
    monkeypatch.setattr(Trainer, "advance", advance)
    assert run("checkpoint.asynchronous=true", "run.dir=beside").status == "finished"
    assert order == ["rows", 2, "rows", 4, "rows", 6, "rows"], "the rows are on the disk first"
    assert rows(Path("beside")) == rows(Path("straight"))
    for step in (2, 4, 6):
        one, other = (read(Path(f"{name}/checkpoints/step_{step:08d}")) for name in ("beside", "straight"))
        assert same_bits(one.tensors(), other.tensors())
        assert one.rng.equal(other.rng)
        assert (one.step, one.last_row) == (other.step, other.last_row)


# ---- folders and requests ----


def test_a_folder_belongs_to_one_run(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(elsewhere))
    names = [run(f"train.seed={seed}", "train.steps=1").dir for seed in (0, 0, 1, 1)]
    assert len(set(names)) == 4
    assert run("run.dir=~/home", "train.steps=1").dir == elsewhere / "home"
    run("run.name=mine", "train.steps=1")
    before = {path: path.read_bytes() for path in Path("runs/mine").rglob("*") if path.is_file()}
    for again in ("run.name=mine", "run.dir=runs/mine"):
        with pytest.raises(RequestError, match="exists already"):
            run(again, "train.steps=1")
    assert {path: path.read_bytes() for path in Path("runs/mine").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["file/x", "file/x/y", "mine/sub", "mine/checkpoints/sub", "link"])
def test_a_folder_that_cannot_be_a_run(elsewhere: Path, place: str) -> None:
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    run("run.dir=mine", "train.steps=1")
    with pytest.raises(RequestError, match=r"run\.dir"):
        run(f"run.dir={place}", "train.steps=1")


def test_runs_is_a_file(elsewhere: Path) -> None:
    Path("runs").touch()
    with pytest.raises(RequestError, match="runs is not a folder"):
        run("train.steps=1")


def test_a_step_that_calls_exit_is_a_failure(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "gradients", lambda self, t: sys.exit(0))
    with pytest.raises(RunFailed, match=r"called sys\.exit\(0\)"):
        run("run.dir=r")


def test_one_pass_unless_told_otherwise(elsewhere: Path) -> None:
    Path("text").mkdir()
    for i in range(40):
        Path(f"text/{i}.txt").write_text(f"document {i} " + "ten words of text that are not very many " * 3)
    small = ["data=text", "data.path=text", "tokenizer=byte", "train.steps=100", "run.dir=r"]
    with pytest.raises(RequestError, match=r"12,800 tokens.*one pass"):
        run(*small)
    assert not Path("r").exists()
    run(*small, "data.allow_repeat=true")
    epochs = [row["epoch"] for row in rows(Path("r"))[1:]]
    assert epochs == sorted(epochs)
    assert epochs[0] == 0
    assert epochs[-1] >= 2


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there(elsewhere: Path, device: str) -> None:
    if getattr(torch, device).is_available():
        pytest.skip(f"{device} is there")
    with pytest.raises(RequestError, match=f"train.device={device}"):
        run(f"train.device={device}")
    assert list(Path().iterdir()) == []


def test_only_one_source_of_settings(elsewhere: Path) -> None:
    with pytest.raises(RequestError, match="give one of them"):
        train([], resume="a", branch="b@1")


def test_bfloat16_is_autocast_over_float32_weights(elsewhere: Path) -> None:
    run("train.dtype=bfloat16", "run.dir=half")
    run("run.dir=full")
    assert all(t.dtype == torch.float32 for t in weights(Path("half"), 6).values())
    assert losses("half") != losses("full")
    assert losses("half") == pytest.approx(losses("full"), abs=0.02)


def test_compiled_is_the_same_and_never_compiles_again(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are one graph, with gradients and without; the backend does not matter to when torch compiles."""
    compilations = compiled(monkeypatch)
    varying = ["schedule=cosine", "eval.every=0", "eval.batch=4"]
    run(*varying, "train.compile=true", "run.dir=compiled")
    run(*varying, "train.compile=true", "train.steps=12", "run.dir=longer")
    assert len(compilations) == 2
    run(*varying, "run.dir=plain")
    assert losses("compiled") == pytest.approx(losses("plain"), abs=1e-5)


def test_a_summary_says_what_happened(elsewhere: Path) -> None:
    outcome = run()
    summary = json.loads((outcome.dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["parameters"] == sum(t.numel() for t in weights(outcome.dir, 6).values())
    assert summary["best_val_loss"] == min(row["val/loss"] for row in rows(outcome.dir) if "val/loss" in row)
    assert summary["val_loss"] == rows(outcome.dir)[-1]["val/loss"]
    assert summary["versions"]["torch"].startswith(torch.__version__.split("+")[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_computes_with_the_threads_of_its_config(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    run(f"train.threads={threads}")
    assert seen == [threads]


def test_the_device_is_written_down(elsewhere: Path) -> None:
    run("run.dir=r", "train.device=auto", "train.steps=1")
    assert "device: auto" not in Path("r/config.yaml").read_text()


def test_bits_per_byte(elsewhere: Path) -> None:
    write_text()
    texts = ["data=text", "data.path=text", "tokenizer=byte"]
    run(*texts, "run.dir=r")
    corpus = open_corpus(compose([o for o in TINY if not o.startswith("data")] + texts))
    bytes_per_token = (corpus.validation[:, 1:] != 256).double().mean().item()
    last = rows(Path("r"))[-1]
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / math.log(2) / bytes_per_token, rel=1e-12)
