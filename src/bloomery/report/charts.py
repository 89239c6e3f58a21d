"""The report's Jinja templates, and charts as inline SVG.

Every text is cleaned of secrets and escaped. The style sheet of the page sets the charts' colors, for the dark and the
light theme. No plotting library: the chart of a long run has 15 kB, and CSS styles its lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from bloomery.core.look import image_tokens, tokens
from bloomery.core.text import redact_secrets

TITLE = " · Bloomery"  # ends the title of every page


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(title=TITLE, **values)


def part(macro: str, **values: Any) -> Markup:
    """The markup of a macro of parts.html."""
    macros = _environment().get_template("parts.html").module
    markup: Markup = getattr(macros, macro)(**values)
    return markup


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bloomery.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    environment.globals["tokens"] = Markup(tokens())
    environment.globals["image_tokens"] = Markup(image_tokens(".bloomery-chart"))
    return environment


def _clean(value: Any) -> Any:
    """Removes secrets and the path of the home folder before escaping; None becomes an empty text."""
    if hasattr(value, "__html__"):
        return value
    home = str(Path.home())
    text = "" if value is None else redact_secrets(str(value))
    return text.replace(home + "/", "~/") if len(home) > 1 else text


def prose(text: str) -> Markup:
    """A sentence with `code` between backticks."""
    pieces = [escape(_clean(piece)) for piece in text.split("`")]
    if len(pieces) % 2 == 0:  # an unpaired backtick: plain text
        return escape(_clean(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if number % 2 else piece
        for number, piece in enumerate(pieces)
    )


Point = tuple[float, float]
_WIDTH = 720
_LEFT = 58
_RIGHT = 14
_TOP = 26
_BOTTOM = 30
_BUCKETS = 400  # the lowest and the highest value of each are drawn, so that spikes stay visible


@dataclass(frozen=True)
class Series:
    """`style` is one of raw, line, eval (dots joined), d0 to d7 (devices): classes of the style sheet."""

    name: str
    points: Sequence[Point]
    style: str = "line"


@dataclass(frozen=True)
class Mark:
    """An event at a step; `kind` is one of kill, resume, skip, rewind, save."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with one unit, a note below them, and one highlighted row."""

    title: str
    rows: Sequence[tuple[str, float]]
    unit: str = ""
    note: str = ""
    highlighted: str = ""


@final
@dataclass(frozen=True, repr=False)
class Plot:
    """A chart: an image in a notebook, text in a terminal."""

    svg: str
    text: str

    def save(self, path: str | Path) -> None:
        """Write an SVG file, for light and dark pages."""
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg


def line_chart(
    title: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    *,
    unit: str = "",
    height: int = 230,
    from_zero: bool = False,
    across: str = "step",
    shape: Literal["lines", "image"] = "lines",
) -> Markup:
    """A chart over steps, or over `across`; a sentence without points. `shape`: for the page, or an SVG file."""
    drawn_series = [line for line in series if line.points]
    if not drawn_series:
        return Markup('<p class="absent">{}: not measured.</p>').format(title)

    # The frame holds every point, with a margin above and below; a curve from zero stands on the frame.
    xs = [x for line in drawn_series for x, _ in line.points]
    ys = [y for line in drawn_series for _, y in line.points]
    lowest = min([*ys, 0.0] if from_zero else ys)
    highest = max(ys)
    margin = (highest - lowest) * 0.05 or abs(highest) * 0.1 or 1.0
    floor = 0.0 if lowest == 0 else lowest - margin
    ceiling = highest + margin
    first = min(xs)
    last = max(max(xs), min(xs) + 1)

    def at_x(value: float) -> str:
        return f"{_LEFT + (value - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def at_y(value: float) -> str:
        share = (value - floor) / (ceiling - floor)
        return f"{height - _BOTTOM - share * (height - _TOP - _BOTTOM):.1f}"

    # Every series is one path; evaluations have a dot for each point, too.
    curves = []
    for line in drawn_series:
        points = downsample(line.points)
        ends = points if len(points) > 1 else points * 2  # a path needs two points
        path = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in ends)
        dots = []
        if line.style == "eval":
            dots = [(at_x(x), at_y(y), f"step {x:,.0f}: {short(y)}") for x, y in points]
        curves.append((line.style, path, dots))

    # There is no step between two steps.
    x_ticks = [x for x in ticks(first, last, 7) if across != "step" or x == round(x)]
    shown_marks = [
        (
            at_x(mark.step),
            mark.kind,
            SIGNS[mark.kind],
            f"step {mark.step:,.0f}: {mark.text.replace('`', '')}",
        )
        for mark in marks
        if first <= mark.step <= last
    ]
    span = f"between {short(min(ys))} and {short(max(ys))} {unit}"
    return part(
        shape,
        title=title,
        label=f"{title} from {across} {first:,.0f} to {last:,.0f}, {span}".strip(),
        keys=[(line.name, line.style) for line in drawn_series] if len(drawn_series) > 1 else [],
        frame={
            "width": _WIDTH,
            "height": height,
            "left": _LEFT,
            "right": _WIDTH - _RIGHT,
            "top": _TOP,
            "bottom": height - _BOTTOM,
        },
        across_ticks=[(at_x(x), f"{x:,.0f}" if x == round(x) else f"{x:g}") for x in x_ticks],
        up_ticks=[(at_y(y), short(y)) for y in ticks(floor, ceiling, 5)],
        marks=shown_marks,
        curves=curves,
        across=across,
        unit=unit or title.lower(),
    )


