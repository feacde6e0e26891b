"""Nemotron-CC over HTTP: the same documents however the connection or the reading is broken."""

import functools
import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError, RunFailed
from abovemup.data import sources, web
from abovemup.data.readers import BadRecords
from abovemup.data.sources import Place, Source, find_source

from .server import Server, serving

ROOT = "contrib/Nemotron/Nemotron-CC/data-jsonl"
FILES = [
    "quality=high/kind=actual/kind2=actual/CC-MAIN-2013-20-part-00000.jsonl.zstd",
    "quality=high/kind=actual/kind2=actual/CC-MAIN-2013-20-part-00001.jsonl.zstd",
    "quality=high/kind=synthetic/kind2=diverse_qa_pairs/CC-MAIN-2024-10-part-00000.jsonl.zstd",
    "quality=high/kind=synthetic/kind2=distill/CC-MAIN-2024-10-part-00000.jsonl.zstd",
    "quality=medium-high/kind=actual/kind2=actual/CC-MAIN-2019-30-part-00000.jsonl.zstd",
]
HQ = {text for i in range(3) for text in (f"{FILES[i]} {j} \u2028 {'x' * (97 * j % 400)}" for j in range(20))}


def corpus(root: Path) -> Path:
    """The layout of Common Crawl; the second file has a frame for each line."""
    for i, name in enumerate(FILES):
        lines = [json.dumps(record(f"{name} {j} \u2028 {'x' * (97 * j % 400)}")).encode() + b"\n" for j in range(20)]
        packed = map(zstandard.compress, lines if i == 1 else [b"".join(lines)])
        (root / ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (root / ROOT / name).write_bytes(b"".join(packed))
    paths = "".join(f"{ROOT}/{name}\n" for name in FILES)
    (root / f"{ROOT}.paths.gz").write_bytes(gzip.compress(paths.encode()))
    return root


def record(text: str) -> dict[str, str]:
    return {"warc_record_id": "7d0e", "url": "http://example.org/n/1", "language": "eng", "text": text}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(sources, "BATCH", 7)
    monkeypatch.setattr(web, "CHUNK", 100)
    with serving() as served:
        served.folders["crawl"] = corpus(tmp_path / "crawl")
        served.faulty = (".zstd",)
        yield served


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


composed = functools.cache(lambda *settings: compose(list(settings)).data)


def nemotron(url: str | Path, *settings: str) -> Source:
    return find_source(composed("data=nemotron_cc", f"data.url={url}", *settings))


def read(source: Source, start: Place | None = None, skip: bool = False) -> tuple[list[str], list[Place]]:
    found, places = [], []
    for batch, place in source.batches(BadRecords(skip), start):
        found += [document.data.decode() for document in batch]
        places.append(json.loads(json.dumps(place)))
    return found, places


def test_the_default_is_the_papers_hq(server: Server) -> None:
    found, _ = read(nemotron(f"{server.url}/crawl/"))
    assert len(found) == 60
    assert set(found) == HQ
    assert found == read(nemotron(f"{server.url}/crawl"))[0]
    assert server.fetched("paths.gz") == 2


def test_a_folder_is_read_like_the_web(server: Server, tmp_path: Path) -> None:
    assert read(nemotron(tmp_path / "crawl"))[0] == read(nemotron(f"{server.url}/crawl"))[0]
    before = nemotron(tmp_path / "crawl").identity()
    (tmp_path / "crawl" / ROOT / FILES[0]).write_bytes(b"")
    assert nemotron(tmp_path / "crawl").identity() != before


def test_parts_are_chosen_by_pattern(server: Server) -> None:
    found, _ = read(nemotron(f"{server.url}/crawl", "data.subset='high/synthetic/*, medium-high/actual/actual'"))
    assert {text.split()[0] for text in found} == {FILES[2], FILES[3], FILES[4]}
    with pytest.raises(RequestError, match=r"data.subset=high/actual/distill is no part.*high/synthetic/distill"):
        nemotron(server.url, "data.subset='high/actual/actual,high/actual/distill'")
    with pytest.raises(RequestError, match="has no file of low/actual/actual"):
        read(nemotron(f"{server.url}/crawl", "data.subset=low/actual/actual"))


@pytest.mark.parametrize("where", ["web", "folder"])
def test_stopped_anywhere_it_goes_on(server: Server, tmp_path: Path, where: str) -> None:
    url = f"{server.url}/crawl" if where == "web" else tmp_path / "crawl"
    whole, places = read(nemotron(url))
    assert len(places) == -(-60 // 7)
    for i, place in enumerate(places, start=1):
        assert read(nemotron(url), place)[0] == whole[7 * i :]


def test_another_list_cannot_be_continued(server: Server, tmp_path: Path) -> None:
    _, places = read(nemotron(f"{server.url}/crawl"))
    (tmp_path / "crawl" / f"{ROOT}.paths.gz").write_bytes(gzip.compress(f"{ROOT}/{FILES[0]}\n".encode()))
    with pytest.raises(RequestError, match="list of paths has changed"):
        read(nemotron(f"{server.url}/crawl"), places[0])


@pytest.mark.parametrize("faults", [{"refuse": 3}, {"refuse": 2, "refuse_status": 503}, {"drop": 3}])
def test_a_busy_or_broken_connection_is_waited_for(server: Server, waits: list[float], faults: dict[str, int]) -> None:
    whole, _ = read(nemotron(f"{server.url}/crawl"))
    server.requests.clear()
    for fault, count in faults.items():
        setattr(server, fault, count)
    assert read(nemotron(f"{server.url}/crawl"))[0] == whole
    assert server.refuse == server.drop == 0
    ranges = [int(asked.split("=")[1].split("-")[0]) for _, _, asked in server.requests if asked]
    assert len(ranges) == faults.get("drop", 0)
    assert ranges == sorted(ranges)
    assert all(ranges)  # it goes on, and does not start again
    assert len(waits) == faults.get("refuse", 3)
    assert "drop" in faults or set(waits) == {7.0}  # Retry-After is honoured


def test_what_does_not_end_is_given_up(server: Server, waits: list[float]) -> None:
    whole, _ = read(nemotron(f"{server.url}/crawl"))
    reading = nemotron(f"{server.url}/crawl").batches(BadRecords(False), None)
    taken = [next(reading)]
    server.refuse = 10**6
    with pytest.raises(RunFailed, match=r"zstd: HTTP 429, \d+ times in a row.\nRun the same again: it goes on"):
        taken.extend(reading)
    server.refuse = 0
    found = [document.data.decode() for batch, _ in taken for document in batch]
    assert found + read(nemotron(f"{server.url}/crawl"), taken[-1][1])[0] == whole


def test_tries_are_counted_from_the_last_byte(
    server: Server, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long download breaks often; only one that stands still is given up."""
    import httpx

    monkeypatch.setattr(web, "TRIES", 2)
    (tmp_path / "crawl" / "big").write_bytes(bytes(range(250)) * 40)
    server.faulty, server.drop = ("big",), 5
    with httpx.Client() as client:
        assert b"".join(web.download(client, f"{server.url}/crawl/big")) == bytes(range(250)) * 40
    assert waits == [1.0] * 5


def test_a_server_that_knows_no_ranges_is_read_again_up_to_where_it_broke(
    server: Server, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    data = bytes(range(250)) * 40
    (tmp_path / "crawl" / "big").write_bytes(data)
    monkeypatch.setattr(web, "TRIES", 3)
    server.faulty, server.drop, server.ranges = ("big",), 2, False
    with httpx.Client() as client:
        assert b"".join(web.download(client, f"{server.url}/crawl/big")) == data
        assert len(waits) == 2
        server.drop = 10**6  # always at the same byte
        with pytest.raises(RunFailed, match="3 times in a row"):
            list(web.download(client, f"{server.url}/crawl/big"))
        server.drop = 1
        reading = web.download(client, f"{server.url}/crawl/big")
        next(reading)
        (tmp_path / "crawl" / "big").write_bytes(data[::-1])
        with pytest.raises(RunFailed, match="changed while it was read"):
            list(reading)


def test_a_file_that_changes_under_the_reading(server: Server, waits: list[float], tmp_path: Path) -> None:
    path = tmp_path / "crawl" / "big"
    path.write_bytes(b"a" * 10_000)
    server.faulty, server.drop = ("big",), 1
    import httpx

    with httpx.Client() as client:
        reading = web.download(client, f"{server.url}/crawl/big")
        next(reading)
        path.write_bytes(b"b" * 10_000)
        with pytest.raises(RunFailed, match="changed while it was read"):
            list(reading)


def test_a_bad_line_is_named_by_its_address(server: Server, tmp_path: Path) -> None:
    lines = [json.dumps(record("one")).encode(), b"{broken", json.dumps(record("two")).encode()]
    (tmp_path / "crawl" / ROOT / FILES[0]).write_bytes(zstandard.compress(b"\n".join(lines)))
    for url in (f"{server.url}/crawl", tmp_path / "crawl"):
        with pytest.raises(RequestError, match=rf"{url}/{ROOT}/{FILES[0]}:2: not JSON"):
            read(nemotron(url))
        bad = BadRecords(skip=True)
        found = [d.data.decode() for batch, _ in nemotron(url).batches(bad) for d in batch]
        assert bad.count == 1
        assert {"one", "two"} < set(found)
    whole = zstandard.compress(b"\n".join(lines[::2]))
    (tmp_path / "crawl" / ROOT / FILES[0]).write_bytes(whole[:-8])
    with pytest.raises(RequestError, match=rf"{FILES[0]}:\d: the .zstd file is damaged"):
        read(nemotron(f"{server.url}/crawl"))


def test_wrong_places_are_named(server: Server, waits: list[float], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"paths.gz: HTTP 404 .*data.url"):
        read(nemotron(f"{server.url}/nothing"))
    with pytest.raises(RequestError, match=r"data.url=.*gone: No such file"):
        nemotron(tmp_path / "gone")
    with pytest.raises(RequestError, match=r"paths\.gz: No such file"):
        read(nemotron(tmp_path))
    (tmp_path / "crawl" / f"{ROOT}.paths.gz").write_bytes(b"<html>")
    with pytest.raises(RequestError, match="not a packed list of paths"):
        read(nemotron(f"{server.url}/crawl"))
    (tmp_path / "crawl" / f"{ROOT}.paths.gz").write_bytes(gzip.compress(f"{ROOT}/{FILES[0]}x\n".encode()))
    with pytest.raises(RequestError, match="HTTP 404"):
        read(nemotron(f"{server.url}/crawl"))
    assert not waits


def test_offline_is_said_at_once(waits: list[float]) -> None:
    source = nemotron("http://127.0.0.1:9")
    assert source.identity()["column"] == "text"  # a prepared corpus is found without a network
    with pytest.raises(RunFailed, match=r"cannot reach http://127.0.0.1:9/ .*: connect, or set data.url="):
        read(source)
    assert not waits


def test_the_true_layout(server: Server) -> None:
    if not (given := os.environ.get("ABOVEMUP_TEST_DATA")):
        pytest.skip("ABOVEMUP_TEST_DATA names no folder")
    server.folders["true"] = Path(given) / "schema/nemotron-cc"
    found, _ = read(nemotron(f"{server.url}/true"))
    assert len(found) == 120
    assert found == read(nemotron(server.folders["true"]))[0]
