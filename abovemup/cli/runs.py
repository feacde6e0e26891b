"""`abovemup runs`: what to do with run directories."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from abovemup.cli.options import Json, RunDir
from abovemup.cli.output import FIGURES, check_file, print_json, print_table
from abovemup.config.errors import RequestError

if TYPE_CHECKING:
    from abovemup.analysis.runs import Row

app = typer.Typer(no_args_is_help=True)

_CONDITIONS = "Conditions on settings and results: status=finished 'optimizer.lr<2^-4'."
_HELP = f"A folder of runs, a study or a run; runs/. {_CONDITIONS}"
Where = Annotated[list[str] | None, typer.Argument(metavar="[DIR] [KEY=VALUE]...", help=_HELP)]
WIDTH = 64  # of a plot in the terminal


@app.command("push")
def push(run: RunDir) -> None:
    """Upload a whole run to W&B, from its first step to its last."""
    from abovemup.tracking.wandb import push as upload
    from abovemup.training.lineage import run_folder

    print(upload(run_folder(run)))


@app.command("list")
def list_runs(
    where: Where = None,
    sort: Annotated[str, typer.Option("--sort", metavar="KEY", help="Rising; by a loss finished runs first.")] = "",
    json: Json = False,
) -> None:
    """A line a run: how it stands, its main settings, and every other setting that differs between the runs."""
    from abovemup.analysis import select

    rows, skipped = _gather(where or [])
    rows = select.ordered(rows, select.known_key(sort, rows)) if sort else rows
    if json:
        print_json({"runs": rows, "skipped": skipped})
    else:
        keys = select.columns(rows)
        print_table(keys, ([row[key] if row.get(key) is not None else "" for key in keys] for row in rows))


@app.command("show")
def show(run: RunDir, json: Json = False) -> None:
    """How a run stands: its numbers, what was typed, versions, norms by role, and where it can go on from."""
    from abovemup.analysis import runs
    from abovemup.config.keys import fields

    folder = _one(run)
    row, last = runs.record(folder), runs.final_norms(folder)
    norms, points = runs.norms_by_role(last), runs.checkpoints(folder)
    if json:
        print_json({**row, "norms": norms, "checkpoints": points})
        return
    facts = {key: value for key, value in row.items() if key not in fields() and value is not None}
    facts["command"] = shlex.join(row.get("command") or [])
    facts["checkpoints"] = ", ".join(f"step {p['step']} ({p['tokens']} tokens)" for p in points) or "none"
    if points and row["status"] != "finished":
        facts["go on"] = f"abovemup train --resume {shlex.quote(str(folder))}"
    print_table(["", ""], facts.items())
    if norms:
        print(f"\nnorms at {last['norm_tokens']} tokens")
        print_table(list(norms[0]), (line.values() for line in norms))


@app.command("plot")
def plot(
    where: Annotated[list[str], typer.Argument(metavar="[DIR] KEY [KEY=VALUE]...", help=f"What. {_CONDITIONS}")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="A PNG; else in the terminal.")] = None,
) -> None:
    """Draw what metrics.jsonl has (loss, val/loss, norm/head/rms_to_inf, ...) of each run over tokens."""
    import numpy as np

    from abovemup.analysis.curves import curves, save_figure
    from abovemup.tracking.plot import braille

    if out is not None:
        check_file("--out", out, FIGURES)
    *places, key = [text for text in where if not _is_condition(text)] or ["loss"]
    rows, _ = _gather([*places, *filter(_is_condition, where)], needed=True)
    drawn = curves(rows, key)
    if out is not None:
        save_figure(drawn, key, out)
        print(f"{out}: {key} of {len(drawn)} of {len(rows)} runs")
        return
    low, high = min(values.index[0] for _, values in drawn), max(values.index[-1] for _, values in drawn)
    for name, values in drawn:  # one x axis, and each on a y axis of its own, whose ends stand above it
        print(f"{name}: {key} from {values.min():.4g} to {values.max():.4g}, last {values.iloc[-1]:.4g}")
        ys = np.interp(np.geomspace(low, high, 2 * WIDTH), values.index, values, left=np.nan, right=np.nan)
        print("\n".join(braille([None if np.isnan(y) else y for y in ys], 8 if len(drawn) == 1 else 4)))
    print(f"{low:.0f} to {high:.0f} tokens, logarithmic")


@app.command("export")
def export(
    form: Annotated[Literal["parquet", "csv", "toolkit"], typer.Option("--format", help="toolkit: as the paper's.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Replaced if it exists.")],
    where: Where = None,
) -> None:
    """Write the runs of a study into one file: a row a run, with its newest norms; toolkit: a row a step."""
    from abovemup.analysis.export import save

    check_file("--out", out)
    rows, _ = _gather(where or [], needed=True)
    print(f"{out}: {save(rows, form, out)} rows of {len(rows)} runs")


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="RUN... | [DIR] KEY=VALUE...", help=f"Runs. {_CONDITIONS}")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete run directories, checkpoints too; none of them when one is being trained or is no run."""
    import shutil
    from contextlib import ExitStack, suppress

    from abovemup.training.run import lock

    told = any(map(_is_condition, names))
    found = list(dict.fromkeys(map(_one, [row["dir"] for row in _gather(names, needed=True)[0]] if told else names)))
    with ExitStack() as stack:
        for path in found:
            stack.callback(lock(path).release)  # so that nobody trains in it meanwhile
        with suppress(typer.Abort):  # nobody to ask
            yes = yes or typer.confirm("\n".join([*map(str, found), "Delete for good what is listed here?"]))
        if not yes:
            raise RequestError("nothing was deleted: answer y, or add --yes.")
        for path in found:
            aside = path.with_name(f".removing-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)  # first out of sight: a run is whole or gone, whatever happens next
            shutil.rmtree(aside)
    print(f"deleted: {', '.join(map(str, found))}")


def _is_condition(text: str) -> bool:
    from abovemup.analysis.select import CONDITION

    return CONDITION.fullmatch(text) is not None and not Path(text).exists()


def _one(name: str) -> Path:
    """The run directory of that name, not a folder of runs, and no link. Raises RequestError."""
    from abovemup.analysis.runs import find

    found = find(name)
    if len(found) > 1 or found[0].name != Path(name).name or found[0].is_symlink():
        raise RequestError(f"{name} is not a run directory itself. Name one.")
    return found[0]


def _gather(arguments: Sequence[str], needed: bool = False) -> tuple[list["Row"], dict[str, str]]:
    """The runs at the places among the arguments (runs/) for which its conditions hold, and of the damaged ones what
    is wrong, which stderr is told too. Raises RequestError when none is left and some are `needed`."""
    from abovemup.analysis.runs import records
    from abovemup.analysis.select import select

    conditions = [text for text in arguments if _is_condition(text)]
    rows, skipped = records([text for text in arguments if not _is_condition(text)] or ["runs"])
    for reason in skipped.values():
        typer.echo(f"abovemup: left out: {reason}", err=True)
    chosen = select(rows, conditions)
    if needed and not chosen:
        raise RequestError(f"none of {len(rows)} runs has {' '.join(conditions)}." if rows else "no run is left.")
    return chosen, skipped
