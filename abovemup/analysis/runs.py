"""Run directories as tables: one row a run, or one row a logged step of a run."""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from abovemup.analysis.attempts import attempted
from abovemup.analysis.cache import cached
from abovemup.config.errors import RequestError
from abovemup.config.keys import did_you_mean, leaves
from abovemup.config.schema import OUTPUT_NORMS
from abovemup.config.values import shown

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

Row = dict[str, Any]

MARKS = ("config.yaml", "metrics.jsonl", "summary.json", ".lock")
# As summary.json calls it -> the first of these that a row has.
LOGGED = {"loss": ("loss",), "val_loss": ("val/loss",), "output_norm": OUTPUT_NORMS}
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 7 times as fast, where libyaml is


class Damaged(RequestError):
    """A run directory that cannot be read: which file, and what is wrong with it."""


def is_run(folder: Path) -> bool:
    """A run that was damaged or ended early is one, a folder that happens to hold a config.yaml is not."""
    return sum((folder / name).is_file() for name in MARKS) > 1


def find(place: str | Path) -> list[Path]:
    """The run at `place` or runs/`place`, or by name all that lie in it or in its runs/. RequestError without any."""
    for path in (Path(place), Path("runs") / place):
        inside = [path] if is_run(path) else [*path.glob("[!.]*"), *path.glob("runs/[!.]*")]
        if found := sorted(run for run in inside if is_run(run)):
            if len({run.name for run in found}) < len(found):
                raise RequestError(f"{place} and its runs/ hold runs of the same name: give {place}/runs.")
            return found
    known = [run.name for run in Path("runs").glob("*") if is_run(run)]
    raise RequestError(f"{place} is no run and holds none.{did_you_mean(Path(place).name, known)}")


def load_runs(path: str | Path, columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """One row a logged step and run: run (its folder's name), step, tokens and, as in metrics.jsonl, `columns` or all.

    `path`: a run, a folder of runs, or a study. What a row or a run has not is NaN, as "nan" is; the torn last line of
    a run that is being written is left out. Named columns are several times as fast as all. `attrs["skipped"]`: of
    each damaged run the directory -> why. Raises RequestError when there is no run.
    """
    import pandas as pd

    runs, skipped = attempted(find(path), lambda run: trajectory(run, columns).assign(run=run.name), Damaged)
    parts = [*runs.values()] or [pd.DataFrame(columns=["run", "step", "tokens", *(columns or ())])]
    frame = pd.concat(parts, ignore_index=True).astype({"step": "int64", "tokens": "int64", "run": str})
    frame.insert(0, "run", frame.pop("run"))
    frame.attrs["skipped"] = skipped
    return frame


def trajectory(folder: Path, columns: Sequence[str] | None = None) -> "pd.DataFrame":
    """The rows of one run: step, tokens and `columns` or all, as floats. Raises Damaged."""
    import numpy as np
    import pandas as pd

    keys, path = list(dict.fromkeys(("step", "tokens", *(columns or ())))), folder / "metrics.jsonl"
    if columns is None:
        frame = pd.DataFrame(logged(folder))
        frame = frame.reindex(columns=list(dict.fromkeys([*keys, *map(str, frame)]))).astype(float)
    else:
        with _reading(path):
            data = cached(path, json.dumps(keys), lambda: _columns(folder, keys).tobytes())
            frame = pd.DataFrame(np.frombuffer(data).reshape(-1, len(keys)).copy(), columns=keys)
    steps, tokens = frame.to_numpy()[:, :2].T
    if not (np.isfinite(tokens).all() and (np.diff(steps) > 0).all()):
        raise Damaged(f"{path} is damaged: rows are out of order, or lack their tokens.")
    return frame


def _columns(folder: Path, keys: list[str]) -> "NDArray[np.float64]":
    """(rows, keys), nan where a row has not the key. Raises Damaged."""
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from pyarrow import json as arrow

    path = folder / "metrics.jsonl"
    if path.stat().st_size:
        schema = pa.schema([(key, pa.float64()) for key in keys])
        parsing = arrow.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        with suppress(pa.ArrowInvalid):  # a torn line, or one with "nan": to be read with care
            table = arrow.read_json(path, arrow.ReadOptions(use_threads=False), parsing)
            return np.stack([table[key].to_numpy() for key in keys], axis=1)
    return pd.DataFrame(logged(folder)).reindex(columns=keys).to_numpy(float)


def records(places: Sequence[str | Path]) -> tuple[list[Row], dict[str, str]]:
    """A row a run: run, dir, status, steps, tokens, loss, val_loss, output_norm, what else summary.json has, and the
    config with dotted keys (optimizer.lr); and of each damaged run the directory -> why. A running or killed run has
    the numbers of its newest rows. RequestError where there is no run."""
    rows, skipped = attempted(dict.fromkeys(run for place in places for run in find(place)), record, Damaged)
    return [*rows.values()], skipped


def record(folder: Path) -> Row:
    """One run. Raises Damaged."""
    with _reading(folder / "summary.json") as path:
        summary = json.loads(path.read_text())
        # Without the manifest of the data: every shard, under names that the config has too.
        manifest = summary.pop("data", None) or {}
        summary = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in summary.items()}
        summary["data_hash"] = manifest.get("source", {}).get("content_hash")
        summary["tokenizer_hash"] = manifest.get("tokenizer", {}).get("hash")
        row: Row = {"run": folder.name, "status": summary["status"]}
    row |= {key: summary.get(key) for key in ("steps", "tokens", *LOGGED)}
    with _reading(folder / "config.yaml") as path:
        text = cached(path, "json", lambda: json.dumps(_config(path.read_text(encoding="utf-8"))).encode())
        config = dict(leaves(json.loads(text)))
    if row["status"] == "running":
        newest: Row = {}
        for earlier in logged(folder, newest_first=True):
            newest = earlier | newest
            if all(not newest.keys().isdisjoint(keys) for keys in LOGGED.values()):
                break
        row |= {"steps": newest.get("step", 0), "tokens": newest.get("tokens", 0)}
        row |= {name: next((newest[k] for k in keys if k in newest), None) for name, keys in LOGGED.items()}
    return row | {k: v for k, v in leaves(summary) if k not in row} | {"dir": str(folder)} | config


