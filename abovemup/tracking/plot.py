"""A curve in a few lines of braille: two by four dots a character."""

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of U+2800, by row and column


def braille(ys: Sequence[float | None], height: int) -> list[str]:
    """`height` lines of len(ys) / 2 characters, highest y on top; known neighbours are joined by a line."""
    width = len(ys) // 2
    points = [(column, y) for column, y in enumerate(ys[: 2 * width]) if y is not None]
    cells = [[0] * width for _ in range(height)]
    if points:
        low, high = min(y for _, y in points), max(y for _, y in points)
        span = (high - low) or 1.0
        # Row 0 is on top; a flat curve lies in the middle.
        rows = [round((high - y) / span * (4 * height - 1)) if high > low else 2 * height for _, y in points]
        dots = [(points[0][0], rows[0])]
        for (a, _), (b, _), row, to in zip(points, points[1:], rows, rows[1:], strict=False):
            dots += line(a, row, b, to)
        for column, row in dots:
            cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def line(x0: int, y0: int, x1: int, y1: int) -> list[tuple[int, int]]:
    """Dots from next to (x0, y0) to (x1, y1), x0 < x1, without a hole."""
    count = max(x1 - x0, abs(y1 - y0))
    return [(x0 + round(i * (x1 - x0) / count), y0 + round(i * (y1 - y0) / count)) for i in range(1, count + 1)]
