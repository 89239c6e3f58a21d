"""Curves as text: a plot of braille dots or ASCII, and bars of one line."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bloomery.view.curves import Points

BARS = "▁▂▃▄▅▆▇█"
Point = tuple[float, float]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of U+2800, by column and row
_LABEL = 9  # columns of the scale


def plot(
    line: Sequence[Point] | Points,
    marks: Sequence[Point],
    strips: Mapping[str, Points] | None = None,
    *,
    width: int,
    height: int,
    top: float | None = None,
    plain: bool = False,
) -> list[str]:
    """`height` rows of at most `width` columns with a scale on the left, one with the first and the last step, then one
    of bars from zero for each of `strips`, over the same steps.

    `line` is drawn as the mean of each interval, `marks` as `o`. Values above `top` are drawn at the upper edge.
    `plain`: ASCII only. Empty without two points.
    """
    columns = width - _LABEL - 1
    if len(line) < 2 or columns < 10 or height < 2:
        return []

    # The scale of both axes. Above `top` everything is drawn at the upper edge.
    steps = [*np.asarray(line, dtype=float)[:, 0].tolist(), *(x for x, _ in marks)]
    first_x = min(steps)
    last_x = max(steps)
    span = max(last_x - first_x, 1e-9)

    def means(points: Sequence[Point] | Points, intervals: int) -> np.ndarray:
        """One value per interval; an empty one is interpolated, or NaN at the ends."""
        x, y = np.array(points, dtype=float).T
        interval = np.minimum(((x - first_x) / span * intervals).astype(int), intervals - 1)
        counts = np.bincount(interval, minlength=intervals)
        filled = counts.nonzero()[0]
        values = np.bincount(interval, weights=y, minlength=intervals)[filled] / counts[filled]
        return np.interp(np.arange(intervals), filled, values, left=np.nan, right=np.nan)

    curve = means(line, columns * (1 if plain else 2))
    heights = [*curve[~np.isnan(curve)].tolist(), *(y for _, y in marks)]
    lowest = min(heights)
    highest = max(heights) if top is None else min(max(top, lowest), max(heights))
    value_range = (highest - lowest) or abs(highest) * 0.1 or 1.0

    # The line: a braille cell has two columns and four rows of dots. The cells between two adjacent
    # columns are filled, so that the line has no gap.
    num_levels = height * (1 if plain else 4)
    bits = [[0] * columns for _ in range(height)]
    previous_level: int | None = None
    for column, value in enumerate(curve.tolist()):
        if math.isnan(value):
            continue
        level = min(int((value - lowest) / value_range * num_levels), num_levels - 1)
        start = level
        if previous_level is not None:
            start = previous_level + (level > previous_level) - (level < previous_level)
        for filled_level in range(min(start, level), max(start, level) + 1):
            dot_row = num_levels - 1 - filled_level
            if plain:
                bits[dot_row][column] = ord("*")
            else:
                bits[dot_row // 4][column // 2] |= 0x2800 | _DOTS[column % 2][dot_row % 4]
        previous_level = level

    # The marks, over the line.
    for x, y in marks:
        row = height - 1 - min(int((y - lowest) / value_range * height), height - 1)
        bits[row][min(int((x - first_x) / span * columns), columns - 1)] = ord("o")

    # The rows as text, with the scale on the left and the steps below.
    scale = {
        0: highest,
        height // 2: lowest + value_range * (height - 1 - height // 2) / max(height - 1, 1),
        height - 1: lowest,
    }
    border = "|" if plain else "│"
    rows = []
    for row_index, cells in enumerate(bits):
        label = f"{scale[row_index]:.4g}" if row_index in scale else ""
        drawn = "".join(chr(cell or 32) for cell in cells).rstrip()
        rows.append(f"{label:>{_LABEL - 1}} {border}{drawn}")
    start_step = f"{first_x:,.0f}"
    end_step = f"{last_x:,.0f}"
    rows.append(f"{'step':>{_LABEL - 1}}  {start_step}{end_step:>{columns - len(start_step)}}")

    # The strips of bars, each from zero to its own peak. Intervals without a value stay blank.
    bar_letters = " .:-=+*#" if plain else BARS
    for name, points in (strips or {}).items():
        if not len(points):
            continue
        values = means(points, columns)
        peak = float(np.nanmax(values))
        heights_of_bars = values * ((len(bar_letters) - 1) / peak if peak > 0 else 0.0)
        bars = "".join(
            " " if math.isnan(bar) else bar_letters[max(round(bar), 0)]
            for bar in heights_of_bars.tolist()
        )
        rows.append(f"{name:>{_LABEL - 1}}  {bars}".rstrip())
    return rows


def interval_strips(
    figures: Sequence[tuple[float, float | None, float | None]], *, width: int, plain: bool = False
) -> list[str]:
    """A line of at most `width` columns for each figure with the ends of its interval, all on one scale.

    `plain`: ASCII only. An interval with unknown ends is drawn as its figure alone.
    """
    values = [value for figure in figures for value in figure if value is not None]
    floor, ceiling = min(values), max(values)
    span = (ceiling - floor) or 1.0
    line, dot = ("-", "o") if plain else ("─", "●")

    def column(value: float) -> int:
        return round((value - floor) / span * (width - 1))

    strips = []
    for value, low, high in figures:
        cells = [" "] * width
        if low is not None and high is not None:
            first, last = column(low), column(high)
            cells[first : last + 1] = line * (last + 1 - first)
        cells[column(value)] = dot
        strips.append("".join(cells).rstrip())
    return strips


def settled_top(line: Sequence[Point] | Points) -> float | None:
    """The maximum after the first tenth of a curve, if drawing that tenth would flatten the rest; else None."""
    start = len(line) // 10
    if start < 10:
        return None
    values = np.asarray(line, dtype=float)[:, 1]
    lowest = float(values.min())
    highest_after = float(values[start:].max())
    is_flattened = highest_after - lowest < 0.6 * (float(values.max()) - lowest)
    return highest_after if is_flattened else None


def sparkline(values: Iterable[float], width: int) -> str:
    """Bars of the last `width` values, scaled to all of them; equal values are low bars."""
    points = list(values)
    lowest = min(points, default=0.0)
    highest = max(points, default=0.0)
    scale = (len(BARS) - 2) / (highest - lowest) if highest > lowest else 0.0
    return "".join(
        BARS[round((value - lowest) * scale)] for value in points[max(len(points) - width, 0) :]
    )