def logged(folder: Path, newest_first: bool = False) -> Iterator[Row]:
    """The rows of metrics.jsonl, without a torn last one. Raises Damaged."""
    with _reading(folder / "metrics.jsonl") as path:
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number in sorted(range(1, len(lines) + 1), reverse=newest_first):
        line = lines[number - 1]
        try:
            row = json.loads(line)
            yield {"step": row["step"]} | {key: float(v) if isinstance(v, str) else v for key, v in row.items()}
        except (ValueError, LookupError, TypeError) as error:
            if number < len(lines):
                raise Damaged(f"{path}:{number} is damaged: {line[:60]!r}.") from error


def final_norms(folder: Path) -> Row:
    """The newest norm/<layer>/<norm>, with norm_tokens, when that was; empty without any. Raises Damaged."""
    for row in logged(folder, newest_first=True):
        if norms := {key: value for key, value in row.items() if key.startswith("norm/")}:
            return {"norm_tokens": row["tokens"], **norms}
    return {}


def norms_by_role(norms: Row) -> list[dict[Any, Any]]:
    """role, norm, layers, min, median, max of norm/<layer>/<norm>, in their order."""
    import pandas as pd

    values = []
    for key, value in norms.items():
        layer, _, norm = key.removeprefix("norm/").rpartition("/")
        last = layer.rpartition(".")[2]
        role = last if last in ("embedding", "head", "bias") else "gain" if "norm" in last else "hidden"
        values += [(role, norm, value)] if layer else []
    each = pd.DataFrame(values, columns=["role", "norm", "value"]).groupby(["role", "norm"], sort=False)["value"]
    return each.agg(layers="size", min="min", median="median", max="max").reset_index().to_dict("records")


def checkpoints(folder: Path) -> list[Row]:
    """step and tokens of each that was written whole, by step."""
    found = [json.loads(path.read_text()) for path in folder.glob("checkpoints/step_*/manifest.json")]
    return sorted(({"step": each["step"], "tokens": each["tokens"]} for each in found), key=lambda at: at["step"])


def plain(row: Row) -> Row:
    """For a table: lists and dicts as one would type them."""
    return {key: shown(value) if isinstance(value, list | dict) else value for key, value in row.items()}


def _config(text: str) -> Row:
    """A section (model: ...) at a time, for in a study most are those of the run before."""
    try:
        return dict(pair for part in re.split(r"(?m)^(?=[a-z])", text) for pair in _section(part))
    except yaml.YAMLError:
        return dict(yaml.load(text, _YAML))


@functools.lru_cache(1024)
def _section(text: str) -> tuple[tuple[str, Any], ...]:
    return tuple((yaml.load(text, _YAML) or {}).items())


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing.") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise Damaged(f"{path} is damaged: {type(error).__name__}: {' '.join(str(error).split())}") from error
