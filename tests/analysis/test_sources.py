"""What fits read: our runs at exact horizons, an ablation's points, the paper's files in its own layouts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from abovemup.analysis import growth, norm_fit, results
from abovemup.analysis.sources import open_source
from abovemup.config.errors import RequestError

CONFIG: dict[str, Any] = {
    "model": {"width": 64, "depth": 2, "vocab_size": 1024, "norm_placement": "everywhere", "init": "exact"},
    "parameterization": {"name": "above_mup", "base_width": 64, "base_depth": 2},
    "optimizer": {"name": "scion", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "schedule": {"name": "constant", "warmup": 0},
    "data": {"name": "python"},
    "tokenizer": {"name": "bpe"},
    "train": {"batch_size": 4, "seq_len": 256, "tokens": 2**20},
}
VERTEX = 3.5  # log2 norm at the best lr of every horizon and batch size


def best_lr(tokens: float, batch: float) -> float:
    return 0.5 * math.log2(batch) - 0.5 * math.log2(tokens) + 0.25


def loss_at(x: float, tokens: float, batch: float) -> float:
    return 3 + 0.28 * (x - VERTEX) ** 2 + 0.05 * (math.log2(batch) - math.log2(tokens) / 2 - 3) ** 2


def write(folder: Path, lr: float, batch: int = 4, status: str = "finished", end: int = 2**20, **changes: Any) -> None:
    """A run whose norm and losses at each power of two are known; single-step losses are 0.5 off at odd steps."""
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(CONFIG))
    config["optimizer"]["lr"] = 2.0**lr
    config["train"] |= {"batch_size": batch, "tokens": end}
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "norm/head/rms_to_inf": 1.0, "val/loss": 6.9}]
    size = batch * 256
    for step in range(1, end // size + 1):
        tokens = step * size
        x = VERTEX + 0.8 * (lr - best_lr(tokens, size))
        row = {"step": step, "tokens": tokens, "loss": loss_at(x, tokens, size) + 0.5 * (step % 2)}
        if tokens & (tokens - 1) == 0:
            row |= {"norm/head/rms_to_inf": 2**x, "norm/embedding/one_to_rms": 2 ** (0.4 * lr + 3)}
            row |= {"val/loss": loss_at(x, tokens, size)}
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "status": status,
        "steps": len(rows) - 1,
        "tokens": end,
        "loss": 3.0,
        "val_loss": 3.0,
        "output_norm": 4.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def write_grid(folder: Path, step: float = 0.5) -> Path:
    """Such runs of 5 batch sizes and learning rates `step` octaves apart. Returns `folder`."""
    for batch in (4, 8, 16, 32, 64):
        for lr in np.arange(-7.5, 1.1, step):
            write(folder / f"b{batch}lr{lr:g}", float(lr), batch)
    return folder


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    write_grid(folder / "runs")
    write(folder / "runs" / "gone", 1.5, 16, "diverged")
    write(folder / "runs" / "cut", -2.25, 16, "interrupted")
    return folder


def test_our_runs_give_their_norm_whatever_the_horizon_and_batch(grid: Path) -> None:
    source = open_source(grid)
    assert source.loss == "val"
    assert source.horizons == {2**n for n in range(16, 21)}
    assert source.excluded == {"cut": "interrupted", "gone": "diverged"}
    answer = results.norm(source)
    assert not any(row["reason"] for row in answer["optima"])
    assert answer["conditions"]["optimizer.name"] == "scion"
    assert source.intercept == {"w64-d2": pytest.approx(math.log(1024) + 1 / 128)}
    for row in answer["best"]:
        assert abs(math.log2(row["batch"]) - math.log2(row["tokens"]) / 2 - 3) <= 0.51
        assert abs(math.log2(row["lr_nearest"]) - best_lr(row["tokens"], row["batch"])) <= 0.51
    assert answer["band"]["log2_norm"] == pytest.approx(VERTEX, abs=0.1)


def test_a_run_that_diverged_is_a_wall_and_no_best(grid: Path) -> None:
    points = open_source(grid).points()["smoothed"]
    assert np.isinf(points[points.run == "gone"].loss).all()
    assert set(points[points.run == "gone"].tokens) == set(points[points.batch == 16 * 256].tokens)
    assert "cut" not in set(points.run)


def test_the_window_is_a_sixteenth_of_the_tokens_and_raw_is_the_single_step(grid: Path) -> None:
    found = open_source(grid, "window", ["optimizer.lr=2^-3", "train.batch_size=4"]).points()
    window, raw = found["smoothed"].set_index("tokens").loss, found["raw"].set_index("tokens").loss
    for tokens in (2**18, 2**20):
        steps = [t for t in range(1024, tokens + 1, 1024) if t > tokens * 15 / 16]
        x = [VERTEX + 0.8 * (-3 - best_lr(t, 1024)) for t in steps]
        losses = [loss_at(y, t, 1024) + 0.5 * (t // 1024 % 2) for y, t in zip(x, steps, strict=True)]
        assert window[tokens] == pytest.approx(np.mean(losses))
        assert raw[tokens] == pytest.approx(losses[-1])


def test_other_norms_and_rankings(grid: Path) -> None:
    answer = results.ranking(open_source(grid, norm=None))
    assert {row["norm"] for row in answer["ranking"]} >= {"head/rms_to_inf", "embedding/one_to_rms", "lr"}
    assert next(row["norm"] for row in answer["ranking"]) in ("head/rms_to_inf", "lr x sqrt(steps)")
    assert answer["ranking"][-1]["regret"] > 100 * answer["ranking"][0]["regret"]
    for open_it in (
        lambda: open_source(grid, norm="head/rms"),
        lambda: open_source(grid, norm=None).points("head/rms"),
    ):
        with pytest.raises(RequestError, match=r"norm/head/rms\. Did you mean norm/head/rms_to_inf"):
            open_it()


def test_a_decaying_run_counts_at_its_end_only(tmp_path: Path) -> None:
    for lr in (-4, -3, -2):
        write(tmp_path / f"lr{lr}", lr, schedule__name="wsd")
    points = open_source(tmp_path).points()["smoothed"]
    assert set(points.tokens) == {2**20}


def test_mixed_conditions_are_refused_with_the_choice_that_settles_it(grid: Path, tmp_path: Path) -> None:
    for i, momentum in enumerate([0.0, 0.9]):
        write(tmp_path / f"r{i}", -3, optimizer__momentum=momentum)
    with pytest.raises(
        RequestError, match=r"mixes optimizer.momentum: 0.0, 0.9. Choose: --where optimizer.momentum=0.0"
    ):
        open_source(tmp_path)
    for i, clip in enumerate([1.0, 2.0]):  # neither a condition of the paper nor a seed
        write(tmp_path / "clip" / f"r{i}", -3, optimizer__clip=clip)
    with pytest.raises(RequestError, match=r"mixes optimizer.clip: 1.0, 2.0"):
        open_source(tmp_path / "clip")
    with pytest.raises(RequestError, match="a condition is expected"):
        open_source(tmp_path, where=["momentum"])
    assert open_source(tmp_path, where=["optimizer.momentum=0.9"]).rows.run.unique().tolist() == ["r1"]
    with pytest.raises(RequestError, match=r"no run with optimizer\.lr=7"):
        open_source(grid, where=["optimizer.lr=7"])
    with pytest.raises(RequestError, match="have no nonsense"):
        open_source(grid, where=["nonsense=7"])


def toolkit(path: Path, columns: dict[str, str], **more: Any) -> Path:
    """A scan at 32 and 64 sequences, in the layout of the paper's public toolkit."""
    rows = []
    for bs in (32, 64):
        for e in range(-9, 0):
            for n in range(-1, 2):
                step = 2**33 // (bs * 4096) + n
                x = 7.0 + 0.8 * (e + 5) + 0.01 * n
                row = {"bs": bs, "step": step, "loss": 4 + 0.1 * (x - 7) ** 2 + 0.03 * n, "norm": 2**x}
                row |= {"lr_in": 2.0**e, "lr_hidden": 2.0**e, "lr_out": 2.0**e, "run_name": f"lr-{2.0**e}-bs-{bs}"}
                rows.append({columns.get(k, k): v for k, v in row.items()})
    pd.DataFrame(rows).assign(**more).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    "columns",
    [
        {
            "step": "_step",
            "loss": "loss_metrics/global_avg_loss",
            "norm": "track_param_rms_to_l1/model_part_0/output",
        },
        {"norm": "output_norm_mean", "loss": "train_loss_mean"},
        {"norm": "output_norm", "loss": "train_loss"},
    ],
    ids=["raw", "seeds", "one seed"],
)
def test_the_papers_layouts_with_its_windows(tmp_path: Path, columns: dict[str, str]) -> None:
    source = open_source(toolkit(tmp_path / "scan.csv", columns))
    points = source.points()
    smoothed, raw = points["smoothed"], points["raw"]
    assert len(raw) == len(smoothed) == 18
    assert set(raw.batch) == {2**17, 2**18}
    assert smoothed.loss.to_numpy() == pytest.approx(raw.loss.to_numpy(), abs=1e-4)  # symmetric about the horizon
    middles = [7 + 0.8 * (round(math.log2(lr)) + 5) for lr in smoothed.lr]
    spread = [np.std([0.1 * (x + 0.01 * n - 7) ** 2 + 0.03 * n for n in (-1, 0, 1)]) for x in middles]
    assert smoothed["std"].to_numpy() == pytest.approx(spread)
    answer = results.norm(source)
    assert answer["refusal"]["reason"] == "batch_edge"
    assert answer["optima"][0]["lr"] == 2**-5
    assert answer["optima"][0]["variants"] == 6


