"""The hub, spoken by a server on this machine: the same documents however it is read, errors that name the thing."""

import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from abovemup.config.compose import compose
from abovemup.config.errors import RequestError, RunFailed
from abovemup.data import sources
from abovemup.data.readers import BadRecords
from abovemup.data.sources import Place, Source, find_source, hash64

from .server import Server, serving

README = """---
configs:
- config_name: default
  default: true
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
Invented rows.
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A hub that the libraries, which read HF_ENDPOINT when they are imported, take for theirs."""
    import datasets
    import huggingface_hub

    with serving() as served, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.delenv("HF_TOKEN", raising=False)
        endpoint(patch, served.url)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        yield served


def endpoint(patch: pytest.MonkeyPatch, url: str) -> None:
    import datasets
    import huggingface_hub

    patch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    patch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    patch.setattr(datasets.config, "HF_ENDPOINT", url)
    patch.setattr(datasets.config, "HUB_DATASETS_URL", url + "/datasets/{repo_id}/resolve/{revision}/{path}")


@pytest.fixture
def waits(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What would have been slept. Faults are off again afterwards."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    yield slept
    server.refuse = server.drop = 0


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BATCH", 7)


def row(text: str, **other: Any) -> dict[str, Any]:
    """A row of FineWeb."""
    about = {
        "id": "<urn:uuid:0>",
        "dump": "CC-MAIN-2024-10",
        "url": "http://example.org/p/1",
        "date": "2024-02-25T10:00:00Z",
        "file_path": "s3://commoncrawl/crawl-data/CC-MAIN-2024-10/segments/1/warc/x.warc.gz",
        "language": "en",
        "language_score": 0.93,
        "token_count": len(text) // 4,
    }
    return {"text": text, **about, **other}


def texts(start: int, count: int) -> list[str]:
    return [f"Page {i}\u2028 about {i * i}. סוף 🦙 {'x' * (i * 37 % 500)}" for i in range(start, start + count)]


def fineweb(root: Path, first: int = 0, undated: bool = False) -> list[str]:
    """Three files of the sample; returns their texts."""
    (root / "sample/10BT").mkdir(parents=True)
    (root / "data/CC-MAIN-2024-10").mkdir(parents=True)
    (root / "README.md").write_text(README)
    for i in range(3):
        table = pa.Table.from_pylist([row(text) for text in texts(first + 20 * i, 20)])
        if undated and i != 1:  # as in older dumps; the last has what others lack
            table = table.drop_columns(["date"])
        if undated and i == 2:
            table = table.append_column("score", pa.array([3.28] * 20))
        pq.write_table(table, root / f"sample/10BT/{i:03}_00000.parquet", row_group_size=6)
    pq.write_table(pa.Table.from_pylist([row("other")]), root / "data/CC-MAIN-2024-10/000_00000.parquet")
    return texts(first, 60)


def json_lines(root: Path) -> list[str]:
    """Two packed files of JSON lines, without names for its subsets."""
    root.mkdir(parents=True)
    for i in range(2):
        lines = [json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z"}) for text in texts(20 * i, 20)]
        (root / f"part-{i}.jsonl").write_text("\n".join(lines) + "\n")
    (root / "README.md").write_text("---\nconfigs:\n- config_name: en\n  data_files: part-*.jsonl\n---\n")
    return texts(0, 40)


composed = functools.cache(lambda *settings: compose(list(settings)).data)


def hub(repo: str | Path, *settings: str) -> Source:
    return find_source(composed("data=hub", f"data.repo={repo}", *settings))


def served(server: Server, root: Path, *settings: str) -> Source:
    """A folder as the only version of a repository."""
    server.repos.pop("me/served", None)
    server.commit("me/served", root)
    return hub("me/served", *settings)


def read(source: Source, start: Place | None = None, bad: BadRecords | None = None) -> tuple[list[str], list[Place]]:
    found, places = [], []
    for batch, place in source.batches(bad or BadRecords(False), start):
        found += [document.data.decode() for document in batch]
        assert [document.key for document in batch] == [hash64(document.data) for document in batch]
        places.append(json.loads(json.dumps(place)))
    return found, places


@pytest.mark.parametrize("kind", ["parquet", "json", "folder"])
def test_stopped_anywhere_it_goes_on(server: Server, tmp_path: Path, kind: str) -> None:
    made = json_lines(tmp_path / "r") if kind == "json" else fineweb(tmp_path / "r")
    settings = [] if kind == "json" else ["data.subset=sample-10BT"]
    source = hub(tmp_path / "r", *settings) if kind == "folder" else served(server, tmp_path / "r", *settings)
    whole, places = read(source)
    assert whole == made
    assert len(places) == -(-len(made) // 7)
    for i, place in enumerate(places, start=1):
        again = hub(tmp_path / "r" if kind == "folder" else "me/served", *settings)
        assert read(again, place)[0] == made[7 * i :]


def test_the_newest_is_looked_up_once(server: Server, tmp_path: Path) -> None:
    old = fineweb(tmp_path / "old")
    first = server.commit("me/grows", tmp_path / "old")
    source = hub("me/grows", "data.subset=sample-10BT")
    reading = source.batches(BadRecords(False), None)
    _, place = next(reading)
    new = fineweb(tmp_path / "new", first=500)
    second = server.commit("me/grows", tmp_path / "new")
    assert [d.data.decode() for documents, _ in reading for d in documents] == old[7:]
    assert read(source, place)[0] == old[7:]
    assert source.describe()["commit"] == first
    assert read(source)[0] == new
    assert source.describe()["commit"] == second
    assert read(hub("me/grows", "data.subset=sample-10BT", f"data.revision={first}"))[0] == old
    assert source.identity() == hub("me/grows", "data.subset=sample-10BT").identity()


def test_files_without_a_column_that_others_have(server: Server, tmp_path: Path) -> None:
    made = fineweb(tmp_path / "r", undated=True)
    server.commit("me/mixed", tmp_path / "r")
    assert read(hub("me/mixed", "data.subset=sample-10BT"))[0] == made


def test_blank_and_null_texts_are_left_out(server: Server, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row("one"), row(""), row(" \n"), row("two")])
    table = pa.concat_tables([table, table.slice(0, 1).set_column(0, "text", pa.array([None], pa.string()))])
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(served(server, tmp_path))[0] == ["one", "two"]


def test_a_column_that_is_no_text_is_said_to_be_none(server: Server, tmp_path: Path) -> None:
    for kind in (pa.list_(pa.string()), pa.struct({"x": pa.string()}), pa.int64()):
        (tmp_path / str(kind)).mkdir()
        pq.write_table(pa.table({"text": pa.array([None], kind)}), tmp_path / str(kind) / "a.parquet")
        with pytest.raises(RequestError, match=r"me/served: column 'text' holds .*, not text"):
            read(served(server, tmp_path / str(kind)))
    (tmp_path / "json").mkdir()
    (tmp_path / "json/a.jsonl").write_text(
        '{"text": "one", "n": 1}\n{"text": ["two"], "n": 2}\n{"text": "three", "n": 3}\n'
    )
    with pytest.raises(RequestError, match=r"column 'text' holds .*, not text") as caught:
        read(served(server, tmp_path / "json"))
    assert str(caught.value).count("\n") < 2


@pytest.mark.parametrize("fault", ["refuse", "drop"])
def test_a_busy_or_broken_connection_is_waited_for(
    server: Server, waits: list[float], tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made = fineweb(tmp_path / "r")
    server.commit(f"fault/{fault}", tmp_path / "r")
    for name in ("datasets", "huggingface_hub"):  # as they are when imported in an ordinary process
        logging.getLogger(name).handlers = [logging.StreamHandler()]
    reading = hub(f"fault/{fault}", "data.subset=sample-10BT").batches(BadRecords(False), None)
    found = [document.data.decode() for document in next(reading)[0]]
    setattr(server, fault, 2)
    found += [document.data.decode() for batch, _ in reading for document in batch]
    assert found == made
    assert getattr(server, fault) == 0
    assert len(waits) == 2
    assert fault == "drop" or min(waits) >= 7  # Retry-After is honoured
    assert capfd.readouterr() == ("", "")


def test_a_hub_that_is_busy_from_the_start_is_asked_again(
    server: Server, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fineweb(tmp_path / "r")
    server.commit("busy/start", tmp_path / "r")
    monkeypatch.setattr(server, "faulty", ("",))
    server.refuse = 2
    assert read(hub("busy/start", "data.subset=sample-10BT"))[0] == made
    assert waits == [7, 7]
    server.refuse = 10**6
    with pytest.raises(RunFailed, match="too many requests"):
        read(hub("busy/start", "data.subset=sample-10BT"))


@pytest.mark.parametrize("fault", ["refuse", "drop"])
def test_what_does_not_end_is_given_up(
    server: Server, waits: list[float], tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made = fineweb(tmp_path / "r")
    server.commit(f"end/{fault}", tmp_path / "r")
    source = hub(f"end/{fault}", "data.subset=sample-10BT")
    reading = source.batches(BadRecords(False), None)
    taken = [next(reading)]
    setattr(server, fault, 10**6)
    with pytest.raises(RunFailed, match="it goes on where it was") as caught:
        taken.extend(reading)
    found = [document.data.decode() for batch, _ in taken for document in batch]
    assert ("too many requests" if fault == "refuse" else "no connection") in str(caught.value)
    assert len(found) < len(made)
    assert waits
    setattr(server, fault, 0)
    assert found + read(source, taken[-1][1])[0] == made
    assert capfd.readouterr() == ("", "")


def test_gated(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fineweb(tmp_path / "r")
    server.commit("nvidia/gated", tmp_path / "r")
    server.gated.add("nvidia/gated")
    source = hub("nvidia/gated", "data.subset=sample-10BT")
    with pytest.raises(RequestError, match=r"gated: accept its terms at .*/datasets/nvidia/gated\nand set HF_TOKEN"):
        read(source)
    monkeypatch.setenv("HF_TOKEN", "hf_invented")
    assert read(source)[0] == made


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["data.repo=me/gone"], "data.repo=me/gone is no folder, and no data set on http"),
        (["data.repo=three/part/name"], "data.repo=three/part/name: .*repo"),
        (["data.revision=gone"], "data.repo=me/named has no branch, tag or commit data.revision=gone"),
        (["data.subset=gone"], "'gone' not found.*'default', 'sample-10BT'"),
        (["data.split=gone"], "gone.*train"),
        (["data.column=body"], "no column 'body'; it has text, id, dump"),
        (["data.column=token_count"], "column 'token_count' holds int64"),
    ],
)
def test_wrong_names_are_named(server: Server, tmp_path: Path, settings: list[str], says: str) -> None:
    fineweb(tmp_path / "r")
    server.repos.pop("me/named", None)
    server.commit("me/named", tmp_path / "r")
    chosen = settings if "data.repo" in settings[0] else ["data.repo=me/named", *settings]
    with pytest.raises(RequestError, match=says) as caught:
        read(find_source(compose(["data=hub", *chosen]).data))
    assert str(caught.value).count("\n") < 2


def test_broken_json_names_its_file(server: Server, tmp_path: Path) -> None:
    json_lines(tmp_path / "r")
    (tmp_path / "r/part-1.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(RequestError, match=r"part-1\.jsonl"):
        read(served(server, tmp_path / "r"))
    fineweb(tmp_path / "p")
    whole = (tmp_path / "p/sample/10BT/001_00000.parquet").read_bytes()
    (tmp_path / "p/sample/10BT/001_00000.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=r"001_00000\.parquet"):
        read(served(server, tmp_path / "p", "data.subset=sample-10BT"))


DAMAGED = {"cut": "001", "garbage": "001", "first": "000", "all": "000", "other column": "002", "json": "part-0"}


def damaged(root: Path, kind: str) -> list[str]:
    """A repository with damaged files; returns the texts of the others, and those before the damage."""
    if kind == "json":
        made = json_lines(root)
        (root / "part-0.jsonl").write_text('{"text": "fine"}\n{"text": \n')
        return made[20:]
    made = fineweb(root)
    paths = sorted((root / "sample/10BT").iterdir())
    for i, path in enumerate(paths):
        whole = path.read_bytes()
        if kind == "garbage" and i == 1:  # in the second row group, of 6
            start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
            path.write_bytes(whole[:start] + b"\xff" * 40 + whole[start + 40 :])
        elif kind == "other column" and i == 2:
            pq.write_table(pa.table({"body": ["x"]}), path)
        elif kind == "all" or (kind == "cut" and i == 1) or (kind == "first" and i == 0):
            path.write_bytes(whole[: len(whole) // 2])
    kept = {"cut": made[:20] + made[40:], "garbage": made[:26] + made[40:], "first": made[20:], "all": []}
    return kept.get(kind, made[:40])


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named_or_counted(server: Server, tmp_path: Path, kind: str) -> None:
    kept = damaged(tmp_path / "r", kind)
    source = served(server, tmp_path / "r", *([] if kind == "json" else ["data.subset=sample-10BT"]))
    if kind == "all":
        with pytest.raises(RequestError, match="all the data_files are invalid"):
            read(source, bad=BadRecords(True))
        return
    with pytest.raises(RequestError, match=rf"{DAMAGED[kind]}\S*:\d+: .*\ndata\.skip_bad=true") as caught:
        read(source)
    assert str(caught.value).count("\n") == 1
    bad = BadRecords(True)
    found, places = read(source, bad=bad)
    assert found == kept
    assert bad.count == 1
    assert DAMAGED[kind] in bad.first
    for i, place in enumerate(places, start=1):
        again = BadRecords(True)
        assert read(source, place, again)[0] == kept[7 * i :]
        assert again.count <= 1  # by the reading that meets it


def test_a_broken_connection_is_no_damaged_file(server: Server, waits: list[float], tmp_path: Path) -> None:
    fineweb(tmp_path / "r")
    server.commit("me/offline", tmp_path / "r")
    bad = BadRecords(True)
    reading = hub("me/offline", "data.subset=sample-10BT").batches(bad)
    next(reading)
    server.drop = 10**6
    with pytest.raises(RunFailed, match="no connection"):
        list(reading)
    assert bad.count == 0


def test_offline_is_said_at_once(server: Server, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = len(server.requests)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(RequestError, match=r"HF_HUB_OFFLINE is set: unset it, or set data.repo="):
            read(hub("me/any"))
    with monkeypatch.context() as patch:
        endpoint(patch, "http://127.0.0.1:9")  # nobody listens
        source = hub("me/any")
        assert source.identity()["place"] == "me/any"  # a prepared corpus is found without a network
        with pytest.raises(RunFailed, match=r"no connection to http://127.0.0.1:9 .*\nRun the same again"):
            read(source)
    assert not waits  # nothing was tried again
    assert len(server.requests) == asked


def test_an_edited_folder_is_another(tmp_path: Path) -> None:
    fineweb(tmp_path / "r")
    before = hub(tmp_path / "r").identity()
    assert before == hub(tmp_path / "r").identity()
    (tmp_path / "r/sample/10BT/001_00000.parquet").write_bytes(b"x")
    assert hub(tmp_path / "r").identity() != before


@pytest.mark.parametrize(
    ("name", "folder", "documents"),
    [
        ("fineweb", "fineweb", 180),
        ("fineweb_edu", "fineweb-edu", 60),
        ("fineweb2_rus", "fineweb-2", 21),
        ("fineweb2_tha", "fineweb-2", 17),
        ("nemotron_cc_v2", "nemotron-cc-v2", 30),
        ("hub", "c4", 60),
    ],
)
def test_the_true_schemas(server: Server, name: str, folder: str, documents: int) -> None:
    """Each choice as it stands, through the hub's names and from a folder."""
    if not (given := os.environ.get("ABOVEMUP_TEST_DATA")):
        pytest.skip("ABOVEMUP_TEST_DATA names no folder")
    root = Path(given) / "schema" / folder
    data = compose([f"data={name}", *(["data.repo=allenai/c4"] if name == "hub" else [])]).data
    assert data.repo
    if data.repo not in server.repos:
        server.commit(data.repo, root)
    through = read(find_source(data))[0]
    assert len(through) == documents
    assert read(find_source(compose([f"data={name}", f"data.repo={root}"]).data))[0] == through


@pytest.mark.slow
def test_in_a_process_of_its_own(server: Server, tmp_path: Path) -> None:
    """With nothing patched: HF_ENDPOINT alone."""
    made = fineweb(tmp_path / "r")
    server.repos.pop("HuggingFaceFW/fineweb", None)
    server.commit("HuggingFaceFW/fineweb", tmp_path / "r")
    server.drop = 1
    code = (
        "from abovemup.config.compose import compose; from abovemup.data.sources import find_source\n"
        "from abovemup.data.readers import BadRecords\n"
        "for batch, _ in find_source(compose(['data=fineweb']).data).batches(BadRecords(False)):\n"
        "    for document in batch: print(ascii(document.data.decode()))"
    )
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [ascii(text) for text in made]
