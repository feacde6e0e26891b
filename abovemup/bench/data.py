"""Making shards against `datasets.map` with the same tokenizer, reading them against a copy, and prepare's memory."""

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from abovemup.bench.ratio import Ratio, beneath, in_turns
from abovemup.config.compose import compose
from abovemup.config.resolve import cores
from abovemup.data.corpus import open_corpus
from abovemup.data.progress import Job, tokenise
from abovemup.data.readers import BadRecords
from abovemup.data.recipe import Recipe, reopen, train_bpe
from abovemup.data.sources import find_source
from abovemup.data.split import documents, make_split

VOCAB, TURNS = 8192, 2
SEQ_LEN, TOKENS = 128, 2**16  # of a window and of a batch
# A process that says the peak of its memory in kB; its own counter starts at exec's shell.
PEAK = (
    "import resource, sys\nfrom abovemup.cli.main import run\ncode = run(sys.argv[1:])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\nsys.exit(code)"
)


def data(timed: int = 20, small: int = 10, large: int = 100, batches: int = 200) -> list[Ratio]:
    """`timed`, `small` and `large`: MB of source."""
    with tempfile.TemporaryDirectory() as folder:
        text = written(Path(folder) / "timed.jsonl", timed)
        (Path(folder) / "tokenizer.json").write_text(train_bpe(itertools.islice(texts(text), 500), VOCAB))
        ratios = [tokenising(Path(folder), text), reading(text, batches)]
        most, least = (peak(written(Path(folder) / f"{size}.jsonl", size)) for size in (large, small))
    name = f"peak memory of data prepare, {large} MB of text over {small} MB"
    return [*ratios, Ratio(name, most, least, "MB", 1.2)]


def written(path: Path, size: int) -> Path:
    """`size` MB of JSON lines: the standard library's sources over and over, each turn from another line on."""
    source = find_source(compose(["data=stdlib"]).data)
    sources = [document.data.decode("utf-8", "replace") for document in documents(source, BadRecords(False))]
    with path.open("w") as file:
        for turn, text in ((turn, text) for turn in itertools.count() for text in sources):
            lines = text.splitlines(keepends=True)
            cut = 7 * turn % max(1, len(lines))
            file.write(json.dumps({"text": f"{turn}\n" + "".join(lines[cut:] + lines[:cut])}) + "\n")
            if file.tell() >= size * 10**6:
                break
    return path


def texts(path: Path) -> Any:
    return (json.loads(line)["text"] for line in path.open())


def tokenising(folder: Path, text: Path) -> Ratio:
    """MB of text a second, all cores, in turns: ours from JSON lines to the shards of two splits and their checksums;
    theirs from a table at hand to one with a column of the same ids. Theirs starts processes."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    exp = compose(["data=text", f"data.path={text}", f"tokenizer.vocab_size={VOCAB}", f"model.vocab_size={VOCAB}"])
    job = Job(find_source(exp.data), Recipe(exp.tokenizer), False)
    split = make_split(job.source, BadRecords(False))
    table = datasets.Dataset.from_dict({"text": list(texts(text))}).cast_column("text", datasets.Value("string"))
    table.save_to_disk(folder / "table")
    table = datasets.load_from_disk(folder / "table")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    def ours() -> None:
        tokenise(Path(tempfile.mkdtemp(dir=folder)), job, reopen("bpe", folder), split, _quiet, _quiet)

    def theirs() -> None:
        table.map(ids, batched=True, num_proc=cores(), load_from_cache_file=False, remove_columns=["text"])

    mine, other = in_turns([ours, theirs], TURNS, min)  # the best: what else the machine does only adds
    size = sum(len(text.encode()) for text in texts(text)) / 1e6
    name = f"tokenising on {cores()} cores over datasets.map"
    return Ratio(name, size / mine, size / other, "MB/s", 1.3, at_least=True)


def _quiet(*said: object) -> None:
    pass


def reading(text: Path, batches: int) -> Ratio:
    """Batches of TOKENS tokens from the shards, in turns with copies of as many. Neither is in a cache, and the memory
    of both is free again at once, as in a training loop."""
    exp = compose(["data=text", f"data.path={text}", f"train.seq_len={SEQ_LEN}", "data.allow_repeat=true"])
    corpus, count = open_corpus(exp, _quiet), TOKENS // SEQ_LEN
    kept = [corpus.batch(i * count, count) for i in range(batches + 1)]
    fresh, copied = itertools.count(len(kept) * count, count), iter(kept)
    works = (lambda: corpus.batch(next(fresh), count), lambda: next(copied).clone())
    mine, other = in_turns(works, batches, statistics.median)
    size, name = count * (SEQ_LEN + 1) * 8 / 1e9, f"reading batches of {SEQ_LEN} tokens over copying them"
    return Ratio(name, size / mine, size / other, "GB/s", 0.5, at_least=True)


def peak(text: Path) -> float:
    """MB of `data prepare`."""
    command = [sys.executable, "-c", PEAK, "data", "prepare", "text", "--path", str(text), "--out", f"{text}.shards"]
    return int(beneath(command).split()[-1]) * 1024 / 1e6