def test_one_norm_under_two_names_is_one(tmp_path: Path) -> None:
    """The paper's logs name the output norm rms_to_l1; newer ones say what it is (PAPER section 10)."""
    old, new = "track_param_rms_to_l1/model_part_0/output", "track_param_rms_to_inf/model_part_0/output"
    whole = pd.read_csv(toolkit(tmp_path / "old.csv", {"norm": old, "step": "_step", "loss": "train_loss"}))
    mixed = pd.concat([whole[whole.bs == 32], whole[whole.bs == 64].rename(columns={old: new})])
    mixed.to_csv(tmp_path / "mixed.csv", index=False)
    both = [open_source(tmp_path / f"{name}.csv").points()["raw"] for name in ("old", "mixed")]
    pd.testing.assert_frame_equal(*(points[["run", "tokens", "loss", "x"]] for points in both))


def test_what_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    for path in (tmp_path / "a.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(RequestError):
            open_source(path)


SEEDS = {"norm": "output_norm_mean", "loss": "train_loss_mean"}


def test_a_std_that_one_seed_has_not_is_that_of_the_others(tmp_path: Path) -> None:
    """The toolkit's aggregate has none for a single seed: no nan in the fit, and no weight of 10^12 for that point."""
    path = toolkit(tmp_path / "scan.csv", SEEDS, train_loss_std=0.01)
    table = pd.read_csv(path)
    table["step"] = (table.step // 2).round()  # 2^32: no window
    table = table.drop_duplicates(["bs", "lr_in", "step"])
    table.loc[table.lr_in == 2.0**-5, "train_loss_std"] = np.nan
    table.to_csv(path, index=False)
    cell = next(iter(norm_fit.cells(open_source(path).points()["smoothed"]).values()))
    assert cell["std"] == pytest.approx(0.01)
    points = pd.DataFrame({"x": [1.0, 2, 2, 3, 3], "lr": [1.0, 2, 2, 4, 4], "loss": [3, 2.9, 2.8, 3, 3.1]})
    cell = norm_fit.cells(points.assign(model="m", tokens=1, batch=1, std=np.nan))["m", 1, 1]
    assert cell["std"] == pytest.approx([0.1 / math.sqrt(2)] * 3)


def test_the_toolkits_momentum_and_decay_are_conditions(tmp_path: Path) -> None:
    """Its momentum is the complement of ours; decayed runs count at their end only; runs called test are none."""
    both = pd.concat(
        pd.read_csv(toolkit(tmp_path / "x.csv", {}, momentum=alpha, seed=0)).assign(
            run_name=lambda t, a=alpha: t.run_name + f"-momentum-{a}" + ("-decayed" if a < 1 else "")
        )
        for alpha in (1.0, 0.1)
    )
    both.rename(columns={"norm": "output_norm", "loss": "train_loss"}).to_csv(tmp_path / "both.csv", index=False)
    with pytest.raises(RequestError, match=r"mixes optimizer.momentum: 0.0, 0.9"):
        open_source(tmp_path / "both.csv")
    source = open_source(tmp_path / "both.csv", where=["momentum<1"])
    assert (source.conditions["optimizer.momentum"], source.conditions["schedule.name"]) == (0.9, "decayed")
    ends = {(2**33 // (bs * 4096) + 1) * bs * 4096 for bs in (32, 64)}
    assert source.horizons == ends
    assert set(source.points()["raw"].tokens) == ends
    source = open_source(tmp_path / "both.csv", where=["momentum=1"])
    assert source.conditions["optimizer.momentum"] == 0
    assert set(source.points()["raw"].tokens) == {2**33}
    both.assign(run_name="test-" + both.run_name).rename(columns={"norm": "output_norm", "loss": "train_loss"}).to_csv(
        tmp_path / "both.csv", index=False
    )
    with pytest.raises(RequestError, match="no run"):
        open_source(tmp_path / "both.csv").points()


def test_the_loss_before_training_fixes_only_a_norm_that_is_1_then(tmp_path: Path) -> None:
    for lr in np.arange(-6.0, 0.0, 0.5):
        write(tmp_path / f"lr{lr}", float(lr))
    source = open_source(tmp_path, norm=None)
    assert source.fixed("head/rms_to_inf") == source.intercept
    assert source.fixed("embedding/one_to_rms") is None
    rows = source.rows
    rows.loc[rows.tokens == 0, "norm/head/rms_to_inf"] = 2.0  # of another initialisation
    assert source.fixed("head/rms_to_inf") is None


def test_a_run_with_damaged_metrics_is_named_and_not_lost(grid: Path, tmp_path: Path) -> None:
    shutil.copytree(grid, tmp_path / "grid")
    (tmp_path / "grid/runs/b4lr-3/metrics.jsonl").write_text("{\n{}\n")
    source = open_source(tmp_path / "grid")
    assert "metrics.jsonl:1 is damaged" in source.excluded["b4lr-3"]
    assert source.rows.run.nunique() == 90


def test_points_no_better_than_untrained_leave_the_variants_in_step(grid: Path) -> None:
    """At a short horizon single steps of a whole cell may lie above the intercept, and their means not."""
    source = open_source(grid, "window")
    single = (source.rows.batch == 64 * 256) & (source.rows.tokens == 2**16)
    source.rows.loc[single, "loss"] = 7.0
    answer = results.norm(source)
    assert len(answer["optima"]) == 25
    assert answer["band"]


def test_seeds_and_models_do_not_part() -> None:
    """Batch sizes are compared at equal lr and model, by the mean over seeds."""
    step = 2.0 ** np.arange(0, 12, 0.25)
    curves = pd.concat(
        pd.DataFrame({"model": model, "batch": batch, "lr": 0.5, "tokens": step * batch}).assign(
            run=f"{model}{batch}{seed}", x=np.log2(step) / 2 + seed * 0.3 + (model == "b")
        )
        for model in "ab"
        for batch in (8, 16)
        for seed in (0, 1)
    )
    assert [(row["model"], "step" in row) for row in growth.parting(curves)] == [("a", False), ("b", False)]


def test_models_have_an_intercept_and_a_law_of_their_own(tmp_path: Path) -> None:
    for width in (64, 128):
        for lr in np.arange(-6.0, 0.0, 0.5):
            write(tmp_path / f"w{width}lr{lr}", float(lr), 16, model__width=width)
    source = open_source(tmp_path)
    assert source.intercept == {f"w{w}-d2": math.log(1024) + 1 / (2 * w) for w in (64, 128)}
    fitted = {row["model"]: row["c"] for row in results.norm(source)["optima"]}
    assert fitted == source.intercept
    with pytest.raises(norm_fit.FitRefused, match=r"one model, here are w128-d2, w64-d2: choose by --where"):
        results.rule(source)
