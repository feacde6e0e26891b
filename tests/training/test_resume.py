"""Any number of legs gives the bits of the uninterrupted run: weights, losses, lr, rows (cases 39, 40, 47)."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.tracking import norms
from abovemup.training import checkpoint
from abovemup.training import trainer as trainer_module
from abovemup.training.run import train
from abovemup.training.trainer import Trainer
from tests.data.test_prepare import Fake
from tests.training.tiny import read, rows, run, same_bits, weights, write_text


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Send this process a real signal while it is inside a method of the trainer at a given step."""

    def arrange(step: int, method: str = "advance", signum: int = signal.SIGTERM) -> None:
        original = getattr(Trainer, method)

        def signalled(self: Trainer, *args: Any) -> Any:
            if self.t + (method != "evaluate") == step:
                os.kill(os.getpid(), signum)
            return original(self, *args)

        monkeypatch.setattr(Trainer, method, signalled)

    return arrange


@pytest.mark.parametrize("schedule", [["schedule=constant"], ["schedule=wsd", "schedule.warmup=2", "schedule.decay=3"]])
@pytest.mark.parametrize("optimizer", ["scion", "muon", "adamw"])
def test_any_number_of_legs_is_the_straight_run(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[..., None], optimizer: str, schedule: list[str]
) -> None:
    settings = [f"optimizer={optimizer}", "optimizer.lr=0.01", *schedule]
    straight = run(*settings, "run.dir=straight")
    assert straight.exit_code == 0
    settings.append(f"checkpoint.asynchronous={optimizer == 'muon'}")
    for step, signum, code in ((1, signal.SIGINT, 130), (3, signal.SIGTERM, 143), (5, signal.SIGINT, 130)):
        with monkeypatch.context():
            stop_at(step, signum=signum)
            leg = run(*settings, "run.dir=legs") if step == 1 else run(resume="legs")
            monkeypatch.undo()
            monkeypatch.chdir(elsewhere)
        assert (leg.status, leg.exit_code) == ("interrupted", code)
        assert json.loads((elsewhere / "legs/summary.json").read_text())["status"] == "interrupted"
    assert run(resume="legs").status == "finished"
    assert rows(Path("legs")) == rows(Path("straight"))
    assert [row["step"] for row in rows(Path("legs"))] == list(range(7))
    for step in (2, 4, 6):
        assert same_bits(weights(Path("legs"), step), weights(Path("straight"), step))


def test_norms_from_blocks_are_those_of_the_straight_run(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[..., None]
) -> None:
    """Where a largest singular value was is state, down to the last bit of what is logged."""
    monkeypatch.setattr(norms, "EXACT", 16)  # sides of 32 go by blocks
    settings = ["norms.which=[stable_rank]", "norms.gradients=true", "optimizer.clip=0.1"]
    settings += ["optimizer.norm_control=pre_decay", "optimizer.weight_decay=0.5"]
    run(*settings, "run.dir=straight")
    stop_at(3)
    assert run(*settings, "run.dir=legs").exit_code == 143
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(norms, "EXACT", 16)
    run(resume="legs")
    assert rows(Path("legs")) == rows(Path("straight"))
    assert same_bits(weights(Path("legs"), 6), weights(Path("straight"), 6))


@pytest.mark.parametrize("step", [0, 2, 6])
def test_stop_in_the_middle_of_an_evaluation(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[..., None], step: int
) -> None:
    run("run.dir=straight")
    stop_at(step, "evaluate")
    assert run("run.dir=legs").exit_code == 143
    assert all(row["step"] != step for row in rows(Path("legs")))
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    run(resume="legs")
    assert rows(Path("legs")) == rows(Path("straight"))
    assert same_bits(weights(Path("legs"), 6), weights(Path("straight"), 6))


def test_a_stop_within_a_step_takes_none_of_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[..., None]
) -> None:
    run("run.dir=straight", "train.micro_batch=1")
    stop_at(3, "gradients")
    assert run("run.dir=legs", "train.micro_batch=1").summary["steps"] == 2
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    run(resume="legs")
    assert rows(Path("legs")) == rows(Path("straight"))


def test_rows_are_sparse_and_still_whole(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[..., None]
) -> None:
    sparse = ["tracking.every=4", "norms.every=0", "eval.every=0"]
    run(*sparse, "run.dir=straight")
    assert [row["step"] for row in rows(Path("straight"))] == [0, 1, 4, 6]
    stop_at(4)
    run(*sparse, "run.dir=legs")
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    run(resume="legs")
    assert rows(Path("legs")) == rows(Path("straight"))


