"""Where the optimum lies, its interval, and the verdicts, on losses whose answer is known."""

import math
from typing import Any

import numpy as np
import pytest

from abovemup.studies.transfer import DULL, Array, Scan, drift, interval, optimum, sensitivity, spread, vertices

LRS = np.arange(-6.0, -1.9, 0.5)


def parabola(at: float, curvature: float = 0.3, floor: float = 4.0) -> Array:
    return floor + curvature * (LRS - at) ** 2


def scan(*groups: list[float]) -> Scan:
    """One batch; a group for each list, a seed for each best log2 lr in it."""
    losses = np.stack([np.stack([parabola(at) for at in bests], axis=1)[None] for bests in groups])
    lrs = np.broadcast_to(LRS[None, None, :, None], losses.shape)
    names = [f"g{i}" for i in range(len(groups))]
    return Scan(("a",), names, [64], LRS, losses, {"lr": lrs}, np.zeros(losses.shape, bool))


def lr(of: Scan, group: int = 0) -> dict[str, Any]:
    return optimum(of, "lr", group, k=3)


@pytest.mark.parametrize("at", [-4.0, -3.9, -3.76, -4.24, -5.3])
def test_the_vertex_of_a_parabola_lies_between_the_points(at: float) -> None:
    for k in (3, 7):
        found = optimum(scan([at]), "lr", 0, k)
        assert found["x"] == pytest.approx(at, abs=1e-9)
        assert found["lr"] == LRS[np.argmin(np.abs(LRS - at))]
        assert found["lowest"] == pytest.approx(4 + 0.3 * (found["lr"] - at) ** 2)
        assert found["reason"] == ""


def test_an_edge_is_told_and_a_divergence_is_none() -> None:
    for at, grid in ((-9.0, -6.0), (0.0, -2.0)):
        found = lr(scan([at]))
        assert (found["lr"], found["x"], found["reason"]) == (grid, grid, "edge")
    one = scan([-4.1])
    one.losses[0, 0, 5:] = math.inf
    found = lr(one)
    assert (found["lr"], found["x"], found["reason"]) == (-4.0, -4.0, "")
    one.losses[:] = math.inf
    assert lr(one)["lowest"] == math.inf
    assert lr(one)["reason"] == "nothing_finite"


def test_the_best_batch_must_be_bracketed() -> None:
    three = scan([-4.0])
    for best, reason in ((0, "batch_edge"), (1, ""), (2, "batch_edge")):
        losses = np.concatenate([three.losses + 0.1 * abs(b - best) for b in range(3)], axis=1)
        many = Scan(("a",), ["g"], [1, 2, 4], LRS, losses, {"lr": np.repeat(three.x["lr"], 3, 1)}, losses > 1e9)
        assert (optimum(many, "lr", 0)["batch"], optimum(many, "lr", 0)["reason"]) == ([1, 2, 4][best], reason)


def test_a_step_limited_optimum_is_not_known() -> None:
    one = scan([-4.0])
    one.limited[0, 0, 4] = True
    assert optimum(one, "lr", 0)["reason"] == "step_limited"
    one.limited[:] = False
    one.limited[0, 0, 0] = True  # elsewhere it is left out of the fit
    one.losses[0, 0, 0] = 50
    assert optimum(one, "lr", 0, 9)["x"] == pytest.approx(-4.0)


def test_the_mean_of_parabolas_has_the_mean_vertex_and_the_interval_is_the_range_of_seeds() -> None:
    three = scan([-4.1, -4.0, -3.6])
    assert lr(three)["x"] == pytest.approx(-3.9)
    assert interval(vertices(three, "lr", 3)[1:, 0]) == pytest.approx([-4.1, -3.6])
    spread_of = three.losses[0, 0, 4].std(ddof=1)
    assert lr(three)["noise"] == pytest.approx(spread_of)


