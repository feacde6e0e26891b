"""Whether a comparison of optimizers is honest: what is tried for each arm, and what may be concluded from it."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from abovemup.cli.main import run
from abovemup.config.conf import conf_dir
from abovemup.config.errors import RequestError
from abovemup.studies.budget import Budget, load
from abovemup.studies.compare import Comparison, Trial, ask, best, edges, ends, foreseen, stages
from abovemup.studies.significance import best_of, holm, paired, pairs, sentence, speedup


def random() -> np.random.Generator:
    return np.random.default_rng(5)


# ---- statistics ----


def test_a_paired_difference_is_the_one_of_scipy() -> None:
    rng = random()
    for n in (2, 5, 9):
        a, b = rng.normal(size=(2, n))
        difference, half, p = paired(a, b)
        d = a - b
        assert difference == pytest.approx(d.mean())
        assert half == pytest.approx(stats.t.ppf(0.975, n - 1) * d.std(ddof=1) / math.sqrt(n))
        assert p == pytest.approx(stats.ttest_rel(a, b).pvalue)
        assert paired(b, a) == pytest.approx((-difference, half, p))
    assert paired([1.0, 2, 4], [1.0, 2, 4]) == (0, 0, 1)
    assert paired([2.0, 3, 5], [1.0, 2, 4]) == (1, 0, 0)
    for a, b in (([1.0], [2.0]), ([1.0, math.inf], [2.0, 2.0]), ([math.inf] * 2, [math.inf] * 2)):
        assert np.isnan(paired(a, b)).all()


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4]) == pytest.approx([0.4])
    rng = random()
    for n in (2, 3, 7):
        p = rng.uniform(0, 0.2, size=n)
        rank = {value: i for i, value in enumerate(sorted(p))}
        by_hand = [min(1, max((n - rank[q]) * q for q in p if q <= value)) for value in p]
        assert holm(p) == pytest.approx(by_hand)
        assert (holm(p) >= p).all()
    assert np.isnan(holm([0.01, math.nan])[1])


def test_best_of_k_by_enumeration() -> None:
    for losses in (random().normal(size=7), np.array([3.0, 1, math.inf, 2, 2])):
        for k, found in enumerate(best_of(losses), start=1):
            assert found == pytest.approx(np.mean([min(draw) for draw in itertools.combinations(losses, k)]))
    assert best_of([4.0]) == pytest.approx([4.0])


@pytest.mark.parametrize("ratio", [1, 1.5, 2, 4])
def test_the_speedup_of_power_laws(ratio: float) -> None:
    tokens = 2.0 ** np.arange(19, 25)

    def law(n: Any) -> Any:
        return 2 + 30 * np.asarray(n) ** -0.3

    fast, slow = law(tokens * ratio), law(tokens)
    within = 1e-9 if math.log2(ratio).is_integer() else 0.02  # between horizons it is interpolated
    assert speedup(tokens, fast, slow) == pytest.approx(ratio, rel=within)
    assert speedup(tokens, slow, fast) == pytest.approx(1 / ratio, rel=within)


def test_a_speedup_needs_a_loss_that_both_reach() -> None:
    tokens = [1, 2, 4]
    assert math.isnan(speedup(tokens, [3.0, 2.9, 2.8], [5.0, 4.9, 4.8]))
    assert math.isnan(speedup(tokens, [math.nan] * 3, [5.0, 4.0, 3.0]))
    assert speedup(tokens, [5.0, 4.0, 3.0], [math.inf, 5.0, 4.0]) == pytest.approx(2)
    # A loss that rises again was reached before.
    assert speedup(tokens, [5.0, 3.0, 3.5], [5.0, 4.0, 3.0]) == pytest.approx(2)


def arm(losses: list[float], **more: Any) -> dict[str, Any]:
    row = {"losses": losses, "loss": float(np.mean(losses)), "tuned": [4.0, 3.0], "curve": [4.0, 3.0], "edge": ""}
    return row | {"momentum": 0.9, "trials": 47} | more


def test_arms_that_are_the_same_are_rarely_told_apart() -> None:
    """Seeds shift all arms alike; of 3 equal arms at most one study in 20 finds any difference (3 sigma of 400)."""
    false, rng = 0, random()
    for _ in range(400):
        losses = 3 + 0.1 * rng.normal(size=5) + 0.01 * rng.normal(size=(3, 5))
        tests = [paired(a, b)[2] for a, b in itertools.combinations(losses, 2)]
        false += bool((holm(tests) < 0.05).any())
    assert false <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)
    (same,) = pairs({"a": arm([3.0, 3.1]), "b": arm([3.0, 3.1])}, [1, 2], True)
    assert same["reason"]


def test_what_is_said() -> None:
    losses = [3.0, 3.1, 3.2, 3.05, 3.15]
    near = [loss + 0.02 + 0.001 * i for i, loss in enumerate(losses)]
    good, worse = arm(losses), arm(near)

    def said(verdicts: bool = True, **arms: dict[str, Any]) -> str:
        return sentence(arms, pairs(arms, [1, 2], verdicts), "where")

    assert re.fullmatch(
        r"b beats a by 0\.0220 \+- 0\.0020 nats \(Holm p = [\d.e-]+\) \(where\)\.", said(a=worse, b=good)
    )
    assert said(False, a=worse, b=good) == "cannot tell b from a: this budget concludes nothing (where)."
    assert "b is best at the edge of its grid of lr" in said(a=good, b=worse | {"edge": "lr"})
    assert "beats" in said(a=good | {"edge": "lr"}, b=worse)  # further out it would win by more
    assert "a (no momentum) beats b (with momentum)" in said(a=good | {"momentum": 0.0}, b=worse)
    assert "momentum" not in said(a=good | {"momentum": 0.0}, b=worse | {"momentum": 0.0})
    lost = arm([*losses[:4], math.inf])
    assert said(a=good, b=lost) == "cannot tell a from b: a seed diverged (where)."
    assert "unequal numbers of trials" in said(a=good, b=worse | {"trials": 46})
    noisy = arm([3.3, 2.9, 3.1, 3.4, 3.0])
    three = said(a=noisy, b=worse, c=good)
    assert three.startswith("c beats b by")
    assert "cannot tell c from a: 0.0" in three


# ---- what is asked ----


ARMS = ("adam", "scion")


def budget(**changes: Any) -> Budget:
    found = replace(
        load("smoke"), verdicts=True, lr={"adam": ["2^-8", "2^-7", "2^-6"], "scion": ["2^-4", "2^-3", "2^-2"]}
    )
    return replace(found, **changes)


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        arms, keys = ([word for word in words if ("=" in word) == has] for has in (False, True))
        with pytest.raises(RequestError) as error:
            ask(arms, keys, load("smoke"), None)
        return str(error.value)

    for arms in ((), ("adam",), ("adam", "adam"), ("adam", "scion", "adam")):
        assert "two or more different" in refused(*arms)
    assert "Did you mean scion?" in refused("adam", "scoin")
    for key in ("optimizer.lr=1", "optimizer.momentum=0", "schedule=wsd", "schedule.warmup=3", "train.batch_size=4"):
        assert "tuned for each arm" in refused("adam", "scion", key)
    for key in ("train.seed=4", "data.seed=4", "train.tokens=2^20", "experiment=paper_main"):
        assert "drop it" in refused("adam", "scion", key)
    assert "unknown key" in refused("adam", "scion", "model.widht=3")
    with pytest.raises(RequestError, match="no grid of lr for muon"):
        ask(["adam", "muon"], [], budget(), None)


def test_one_optimizer_under_two_names_is_refused(tmp_path: Path) -> None:
    """Also with another default of what is tuned; not with another msign."""
    (tmp_path / "optimizer").mkdir()
    text = (conf_dir() / "optimizer" / "scion.yaml").read_text()
    for name, change in (("mine", "momentum: 0.5"), ("other", "nesterov: true")):
        (tmp_path / "optimizer" / f"{name}.yaml").write_text(re.sub("lr: .*", f"lr: 2^-1\n{change}", text))
    wide = "# @package _global_\ndefaults:\n  - /optimizer/scion@optimizer\n  - _self_\n"
    (tmp_path / "optimizer" / "wide.yaml").write_text(f"{wide}optimizer: {{nesterov: true}}\nmodel: {{gains: true}}\n")
    grids = {name: ["2^-4", "2^-3", "2^-2"] for name in ("scion", "mine", "other", "wide", "above_mup")}

    def asked(*arms: str) -> Comparison:
        return ask([*arms], [], budget(lr=grids), tmp_path)

    with pytest.raises(RequestError, match="scion and mine are one optimizer"):
        asked("scion", "mine")
    with pytest.raises(RequestError, match=r"differ in model\.gains"):
        asked("scion", "wide")
    assert {*asked("scion", "above_mup", "other").arms} == {"scion", "above_mup", "other"}


# ---- what is tried ----


def bowl(t: Trial, lr: float = 0.0, batch: float = 9.1) -> float:
    """Best in the middle of either grid."""
    middle = {"adam": -7, "scion": -3}[t.arm] + lr
    return 3 + (t.lr - middle) ** 2 + 0.1 * (t.batch - batch) ** 2


def tried(loss: Callable[[Trial], float], stop: int | None = None, **changes: Any) -> list[list[Trial]]:
    """The trials after each stage, or the first few."""
    known = {"batch": [2**8, 2**9, 2**10], "tokens": [2**13, 2**14]} | changes
    found = stages(ask([*ARMS], [], budget(**known), None), loss)
    return [[*trials] for trials in itertools.islice(found, stop)]


def counts(trials: list[Trial]) -> dict[str, int]:
    return Counter(arm for arm, _ in {(t.arm, t.cell.id) for t in trials if t.stage != "seed"})


@pytest.fixture(scope="module")
def lists() -> list[list[Trial]]:
    return tried(bowl)


def test_all_arms_share_all_but_the_optimizer(lists: list[list[Trial]]) -> None:
    own = ("optimizer", "schedule", "train.batch_size", "train.seed", "data.seed")
    assert len({tuple(text for text in t.cell.overrides if not text.startswith(own)) for t in lists[-1]}) == 1
    orders = {tuple(t.settings["data.seed"] for t in lists[-1] if (t.arm, t.stage) == (arm, "seed")) for arm in ARMS}
    assert orders == {("2", "3", "4", "5", "6")}


def test_every_arm_has_as_many_trials(lists: list[list[Trial]]) -> None:
    assert [counts(trials)["adam"] for trials in lists] == [9, 11, 13, 15, 17, 19, 20, 20]
    for trials in lists:
        assert counts(trials)["adam"] == counts(trials)["scion"]
        assert len({t.cell.id for t in trials}) == len(trials)  # none is another's repetition


def test_a_decay_that_helps_one_arm_takes_no_horizons_from_it() -> None:
    """Horizons are read from runs of constant lr: as many of each arm, also where only one is best with a decay."""

    def helps_adam(t: Trial) -> float:
        return bowl(t) + ("schedule" in t.settings) * (-0.1 if t.arm == "adam" else 0.1)

    trials = [t for t in tried(helps_adam)[-1] if t.stage != "seed"]
    assert Counter(t.arm for t in trials if "schedule" not in t.settings) == {"adam": 19, "scion": 19}
    assert "schedule" in best(trials, "adam", helps_adam).settings


def test_an_edge_of_one_arm_widens_the_grid_of_all() -> None:
    def beyond(t: Trial) -> float:
        return bowl(t, lr=1.2 if t.arm == "adam" else 0)  # adam's best is above its grid

    lists = tried(beyond, 2, batch=[2**9])
    grids = [{arm: sorted({t.lr for t in trials if t.arm == arm}) for arm in ARMS} for trials in lists]
    assert grids[1] == {"adam": [-8, -7, -6, -5], "scion": [-4, -3, -2, -1]}
    assert not edges(lists[1], "adam", beyond)
    assert counts(lists[1])["adam"] == counts(lists[1])["scion"] == 4


def test_a_grid_is_widened_twice_and_then_said_to_be_too_small() -> None:
    def falling(t: Trial) -> float:
        return 3 - 0.1 * t.lr

    lists = tried(falling, 4, batch=[2**9])
    assert [len({t.lr for t in trials if t.arm == "adam"}) for trials in lists[:3]] == [3, 4, 5]
    assert edges(lists[-1], "adam", falling) == [("lr", -1)]
    assert counts(lists[-1])["adam"] == counts(lists[-1])["scion"]


def test_no_batch_size_that_a_horizon_is_no_multiple_of() -> None:
    def small(t: Trial) -> float:
        return bowl(t, batch=-20)

    lists = tried(small, 3, batch=[64, 128])
    assert {t.batch for t in lists[-1]} == {6, 7}
    assert edges(lists[-1], "scion", small) == [("batch", 0)]


def test_the_best_is_carried_on_and_repeated_on_fresh_seeds() -> None:
    def loss(t: Trial) -> float:
        if t.settings.get("optimizer.momentum") == "0":
            return math.inf  # diverged: never the best
        liked = {"optimizer.momentum": "0.95", "schedule": "wsd", "optimizer.lr_scale.head": "4"}
        return bowl(t) - sum(0.1 for key, value in liked.items() if t.settings.get(key) == value)

    trials = tried(loss, seeds=["7", "3"])[-1]
    seeds = [t for t in trials if t.stage == "seed"]
    assert len(seeds) == 10
    for arm in ARMS:
        own, top = [t for t in seeds if t.arm == arm], best(trials, arm, loss)
        for key in ("train.seed", "data.seed"):
            assert [t.settings[key] for t in own] == ["8", "9", "10", "11", "12"]
        for t in own:
            assert {k: v for k, v in t.settings.items() if not k.endswith(".seed")} == top.settings
    assert best(trials, "adam", loss).settings == {
        "optimizer.lr": "2^-7", "train.batch_size": "8", "optimizer.momentum": "0.95", "schedule": "wsd",
        "schedule.decay": "0.2", "optimizer.lr_scale.head": "4",
    }  # fmt: skip
    assert "optimizer.lr_scale.head" not in best(trials, "scion", loss).settings
    arms = ask([*ARMS], [], budget(), None).arms
    said = {arm: [*ends([t for t in trials if t.arm == arm], best(trials, arm, loss), arms[arm])] for arm in ARMS}
    assert said["scion"] == ["momentum=0.95", "decay=0.2"]
    assert said["adam"] == ["momentum=0.95", "lr_scale.head=4", "decay=0.2"]
    assert {t.settings.get("train.seed", "7") for t in trials if t.stage != "seed"} == {"7"}


def test_what_is_said_before_it_starts_is_what_comes(lists: list[list[Trial]]) -> None:
    asked = ask([*ARMS], [], budget(batch=[2**8, 2**9, 2**10], tokens=[2**13, 2**14]), None)
    assert len(foreseen(asked)) == len({t.cell.id for t in lists[-1]})


def test_a_longer_grid_gives_its_middle() -> None:
    lrs = {"adam": ["2^-8", "2^-7", "2^-6"], "scion": ["2^-5", "2^-4", "2^-3", "2^-2", "2^-1"]}
    assert {t.lr for t in tried(bowl, 1, lr=lrs)[0] if t.arm == "scion"} == {-4, -3, -2}


# ---- the whole ----


@pytest.mark.slow
def test_a_comparison_from_one_end_to_the_other(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "adam", "scion", "--budget=smoke", "model.width=16", "model.head_dim=8", "--jobs=2", "--json"]
    assert run(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert re.match("cannot tell .* concludes nothing", said["verdict"])
    folder = elsewhere / "studies" / "compare-adam-scion-smoke"
    assert json.loads((folder / "result.json").read_text()) == said
    assert len((folder / "points.csv").read_text().splitlines()) == 1 + 2 * (2 + 2 + 2)
    assert (folder / "figure.png").stat().st_size > 10_000
    for row in said["arms"].values():
        assert row["trials"] == 4
        assert row["loss"] == pytest.approx(np.mean(row["losses"]))
        assert row["tuned"][-1] == pytest.approx(min(row["best_of"]))
        assert 0 <= row["optimizer's share of a step"] < 1
        assert row["seconds"] > 0
        assert row["norm, head rms_to_inf"] > 0
    runs = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")}
    assert run(command[:-1]) == 0
    assert said["verdict"] in capsys.readouterr().out
    assert runs == {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")}
