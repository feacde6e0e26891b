"""Power laws and their intervals: exact on exact data, and true as often as they say."""

import math

import numpy as np
import pandas as pd
import pytest

from abovemup.analysis import rules
from abovemup.analysis.norm_fit import FitRefused

BATCHES, HORIZONS = 2.0 ** np.arange(12, 18), 2.0 ** np.arange(24, 32, 2)


def table(noise: float, rng: np.random.Generator, alpha: float = 0.62, beta: float = -0.56) -> pd.DataFrame:
    grid = pd.DataFrame([{"batch": b, "tokens": t} for b in BATCHES for t in HORIZONS])
    exact = alpha * np.log2(grid.batch) + beta * np.log2(grid.tokens) + 2.3
    return grid.assign(lr=2 ** (exact + rng.normal(0, noise, len(grid))))


def test_an_exact_law_is_recovered() -> None:
    law = rules.power_law("lr", table(0.0, np.random.default_rng(0)), ["batch", "tokens"])
    assert law.exponents == pytest.approx({"batch": 0.62, "tokens": -0.56, "constant": 2.3}, abs=1e-10)
    value, interval, _ = law.predict({"batch": 2.0**20, "tokens": 2.0**40})
    assert value == pytest.approx(0.62 * 20 - 0.56 * 40 + 2.3)
    assert interval == pytest.approx([value, value], abs=1e-6)
    assert law.beyond({"batch": 2.0**20, "tokens": 2.0**40}) == pytest.approx({"batch": 3, "tokens": 10})
    assert law.beyond({"batch": 2.0**13, "tokens": 2.0**23}) == pytest.approx({"tokens": 1})


def test_of_200_draws_the_truth_lies_in_the_intervals_about_as_often_as_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "DRAWS", 200)
    rng, ols, drawn, at, more = np.random.default_rng(1), [], [], [], []
    for _ in range(200):
        rows = table(0.3, rng)
        law = rules.power_law("lr", rows, ["batch", "tokens"])
        ols.append(
            [low < truth < high for truth, (low, high) in zip((0.62, -0.56), law.intervals().values(), strict=False)]
        )
        truth = 0.62 * 14 - 0.56 * 34 + 2.3
        _, (low, high), single = law.predict({"batch": 2.0**14, "tokens": 2.0**34})
        at.append(low < truth < high)
        more.append(single[0] < truth + rng.normal(0, 0.3) < single[1])
        low, high = rules.over_rows(law, rows)["tokens"]
        drawn.append(low < -0.56 < high)
    assert all(0.91 <= share <= 0.985 for share in np.mean(ols, axis=0))
    assert 0.91 <= np.mean(at) <= 0.985
    assert 0.91 <= np.mean(more) <= 0.985
    assert 0.91 <= np.mean(drawn) <= 0.985


def test_rows_of_a_run_count_as_one() -> None:
    """Of 30 runs with 12 rows each, whose scatter is the run's: as single rows they would know thrice too much."""
    rng, inside = np.random.default_rng(2), {"run": [], None: []}
    grid = pd.DataFrame([{"lr": 2.0**i, "batch": b, "run": f"{i} {b}"} for i in range(-5, 0) for b in BATCHES])
    for _ in range(200):
        runs = grid.assign(own=rng.normal(0, 0.15, len(grid))).merge(
            pd.DataFrame({"tokens": 2.0 ** np.arange(20, 32)}), "cross"
        )
        exact = 0.5 * np.log2(runs.lr) - 0.6 * np.log2(runs.batch) + 0.6 * np.log2(runs.tokens)
        rows = runs.assign(norm=2 ** (exact + runs.own + rng.normal(0, 0.02, len(runs))))
        for by, found in inside.items():
            low, high = rules.power_law("norm", rows, ["lr", "batch", "tokens"], by).intervals()["lr"]
            found.append(low < 0.5 < high)
    assert 0.9 <= np.mean(inside["run"]) <= 0.985
    assert np.mean(inside[None]) < 0.6


