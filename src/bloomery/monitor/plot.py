"""A curve in text: dots of braille for a line, letters for single points. No colour is needed to read it."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from bloomery.monitor.tally import BARS

Point = tuple[float, float]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of U+2800, by column and row
_LABEL = 9  # columns of the scale


def plot(
    line: Sequence[Point],
    marks: Sequence[Point],
    strips: Mapping[str, Sequence[Point]] | None = None,
    *,
    width: int,
    height: int,
    top: float | None = None,
    plain: bool = False,
) -> list[str]:
    """`height` rows of at most `width` columns with a scale on the left, one with the first and the last step, then one
    of bars from zero for each of `strips`, over the same steps.

    `line` is drawn as the mean of each stretch, `marks` as `o`. What is above `top` touches the upper edge. `plain`:
    ASCII alone. Empty without two points.
    """
    columns, across = width - _LABEL - 1, [x for x, _ in (*line, *marks)]
    if len(line) < 2 or columns < 10 or height < 2:
        return []
    first, last = min(across), max(across)
    span = max(last - first, 1e-9)
    fine = columns * (1 if plain else 2)
    means = _means(line, first, span, fine)
    heights = [y for y in means if y is not None] + [y for _, y in marks]
    low, high = min(heights), max(heights)
    high = high if top is None else min(max(top, low), high)
    room = (high - low) or abs(high) * 0.1 or 1.0
    cells = _drawn(means, low, room, columns, height, plain)
    for x, y in marks:
        row = height - 1 - min(int((y - low) / room * height), height - 1)
        cells[row][min(int((x - first) / span * columns), columns - 1)] = "o"
    scale = {0: high, height // 2: low + room * (height - 1 - height // 2) / max(height - 1, 1), height - 1: low}
    bar = "|" if plain else "│"
    rows = [
        f"{f'{scale[at]:.4g}' if at in scale else '':>{_LABEL - 1}} {bar}{''.join(row)}".rstrip()
        for at, row in enumerate(cells)
    ]
    ends = f"{first:,.0f}", f"{last:,.0f}"
    below = [
        f"{name:>{_LABEL - 1}}  {_bars(_means(points, first, span, columns), plain)}".rstrip()
        for name, points in (strips or {}).items()
        if points
    ]
    return [*rows, f"{'step':>{_LABEL - 1}}  {ends[0]}{ends[1]:>{columns - len(ends[0])}}", *below]


def settled_top(line: Sequence[Point]) -> float | None:
    """The height below which a curve stays after its first tenth, where that part would leave the rest flat."""
    start = len(line) // 10
    if start < 10:
        return None
    rest = [y for _, y in line[start:]]
    low, high = min(y for _, y in line), max(y for _, y in line)
    return max(rest) if max(rest) - low < 0.6 * (high - low) else None


def _bars(means: Sequence[float | None], plain: bool) -> str:
    """One column a value, from zero."""
    levels = " .:-=+*#" if plain else BARS
    high = max((y for y in means if y is not None), default=0.0)
    scale = (len(levels) - 1) / high if high > 0 else 0.0
    return "".join(" " if y is None else levels[max(round(y * scale), 0)] for y in means)


def _means(line: Sequence[Point], first: float, span: float, columns: int) -> list[float | None]:
    """One value a column; a column without a point lies on the way between its neighbours."""
    stretches: list[list[float]] = [[] for _ in range(columns)]
    for x, y in line:
        stretches[min(int((x - first) / span * columns), columns - 1)].append(y)
    means = [statistics.fmean(stretch) if stretch else None for stretch in stretches]
    known = [at for at, mean in enumerate(means) if mean is not None]
    for left, right in itertools.pairwise(known):
        start, end = means[left], means[right]
        assert start is not None and end is not None
        for at in range(left + 1, right):
            means[at] = start + (end - start) * (at - left) / (right - left)
    return means


def _drawn(
    means: Sequence[float | None], low: float, room: float, columns: int, height: int, plain: bool
) -> list[list[str]]:
    """Rows of cells, the highest first. What lies between two neighbouring columns is filled: the line holds."""
    fine = height * (1 if plain else 4)
    levels = [None if y is None else min(int((y - low) / room * fine), fine - 1) for y in means]
    bits = [[0] * columns for _ in range(height)]
    before: int | None = None
    for at, level in enumerate(levels):
        if level is None:
            continue
        start = level if before is None else before + (level > before) - (level < before)
        for y in range(min(start, level), max(start, level) + 1):
            down = fine - 1 - y
            if plain:
                bits[down][at] = 1
            else:
                bits[down // 4][at // 2] |= _DOTS[at % 2][down % 4]
        before = level
    if plain:
        return [["*" if bit else " " for bit in row] for row in bits]
    return [[chr(0x2800 + bit) if bit else " " for bit in row] for row in bits]
