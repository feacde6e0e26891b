from hypothesis import given
from hypothesis import strategies as st

from abovemup.tracking.plot import braille


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """(row, column) of each dot."""
    places = {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (0, 1), 4: (1, 1), 5: (2, 1), 6: (3, 0), 7: (3, 1)}
    return {
        (4 * i + places[bit][0], 2 * j + places[bit][1])
        for i, line in enumerate(lines)
        for j, c in enumerate(line)
        for bit in range(8)
        if c != " " and (ord(c) - 0x2800) >> bit & 1
    }


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=2, max_size=80), st.integers(1, 10))
def test_the_shape_and_no_hole_between_known_points(ys: list[float | None], height: int) -> None:
    lines = braille(ys, height)
    assert [len(line) for line in lines] == [len(ys) // 2] * height
    known = [i for i, y in enumerate(ys[: len(ys) // 2 * 2]) if y is not None]
    columns = {column for _, column in dots(lines)}
    assert columns == (set(range(known[0], known[-1] + 1)) if known else set())


def test_the_extremes_are_the_first_and_the_last_row() -> None:
    found = dots(braille([2.0, 2.0, 1.0, None, 0.0, 0.0], 2))
    assert {(0, 0), (0, 1), (7, 4), (7, 5)} <= found
    assert {(0, 2), (7, 2), (0, 4)}.isdisjoint(found)
    assert {row for row, _ in found} == set(range(8))