def test_the_error_of_lr_over_tokens_is_propagated() -> None:
    rng, seen, told = np.random.default_rng(2), [], []
    for _ in range(200):
        batch = pd.DataFrame({"tokens": HORIZONS}).assign(
            batch=lambda t: 2 ** (0.45 * np.log2(t.tokens) + rng.normal(0, 0.3, 4))
        )
        laws = rules.power_law("lr", table(0.3, rng), ["batch", "tokens"]), rules.power_law("batch", batch, ["tokens"])
        exponent, error = rules.lr_over_tokens(*laws)
        seen.append(exponent)
        told.append(error**2)
    assert np.mean(seen) == pytest.approx(-0.56 + 0.62 * 0.45, abs=0.01)
    assert math.sqrt(np.mean(told)) == pytest.approx(np.std(seen), rel=0.2)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (slice(0, 3), "few_points"),
        (slice(0, 4), "no_spread"),  # one batch size
    ],
)
def test_a_law_without_the_grid_for_it_is_refused(rows: slice, reason: str) -> None:
    with pytest.raises(FitRefused) as refusal:
        rules.power_law("lr", table(0.1, np.random.default_rng(0))[rows], ["batch", "tokens"])
    assert refusal.value.reason == reason


def test_first_horizons_are_the_first_rows_in_the_band() -> None:
    """Of each seed; not step 0, where log2 of the tokens is none; not of a run whose lr decays, or that diverged."""
    curves = pd.DataFrame({"batch": 8, "lr": 0.5, "tokens": [64, 16, 32, 128], "x": [7.1, 6.0, 6.9, 7.5]})
    curves = curves.assign(constant=True, diverged=False)
    others = [{"lr": 0.25, "x": 5.0}, {"x": 7.0, "tokens": [0, 1, 2, 3]}, {"constant": False}, {"diverged": True}]
    curves = pd.concat(curves.assign(run=i, **other) for i, other in enumerate([{}, {}, *others]))
    found = rules.first_horizons(curves, {"log2_norm": 7.0, "half_width": 0.2})
    assert dict(zip(found.run, found.tokens, strict=True)) == {0: 32, 1: 32, 3: 1}


def scan(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for t in HORIZONS:
        for b in BATCHES[:4]:
            best = 0.62 * math.log2(b) - 0.56 * math.log2(t) + 2.3
            for lr in np.arange(-16, 0, 0.5):
                x = 7 + 0.8 * (lr - best)
                loss = 4 + 0.2 * (x - 7) ** 2 + rng.normal(0, 0.005)
                rows.append(
                    {"run": f"{b}{lr}", "model": "m", "tokens": t, "batch": b, "lr": 2.0**lr, "x": x, "loss": loss}
                )
    return pd.DataFrame(rows).assign(std=0.0)


def test_the_bootstrap_over_runs_holds_the_truth_and_is_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DRAWS", 30)
    points = scan(np.random.default_rng(0))
    first, again = rules.over_runs(points, None), rules.over_runs(points, None)
    assert first == again
    low, high = first["lr"]["tokens"]
    assert low < -0.56 < high < low + 0.5


def test_draws_that_refuse_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many resampled grids have no law, the interval of the others would be a choice."""
    monkeypatch.setattr(rules, "DRAWS", 40)
    refused = rules._bootstrap(lambda rng: {"lr": {"batch": rng.random()}} if rng.random() < 0.8 else {})
    assert refused == {}
    low, high = rules._bootstrap(lambda rng: {"lr": {"batch": rng.random()}})["lr"]["batch"]
    assert 0 < low < 0.1 < 0.9 < high < 1


def test_one_batch_size_says_nothing_on_the_best_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DRAWS", 5)
    points = scan(np.random.default_rng(0))
    assert rules.over_runs(points[points.batch == BATCHES[0]], None) == {}
