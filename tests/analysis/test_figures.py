"""Figures are tables: what is drawn are the runs and the fits, in both renderers; what cannot be drawn says why."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from abovemup.analysis import figures, render, results, rules
from abovemup.analysis.norm_fit import FitRefused
from abovemup.analysis.report import bound
from abovemup.analysis.sources import Source, open_arms, open_source
from abovemup.cli.main import run
from abovemup.config.compose import compose
from abovemup.config.errors import RequestError
from abovemup.config.keys import flatten
from tests.analysis.test_sources import VERTEX, write, write_grid


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("grid"), step=1.0)


@pytest.fixture(scope="module")
def opened(grid: Path) -> tuple[Source, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "DRAWS", 5)
        source = open_source(grid)
        return source, results.rule(source)


def test_what_is_drawn_is_what_was_run_and_fitted(opened: tuple[Source, dict[str, Any]]) -> None:
    source, answer = opened
    found, left_out = figures.drawn(figures.FIGURES, source, answer)
    assert [*found] == [f.__name__ for f in figures.FIGURES if f is not figures.optima_over_models]
    assert left_out == ["Not drawn, optima over models: there is one model."]
    scan = source.points()["smoothed"]
    runs = found["parabolas"].table.query("series == 'runs'")
    scan = scan[np.isfinite(scan.loss)]  # the others are walls: no better than untrained
    assert sorted(zip(runs.x, runs.y, strict=True)) == sorted(zip(scan.x, scan.loss, strict=True))
    assert found["parabolas"].table.row.nunique() * found["parabolas"].table.column.nunique() == 25
    best = found["optima_over_horizons"].table.query("opacity == 1")
    assert best.x.to_numpy() == pytest.approx(VERTEX, abs=0.1)
    assert best["size"].min() == found["optima_over_horizons"].table["size"].max()
    low, high = found["optima_over_horizons"].band or (0, 0)
    assert (low + high) / 2 == pytest.approx(answer["band"]["log2_norm"])
    law = found["lr_over_batch"].table.query("mode == 'lines' and series == '2^20 law'")
    assert np.polyfit(law.x, law.y, 1)[0] == pytest.approx(answer["rules"]["lr"]["exponents"]["batch"])
    assert set(law.column) == {"w64-d2"}
    assert set(found["norm_growth"].table.groupby("run").x.max()) == {20.0}
    assert found["norm_growth"].table[["colour", "dash", "series"]].nunique().tolist() == [4, 4, 16]
    fitted = found["first_horizon"].table.query("dash == 'fitted'").groupby("series")[["x", "y"]].agg(np.ptp)
    slopes = (fitted.y / fitted.x)[fitted.x > 0]
    assert slopes.to_numpy() == pytest.approx(-answer["rules"]["first_horizon"]["exponents"]["tokens"])
    dots = found["batch_over_tokens"].table.query("series == 'best batch'")
    assert dots.y.tolist() == np.log2(dots.batch).tolist()
    lines = found["batch_over_tokens"].table.query("mode == 'lines'").pivot(index="x", columns="series", values="y")
    assert (lines["95 % low"] < lines["law"]).all()
    assert (lines["law"] < lines["95 % high"]).all()
    assert re.search(r"D\^\(0\.\d+ \+- ", found["batch_over_tokens"].title)
    variants, optima = found["optima_by_variant"].table, found["optima_over_horizons"].table
    assert set(variants.column) == {"smoothed, lowest point", "smoothed, parabola"}
    fits = variants[variants.column == "smoothed, parabola"]
    assert sorted(fits.x) == sorted(optima.x)
    assert fits[fits.opacity == 1].x.tolist() == optima[optima.opacity == 1].x.tolist()


def test_both_renderers_draw_all_of_it_and_tell_series_apart_without_colour(
    opened: tuple[Source, dict[str, Any]], tmp_path: Path
) -> None:
    for name, figure in figures.drawn(figures.FIGURES, *opened)[0].items():
        traces = list(render.traces(figure))
        assert sum(len(points) for *_, points in traces) == len(figure.table)
        drawn = render.html(figure, name)
        data = json.loads(re.search(r'"' + name + r'",\s*(\[.*?\]),\s*\{"template"', drawn, re.S)[1])  # type: ignore[index]
        assert [trace["y"] for trace in data] == [points.y.tolist() for *_, points in traces]
        assert data[0]["text"][0] or "lines" in data[0]["mode"]
        styles = [(style["marker"], style["dash"]) for *_, style, _points in traces]
        assert [(trace["marker"]["symbol"], trace["line"]["dash"]) for trace in data] == styles
        assert name != "norm_growth" or len({dash for _, dash in styles}) == 4
        markers: dict[str, set[str]] = {}
        for *_, style, _points in traces:
            markers.setdefault(style["colour"], set()).add(style["marker"])
        assert all(len(each) == 1 for each in markers.values())
        assert len({next(iter(each)) for each in markers.values()}) == len(markers)
        if name in ("norm_against_loss", "optima_over_horizons"):  # a shade, a band
            suffix, start = (".png", b"\x89PNG") if name == "norm_against_loss" else (".pdf", b"%PDF")
            render.save(figure, tmp_path / f"{name}{suffix}")
            assert (tmp_path / f"{name}{suffix}").read_bytes()[:4] == start


def test_layouts_of_the_roles_rates(tmp_path: Path) -> None:
    """27 layouts, whose best are known; one lr for all roles is no layout."""
    grid = [(a, b, c) for a in (1, 4, 16) for b in (1, 4, 16) for c in (1, 4, 16)]
    for a, b, c in grid:
        scale = {"embedding": float(a), "hidden": float(b), "head": float(c), "gain": 1.0, "bias": 1.0}
        lr = -5.0 + 0.25 * (np.log2(b) != 4) + 0.01 * a + 0.001 * c
        write(tmp_path / f"{a}-{b}-{c}", float(lr), optimizer__lr_scale=scale, optimizer__lr=2.0**-5)
    with pytest.raises(RequestError, match=r"mixes optimizer\.lr_scale\.embedding"):
        open_source(tmp_path)
    source = open_arms(tmp_path)[""]
    assert int(source.rows.drop_duplicates("run").lr.notna().sum()) == 3
    table = figures.layout(source.points()["smoothed"]).table
    last = table[(table.row == "2^20") & table.y.notna()]
    ranked = last.groupby("line").agg(text=("text", "first"), series=("series", "first"))
    losses = ranked.text.str.extract(r"loss ([\d.]+)")[0].astype(float)
    assert (ranked.series == "3 best").sum() == 3
    assert losses[ranked.series == "3 best"].max() <= losses[ranked.series == "others"].min()
    one = last[last.line == last.line.iloc[0]].sort_values("x")
    assert len(one) == 3
    with pytest.raises(FitRefused, match="one lr for all roles"):
        figures.layout(source.points()["smoothed"].query("lr_in == lr_out and lr_in == lr_hidden"))


def test_momenta_and_schedules_are_arms(tmp_path: Path) -> None:
    for momentum in (0.0, 0.9):
        for lr in np.arange(-6.0, 0.0):
            write(tmp_path / f"m{momentum}lr{lr}", float(lr), 16, optimizer__momentum=momentum)
    arms = open_arms(tmp_path)
    assert [*arms] == ["optimizer.momentum=0.0", "optimizer.momentum=0.9"]
    scans = {name: arm.points()["smoothed"] for name, arm in arms.items()}
    table = figures.loss_over_lr(scans, "head/rms_to_inf", {}).table
    assert table.groupby("column").size().tolist() == [6, 6]
    lowest = figures.lowest_points(scans, "head/rms_to_inf", {}).table
    for name, scan in scans.items():
        end = scan[scan.tokens == 2**20]
        own = lowest[(lowest.column == name) & (lowest.tokens == 2**20)]
        assert (own.x.iloc[0], own.y.iloc[0]) == (end.x[end.loss.idxmin()], end.loss.min())


def test_a_norm_grows_under_decay_to_its_bound() -> None:
    tokens = 2.0 ** np.arange(12, 21)
    scans = {
        f"decay {decay:g}": pd.DataFrame(
            {"model": "m", "tokens": tokens, "batch": 2**10, "lr": lr, "x": np.log2(tokens) - 12 - decay, "loss": 3.0}
        )
        for decay, lr in ((0.0, 0.5), (0.25, 0.5), (1.0, 0.25))
    }
    bounds = {"decay 0": None, "decay 0.25": 4.0, "decay 1": 1.0}
    table = figures.norm_under_decay(scans, "head/rms_to_inf", bounds).table
    for name, scan in scans.items():
        own = table[(table.colour == name) & (table.dash != "bound")]
        assert own.y.tolist() == scan.x.tolist()
        assert own.x.tolist() == np.log2(scan.tokens).tolist()
    lines = table[table.dash == "bound"]
    assert sorted(zip(lines.colour, lines.x, lines.y, strict=True)) == [
        *(("decay 0.25", x, 2.0) for x in (12.0, 20.0)),
        *(("decay 1", x, 0.0) for x in (12.0, 20.0)),
    ]
    with pytest.raises(FitRefused, match="one weight decay"):
        figures.norm_under_decay(scans, "head/rms_to_inf", dict.fromkeys(scans, 10.0))


@pytest.mark.parametrize(
    ("overrides", "norm", "expected"),
    [
        (["optimizer.weight_decay=0.1"], "head/rms_to_inf", 10),
        (["optimizer.weight_decay=0.1", "optimizer.lr_scale.head=4"], "head/rms_to_inf", 40),
        (["optimizer.weight_decay=0.1"], "layers.0.attention.wq/rms_to_rms", 10),
        (["optimizer.weight_decay=0.1"], "head/frobenius", None),
        (["optimizer.weight_decay=0.1", "optimizer.roles.head.weight_decay=0"], "head/rms_to_inf", None),
        (["optimizer.weight_decay=0.1", "optimizer.norm_control=post_clip"], "head/rms_to_inf", None),
        (["optimizer=scion_constrained"], "head/rms_to_inf", 3000),
        (["optimizer=adamw"], "head/rms_to_inf", None),
        ([], "head/rms_to_inf", None),
    ],
)
def test_where_decay_holds_a_norm(overrides: list[str], norm: str, expected: float | None) -> None:
    assert bound(pd.DataFrame([flatten(compose(overrides))]), norm) == (expected and pytest.approx(expected))


def test_panels_and_models_stand_in_the_order_of_their_numbers() -> None:
    names = ["w128-d2, 2^-3.5", "w64-d2, 2^10", "w64-d2, 2^9", "w128-d2, 2^-4"]
    assert sorted(names, key=figures.numbered) == [names[2], names[1], names[3], names[0]]
    table = pd.DataFrame({"x": 1.0, "y": 1.0, "series": "a", "column": ["batch 2^10", "batch 2^9", "batch 2^10"]})
    figure = figures.Figure("", table, "log2 norm")
    assert figure.table.column.tolist() == ["batch 2^9", "batch 2^10", "batch 2^10"]
    assert figure.ends == (0.5, 1.5)  # a single norm is no range of its own
    assert figures.Figure("", table.assign(x=[1.0, 3.0, 4.0]), "log2 norm").ends is None


def test_what_was_left_out_is_told_in_its_own_arm(tmp_path: Path) -> None:
    for momentum, status in ((0.0, "interrupted"), (0.9, "diverged")):
        for lr in (-5, -4, -3):
            write(tmp_path / f"m{momentum}lr{lr}", lr, 16, optimizer__momentum=momentum)
        write(tmp_path / f"m{momentum}gone", -2, 16, status, optimizer__momentum=momentum)
    write(tmp_path / "alone", -2, 16, "interrupted", optimizer__momentum=0.5)
    plain, heavy = open_arms(tmp_path).values()
    assert plain.excluded == {"m0.0gone": "interrupted"}
    assert heavy.excluded == {"m0.9gone": "diverged"}
    for run_ in ("m0.0gone", "alone"):
        with pytest.raises(RequestError, match="no run is finished: 1 interrupted"):
            open_source(tmp_path / run_)


def test_texts_of_a_run_are_no_markup() -> None:
    table = pd.DataFrame({"x": [1.0], "y": 1.0, "series": "<b>s", "column": "<i>c", "text": "<a href='javascript:1'>"})
    drawn = render.html(figures.Figure("", table, "x"), "name")
    for shown in ('"name":"&lt;b&gt;s"', '"&lt;a href=&#39;javascript:1&#39;&gt;"', '"text":"&lt;i&gt;c"'):
        assert shown in drawn


def test_an_arm_without_anything_to_show_is_told_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "save", lambda figure, *paths: [path.touch() for path in paths])
    for lr in (-5, -4, -3):
        write(tmp_path / "runs" / f"lr{lr}", lr, 16)
    write(tmp_path / "runs" / "gone", -3, 16, "diverged", optimizer__momentum=0.9)
    assert run(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "a.html")]) == 0
    assert "Left out, optimizer.momentum=0.9: no run has this loss" in (tmp_path / "a.html").read_text()
    files = {path.name for path in (tmp_path / "a_files").iterdir()}
    for old in ("2-optima.csv", "2-parabolas.png", "norm_under_decay.pdf"):
        (tmp_path / "a_files" / old).touch()
    users = {"my-optima.csv", "2-optima.xlsx", "2-optima"}
    for mine in users:
        (tmp_path / "a_files" / mine).mkdir()
    assert run(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "a.html")]) == 0
    assert {path.name for path in (tmp_path / "a_files").iterdir()} == files | users
    assert run(["report", str(tmp_path / "runs" / "gone"), "--out", str(tmp_path / "b.html")]) == 2
    assert not (tmp_path / "b.html").exists()


def test_a_report_is_one_file_that_asks_for_nothing(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "DRAWS", 5)
    monkeypatch.setattr(render, "save", lambda figure, *paths: [path.touch() for path in paths])  # is tested above
    (grid / "result.json").write_text(json.dumps({"question": "Is <b> safe?", "verdict": "cannot tell"}))
    out = tmp_path / "page.html"
    assert run(["report", str(grid), "--out", str(out), "--where", "train.batch_size<64"]) == 0
    (grid / "result.json").unlink()
    page = out.read_text()
    shell = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"( src=| href=|@import|url\()", shell)
    assert "default-src 'none'" in shell
    assert "<h1>Is &lt;b&gt; safe?</h1>" in shell
    assert page.count("plotly.js v") == 1
    assert "abovemup report" in shell
    assert "Not drawn, layout" in shell
    files = {path.name for path in (tmp_path / "page_files").iterdir()}
    for name in re.findall(r"page_files/([\w-]+)\.png", shell):
        assert {f"{name}.png", f"{name}.pdf", f"{name}.csv"} <= files
        pd.read_csv(tmp_path / "page_files" / f"{name}.csv")[["x", "y", "series"]]
    assert "\\begin{tabular}" in (tmp_path / "page_files" / "1-optima.tex").read_text()
    assert run(["report", str(grid), "--methods"]) == 0
    told = capsys.readouterr().out
    for part in ("model.vocab_size=1024", "optimizer.lr=", "through the 7 points", "Student's t", "w64-d2: 6.939"):
        assert part in told
    assert run(["report", str(grid), "--out", str(tmp_path / "page.pdf")]) == 2