def test_rows_after_the_checkpoint_and_a_torn_line_are_taken_back(elsewhere: Path) -> None:
    run("run.dir=straight")
    run("run.dir=torn")
    with open("torn/metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    run(resume="torn@4")
    assert rows(Path("torn")) == rows(Path("straight"))


def test_killed_before_the_first_checkpoint_it_starts_again(elsewhere: Path) -> None:
    run("run.dir=straight")
    run("run.dir=bare")
    shutil.rmtree("bare/checkpoints")
    with pytest.raises(RequestError, match="are gone, and it is finished"):
        run(resume="bare")
    summary = Path("bare/summary.json")
    summary.write_text(summary.read_text().replace('"status": "finished"', '"status": "running"'))
    run(resume="bare")
    assert rows(Path("bare")) == rows(Path("straight"))


def test_when_all_checkpoints_are_damaged_nothing_is_touched(elsewhere: Path) -> None:
    run("run.dir=bare")
    for path in Path("bare/checkpoints").iterdir():
        (path / "__0_0.distcp").write_bytes(b"torn")
    before = rows(Path("bare"))
    with pytest.raises(RequestError, match="no whole checkpoint left"):
        run(resume="bare")
    assert rows(Path("bare")) == before


@pytest.mark.parametrize("content", ["[]", '{"data": 5}', "", None])
def test_a_damaged_summary_names_the_fix(elsewhere: Path, content: str | None) -> None:
    run("run.dir=r")
    Path("r/summary.json").unlink()
    if content is not None:
        Path("r/summary.json").write_text(content)
    with pytest.raises(RequestError, match="Restore the file, or start a new run"):
        run(resume="r@4")


def test_a_longer_constant_run_is_the_run_of_that_length(elsewhere: Path) -> None:
    quiet = ["eval.every=0", "norms.every=0"]
    run(*quiet, "train.steps=9", "run.dir=straight")
    run(*quiet, "train.steps=5", "run.dir=longer")
    assert run("train.tokens=1152", resume="longer").summary["steps"] == 9
    assert same_bits(weights(Path("longer"), 9), weights(Path("straight"), 9))
    assert [row["step"] for row in rows(Path("longer"))] == list(range(10))
    again = train([], config_file=Path("longer/config.yaml"))
    assert again.summary["steps"] == 9


def test_a_finished_run_is_left_as_it_is(elsewhere: Path) -> None:
    run("run.dir=done")
    before = rows(Path("done"))
    assert run(resume="done").status == "finished"
    assert rows(Path("done")) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=0.5"], r"optimizer.lr was 0.0625, is now 0.5"),
        (["train.batch_size=8", "train.steps=12"], r"train.batch_size was 4, is now 8"),
        (["optimizer=adam"], r"optimizer.name was scion, is now adam"),
        (["model.depth=3"], r"model.depth was 2, is now 3"),
        (["data.seed=1"], r"data.seed was 0, is now 1"),
        (["schedule=cosine"], r"schedule.name was constant, is now cosine"),
        (["train.steps=3"], r"step 6"),
    ],
)
def test_nothing_else_may_change(elsewhere: Path, overrides: list[str], message: str) -> None:
    run("run.dir=old")
    before = {path: path.read_bytes() for path in Path("old").rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=message):
        run(*overrides, resume="old")
    assert {path: path.read_bytes() for path in Path("old").rglob("*") if path.is_file()} == before


def test_cadences_and_tracking_may_change(elsewhere: Path) -> None:
    run("run.dir=old")
    run("train.steps=8", "eval.every=4", "norms.every=2", "checkpoint.every=8", "tracking.every=2", resume="old")
    assert [row["step"] for row in rows(Path("old"))] == [0, 1, 2, 3, 4, 5, 6, 8]