@dataclass(frozen=True)
class Dot:
    """A figure at a setting, with the ends of its interval where they are known. `kind`: best, plain or stopped."""

    setting: str
    value: float
    low: float | None
    high: float | None
    text: str
    kind: Literal["best", "plain", "stopped"] = "plain"


_MOST_SETTINGS = 8  # of which the axis names each
_LOG_RATIO = 8.0  # of the largest setting to the smallest, from which the axis is logarithmic
_APART = 7.0  # pixels between dots of the same setting


def dot_chart(title: str, dots: Sequence[Dot], *, unit: str, height: int = 230) -> Markup:
    """Figures with their intervals over a setting: numbers on an axis, logarithmic where they span a factor of eight;
    anything else side by side, in the order of the dots.
    """
    settings = list(dict.fromkeys(dot.setting for dot in dots))
    try:
        numbers = {setting: float(setting) for setting in settings}
    except ValueError:
        numbers = {}
    is_number = bool(numbers) and all(map(math.isfinite, numbers.values()))
    across = title
    if is_number:
        settings.sort(key=numbers.__getitem__)
        places = numbers
        if min(numbers.values()) > 0 and max(numbers.values()) >= _LOG_RATIO * min(
            numbers.values()
        ):
            places = {setting: math.log10(number) for setting, number in numbers.items()}
            across = f"{title} (logarithmic)"
    else:
        places = {setting: float(index) for index, setting in enumerate(settings)}

    # Half a setting of space on both sides; the frame holds the intervals.
    first, last = min(places.values()), max(places.values())
    edge = (last - first) * 0.06 or 1.0
    ends = [end for dot in dots for end in (dot.value, dot.low, dot.high) if end is not None]
    margin = (max(ends) - min(ends)) * 0.06 or abs(max(ends)) * 0.1 or 1.0
    floor, ceiling = min(ends) - margin, max(ends) + margin

    def at_x(setting: str) -> float:
        share = (places[setting] - first + edge) / (last - first + 2 * edge)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> str:
        share = (value - floor) / (ceiling - floor)
        return f"{height - _BOTTOM - share * (height - _TOP - _BOTTOM):.1f}"

    drawn = []
    for setting in settings:
        alike = [dot for dot in dots if dot.setting == setting]
        for index, dot in enumerate(alike):
            x = at_x(setting) + (index - (len(alike) - 1) / 2) * _APART
            whisker = None
            if dot.low is not None and dot.high is not None:
                whisker = (at_y(dot.low), at_y(dot.high))
            drawn.append((f"{x:.1f}", at_y(dot.value), whisker, dot.kind, dot.text))
    every = math.ceil(len(settings) / _MOST_SETTINGS)
    return part(
        "lines",
        title=title,
        label=f"{unit} by {across}, between {short(min(ends))} and {short(max(ends))}",
        keys=[],
        frame={
            "width": _WIDTH,
            "height": height,
            "left": _LEFT,
            "right": _WIDTH - _RIGHT,
            "top": _TOP,
            "bottom": height - _BOTTOM,
        },
        across_ticks=[(f"{at_x(setting):.1f}", setting) for setting in settings[::every]],
        up_ticks=[(at_y(y), short(y)) for y in ticks(floor, ceiling, 5)],
        marks=[],
        curves=[],
        dots=drawn,
        across=across,
        unit=unit,
    )


