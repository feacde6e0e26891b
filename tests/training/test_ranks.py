"""How ranks divide a batch, and which of them says what ended the run."""

import signal
import threading

import pytest
import torch
import torch.distributed as dist

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError, RunFailed
from abovemup.config.resolve import cores
from abovemup.training import ranks as module
from abovemup.training.evaluate import IGNORE, inputs, scored
from abovemup.training.ranks import ALONE, Ranks, Silent
from abovemup.training.run import over


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


def test_several_processes_mean_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their threads share the cores."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores()))
    exp = compose(["model.width=256", "train.threads=8"])
    assert (exp.parallel.name, exp.train.threads) == ("single", 8)
    assert over(ALONE, exp, []) == exp
    many = over(Ranks(1, 4), exp, [])
    assert (many.parallel.name, many.choices["parallel"], many.train.threads) == ("ddp", "ddp", 1)
    fsdp = compose(["parallel=fsdp", "parallel.replicate=2"])
    assert over(Ranks(0, 4), fsdp, ["parallel=fsdp"]).parallel == fsdp.parallel


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel=single", "parallel=single is one process, and there are 2: use parallel=ddp or fsdp"),
        ("train.micro_batch=auto", "is for one process, and there are 2: give a number"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(override: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        over(Ranks(0, 2), compose([override]), [override])
    with pytest.raises(RequestError, match="replicate=3 does not divide 2 processes"):
        over(Ranks(0, 2), compose(["parallel=fsdp", "parallel.replicate=3"]), [])


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


def test_what_all_say_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends({rank: RequestError("no data") for rank in range(3)}, 3, monkeypatch)
    assert str(found[0]) == "no data"
    assert [found[rank].code for rank in (1, 2) if isinstance(found[rank], Silent)] == [2, 2]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("bad\nvalue"), RunFailed, "rank 1: ValueError: bad value"),
        (RequestError("no data"), RequestError, "rank 1: no data"),
    ],
)
def test_the_one_that_fails_is_named(
    error: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ends({0: LOST, 1: error, 2: LOST}, 3, monkeypatch)
    assert isinstance(found[0], kind)
    assert str(found[0]) == said
    assert isinstance(found[1], Silent)
    assert isinstance(found[2], Silent)
    assert found[1].code == found[2].code == (2 if kind is RequestError else 4)


def test_rank_0_says_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("mine")
    found = ends({0: error, 1: LOST, 2: LOST}, 3, monkeypatch)
    assert found[0] is error
    assert isinstance(found[1], Silent)
    assert isinstance(found[2], Silent)


@pytest.mark.parametrize("gone", [0, 1])
def test_the_one_that_is_gone_is_named_by_the_first_that_is_left(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {rank: LOST for rank in range(3) if rank != gone}
    found = ends({**left}, 3, monkeypatch)
    assert str(found[min(left)]) == f"rank {gone} does not answer: it was killed, or it hangs"
    assert isinstance(found[2], Silent)


def test_a_signal_to_all_is_each_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends({rank: SystemExit(143) for rank in range(2)}, 2, monkeypatch)
    assert isinstance(found[0], SystemExit)
    assert isinstance(found[1], Silent)
    assert found[1].code == 143


def test_rank_0_told_by_the_launcher_to_end_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends the others with SIGTERM as soon as one has ended."""
    found = ends({0: SystemExit(143), 1: RequestError("no data")}, 2, monkeypatch)
    assert str(found[0]) == "rank 1: no data"