def test_a_decayed_run_cannot_be_longer(elsewhere: Path) -> None:
    run("schedule=cosine", "run.dir=old")
    with pytest.raises(RequestError, match="--branch old@TOKENS"):
        run("train.steps=12", resume="old")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.optimizer.pop("head.weight"), "missing: head.weight"),
        (lambda s: s.optimizer["head.weight"].pop("momentum_buffer"), "missing: momentum_buffer of head"),
        (
            lambda s: s.optimizer.update({"head.weight": {"momentum_buffer": torch.ones(32, 257)}}),
            "of head.weight has shape",
        ),
        (lambda s: s.optimizer["head.weight"].update(v=torch.ones(2)), "left over: v of head.weight"),
        (lambda s: s.optimizer.update({"x": {"v": torch.ones(2)}}), "left over: x"),
        (lambda s: s.model.pop("head.weight"), "this model's weights: head.weight"),
        (lambda s: s.model.update(x=torch.ones(2)), "this model's weights: x"),
        (lambda s: s.model.update({"head.weight": torch.ones(257, 16)}), "this model's weights: head.weight"),
    ],
)
def test_another_state_is_refused(elsewhere: Path, change: Callable[[checkpoint.State], Any], said: str) -> None:
    run("run.dir=old", "optimizer.momentum=0.9")
    path = Path("old/checkpoints/step_00000004")
    state = read(path)
    change(state)
    checkpoint.save(path.parent, state)
    with pytest.raises(RequestError, match=said):
        run(resume="old@4")


def test_a_tail_branched_off_is_the_decayed_run(elsewhere: Path) -> None:
    """A wsd run is constant until its decay begins: branching there must give its bits."""
    tail = ["schedule=wsd", "schedule.warmup=0", "schedule.decay=4", "train.steps=8"]
    run(*tail, "run.dir=straight")
    run("train.steps=6", "checkpoint.every=pow2", "run.dir=trunk")
    assert sorted(p.name for p in Path("trunk/checkpoints").iterdir()) == [f"step_{step:08d}" for step in (1, 2, 4, 6)]
    outcome = run(*tail, "run.dir=tail", branch="trunk@2^9")
    assert outcome.status == "finished"
    assert same_bits(weights(Path("tail"), 8), weights(Path("straight"), 8))
    assert [row["step"] for row in rows(Path("tail"))] == [4, 5, 6, 7, 8]
    assert rows(Path("tail"))[1:] == rows(Path("straight"))[5:]


def test_a_branch_killed_at_once_can_be_resumed(elsewhere: Path) -> None:
    tail = ["schedule=wsd", "schedule.decay=4", "train.steps=8"]
    run("train.steps=6", "run.dir=trunk")
    run(*tail, "run.dir=whole", branch="trunk@512")
    run(*tail, "run.dir=tail", branch="trunk@512")
    for step in (6, 8):
        (Path("tail/checkpoints") / f"step_{step:08d}/state.pt").unlink()
    run(resume="tail")
    assert rows(Path("tail")) == rows(Path("whole"))
    assert json.loads(Path("tail/summary.json").read_text())["branched_from"] == "trunk@512"


@pytest.mark.parametrize(
    ("branch", "overrides", "message"),
    [
        ("trunk", [], "at how many tokens"),
        ("trunk@300", ["train.steps=8"], "no checkpoint at 300 tokens. It has: 256, 512, 768"),
        ("trunk@512", ["train.steps=4"], "starts at step 4"),
        ("trunk@512", ["train.steps=8", "model.depth=3"], "model.depth was 2, is now 3"),
        ("nothing@512", [], "nothing is not a run"),
    ],
)
def test_branches_that_make_no_sense(elsewhere: Path, branch: str, overrides: list[str], message: str) -> None:
    run("run.dir=trunk")
    with pytest.raises(RequestError, match=message):
        run(*overrides, "run.dir=new", branch=branch)
    assert not Path("new").exists()


