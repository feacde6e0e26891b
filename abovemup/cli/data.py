"""`abovemup data`: make token shards of a source, and look at those there are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from abovemup.cli.options import ConfigDir, Json, Overrides

if TYPE_CHECKING:
    from abovemup.data.progress import Note, Watch

app = typer.Typer(no_args_is_help=True)
Dir = Annotated[Path, typer.Argument(exists=True, file_okay=False, metavar="DIR", help="A prepared folder.")]
SHOWN = 3  # documents


@app.command("prepare")
def prepare(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A choice of the data group: text, fineweb, ...")],
    overrides: Overrides = None,
    path: Annotated[str | None, typer.Option(metavar="P", help="data=text: a file or a folder.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder, instead of the cache's.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Train tokens: 10B; all.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad records and go on.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Threads; as many as cores.")] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Tokenise a source into shards, once: abovemup data prepare text --path corpus/ --out shards/

    Stopped at any moment, the same command goes on where it was.
    """
    from abovemup.config.cadence import parse_tokens
    from abovemup.config.compose import compose
    from abovemup.config.errors import RequestError
    from abovemup.data.prepare import prepared
    from abovemup.data.progress import Job
    from abovemup.data.recipe import Recipe
    from abovemup.data.sources import find_source
    from abovemup.data.split import Amount
    from abovemup.training.signals import Stop

    if source in ("synthetic", "shards"):
        raise RequestError(f"data={source} needs no preparing: abovemup train data={source}")
    typed = [f"data={source}", *(overrides or []), *(["data.skip_bad=true"] if skip_bad else [])]
    e = compose(typed + ([] if path is None else [f"data.path={path}"]), config_dir=config_dir)
    amount = None if tokens is None else Amount(parse_tokens(tokens), e.eval.tokens + 1)
    out = None if out is None else Path(os.path.expanduser(out))
    job = Job(find_source(e.data), Recipe(e.tokenizer), e.data.skip_bad, amount, out, workers)
    with Stop(), _shown() as (note, watch):
        folder, manifest, *_ = prepared(job, note, watch)
    print(f"abovemup train data=shards data.path={folder}")
    if amount and (have := counts(manifest, "train")["tokens"]) < amount.train:
        ends = f"{job.source.place} ends after {have:,} train tokens"
        raise RequestError(f"{ends}, {amount.train:,} were asked for. What there is can be read.")


@contextmanager
def _shown() -> Iterator[tuple["Note", "Watch | None"]]:
    """Where lines and progress go: a bar on a terminal, in a pipe lines only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda line: print(line, flush=True), None
        return
    with Progress(BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=None, visible=False)
        first: list[int] = []  # bytes that an earlier process has done

        def watch(documents: int, tokens: int, size: int, share: float | None) -> None:
            first[:] = first or [size]
            speed = (size - first[0]) / 1e6 / (progress.tasks[0].elapsed or 1.0)
            text = f"{documents:,} documents  {tokens:,} tokens  {speed:.1f} MB/s  ETA"
            total, done = (None, None) if share is None else (1.0, min(1.0, share))
            progress.update(task, description=text, visible=True, total=total, completed=done)

        yield lambda line: console.print(Text(line), soft_wrap=True), watch


@app.command("list")
def list_(json: Json = False) -> None:
    """What the cache holds, and what was stopped on the way."""
    from abovemup.cli.output import print_json, print_table
    from abovemup.config.site import cache_folder
    from abovemup.data.shards import read_manifest

    rows = []
    for folder in sorted(path for path in (cache_folder() / "corpora").glob("[!.]*") if path.is_dir()):
        try:
            manifest = read_manifest(folder)
            tokens = [counts(manifest, split)["tokens"] for split in ("train", "validation")]
            rows.append([str(folder), manifest["source"]["name"], manifest["tokenizer"]["name"], *tokens, ""])
        except (OSError, ValueError, KeyError, TypeError):
            state = "stopped on the way" if folder.suffix == ".part" else "damaged, or of another version"
            rows.append([str(folder), "", "", 0, 0, state])
    columns = ["folder", "source", "tokenizer", "train tokens", "validation tokens", "state"]
    print_json([dict(zip(columns, row, strict=True)) for row in rows]) if json else print_table(columns, rows)


@app.command("inspect")
def inspect(folder: Dir, json: Json = False) -> None:
    """What a prepared folder holds: its source, counts, and first documents."""
    from abovemup.cli.output import print_json
    from abovemup.data.prepare import open_prepared
    from abovemup.data.progress import SPLITS
    from abovemup.tracking.terminal import safe

    _, manifest, tokenizer, shards = open_prepared(folder)
    about = {"source": manifest["source"], "tokenizer": manifest["tokenizer"]}
    about |= {split: counts(manifest, split) for split in SPLITS}
    about["train"]["unigram_entropy"] = manifest["unigram_entropy"]
    first = tokenizer.decode(shards["train"][0][: 2**14].tolist())
    documents = first.split(tokenizer.decode([tokenizer.eot]))[:SHOWN]
    if json:
        print_json({"folder": str(folder), **about, "first_documents": documents})
        return
    for part, values in about.items():
        print("\n".join(f"{part:12} {key:16} {value}" for key, value in values.items()))
    for number, text in enumerate(documents, start=1):
        print(f"\ndocument {number}: {safe(text[:400])}{' ...' if len(text) > 400 else ''}")


@app.command("verify")
def verify(folder: Dir) -> None:
    """Read every shard and compare its checksum with the manifest's; exit 1 when one is not what was written."""
    from abovemup.data.shards import flaws

    wrong = flaws(folder)
    for what in wrong:
        typer.echo(f"abovemup: {folder}: {what}", err=True)
    if wrong:
        raise typer.Exit(1)
    print(f"{folder} is what was written")


def counts(manifest: dict[str, Any], split: str) -> dict[str, Any]:
    """Tokens, documents, bytes and bytes per token of a split."""
    from abovemup.data.shards import total

    shards, size = manifest[split]["shards"], manifest[split]["bytes"]
    tokens = total(shards, "tokens")
    return {"tokens": tokens, "documents": total(shards, "documents"), "bytes": size, "bytes_per_token": size / tokens}
