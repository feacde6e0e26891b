"""A study as one file, for others: a table of its runs, or the raw CSV of the paper's public toolkit."""

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from abovemup.analysis.paper import SEQUENCE
from abovemup.analysis.runs import Row, final_norms, plain, trajectory
from abovemup.config.errors import RequestError
from abovemup.config.values import shown

# Columns of the toolkit of arXiv:2510.03871, in the names of the paper's logs (rms_to_l1 is RMS->inf), and ours.
TOOLKIT = {
    "_step": "step",
    "track_param_rms_to_l1/model_part_0/output": "norm/head/rms_to_inf",
    "track_param_rms_to_rms/model_part_0/output": "norm/head/rms_to_rms",
    "track_param_l1_to_rms/model_part_0/tok_embeddings": "norm/embedding/one_to_rms",
    "track_param_rms_to_rms/model_part_0/layers.3.feed_forward.w2": "norm/layers.3.feed_forward.w2/rms_to_rms",
    "loss_metrics/global_avg_loss": "loss",
    "lr/opt_0/group_0": "lr/hidden",
    "lr/opt_0/group_1": "lr/embedding",
    "lr/opt_0/group_2": "lr/head",
}


def save(rows: Sequence[Row], form: str, path: Path) -> int:
    """Write the runs `rows` (of `runs.records`) as parquet, csv or toolkit, whole or not at all; returns the lines.

    Raises RequestError for runs that cannot be told in that form, Damaged.
    """
    frame = toolkit(rows) if form == "toolkit" else table(rows)
    aside = path.with_name(f"{path.name}.aside")
    frame.to_parquet(aside, index=False) if form == "parquet" else frame.to_csv(aside, index=False)
    os.replace(aside, path)
    return len(frame)


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """One row a run: summary, config, and its newest norms (norm/<layer>/<norm>, measured at norm_tokens)."""
    frame = pd.DataFrame([plain(row) | final_norms(Path(row["dir"])) for row in rows])
    mixed = [str(key) for key, kind in frame.dtypes.items() if kind == "object"]
    frame[mixed] = frame[mixed].map(shown, na_action="ignore")  # a file's column has one type: "auto" and 16 are text
    return frame


def toolkit(rows: Sequence[Row]) -> pd.DataFrame:
    """The toolkit's raw layout: a row for each step that has a loss and an output norm, momentum 1.0 for none.

    Raises RequestError for what the toolkit does not take, and for runs whose form in it is not known: of Adam, and
    with an lr for each role.
    """
    parts: dict[str, pd.DataFrame] = {}
    for row in rows:
        frame = trajectory(Path(row["dir"]), list(TOOLKIT.values())).astype({"step": "int64"})
        frame = frame.dropna(subset=["loss", "norm/head/rms_to_inf"])
        lrs = frame[["lr/hidden", "lr/embedding", "lr/head"]].max()
        batch = row["train.batch_size"] * row["train.seq_len"] / SEQUENCE
        adam = "adam" in [row[f"optimizer.roles.{role}.norm"] for role in ("embedding", "hidden", "head")]
        if adam or lrs.nunique() != 1 or batch not in [2**n for n in range(3, 13)]:
            raise RequestError(
                f"{row['dir']} has no known form in the toolkit's layout: steepest descent, one lr, a batch of 2^3 to "
                "2^12 times 4096 tokens, and steps with a loss and an output norm. Use --format parquet or csv."
            )
        lr, momentum, seed = float(lrs["lr/head"]), round(1 - row["optimizer.momentum"], 12), row["train.seed"]
        name = f"lr-{lr}-bs-{batch:.0f}{'' if momentum == 1 else f'-momentum-{momentum}'}-seed-{seed}"
        name += "" if row["schedule.name"] == "constant" else "-decayed"
        if name in parts:
            raise RequestError(f"{row['dir']} is not the only {name}: choose by conditions.")
        more = {"run_name": name, "bs": int(batch), "seed": seed, "momentum": momentum}
        more |= dict.fromkeys(("lr", "lr_hidden", "lr_in", "lr_out"), lr)
        parts[name] = frame[[*TOOLKIT.values()]].set_axis([*TOOLKIT], axis=1).assign(**more)
    return pd.concat(parts.values(), ignore_index=True)