def test_two_processes_cannot_train_one_run(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("run.dir=old")
    refused: list[str] = []
    original = trainer_module.Trainer.advance

    def meanwhile(self: Trainer) -> Any:
        if not refused:
            pid = os.fork()
            if pid == 0:  # the kernel's lock, not this process's memory, must refuse
                try:
                    train([], resume="old")
                except RequestError as error:
                    os._exit(7 if "another process" in str(error) else 8)
                os._exit(9)
            refused.append(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        return original(self)

    monkeypatch.setattr(trainer_module.Trainer, "advance", meanwhile)
    run("train.steps=8", resume="old")
    assert refused == ["7"]


def test_the_random_state_goes_on(elsewhere: Path) -> None:
    torch.manual_seed(5)
    run("run.dir=a")
    saved = torch.load("a/checkpoints/step_00000006/state.pt")["rng"]
    torch.manual_seed(6)
    run("train.steps=7", resume="a")
    assert torch.equal(torch.load("a/checkpoints/step_00000007/state.pt")["rng"], saved)


def test_a_tied_run_resumes_with_one_tensor(elsewhere: Path) -> None:
    """Case 8: one tensor in the gradient norm, in the checkpoint and after a resume."""
    tied = ["model.tie_embeddings=true", "optimizer=muon"]
    run(*tied, "run.dir=straight")
    run(*tied, "run.dir=legs")
    run(resume="legs@2")
    assert rows(Path("legs")) == rows(Path("straight"))
    saved = weights(Path("legs"), 6)
    assert "head.weight" not in saved
    assert same_bits(saved, weights(Path("straight"), 6))
    summary = json.loads(Path("legs/summary.json").read_text())
    assert summary["output_norm"] == rows(Path("legs"))[-1]["norm/embedding/one_to_rms"]


def test_other_data_is_refused(elsewhere: Path) -> None:
    write_text()
    run("data=text", "data.path=text", "tokenizer=byte", "run.dir=r")
    Path("text/0.txt").write_text("another text " * 100)
    with pytest.raises(RequestError, match="has changed since"):
        run(resume="r@2")


def test_a_warmup_in_fractions_stays_what_it_was(elsewhere: Path) -> None:
    """However often a longer run goes on: lr(step) must not follow the horizon."""
    run("run.dir=a", "schedule.warmup=0.5")
    run("train.steps=24", resume="a")
    straight = rows(Path("a"))
    run(resume="a@8")
    assert rows(Path("a")) == straight
    assert rows(train([], config_file=Path("a/config.yaml")).dir)[1:6] == straight[1:6]
    assert compose([], config_file=Path("a/config.yaml")).schedule.warmup == 3


@pytest.mark.parametrize("place", ["run.dir=b", "run.name=b"])
def test_a_resumed_run_stays_in_its_folder(elsewhere: Path, place: str) -> None:
    run("run.dir=a")
    with pytest.raises(RequestError, match=f"{place} would be another"):
        run(place, "train.steps=8", resume="a")


def test_a_refused_resume_leaves_the_summary(elsewhere: Path) -> None:
    run("run.dir=a")
    Path("a/metrics.jsonl").unlink()
    with pytest.raises(RequestError, match=r"metrics.jsonl"):
        run("train.steps=8", resume="a")
    assert json.loads(Path("a/summary.json").read_text())["status"] == "finished"
    assert "steps: 6" in Path("a/config.yaml").read_text()


def test_going_back_forgets_what_came_after(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[..., None]
) -> None:
    run("run.dir=straight")
    run("run.dir=legs")
    stop_at(3)
    assert run(resume="legs@2").exit_code == 143
    monkeypatch.undo()
    monkeypatch.chdir(elsewhere)
    run(resume="legs")
    assert rows(Path("legs")) == rows(Path("straight"))


def test_a_branch_of_a_decayed_run_says_how_it_decays(elsewhere: Path) -> None:
    run("schedule=cosine", "run.dir=trunk")
    with pytest.raises(RequestError, match="decays its learning rate over 6 steps, the branch has 12"):
        run("train.steps=12", "run.dir=new", branch="trunk@512")
    assert not Path("new").exists()


def test_a_resume_leaves_what_a_config_follows(elsewhere: Path) -> None:
    """A cosine decays to the end of its run, also when the config of a resumed run is used for a longer one."""
    run("schedule=cosine", "schedule.warmup=0", "run.dir=a")
    run(resume="a@4")
    assert compose(["train.steps=12"], config_file=Path("a/config.yaml")).schedule.decay == 12


def test_another_horizon_does_not_change_what_a_remote_run_reads(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ABOVEMUP_CACHE", str(elsewhere / "cache"))
    source = Fake([f"page {i} of many: {'words ' * (i % 17)}" for i in range(2000)])
    monkeypatch.setattr("abovemup.data.corpus.find_source", lambda data: source)
    remote = ["data=hub", "tokenizer=byte", "data.repo=me/pages", "eval.tokens=64"]
    assert run(*remote, "run.dir=trunk").status == "finished"
    assert "abovemup data prepare hub" in capfd.readouterr().out
    assert train(["train.steps=4", "run.dir=tail"], branch="trunk@256").status == "finished"
    assert run(resume="tail").status == "finished"
    for longer in ({"resume": "trunk"}, {"branch": "trunk@256"}):
        with pytest.raises(RequestError, match="cannot be made longer") as caught:
            train(["train.tokens=2^20"], **longer)
        said, fix = str(caught.value).split("\n")
        assert "allow_repeat" not in said + fix  # which a run that goes on may not change
        assert f"abovemup data prepare hub --tokens {2**20 + 32} data.repo=me/pages" in fix.replace(
            "tokenizer=byte ", ""
        )
    assert "prepare" not in capfd.readouterr().out  # none of these read the source again
    assert len(list((elsewhere / "cache/corpora").glob("[!.]*"))) == 1
