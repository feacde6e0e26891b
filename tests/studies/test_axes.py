"""What is typed for a key of a study."""

import pytest

from abovemup.config.conf import choices
from abovemup.config.errors import RequestError
from abovemup.studies.axes import grid, typed, values
from abovemup.studies.sweep import cells_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64,128", ["64", "128"]),
        (" 64 , 128 ,64", ["64", "128"]),
        ("2^-4", ["2^-4"]),
        ("2^-4,2^-3.5,2^-4", ["2^-4", "2^-3.5"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{a: 1,b: 2},c", ["{a: 1,b: 2}", "c"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("choice(2^-4,2^-3)", ["2^-4", "2^-3"]),
        ("range(8,33,8)", ["8", "16", "24", "32"]),
        ("range(3)", ["0", "1", "2"]),
        ("range(0.1,0.45,0.1)", ["0.1", "0.2", "0.3", "0.4"]),
        ("sort(3,1,2)", ["1", "2", "3"]),
        ("log2range(-9,-7.5,0.5)", ["2^-9", "2^-8.5", "2^-8", "2^-7.5"]),
        ("log2range(1,-1,-1)", ["2^1", "2^0", "2^-1"]),
        ([1, None, True, "2^-4"], ["1", "null", "true", "2^-4"]),
        ("", [""]),
    ],
)
def test_values(text: object, expected: list[str]) -> None:
    assert values("key", text) == expected


def test_glob_is_over_the_choices_of_a_group() -> None:
    assert values("schedule", "glob(*)") == choices()["schedule"]
    assert values("optimizer", "glob(scion*)") == [name for name in choices()["optimizer"] if name.startswith("scion")]
    assert "adam" not in values("optimizer", "glob(*,exclude=a*)")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(
            ("optimizer.lr", f"log2range({bounds})")
            for bounds in ("-9,-7.6,0.5", "1,2,-1", "1,2,0", "a,2,1", "", "1,2")
        ),
        *(("optimizer.lr", f"log2range(1,2,1{rest}") for rest in ("", "),0.5", "),log2range(3,4,1)")),
        *(
            ("optimizer.lr", text)
            for text in (
                "range(1,2,0)",
                "range(1",
                "interval(0,1)",
                "glob(*)",
                "range(2,1)",
                "range(0,1,1e-9)",
                "choice(1",
            )
        ),
    ],
)
def test_what_is_no_list_of_values_is_refused(key: str, text: str) -> None:
    with pytest.raises(RequestError, match=key if "log2" not in text else "expected log2range"):
        values(key, text)


def test_what_a_study_sets_itself_is_refused() -> None:
    for wrong, said in (
        (["scion"], "KEY=VALUE"),
        (["a=1", "a=2"], "twice"),
        (["run.dir=x"], "--dir"),
        (["+run.dir=x"], "--dir"),
        (["run={name: x}"], "--dir"),
        (["=1"], "KEY=VALUE"),
        (["+a=1", "a=2"], "twice"),
    ):
        with pytest.raises(RequestError, match=said):
            typed(wrong)


def test_a_study_is_local_unless_tracking_is_given() -> None:
    for fixed, axes in (({"tracking": "wandb"}, {}), ({}, {"tracking.project": ["mine"]})):
        assert next(iter(grid(axes, fixed)))[1] == {key: value for key, (value,) in axes.items()} | fixed
    (only,) = cells_of(["data=synthetic"], None)
    assert "tracking=local" in only.overrides


def test_far_too_many_are_refused_at_once() -> None:
    many = [str(i) for i in range(200)]
    with pytest.raises(RequestError, match="40000 combinations"):
        next(iter(grid({"a": many, "b": many}, {})))


def test_a_grid_is_every_combination_and_several_horizons_are_measured_on_the_way() -> None:
    got = list(grid({"a,b": ["1", "2"], "c": ["x", "y"]}, {"d": "0"}))
    assert [at for at, _ in got] == [{"a,b": a, "c": c} for a in "12" for c in "xy"]
    assert got[0][1] == {"tracking": "local", "d": "0", "a": "1", "b": "1", "c": "x"}
    for horizons, every in ((["1"], None), (["1", "2"], "pow2")):
        assert [s.get("eval.every") for _, s in grid({"train.tokens": horizons}, {})] == [every] * len(horizons)
    assert next(iter(grid({"train.tokens": ["1", "2"]}, {"eval.every": "7"})))[1]["eval.every"] == "7"


def test_cells_of_a_sweep_are_each_once() -> None:
    cells = cells_of(["data=synthetic", "parameterization=mup,above_mup", "optimizer.lr=1e-1,0.1,0.2"], None)
    assert len(cells) == 2  # at the base the two are one
    with pytest.raises(RequestError, match="unknown key"):
        cells_of(["model.widht=3,4"], None)


def test_a_budget_gives_way_to_what_is_typed() -> None:
    asked = ["data=synthetic", "optimizer.lr=0.1,0.2"]
    cells = cells_of(asked, None, "pocket")
    assert len(names := {cell.name for cell in cells}) == 2
    assert {(c.name, c.tokens) for c in cells} == {(name, 2**n) for name in names for n in range(19, 23)}
    small = cells_of([*asked, "model=tiny", "train.steps=4"], None, "pocket")
    assert len(small) == 2
    assert {"model=tiny", "train.seq_len=128", "train.steps=4"} <= {*small[0].overrides}
    assert "train.tokens" not in "".join(small[0].overrides)
    with pytest.raises(RequestError, match="no budget pokcet"):
        cells_of(asked, None, "pokcet")


def test_an_axis_without_values_is_refused() -> None:
    with pytest.raises(RequestError, match="no value"):
        values("model.width", [])