@pytest.mark.parametrize("count", [4, 5, 6, 9])
def test_the_interval_of_one_seed_holds_the_truth_as_often_as_it_says(count: int) -> None:
    """Also of four points, of whose residuals hardly anything is known."""
    rng, lrs, inside, refused = np.random.default_rng(count), np.arange(count) - (count - 1) / 2, 0, 0
    for _ in range(repeats := 300):
        losses = (4 + 0.3 * (lrs - 0.2) ** 2 + 0.01 * rng.standard_normal(count))[None, None, :, None]
        one = Scan(("a",), ["g"], [64], lrs, losses, {"lr": lrs[None, None, :, None]}, np.zeros(losses.shape, bool))
        refused += bool(optimum(one, "lr", 0)["reason"])
        low, high = interval(vertices(one, "lr")[1:, 0])
        inside += low <= 0.2 <= high
    assert refused == 0
    assert inside / repeats == pytest.approx(0.95, abs=0.03)


def test_three_points_say_nothing_of_their_error() -> None:
    """A parabola goes through any three: no noise may come out as a sure verdict."""
    lrs = np.array([-5.0, -4.0, -3.0])
    losses = np.stack([4 + 0.3 * (lrs - at) ** 2 for at in (-4.0, -4.0, -4.0)])[:, None, :, None]
    x = {name: np.broadcast_to(lrs[None, None, :, None], losses.shape) + by for by, name in enumerate(["norm", *DULL])}
    for name in DULL:
        x[name] = x[name] + np.arange(3)[:, None, None, None]
    one = Scan(("a",), ["g0", "g1", "g2"], [64], lrs, losses, x, np.zeros(losses.shape, bool))
    assert np.isnan(interval(vertices(one, "norm")[1:, 0])).all()
    found = spread(one, "norm", "size")
    assert (found["verdict"], found["why"]) == ("cannot tell", "3_points at g0, 3_points at g1, 3_points at g2")


def test_the_best_batch_is_part_of_what_is_not_sure() -> None:
    """Two batches, as good as each other, an octave apart."""
    lrs = np.arange(-6.0, -1.9, 0.5)
    noise = 0.01 * np.random.default_rng(0).standard_normal((1, 2, len(lrs), 1))
    away = lrs[None, None, :, None] - np.array([-4.5, -3.5])[None, :, None, None]
    losses = 4 + 0.3 * away**2 + noise
    x = {"lr": np.broadcast_to(lrs[None, None, :, None], losses.shape)}
    low, high = interval(vertices(Scan(("a",), ["g"], [1, 2], lrs, losses, x, losses > 9), "lr")[1:, 0])
    assert low < -4.4
    assert high > -3.6


def test_the_interval_shrinks_with_the_root_of_the_number_of_seeds() -> None:
    rng = np.random.default_rng(1)
    low, high = interval(vertices(scan([*(-4 + 0.2 * rng.standard_normal(64))]), "lr", 3)[1:, 0])
    assert (high - low) / 2 == pytest.approx(1.96 * 0.2 / 8, rel=0.25)


def test_seeds_are_paired_over_groups() -> None:
    """Each group's own interval is an octave wide, and the drift is the same for every seed."""
    moved = drift(scan([-4.4, -3.9, -3.4], [-4.4, -3.9, -3.4], [-4.2, -3.7, -3.2]), "size")
    assert moved["interval"] == pytest.approx([0.2, 0.2])
    assert moved["verdict"] == "transfers"


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ([-4.2, -4.1, -4.0], "transfers"),
        ([-5.2, -5.1, -5.0], "drifts"),
        ([-2.9, -3.0, -3.1], "drifts"),
        ([-5.0, -4.6, -4.0], "cannot tell"),
        ([-9.0, -9.0, -9.0], "cannot tell"),
    ],
)
def test_the_verdict_on_the_lr(last: list[float], verdict: str) -> None:
    assert drift(scan([-4.0, -4.0, -4.0], [-4.0] * 3, last), "size")["verdict"] == verdict


