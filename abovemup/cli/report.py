"""`abovemup report`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from abovemup.cli.output import check_file


def report(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="As of `abovemup fit`.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="An .html; its figures go beside it.")] = Path(
        "report.html"
    ),
    methods: Annotated[bool, typer.Option("--methods", help="Print the methods paragraph, and write nothing.")] = False,
    loss: Annotated[str | None, typer.Option(metavar="paper|val|window", help="Which loss; val, else window.")] = None,
    norm: Annotated[str, typer.Option(metavar="LAYER/NORM", help="Which norm.")] = "head/rms_to_inf",
    where: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only such runs: key<value too.")] = None,
) -> None:
    """Write the paper's figures and tables from these runs into one HTML file that needs no network."""
    from abovemup.analysis import sentences
    from abovemup.analysis.report import write
    from abovemup.analysis.sources import open_arms

    if not methods:
        check_file("--out", out, (".html",))
    sources = open_arms(source, loss, where or [], norm)
    if methods:
        print(sentences.methods(sources.values()))
        return
    options = [text for condition in where or [] for text in ("--where", condition)]
    options += ["--loss", loss] if loss else []
    command = shlex.join(["abovemup", "report", str(source), "--norm", norm, *options])
    count = write(sources, source, norm, command, out)
    print(f"{out}: {count['figures']} figures; {out.with_name(out.stem)}_files/ has {count['files']} files")
