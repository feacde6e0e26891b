"""The best lr, its interval and the verdict, on losses whose answer is known."""

import math
from pathlib import Path

import numpy as np
import pytest

from abovemup.studies.transfer import Array, Curve, best, bootstrap, draw, drift, interval, row, sentence

LRS = np.arange(-6.0, -1.9, 0.5)


def parabola(at: float, curvature: float = 0.3, floor: float = 4.0) -> Array:
    return floor + curvature * (LRS - at) ** 2


def curve(*bests: float, size: str = "64", arm: str = "a") -> Curve:
    """A seed for each best."""
    return Curve((arm,), size, LRS, np.stack([parabola(at) for at in bests], axis=1))


@pytest.mark.parametrize("at", [-4.0, -3.9, -3.76, -4.24, -5.3])
def test_the_vertex_of_a_parabola_lies_between_the_points(at: float) -> None:
    found = best(LRS, parabola(at))
    assert found.vertex == pytest.approx(at, abs=1e-9)
    assert found.grid == LRS[np.argmin(np.abs(LRS - at))]
    assert found.loss == pytest.approx(4 + 0.3 * (found.grid - at) ** 2)
    assert not found.edge


def test_no_vertex_at_an_edge_or_beside_a_divergence() -> None:
    for at, grid in ((-9.0, -6.0), (0.0, -2.0)):
        found = best(LRS, parabola(at))
        assert (found.grid, found.vertex, found.edge) == (grid, grid, True)
    losses = parabola(-4.1)
    losses[5:] = math.inf
    found = best(LRS, losses)
    assert (found.grid, found.vertex, found.edge) == (-4.0, -4.0, False)
    assert best(LRS, np.full(len(LRS), math.inf)).loss == math.inf
    flat = best(LRS, np.where(np.abs(LRS + 4) <= 0.5, 1.0, 2.0))
    assert flat.grid - 0.5 <= flat.vertex <= flat.grid + 0.5


def test_the_mean_of_parabolas_has_the_mean_vertex_and_the_interval_is_the_range_of_seeds() -> None:
    found = row(curve(-4.1, -4.0, -3.6))
    assert found["best"]["vertex"] == pytest.approx(-3.9)
    assert found["interval"] == pytest.approx([-4.1, -3.6])
    assert (found["seeds"], found["missing"]) == (3, 0)


def test_the_interval_shrinks_with_the_root_of_the_number_of_seeds() -> None:
    rng = np.random.default_rng(1)
    low, high = interval(bootstrap(curve(*(-4 + 0.2 * rng.standard_normal(64))), list(range(64))))
    assert (high - low) / 2 == pytest.approx(1.96 * 0.2 / 8, rel=0.25)


def test_seeds_are_paired_over_sizes() -> None:
    """Each size's own interval is an octave wide, and the drift is the same for every seed."""
    first, last = curve(-4.4, -3.9, -3.4), curve(-4.2, -3.7, -3.2, size="256")
    moved = drift(first, last)
    assert row(first)["interval"] == pytest.approx([-4.4, -3.4])
    assert moved["drift"] == pytest.approx(0.2)
    assert moved["interval"] == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        ((0.1, 0.2, -0.3), "transfers"),
        ((-1.0, -0.8, -1.2), "drifts"),
        ((0.8, 0.9, 0.7), "drifts"),
        ((0.2, 0.4, 0.9), "cannot tell"),
        ((-0.2, -0.4, -0.9), "cannot tell"),
    ],
)
def test_the_verdict_is_about_one_step_of_the_grid(by: tuple[float, ...], verdict: str) -> None:
    moved = drift(curve(-4.0, -4.0, -4.0), curve(*(-4.0 + d for d in by)))
    assert moved["verdict"] == verdict
    assert moved["step"] == 0.5
    assert ("why" in moved) == (verdict == "cannot tell")


def test_regret_is_the_loss_given_up_at_the_last_size() -> None:
    moved = drift(curve(-4.0, -4.0), curve(-5.0, -5.0))
    assert moved["regret"] == pytest.approx(0.3)
    assert drift(curve(-4.0, -4.0), curve(-4.0, -4.0))["regret"] == 0


def test_an_edge_claims_nothing_and_an_unfinished_seed_is_left_out() -> None:
    edge = drift(curve(-4.0, -4.0), curve(-9.0, -9.0))
    assert edge["verdict"] == "cannot tell"
    assert "drift" not in edge
    assert "edge" in edge["why"]
    part = curve(-4.0, -4.2, -3.0)
    part.losses[3, 2] = math.nan
    assert (row(part)["seeds"], row(part)["missing"]) == (2, 1)
    assert row(part)["best"]["vertex"] == pytest.approx(-4.1)
    assert drift(part, curve(-4.0, -4.2, -3.0))["drift"] == pytest.approx(0)
    part.losses[3, 1] = math.nan
    assert drift(part, curve(-4.0, -4.2, -3.0))["why"] == "1 whole seeds"
    part.losses[3, 0] = math.nan
    assert "best" not in row(part)


def test_the_sentence_names_every_arm() -> None:
    drifts = [
        drift(curve(-4.0, -4.0, arm="one"), curve(-4.0, -4.0)),
        drift(curve(-4.0, -4.0, arm="two"), curve(-5.0, -5.0)),
        drift(curve(-4.0, -4.0, arm="three"), curve(-9.0, -9.0)),
    ]
    said = sentence(drifts, "from 64 to 256")
    assert "transfers: one; drifts: two; cannot tell: three (best at the edge" in said
    assert "within 0.5 octave" in said


def test_the_figure_of_what_is_there(tmp_path: Path) -> None:
    part = curve(-4.0, -4.2, size="256")
    part.losses[:] = math.nan
    draw([curve(-4.0, -4.2), part, curve(-9.0, -9.0, arm="b")], "model.width", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"figure.png"}
