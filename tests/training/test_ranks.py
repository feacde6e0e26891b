"""How ranks divide a batch, and which of them says what ended the run."""

import signal
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError, RunFailed
from abovemup.model.loss import IGNORE
from abovemup.training import ranks as module
from abovemup.training.device import placed
from abovemup.training.evaluate import inputs, scored
from abovemup.training.ranks import ALONE, Ranks, Silent, report


@pytest.mark.parametrize(("count", "world", "sizes"), [(8, 3, [3, 3, 2]), (2, 3, [1, 1, 0]), (6, 2, [3, 3])])
def test_slices_are_the_batch(count: int, world: int, sizes: list[int]) -> None:
    spans = [Ranks(rank, world).span(count) for rank in range(world)]
    assert [n for _, n in spans] == sizes
    assert [i for first, n in spans for i in range(first, first + n)] == list(range(count))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_ranks_make_the_same_number_of_passes(size: int) -> None:
    windows = torch.arange(40).view(8, 5)
    whole = [part for rank in range(3) for part in parts(rank, size, windows)]
    assert torch.cat([part for part in whole if scored(part)]).equal(windows)
    assert len({len(parts(rank, size, windows)) for rank in range(3)}) == 1
    blank = parts(2, 1, windows)[-1]
    assert blank.tolist() == [[IGNORE] * 5]
    assert inputs(blank).tolist() == [[0] * 4]


def parts(rank: int, size: int, windows: torch.Tensor) -> list[torch.Tensor]:
    ranks = Ranks(rank, 3)
    first, count = ranks.span(len(windows))
    return ranks.parts(windows[first : first + count], size, len(windows))


def test_one_process_is_the_identity() -> None:
    assert ALONE.gather([1.5, 2]) == [[1.5, 2]]
    assert ALONE.same("x") == ALONE.after_first(lambda: "x") == "x"
    error = ValueError("mine")
    assert ALONE.verdict(error) is error


def test_several_processes_mean_ddp() -> None:
    exp = compose(["model.width=256"])
    assert ALONE.settle(exp, []) == exp
    many = Ranks(1, 4).settle(exp, [])
    assert (many.parallel.name, many.choices["parallel"]) == ("ddp", "ddp")
    fsdp = compose(["parallel=fsdp", "parallel.replicate=2"])
    assert Ranks(0, 4).settle(fsdp, ["parallel=fsdp"]).parallel == fsdp.parallel


TENSOR = ["parallel=fsdp", "parallel.tensor=2", "model.heads=4", "model.kv_heads=2", "model.head_dim=16"]


def test_ranks_that_share_a_sequence_read_the_same() -> None:
    spans = []
    for rank in range(6):
        ranks = Ranks(rank, 6)
        ranks.tensor = 2
        spans.append(ranks.span(8))
    assert spans == [(0, 3), (0, 3), (3, 3), (3, 3), (6, 2), (6, 2)]


@pytest.mark.parametrize(
    ("overrides", "world", "said"),
    [
        (["parallel.replicate=4"], 8, "parallel.tensor=2 goes with parallel=fsdp,"),
        (["parallel.replicate=2"], 4, "parallel.tensor=2 goes with parallel=fsdp, parallel.replicate=1"),
        (["train.compile=true"], 2, "and train.compile=false"),
        ([], 1, "add --nproc 2 or parallel=single"),
        ([], 3, "parallel.tensor=2 does not divide the number of processes, 3"),
        (["model.kv_heads=1"], 2, "parallel.tensor=2 does not divide model.kv_heads, 1"),
        (["model.ffn=77"], 4, "parallel.tensor=2 does not divide model.ffn, 77"),
    ],
)
def test_what_tensor_parallelism_cannot_divide(overrides: list[str], world: int, said: str) -> None:
    typed = [f"{k}={v}" for k, v in dict(o.split("=") for o in [*TENSOR, *overrides]).items()]
    with pytest.raises(RequestError, match=said):
        Ranks(0, world).settle(compose(typed), typed)


