"""Parabolas of loss over log2(norm): exact on exact data, equal to a slow readable twin, and refusals for the rest."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from abovemup.analysis.norm_fit import (
    FitRefused,
    band,
    best_batches,
    initial_loss,
    lowest,
    nearest_lr,
    optima,
    parabola,
    with_variants,
)

X = np.array([4.0, 5.0, 5.5, 6.2, 7.0, 7.9, 8.3, 9.0])
NONE = np.zeros(len(X))


def twin(x: list[float], loss: list[float], std: list[float], c: float | None, k: int) -> tuple[float, float]:
    """PAPER.md 5.2 as it reads, by the normal equations: (vertex, loss there)."""
    seed = min(range(len(x)), key=lambda i: loss[i])
    near = sorted(range(len(x)), key=lambda i: abs(x[i] - x[seed]))
    used, rest = near[:k], near[k:]
    for side in (-1, 1):
        there = [i for i in rest if side * (x[i] - x[seed]) > 0]
        if there and all(side * (x[i] - x[seed]) <= 0 for i in used):
            used.remove(max(used, key=lambda i: abs(x[i] - x[seed])))
            used.append(there[0])
    powers, origin = (2, 0.0) if c is not None else (3, x[seed])  # the normal equations want it near the points
    normal, right = np.zeros((powers, powers)), np.zeros(powers)
    for i in used:
        weight = 1.0 if not any(std) else 1 / max(std[i] ** 2, 1e-12)
        row = np.array([(x[i] - origin) ** 2, x[i] - origin, 1.0][:powers])
        normal += weight * np.outer(row, row)
        right += weight * row * (loss[i] - (c or 0))
    found = np.linalg.solve(normal, right)
    a, b, c0 = found[0], found[1], c if c is not None else found[2]
    return origin - b / (2 * a), c0 - b**2 / (4 * a)


@pytest.mark.parametrize("fixed", [True, False])
@given(
    a=st.floats(0.01, 2),
    x0=st.floats(5.3, 8.1),
    y0=st.floats(1, 9),
    k=st.integers(3, 8),
    order=st.permutations(range(8)),
)
def test_an_exact_parabola_is_recovered(a: float, x0: float, y0: float, k: int, order: list[int], fixed: bool) -> None:
    x = X[order]
    loss = y0 + a * (x - x0) ** 2
    found = parabola(x, loss, NONE, y0 + a * x0**2 if fixed else None, k=k)
    assert found["x"] == pytest.approx(x0, abs=1e-9)
    assert (found["loss"], found["a"]) == pytest.approx((y0, a), rel=1e-10, abs=1e-10)
    assert found["points"] == k
    assert found["x_error"] < 1e-5 or math.isnan(found["x_error"])


@pytest.mark.parametrize(("fixed", "weighted", "k"), [*itertools.product([True, False], [True, False], [3, 5, 7])])
def test_the_twin_agrees(fixed: bool, weighted: bool, k: int) -> None:
    rng = np.random.default_rng(k)
    for _ in range(50):
        x = np.sort(rng.uniform(3, 10, size=12))
        loss = 4 + 0.2 * (x - rng.uniform(5, 8)) ** 2 + rng.normal(0, 0.02, size=12)
        std = rng.uniform(0.01, 0.1, size=12) if weighted else np.zeros(12)
        c = 11.765 if fixed else None
        try:
            found = parabola(x, loss, std, c, k=k)
        except FitRefused:
            continue
        assert (found["x"], found["loss"]) == pytest.approx(twin([*x], [*loss], [*std], c, k), rel=1e-7)


def test_a_seed_that_is_not_bracketed_gets_the_nearest_point_of_the_missing_side() -> None:
    x = np.array([1.0, 4.0, 4.1, 4.2, 4.3])
    loss = np.array([9.0, 3.0, 3.05, 3.2, 3.4])
    found = parabola(x, loss, np.zeros(5), None, k=4)
    assert (found["x"], found["loss"]) == pytest.approx(twin([*x], [*loss], [0] * 5, None, 4))
    chosen = np.array([0, 1, 2, 3])  # instead of 1 to 4
    assert found["a"] == pytest.approx(np.polyfit(x[chosen], loss[chosen], 2)[0])


def test_errors_are_the_spread_of_repeated_fits() -> None:
    rng = np.random.default_rng(0)
    fits = [parabola(X, 4 + 0.2 * (X - 6.5) ** 2 + rng.normal(0, 0.01, 8), NONE, None, k=8) for _ in range(2000)]
    assert np.mean([f["x_error"] for f in fits]) == pytest.approx(np.std([f["x"] for f in fits]), rel=0.1)
    assert np.mean([f["loss_error"] for f in fits]) == pytest.approx(np.std([f["loss"] for f in fits]), rel=0.1)


@pytest.mark.parametrize("fixed", [True, False])
def test_of_200_draws_the_vertex_lies_in_its_95_percent_interval_about_as_often(fixed: bool) -> None:
    rng, inside = np.random.default_rng(3), []
    c = 4 + 0.2 * 6.5**2 if fixed else None
    half = stats.t.ppf(0.975, len(X) - (2 if fixed else 3))
    for _ in range(200):
        found = parabola(X, 4 + 0.2 * (X - 6.5) ** 2 + rng.normal(0, 0.02, 8), NONE, c, k=8)
        inside.append(
            [abs(found[name] - truth) < half * found[f"{name}_error"] for name, truth in (("x", 6.5), ("loss", 4))]
        )
    assert all(0.91 <= share <= 0.985 for share in np.mean(inside, axis=0))


def test_the_vertex_is_judged_against_all_points_and_marked_beyond_those_fitted() -> None:
    x, loss = np.array([5.0, 5.5, 6.0]), np.array([4.1, 4.0, 4.05])
    with pytest.raises(FitRefused, match=r"outside the points, 2\^5.00 to 2\^6.00") as refusal:
        parabola(x, loss, np.zeros(3), 5.0)
    assert refusal.value.reason == "outside"
    more = parabola(np.array([1.0, *x, 10.0]), np.array([4.9, *loss, 4.9]), np.zeros(5), 5.0, k=3)
    assert more["beyond"]
    assert not 5 <= more["x"] <= 6


@pytest.mark.parametrize(
    ("losses", "lrs", "reason", "advice"),
    [
        ([5.0, 4.0, 3.0, 2.9], [1, 2, 4, 8], "edge", "extend lr to 32"),
        ([2.9, 3.0, 4.0, 5.0], [1, 2, 4, 8], "edge", "extend lr to 0.25"),
        ([5.0, 4.0, 2.9, math.inf], [1, 2, 4, 8], "edge", "add lr between 4 and 8"),
        ([3.0, 2.9, math.nan, math.inf], [1, 2, 4, 8], "few_points", "at least 3"),
        ([math.nan, math.inf, math.nan, math.inf], [1, 2, 4, 8], "nothing_finite", "lower the lr"),
        ([4.0, 3.0, 2.0, 1.0], [1, 2, 4, 8], "edge", "extend"),
        ([2.0, 3.0, 2.0, 1.0], [1, 2, 4, 8], "edge", "extend"),
        ([3.0, 2.9, 2.95, 2.8], [1, 4, 8, 2], "edge", "largest lr or norm: add lr between 2 and 4"),
        ([3.0, 3.0, 3.0, 3.0], [1, 2, 4, 8], "flat", "every loss is 3"),
    ],
)
def test_refusals_name_the_reason_and_the_fix(losses: list[float], lrs: list[int], reason: str, advice: str) -> None:
    x, lr = np.array([1.0, 2.0, 3.0, 4.0]), np.array(lrs, float)
    with pytest.raises(FitRefused, match=advice) as refusal:
        parabola(x, np.array(losses), np.zeros(4), None, lr)
    assert refusal.value.reason == reason


def test_a_hump_is_concave() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    with pytest.raises(FitRefused) as concave:
        parabola(x, np.array([3.0, 3.5, 2.99, 3.5, 3.0]), np.zeros(5), None)
    assert concave.value.reason == "concave"


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_never_best(order: tuple[int, ...], bad: float) -> None:
    """Case 86: comparisons with nan are false, so that a minimum would depend on the order."""
    losses, x = np.array([bad, 3.0, 2.9, 3.1]), np.array([9.0, 1.0, 2.0, 3.0])
    index = list(order)
    assert losses[index][lowest(x[index], losses[index], np.zeros(4))] == 2.9


def test_ties_go_to_the_smaller_std_and_then_to_the_larger_norm() -> None:
    x, loss = np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 3.0, 3.0, 5.0])
    assert lowest(x, loss, np.zeros(4)) == 2
    assert lowest(x, loss, np.array([0.0, 0.1, 0.2, 0.0])) == 1


def test_the_nearest_lr_is_of_all_runs_and_none_that_diverged() -> None:
    found = parabola(X, 4 + 0.2 * (X - 6.5) ** 2, NONE, None)
    loss = 4 + 0.2 * (X - 6.5) ** 2
    lr = np.arange(8.0)
    assert nearest_lr(X, loss, lr, found) == 3
    loss[3] = math.nan
    assert nearest_lr(X, loss, lr, found) == 4


def test_the_intercept_comes_from_vocabulary_and_width() -> None:
    assert initial_loss(1024, 64) == math.log(1024) + 1 / 128


def scan(optimum: dict[tuple[float, float], tuple[float, float]], seeds: int = 1) -> pd.DataFrame:
    """(tokens, batch) -> (x, loss) at the vertex; x = 6 + log2 lr, and lr on the grid of whole octaves."""
    rows = [
        {"run": f"{t}-{b}-{e}-{s}", "model": "m", "tokens": t, "batch": b, "lr": 2.0**e, "x": 6.0 + e, "std": 0.0}
        | {"loss": y + 0.1 * (6 + e - x) ** 2 + 0.001 * (s - (seeds - 1) / 2)}
        for (t, b), (x, y) in optimum.items()
        for e in range(-5, 6)
        for s in range(seeds)
    ]
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


def test_band_over_horizons_and_what_it_leaves_open() -> None:
    points = scan(
        {(8, 1): (6, 3), (8, 2): (6.5, 2.9), (8, 4): (7, 3.1), (16, 1): (5, 2.9), (16, 2): (5.5, 2.5), (16, 4): (7, 3)}
    )
    best = best_batches(optima(points, None))
    assert best.batch.tolist() == [2, 2]
    answer = band(best, points)
    assert (answer["log2_norm"], answer["half_width"]) == pytest.approx((6.0, 0.5))
    inside = [p for p in points.itertuples() if abs(p.x - 6) <= 0.5 and p.tokens == 8]
    assert answer["losses_inside"][0]["highest"] == max(p.loss for p in inside)


def test_a_batch_at_the_edge_or_a_lower_one_that_was_refused_is_no_best_batch() -> None:
    points = scan({(8, 1): (6, 3), (8, 2): (6.5, 2.9), (16, 1): (5, 2.9), (16, 2): (13, 2.5), (16, 4): (7, 3)})
    best = best_batches(optima(points, None))
    assert best.reason.tolist() == ["batch_edge", "batch_unknown"]
    assert "extend lr to" in best.advice.iloc[1]
    with pytest.raises(FitRefused, match="batch"):
        band(best, points)


def test_seeds_of_one_lr_are_averaged_and_none_weighs_more_by_chance() -> None:
    """Two seeds that happen to agree at one lr are no better known than the others."""
    points = scan({(8, 1): (6.3, 3)}, seeds=3)
    found = optima(points, None).iloc[0]
    assert (found.x, found.loss, found.runs) == pytest.approx((6.3, 3.0, 11))
    noisy = points.assign(loss=points.loss + 0.01 * np.random.default_rng(0).standard_normal(len(points)))
    mean = noisy.groupby("lr", as_index=False).agg({"loss": "mean", "x": "first", "std": "first"})
    alone = optima(mean.assign(model="m", tokens=8, batch=1), None).iloc[0]
    assert optima(noisy, None).iloc[0].x == pytest.approx(alone.x)


@settings(max_examples=20, deadline=None)
@given(st.floats(5.6, 6.9))
def test_variants_share_one_optimum_where_there_is_no_doubt(x: float) -> None:
    points = scan({(8, 1): (x, 3.0)})
    found = with_variants({"smoothed": points, "raw": points}, {"m": 3 + 0.1 * x**2}).iloc[0]
    assert found.variants == 6
    assert with_variants({"smoothed": points, "raw": points}, None).variants.tolist() == [4]
    assert found.lr == pytest.approx(2.0 ** round(x - 6), rel=1e-9) or abs((x - 6) % 1 - 0.5) < 0.01
