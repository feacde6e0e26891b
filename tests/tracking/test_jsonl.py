import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abovemup.config.errors import RequestError
from abovemup.tracking.jsonl import JsonlSink, read, rewind
from abovemup.tracking.records import dumps, loads


def row(step: int) -> dict[str, float | int]:
    return {"step": step, "tokens": 8 * step, "loss": 1 / (step + 1)}


def write(path: Path, steps: range, after: int | None = None) -> None:
    sink = JsonlSink(path, after)
    for step in steps:
        sink.log(row(step))
    sink.sync()


def steps(path: Path) -> list[float | int]:
    return [record["step"] for record in read(path)]


@given(st.dictionaries(st.text(), st.floats(), max_size=5))
def test_every_float_comes_back_and_the_json_is_strict(values: dict[str, float]) -> None:
    record = {**values, "step": 3}
    line = dumps(record)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = loads(line)
    assert list(back) == list(record)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(back.values(), record.values(), strict=True))


def test_non_finite_values_have_their_names() -> None:
    assert dumps({"a": math.nan, "b": [math.inf, {"c": -math.inf}]}) == '{"a": "nan", "b": ["inf", {"c": "-inf"}]}'


def test_a_row_is_in_the_file_before_the_next(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(row(0))
    assert read(tmp_path / "metrics.jsonl") == [row(0)]


@pytest.mark.parametrize("step", [2, 1, 0])
def test_no_step_twice_or_back(tmp_path: Path, step: int) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(row(2))
    with pytest.raises(ValueError, match="after that of step 2"):
        sink.log(row(step))


def test_case_47_each_step_once_after_kill_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(7))  # killed at 6; the checkpoint is of step 4
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    warnings: list[str] = []
    assert rewind(path, 6, warn=warnings.append) == 6
    assert len(warnings) == 1
    assert "torn" in warnings[0]
    assert rewind(path, 4, warn=warnings.append) == 4
    write(path, range(5, 11), after=4)
    assert steps(path) == list(range(11))
    assert len(warnings) == 1
    with pytest.raises(FileExistsError):
        JsonlSink(path)
    assert steps(path) == list(range(11))


@pytest.mark.parametrize("tail", ['{"step": 7, "lo\n', "\0\0\0", '{"step": 7, "loss": "lo"}\n', "[1]\n", "{}"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    whole = path.read_bytes()
    with path.open("a") as file:
        file.write(tail)
    assert steps(path) == [0, 1, 2]
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:4"):
        assert rewind(path, 2) == 2
    assert path.read_bytes() == whole


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    path.write_bytes(path.read_bytes()[:-1])
    rewind(path, 2)
    write(path, range(3, 5), after=2)
    assert steps(path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "lacks the row of step 3"),
        ('{"step": 0}\n{"step": 1}\n', "lacks the row of step 3"),
        ('{"step": 0}\n{"st\n{"step": 2}\n{"step": 3}\n', "jsonl:2 is damaged"),
        ('{"step": 0}\n{"step": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n', "step 1 comes after step 1"),
    ],
)
def test_rewind_refuses_what_it_cannot_make_whole(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines)
    with pytest.raises(RequestError, match=message):
        rewind(path, 3)
    assert path.read_text() == lines
    assert list(tmp_path.iterdir()) == [path]


def test_rewind_knows_rows_that_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(0, 50, 10))
    assert rewind(path, 30) == 30
    assert steps(path) == [0, 10, 20, 30]
    with pytest.raises(RequestError, match="lacks the row of step 35"):
        rewind(path, 35)


def test_a_reader_of_the_old_file_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(7))
    with path.open() as reader:
        rewind(path, 3)
        write(path, range(4, 20), after=3)
        assert [json.loads(line)["step"] for line in reader] == list(range(7))


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a\u2028\u0085b": 1}\n{"step": 1}\r\n', encoding="utf-8", newline="")
    assert read(path) == [{"step": 0, "a\u2028\u0085b": 1}, {"step": 1}]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="missing"):
        read(tmp_path / "metrics.jsonl")
    with pytest.raises(RequestError, match="missing"):
        rewind(tmp_path / "metrics.jsonl", 0)