def test_tensor_parallelism_divides_what_it_can() -> None:
    for world, overrides in ((2, ["model.ffn=77"]), (4, [])):
        exp = Ranks(0, world).settle(compose([*TENSOR, *overrides]), TENSOR)
        assert (exp.parallel.name, exp.parallel.tensor) == ("fsdp", 2)


def test_processes_share_the_cores_and_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    train = placed(compose(["train.threads=8", "train.device=cpu"])).train
    ALONE.occupy(train)
    for here in ("2", "16"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        Ranks(1, 16, dist.HashStore()).occupy(train)
    assert used == [8, 4, 1]
    with pytest.raises(RequestError, match="16 processes need a GPU each, of 1: use fewer"):
        Ranks(1, 16, dist.HashStore()).occupy(replace(train, device="cuda"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel=single", "parallel=single is one process, and there are 2: use parallel=ddp or fsdp"),
        ("train.micro_batch=auto", "is for one process, and there are 2: give a number"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(override: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Ranks(0, 2).settle(compose([override]), [override])
    with pytest.raises(RequestError, match="replicate=3 does not divide 2 processes"):
        Ranks(0, 2).settle(compose(["parallel=fsdp", "parallel.replicate=3"]), [])


def ends(errors: dict[int, BaseException], world: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, BaseException]:
    """What each of the ranks ends with, all at once."""
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    store, found = dist.HashStore(), {}

    def end(rank: int) -> None:
        found[rank] = Ranks(rank, world, store).verdict(errors[rank])

    threads = [threading.Thread(target=end, args=(rank,)) for rank in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


LOST = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def speaker(found: dict[int, BaseException]) -> BaseException:
    """What is said, by one of them; the others know it."""
    [said] = [error for error in found.values() if not isinstance(error, Silent)]
    for error in found.values():
        if isinstance(error, Silent):
            assert (str(error), error.code) == (str(said), report(said)[0])
    return said


def test_what_all_say_is_said_once_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {rank: RequestError("no data") for rank in range(3)}
    found = ends({**errors}, 3, monkeypatch)
    assert speaker(found) is found[0] is errors[0]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("bad\nvalue"), RunFailed, "rank 1: ValueError: bad value"),
        (RequestError("no data in gloo/"), RequestError, "rank 1: no data in gloo/"),
    ],
)
@pytest.mark.parametrize("others", [(0, 2), (2,), ()])
def test_the_one_that_fails_is_named(
    others: tuple[int, ...], error: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when rank 0 hangs and the others do."""
    found = speaker(ends({1: error, **dict.fromkeys(others, LOST)}, 3, monkeypatch))
    assert isinstance(found, kind)
    assert str(found) == said


def test_rank_0_says_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RunFailed("mine")
    found = ends({0: error, 1: LOST, 2: LOST}, 3, monkeypatch)
    assert speaker(found) is found[0] is error


@pytest.mark.parametrize("gone", [0, 1])
def test_the_one_that_is_gone_is_named(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {rank: LOST for rank in range(3) if rank != gone}
    found = speaker(ends({**left}, 3, monkeypatch))
    assert str(found) == f"rank {gone} does not answer: it was killed, or it hangs"


def test_a_signal_to_all_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = speaker(ends({rank: SystemExit(143) for rank in range(2)}, 2, monkeypatch))
    assert isinstance(found, SystemExit)


def test_a_signal_to_rank_0_is_not_an_error_of_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends({0: SystemExit(143), 1: dist.DistError("rank 0 has ended")}, 2, monkeypatch)
    assert isinstance(speaker(found), SystemExit)


def test_a_signal_to_one_does_not_accuse_rank_0_which_prepares_data(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends({1: SystemExit(143)}, 2, monkeypatch)
    assert isinstance(found[1], SystemExit)


def test_rank_0_told_by_the_launcher_to_end_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends the others with SIGTERM as soon as one has ended."""
    found = ends({0: SystemExit(143), 1: RequestError("no data")}, 2, monkeypatch)
    assert str(speaker(found)) == "rank 1: no data"
