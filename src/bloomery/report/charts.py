"""Charts as inline SVG whose colours come from the page's style sheet, so that they follow a dark or a light theme.

Written here instead of drawn with a library: the chart of a long run is 15 kB, and the page can style its lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bloomery.report.html import Html, el, join

Point = tuple[float, float]
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 58, 14, 26, 30
_BUCKETS = 400  # of which the lowest and the highest value are drawn, so that no spike is lost


@dataclass(frozen=True)
class Series:
    """`style` is one of raw, line, eval (dots joined), d0 to d7 (devices): classes of the style sheet."""

    name: str
    points: Sequence[Point]
    style: str = "line"


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step; `kind` is one of kill, resume, skip, rewind, save."""

    step: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bars:
    """A group of horizontal bars of one unit; `note` says how to read them, `own` is the row that is this run's."""

    title: str
    rows: Sequence[tuple[str, float]]
    unit: str = ""
    note: str = ""
    own: str = ""


def line_chart(
    title: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    *,
    unit: str = "",
    height: int = 230,
    from_zero: bool = False,
    across: str = "step",
) -> Html:
    """A figure over steps, or over what `across` names. Without any points there is a sentence instead."""
    series = [one for one in series if one.points]
    if not series:
        return el("p", f"{title}: nothing was measured.", class_="absent")
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    frame = _Frame.around(xs, [*ys, 0.0] if from_zero else ys, height)
    shapes = [
        *(_tick_y(frame, value) for value in ticks(frame.low, frame.high, 5)),
        *(_tick_x(frame, x) for x in ticks(frame.first, frame.last, 7) if across != "step" or x == round(x)),
        *(_mark(frame, mark) for mark in marks if frame.first <= mark.step <= frame.last),
        *(_curve(frame, one) for one in series),
        el("text", across, x=_WIDTH - _RIGHT, y=height + 6, class_="axis end"),
        el("text", unit or title.lower(), x=_LEFT, y=_TOP - 2, class_="axis"),
    ]
    span = f"between {short(min(ys))} and {short(max(ys))} {unit}"
    label = f"{title} from {across} {frame.first:,.0f} to {frame.last:,.0f}, {span}".strip()
    picture = el("svg", *shapes, viewBox=f"0 0 {_WIDTH} {height + 10}", role="img", aria_label=label)
    keys = [el("span", one.name, class_=f"key {one.style}") for one in series] if len(series) > 1 else []
    heading = el("figcaption", el("b", title), *keys)
    return el("figure", heading, picture)


@dataclass(frozen=True)
class _Frame:
    first: float
    last: float
    low: float
    high: float
    height: int

    @staticmethod
    def around(xs: Sequence[float], ys: Sequence[float], height: int) -> "_Frame":
        low, high = min(ys), max(ys)
        room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        floor = 0.0 if low == 0 else low - room
        return _Frame(min(xs), max(max(xs), min(xs) + 1), floor, high + room, height)

    def x(self, value: float) -> float:
        return _LEFT + (value - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - (value - self.low) / (self.high - self.low) * (self.height - _TOP - _BOTTOM)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values inside [low, high], at most `most` of them: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """At most four digits that count, thousands as k."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g} k"
    return f"{value:.4g}"


def _tick_y(frame: _Frame, value: float) -> Html:
    y = f"{frame.y(value):.1f}"
    line = el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid")
    return join(line, el("text", short(value), x=_LEFT - 8, y=y, dy="0.35em", class_="tick end"))


def _tick_x(frame: _Frame, value: float) -> Html:
    return el(
        "text",
        f"{value:,.0f}" if value == round(value) else f"{value:g}",
        x=f"{frame.x(value):.1f}",
        y=frame.height - 9,
        class_="tick middle",
    )


def _mark(frame: _Frame, mark: Mark) -> Html:
    x = f"{frame.x(mark.step):.1f}"
    bottom = frame.height - _BOTTOM
    line = el("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_=f"mark {mark.kind}")
    sign = el("text", SIGNS[mark.kind], x=x, y=_TOP + 10, class_=f"sign middle {mark.kind}")
    return el("g", el("title", f"step {mark.step:,.0f}: {mark.text.replace('`', '')}"), line, sign)


SIGNS = {"kill": "✕", "resume": "↻", "skip": "△", "rewind": "↶", "save": "▾"}


def _curve(frame: _Frame, series: Series) -> Html:
    points = thin(series.points)
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    line = el("polyline", points=path, class_=f"curve {series.style}")
    if series.style != "eval":
        return line
    dots = [
        el("circle", el("title", f"step {x:,.0f}: {short(y)}"), cx=f"{frame.x(x):.1f}", cy=f"{frame.y(y):.1f}", r=3)
        for x, y in points
    ]
    return el("g", line, *dots, class_="eval")


def thin(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """The lowest and the highest point of each of `buckets` stretches, in order; short series as they are."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept = []
    for index in range(buckets):
        part = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        ends = {min(part, key=_height), max(part, key=_height)}
        kept += sorted(ends)
    return kept


def _height(point: Point) -> float:
    return point[1]


def bar_chart(bars: Bars) -> Html:
    """Bars from zero, their values written beside them."""
    most = max((value for _, value in bars.rows), default=0.0) or 1.0
    rows = [
        el(
            "div",
            el("span", label, class_="label"),
            el("span", el("i", style=f"width:{max(value, 0) / most:.2%}"), class_="rail"),
            el("span", f"{_fixed(value)} {bars.unit}".strip(), class_="value"),
            class_="bar own" if label == bars.own else "bar",
        )
        for label, value in bars.rows
    ]
    note = el("p", bars.note, class_="note") if bars.note else None
    return el("figure", el("figcaption", el("b", bars.title)), el("div", *rows, class_="bars"), note)


def _fixed(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
