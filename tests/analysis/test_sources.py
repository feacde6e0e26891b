"""What fits read: our runs at exact horizons, an ablation's points, the paper's files in its own layouts."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from abovemup.analysis import results
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


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    for batch in (4, 8, 16, 32, 64):
        for lr in np.arange(-7.5, 1.1, 0.5):
            write(folder / "runs" / f"b{batch}lr{lr:g}", float(lr), batch)
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
    assert source.intercept == pytest.approx(math.log(1024) + 1 / 128)
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
    answer = results.ranking(open_source(grid))
    assert next(row["norm"] for row in answer["ranking"]) in ("head/rms_to_inf", "lr x sqrt(steps)")
    assert answer["ranking"][-1]["regret"] > 100 * answer["ranking"][0]["regret"]
    with pytest.raises(RequestError, match=r"embedding/one_to_rms"):
        open_source(grid).points("head/rms")


def test_a_decaying_run_counts_at_its_end_only(tmp_path: Path) -> None:
    for lr in (-4, -3, -2):
        write(tmp_path / f"lr{lr}", lr, schedule__name="wsd")
    points = open_source(tmp_path, horizons=[2**18, 2**20]).points()["smoothed"]
    assert set(points.tokens) == {2**20}


def test_mixed_conditions_are_refused_with_the_choice_that_settles_it(grid: Path, tmp_path: Path) -> None:
    for i, momentum in enumerate([0.0, 0.9]):
        write(tmp_path / f"r{i}", -3, optimizer__momentum=momentum)
    with pytest.raises(
        RequestError, match=r"mixes optimizer.momentum: 0.0, 0.9. Choose: --where optimizer.momentum=0.0"
    ):
        open_source(tmp_path)
    assert open_source(tmp_path, where=["optimizer.momentum=0.9"]).rows.run.unique().tolist() == ["r1"]
    with pytest.raises(RequestError, match=r"no run with optimizer\.lr=7"):
        open_source(grid, where=["optimizer.lr=7"])
    with pytest.raises(RequestError, match="has no nonsense"):
        open_source(grid, where=["nonsense=7"])


def test_points_of_an_ablation(tmp_path: Path) -> None:
    head = "optimizer,model.width,lr,seed,status,val_loss,output_norm,cell\n"
    rows = [
        f"scion,{w},{2.0**e},{s},finished,{3 + 0.1 * (e + 2.2) ** 2},{2.0 ** (e + 6)},c{w}{e}{s}\n"
        for w in (64, 128)
        for e in range(-5, 2)
        for s in (1, 2)
    ]
    bad = [
        "scion,64,4.0,1,diverged,inf,nan,d\n",
        "scion,64,4.0,2,diverged,inf,nan,d2\n",
        "scion,64,8.0,2,missing,nan,nan,m\n",
    ]
    (tmp_path / "points.csv").write_text(head + "".join(rows + bad))
    answer = results.norm(open_source(tmp_path / "points.csv"))
    assert [row["model"] for row in answer["best"]] == ["model.width=128", "model.width=64"]
    assert answer["band"]["log2_norm"] == pytest.approx(3.8)
    assert answer["excluded"] == {"m": "missing"}


def toolkit(path: Path, columns: dict[str, str]) -> Path:
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
    pd.DataFrame(rows).to_csv(path, index=False)
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
    source = open_source(toolkit(tmp_path / "scan.csv", columns), horizons=[2**33])
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


def test_what_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    for path in (tmp_path / "a.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(RequestError):
            open_source(path)


def test_norms_without_losses_are_curves_and_no_points(tmp_path: Path) -> None:
    rows = [{"bs": 32, "log2_lr": -5, "step": 2**n, "log2_output_norm": n / 2} for n in range(9, 17)]
    pd.DataFrame(rows).to_csv(tmp_path / "growth.csv", index=False)
    source = open_source(tmp_path / "growth.csv")
    with pytest.raises(RequestError, match="no run has this loss and norm"):
        source.points()
    (curve,) = results.growth(source)["curves"]
    assert (curve["slopes"], curve["breaks"]) == (pytest.approx([0.5]), [])