def test_every_size_must_stay_also_one_that_is_not_the_farthest() -> None:
    """The nearer one is known to octaves only."""
    found = drift(scan([-4.0] * 3, [-4.1] * 3, [-2.5, -4.0, -5.5]), "size")
    assert (found["verdict"], found["why"]) == ("cannot tell", "the intervals hold both")
    one = scan([-4.0] * 3, [-3.0, -4.0, -4.9], [-4.4, -4.0, -3.7])
    one.losses[:, :, LRS > -4] = math.inf  # the best of the mean is one lr at all sizes
    assert drift(one, "size")["verdict"] == "cannot tell"
    edge = drift(scan([-4.0] * 3, [-4.0] * 3, [-4.0, -1.9, -6.0]), "size")
    assert edge["why"] == "edge at g2 of a seed"


def test_one_of_several_sizes_outside_is_corrected_for_their_number() -> None:
    """Mean 1.0, half of the 95 % interval 0.50, of the 97.5 % interval 0.72."""
    moved = [-3.2, -3.0, -2.8]
    few = drift(scan([-4.0] * 3, moved, [-4.0] * 3), "size")
    assert few["interval"][0] > 0.5
    assert few["verdict"] == "cannot tell"


def test_the_regret_of_the_first_lr() -> None:
    assert drift(scan([-4.0, -4.0], [-4.0, -4.0], [-5.0, -5.0]), "size")["regret"] == pytest.approx(0.3)
    assert drift(scan([-4.0, -4.0], [-4.0, -4.0], [-4.0, -4.0]), "size")["regret"] == 0


def test_what_is_not_whole_is_left_out() -> None:
    part = scan([-4.0, -4.2, -3.0], [-4.0, -4.2, -3.0], [-4.0, -4.2, -3.0])
    part.losses[0, 0, 3, 2] = math.nan
    assert part.whole().losses.shape[-1] == 2
    assert drift(part, "size")["drift"] == pytest.approx(0)
    assert drift(part, "size")["seeds"] == 2
    part.losses[0, 0, 3, 1] = math.nan
    assert drift(part, "size")["why"] == "1 whole seed"


