"""One HTML file on a source that opens without a network, and its figures and tables as files beside it."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from abovemup.analysis import figures, render, results, rules, sentences
from abovemup.analysis.attempts import attempted
from abovemup.analysis.norm_fit import FitRefused
from abovemup.analysis.sources import Source
from abovemup.config.errors import RequestError
from abovemup.config.io import write_whole

# Nothing may be loaded: a page that asked for a file would say so in the browser's console.
_PAGE = Path(__file__).with_name("report.html")
_NAMES = [figure.__name__ for figure in (*figures.FIGURES, *figures.OF_ARMS, figures.layout)]
_OURS = re.compile(rf"(\d+-)?({'|'.join([*_NAMES, 'optima', 'rules'])})\.(png|pdf|csv|tex)")  # what `write` may write
_COLUMNS = ["model", "tokens", "batch", "runs", "x", "x_error", "loss", "loss_error", "lr", "lr_error", "reason"]


def write(sources: dict[str, Source], path: Path, norm: str, command: str, out: Path) -> dict[str, int]:
    """The report on the arms `sources` of `path`, a study with its result.json or not; `command` is what made it.

    Returns how many figures and files there are. Raises RequestError when no arm has anything at a horizon.
    """
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    told: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):  # there is none, or it is no study's
        told = {key: str(value) for key, value in dict(json.loads((path / "result.json").read_text())).items()}
    scans, without = attempted(sources, lambda name: sources[name].points(norm)["smoothed"], RequestError)
    lost = [f"{f'Left out, {name}: ' if name else ''}{why}" for name, why in without.items()]
    if not scans:
        raise RequestError(lost[0])
    drawn, left_out = figures.drawn(figures.OF_ARMS, scans, norm, {n: bound(sources[n].runs, norm) for n in scans})
    said = [told[key] for key in ("verdict", "conditions") if key in told] + lost + left_out
    sections: list[dict[str, Any]] = [{"title": "All", "sentences": said, "figures": drawn, "tables": {}}]
    numbers = dict(zip(scans, range(1, 1 + len(scans)), strict=True))
    arms, without = attempted(scans, lambda name: section(name, sources[name], norm, f"{numbers[name]}-"), RequestError)
    said += [f"{name}: {why}" for name, why in without.items()]
    sections += arms.values()
    folder = out.with_name(f"{out.stem}_files")
    if (folder.exists() and not folder.is_dir()) or (folder / "metrics.jsonl").exists():
        raise RequestError(f"{folder} is no folder for figures: choose another --out.")
    folder.mkdir(exist_ok=True)
    for each in sections:
        for name, figure in each["figures"].items():
            render.save(figure, folder / f"{name}.png", folder / f"{name}.pdf")
            figure.table.to_csv(folder / f"{name}.csv", index=False)
        for name, table in each["tables"].items():
            table.to_csv(folder / f"{name}.csv", index=False)
            (folder / f"{name}.tex").write_text(table.to_latex(index=False, escape=True, float_format="%.4g"))
    runs = pd.concat([source.runs for source in sources.values()])
    commands = [command, *runs.get("command", pd.Series(dtype=str)).dropna()]
    question = told.get("question", f"What do loss and norm depend on in {path.resolve().name}?")
    page = {"question": question, "sections": sections, "commands": "\n".join(commands), "files": folder.name}
    page["methods"] = sentences.methods(sources.values())
    template = Environment(autoescape=True).from_string(_PAGE.read_text())
    write_whole(out, template.render(page, plotly=get_plotlyjs(), html=render.html))
    made = {name for each in sections for kind in ("figures", "tables") for name in each[kind]}
    for old in folder.iterdir():  # of a report that had more arms, or figures
        if old.is_file() and _OURS.fullmatch(old.name) and old.stem not in made:
            old.unlink()
    figure_count, tables = (sum(len(each[kind]) for each in sections) for kind in ("figures", "tables"))
    return {"figures": figure_count, "files": 3 * figure_count + 2 * tables}


def bound(runs: pd.DataFrame, norm: str) -> float | None:
    """Where weight decay holds a norm in which its layer's role steps; None without decay, and for other steps."""
    if runs.empty:  # those of others: a table says less of them
        return None
    run = runs.iloc[0]  # an arm has one decay
    layer, _, name = norm.rpartition("/")
    role = layer if layer in ("embedding", "head") else "hidden"
    scale, decay = (run.get(f"optimizer.roles.{role}.{key}") for key in ("scale", "weight_decay"))
    decay = run.get("optimizer.weight_decay") if pd.isna(decay) else decay
    steps = {name, "sign"} if role == "head" else {name}  # whose norm is the head's, too
    if not decay or run.get(f"optimizer.roles.{role}.norm") not in steps or run["optimizer.norm_control"] != "decay":
        return None
    return run[f"optimizer.lr_scale.{role}"] * scale / decay


def section(name: str, source: Source, norm: str, prefix: str) -> dict[str, Any]:
    """Title, sentences, figures and tables of an arm; layouts of lr are drawn, not fitted."""
    drawn, left_out = figures.drawn((figures.layout,), source.points(norm)["smoothed"])
    if "lr_in" in source.rows and source.rows.lr.notna().any():
        source = replace(source, rows=source.rows[source.rows.lr.notna()])
    answer = results.norm(source, norm)
    try:
        results.laws(source, answer)
    except FitRefused as refusal:
        answer["refused"] = dict.fromkeys(("lr", "batch", "first_horizon"), str(refusal))
    more, also_left_out = figures.drawn(figures.FIGURES, source, answer)
    drawn = {prefix + figure: each for figure, each in (more | drawn).items()}
    tables = {f"{prefix}optima": pd.DataFrame(answer["optima"]).reindex(columns=_COLUMNS)}
    tables |= {f"{prefix}rules": pd.DataFrame(rules.lines(answer["rules"]))} if "rules" in answer else {}
    said = sentences.findings(answer) + also_left_out + left_out
    return {"title": name or "Results", "sentences": said, "figures": drawn, "tables": tables}
