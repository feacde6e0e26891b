"""The real commands on a hub and a web server of this machine: refused, cut off, killed, and offline."""

import gzip
import json
import random
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from abovemup.data.shards import flaws
from tests.data.opening import jsonl, sentences
from tests.data.server import Server, serving
from tests.data.test_hub import README, row
from tests.data.test_web import ROOT, record
from tests.training.tiny import rows

from .process import run, started, tiny, until

pytestmark = pytest.mark.slow

FILES = 10
TEXTS = [text * 15 for text in sentences(FILES * 150)]
SOURCES = {
    "fineweb": ["fineweb", "tokenizer=byte"],
    "nemotron_cc": ["nemotron_cc", "--tokens", "1M", "tokenizer=byte"],
    "hub": ["hub", "data.repo=me/lines", "tokenizer=byte"],
}


def write(root: Path) -> None:
    """The same texts as a parquet repository, as Common Crawl's packed lines with their list, and as plain lines."""
    paths = [f"{ROOT}/quality=high/kind=actual/kind2=actual/part-{i:05}.jsonl.zstd" for i in range(FILES)]
    names = ["fineweb/README.md", "fineweb/data/CC-MAIN-2024-10/0.parquet", "fineweb/sample/10BT/0", "lines/0"]
    for name in (*names, *(f"crawl/{path}" for path in paths)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "fineweb/README.md").write_text(README)
    pq.write_table(pa.Table.from_pylist([row("other")]), root / "fineweb/data/CC-MAIN-2024-10/0.parquet")
    (root / f"crawl/{ROOT}.paths.gz").write_bytes(gzip.compress("\n".join(paths).encode()))
    for i, path in enumerate(paths):
        texts = TEXTS[i::FILES]
        pq.write_table(pa.Table.from_pylist(list(map(row, texts))), root / f"fineweb/sample/10BT/{i:03}.parquet")
        lines = "\n".join(json.dumps(record(text)) for text in texts)
        (root / "crawl" / path).write_bytes(zstandard.compress(lines.encode()))
        jsonl(root / f"lines/part-{i}.jsonl", texts)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write(root)
    return root


@pytest.fixture
def server(written: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(elsewhere / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("ABOVEMUP_CACHE", str(elsewhere / "cache"))
    with serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        served.wait = 1
        served.commit("HuggingFaceFW/fineweb", written / "fineweb")
        served.commit("me/lines", written / "lines")
        served.folders["crawl"] = written / "crawl"
        yield served


def prepare(source: str, server: Server, out: str, workers: int) -> list[str]:
    url = [f"data.url={server.url}/crawl"] if source == "nemotron_cc" else []
    return ["data", "prepare", *SOURCES[source], *url, "--out", out, "--workers", str(workers)]


@pytest.mark.parametrize("source", SOURCES)
def test_whatever_happens_the_shards_are_the_same_bits(server: Server, elsewhere: Path, source: str) -> None:
    whole = run(elsewhere, *prepare(source, server, "whole", 1))
    assert whole.code == 0, whole.err
    assert whole.out.endswith("abovemup train data=shards data.path=whole\n")
    progress, moments = elsewhere / "out.part/progress.json", random.Random(source)
    server.refuse, server.pace = 1, 0.5  # refused at the start
    with started(elsewhere, *prepare(source, server, "out", 2)) as process:
        time.sleep(moments.uniform(0.5, 3))  # before there is a record, or after
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    began = time.time()
    with started(elsewhere, *prepare(source, server, "out", 2)) as process:
        assert until(process, lambda: progress.exists() and progress.stat().st_mtime > began)
        server.drop = 1
        time.sleep(moments.uniform(0, 0.5))
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    server.refuse, server.drop, server.pace = 1, 1, 0
    last = run(elsewhere, *prepare(source, server, "out", 3))
    assert last.code == 0, last.err
    assert "goes on where it was stopped" in last.out
    assert server.refuse == server.drop == 0
    assert contents(elsewhere / "out") == contents(elsewhere / "whole")
    assert flaws(elsewhere / "out") == []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_prepares_what_it_needs_and_then_needs_no_network(
    server: Server, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("tokenizer.vocab_size=300", "model.vocab_size=300", "train.steps=3")
    settings = [s for s in tiny(*sizes) if not s.startswith("data")]
    first = run(elsewhere, "train", *settings, "data=fineweb", "run.name=first")
    assert first.code == 0, first.err
    said = next(line for line in first.out.splitlines() if "prepared first" in line).split("as by: ")[1]
    asked = len(server.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    second = run(elsewhere, "train", *settings, "data=fineweb", "run.name=second")
    assert second.code == 0, second.err
    assert "prepared first" not in second.out
    assert len(server.requests) == asked
    assert rows(elsewhere / "runs/second") == rows(elsewhere / "runs/first")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("ABOVEMUP_CACHE", str(elsewhere / "another"))
    by_hand = run(elsewhere, *shlex.split(said)[1:])
    assert by_hand.code == 0, by_hand.err
    command = shlex.split(by_hand.out.splitlines()[-1])[1:]
    assert command[:2] == ["train", "data=shards"]
    third = run(elsewhere, *command, *settings, "run.name=third")
    assert third.code == 0, third.err
    assert rows(elsewhere / "runs/third") == rows(elsewhere / "runs/first")