def law(norm: float, of_lr: float, noise: float = 0.0, seeds: int = 1, groups: int = 4, batches: int = 1) -> Scan:
    """Horizons at which the log2 of the best norm moves by `norm` octaves each, that of the best lr by `of_lr`."""
    rng, lrs = np.random.default_rng(3), np.arange(-7.0, 1.1, 0.5)
    shape = (groups, batches, len(lrs), seeds)
    t = np.arange(groups)[:, None, None, None]
    away = lrs[None, None, :, None] - (-2.0 + of_lr * t)  # from the best lr
    losses = 4 - 0.2 * t + 0.05 * away**2 + 0.05 * np.abs(np.arange(batches) - batches // 2)[None, :, None, None]
    losses = losses + noise * rng.standard_normal(shape)
    x = {"norm": 6 + norm * t + away + np.zeros(shape)}
    for name, power in DULL.items():
        x[name] = np.broadcast_to(lrs[None, None, :, None] + power * (12 + t), shape)
    names = [f"2^{19 + i}" for i in range(groups)]
    return Scan(("a",), names, [*range(batches)], lrs, losses, x, np.zeros(shape, bool))


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(
    ("norm", "of_lr", "noise", "verdict"),
    [
        (0.0, -0.3, 0.001, "transfers"),
        (0.4, 0.0, 0.001, "drifts"),
        (0.0, -0.3, 0.3, "cannot tell"),
        (0.4, 0.0, 0.3, "cannot tell"),
        (0.25, -0.25, 0.02, "cannot tell"),  # as far
    ],
)
def test_the_verdict_on_the_norm(norm: float, of_lr: float, noise: float, verdict: str, seeds: int) -> None:
    found = spread(law(norm, of_lr, noise, seeds), "norm", "tokens")
    assert found["verdict"] == verdict, found
    if noise == 0.001:
        away = np.arange(4).std()
        for name, moves in {"norm": norm, **{name: of_lr + power for name, power in DULL.items()}}.items():
            low, high, regret = found["spreads"][name][1:]
            assert found["spreads"][name][0] == pytest.approx(abs(moves) * away, abs=0.03)
            assert 0 <= low <= high
            assert regret == pytest.approx(0.05 * (moves * away) ** 2, abs=0.004)  # of the parabola 0.05 x^2


def test_the_verdict_on_the_norm_needs_brackets_groups_and_the_norm() -> None:
    assert spread(law(0.0, -0.3, groups=3), "norm", "tokens")["why"] == "3 of the 4 that it takes"
    assert spread(law(0.0, -0.3, groups=3), "norm", "size")["verdict"] == "transfers"
    assert "edge at 2^22" in spread(law(0.0, -2.0), "norm", "tokens")["why"]
    limited = law(0.0, -0.3)
    limited.limited[0] = True
    assert spread(limited, "norm", "tokens")["why"] == "step_limited at 2^19"
    one = law(0.0, -0.3, batches=3)
    one.losses[:, 1] += 1
    assert "batch_edge" in spread(one, "norm", "tokens")["why"]
    assert "not measured" in spread(law(0.0, -0.3), "other", "tokens")["why"]
    one.losses[:] = math.nan
    assert spread(one, "norm", "tokens")["why"] == "no seed is whole"


def test_every_other_coordinate_must_be_beaten() -> None:
    one = law(0.05, -0.3, 0.001)
    assert spread(one, "norm", "tokens")["verdict"] == "transfers"
    one.x["other"] = one.x["norm"] - 0.05 * np.arange(4)[:, None, None, None]
    found = spread(one, "norm", "tokens")
    assert (found["verdict"], found["rival"]) == ("drifts", "other")


@pytest.mark.parametrize(("slope", "power"), [(0.05, 0.0), (-0.25, 0.0), (0.05, 0.5), (0.05, 1.0)])
def test_a_norm_that_hardly_reacts_to_the_lr_does_not_transfer_for_nothing(slope: float, power: float) -> None:
    """It is few octaves wide, and follows lr x steps^power: its one value costs exactly as much."""
    one = law(0.0, -0.3, 0.001)
    (dull,) = (name for name, of in DULL.items() if of == power)
    one.x["norm"] = slope * one.x[dull]
    found = spread(one, "norm", "tokens")
    assert found["spreads"]["norm"][0] < min(found["spreads"][name][0] for name in DULL)
    assert found["spreads"]["norm"][3] == pytest.approx(found["spreads"][dull][3])
    assert found["verdict"] == "cannot tell"


def test_the_lr_that_is_farthest_counts_and_two_sizes_are_too_few() -> None:
    there = drift(scan([-4.0, -4.0], [-5.0, -5.0], [-4.0, -4.0]), "size")
    assert (there["verdict"], there["to"], there["drift"]) == ("drifts", "g1", pytest.approx(-1))
    assert drift(scan([-4.0, -4.0], [-4.0, -4.0]), "size")["why"] == "2 of the 3 that it takes"


def test_sensitivity_is_the_octaves_within_one_percent() -> None:
    lrs = np.arange(-6.0, -1.9, 0.01)
    assert sensitivity(lrs, 4 + 0.16 * (lrs + 4) ** 2) == pytest.approx(1.0, abs=0.01)  # 0.16 x 0.5^2 = 4 / 100
    assert sensitivity(LRS, parabola(-4.0, curvature=0.32)) == pytest.approx(2 * 0.5 * 0.04 / 0.08)
    assert sensitivity(LRS, np.full(len(LRS), 3.0)) == LRS[-1] - LRS[0]
    assert math.isnan(sensitivity(LRS, np.full(len(LRS), math.inf)))  # what diverges everywhere is not robust
    losses = parabola(-4.0)
    losses[5:] = math.inf
    assert sensitivity(LRS, losses) == pytest.approx(0.5 * 0.04 / 0.075)