SIGNS = {"kill": "✕", "resume": "↻", "skip": "△", "rewind": "↶", "save": "▾"}


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values inside [low, high], at most `most` of them: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    least_step = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least_step * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """At most four significant digits, thousands as k."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g} k"
    return f"{value:.4g}"


def downsample(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """The lowest and the highest point of each of `buckets` intervals, in order; short series unchanged."""
    if len(points) <= 2 * buckets:
        return list(points)
    extremes = []
    for index in range(buckets):
        bucket = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        low = min(bucket, key=lambda point: point[1])
        high = max(bucket, key=lambda point: point[1])
        extremes += sorted({low, high})
    return extremes


@dataclass(frozen=True)
class HeatMap:
    """Rows of ratios to what would be fair: label and values, of which every row has as many."""

    title: str
    rows: Sequence[tuple[str, Sequence[float]]]
    across: str = ""
    up: str = ""


# Where each color begins, from below fair to above, and the name of its class.
HEAT = (
    (0.0, "dead", "none"),
    (1e-12, "low3", "below 0.25"),
    (0.25, "low2", "0.25 to 0.6"),
    (0.6, "low1", "0.6 to 0.85"),
    (0.85, "fair", "fair: 0.85 to 1.18"),
    (1.18, "high1", "1.18 to 1.7"),
    (1.7, "high2", "1.7 to 4"),
    (4.0, "high3", "4 and more"),
)
_LOWEST_ROW, _HIGHEST_ROW = 6, 22  # pixels
_MAP_HEIGHT = 320  # of the rows, where there are many


def heat_map(content: HeatMap, *, shape: Literal["heat", "heat_image"] = "heat") -> Markup:
    """A colored cell for each value. `shape`: for the page, or an SVG file. One path has all cells of a color: a map of
    6,000 cells takes 60 kB.
    """
    columns = len(content.rows[0][1])
    row_height = min(_HIGHEST_ROW, max(_LOWEST_ROW, _MAP_HEIGHT // len(content.rows)))
    cell_width = (_WIDTH - _LEFT - _RIGHT) / columns
    paths: dict[str, list[str]] = {name: [] for _, name, _ in HEAT}
    titles = []
    for row, (label, values) in enumerate(content.rows):
        start = 0
        names = [heat_class(value) for value in values]
        for end in range(1, columns + 1):
            if end == columns or names[end] != names[start]:
                paths[names[start]].append(f"M{start} {row}h{end - start}v1h{start - end}z")
                start = end
        top = max(range(columns), key=lambda column: values[column])
        least = min(range(columns), key=lambda column: values[column])
        titles.append(
            f"{label}: {content.across} {top} {short(values[top])}, {content.across} {least}"
            f" {short(values[least])}, {sum(value == 0 for value in values)} at 0"
        )

    bottom = _TOP + row_height * len(content.rows)
    shown = {name for name, cells in paths.items() if cells}
    all_values = [value for _, values in content.rows for value in values]
    span = f"between {short(min(all_values))} and {short(max(all_values))}"
    label = f"{content.title}, {len(content.rows)} by {columns}, {span}"
    up_ticks = ticks(0, len(content.rows) - 1, 8) if len(content.rows) > 1 else [0]
    across_ticks = ticks(0, columns - 1, 9) if columns > 1 else [0]
    return part(
        shape,
        title=content.title,
        label=label,
        keys=[(text, name) for _, name, text in HEAT if name in shown],
        frame={
            "width": _WIDTH,
            "height": bottom + _BOTTOM,
            "left": _LEFT,
            "right": _WIDTH - _RIGHT,
            "top": _TOP,
            "bottom": bottom,
        },
        scale=f"{cell_width:.4f} {row_height}",
        paths=[(name, "".join(cells)) for name, cells in paths.items() if cells],
        titles=[(row, text) for row, text in enumerate(titles)],
        columns=columns,
        up_ticks=[
            (f"{_TOP + (row + 0.5) * row_height:.1f}", content.rows[round(row)][0].split()[-1])
            for row in up_ticks
            if row == round(row)
        ],
        across_ticks=[
            (f"{_LEFT + (column + 0.5) * cell_width:.1f}", f"{column:.0f}")
            for column in across_ticks
            if column == round(column)
        ],
        across=content.across,
        unit=content.up,
    )


def heat_class(value: float) -> str:
    """The name of a value's color."""
    return next(name for begin, name, _ in reversed(HEAT) if value >= begin)


@dataclass(frozen=True)
class Intervals:
    """Figures with their confidence intervals on one scale: label, value, low, high; the ends may be unknown."""

    title: str
    rows: Sequence[tuple[str, float, float | None, float | None]]
    share: bool  # of 1, shown in percent on the whole scale
    note: str = ""


def interval_chart(intervals: Intervals) -> Markup:
    """A band for each interval and a line at its figure; the first row is highlighted."""
    form = ".1%" if intervals.share else ".4f"

    # Shares have the whole scale from 0 to 1, other figures the range that they need.
    figures = [figure for _, *row in intervals.rows for figure in row if figure is not None]
    lowest, highest = (0.0, 1.0) if intervals.share else (min(figures), max(figures))
    margin = 0.0 if intervals.share else (highest - lowest) * 0.1 or abs(highest) * 0.1 or 1.0
    floor = lowest - margin
    size = highest - lowest + 2 * margin

    rows = []
    for label, value, low, high in intervals.rows:
        band_start = value if low is None else low
        band_end = value if high is None else high
        spread = "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"
        rows.append(
            (
                label,
                f"{(band_start - floor) / size:.2%}",
                f"{(band_end - band_start) / size:.2%}",
                f"{(value - floor) / size:.2%}",
                f"{value:{form}}{spread}",
            )
        )
    return part("intervals", title=intervals.title, rows=rows, note=intervals.note)


def bar_chart(bars: Bars) -> Markup:
    """Bars from zero, each with its value."""
    longest = max((value for _, value in bars.rows), default=0.0) or 1.0
    rows = []
    for label, value in bars.rows:
        figure = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
        width = f"{max(value, 0) / longest:.2%}"
        rows.append((label, width, f"{figure} {bars.unit}".strip(), label == bars.highlighted))
    return part("bars", title=bars.title, rows=rows, note=bars.note)
