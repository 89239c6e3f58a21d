"""Charts of studio: ECharts, which NiceGUI ships, with the points that have changed alone on the wire."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol, cast, final

import numpy as np
from nicegui import __version__, ui
from nicegui.dependencies import esm_modules
from nicegui.events import GenericEventArguments

from bloomery.report.charts import HEAT
from bloomery.studio.components import text
from bloomery.view.curves import NO_POINTS, Axis, Points
from bloomery.view.incidents import Incident

NUM_COLORS = 8  # of curves, c1 to c8 among the tokens
DASHES = ("solid", "dashed", "dotted")
MOST_MARKS = 40  # of checkpoints, and of other events
MARK_CHARACTERS = 120
SMOOTHINGS = {
    0.0: "off",
    0.6: "0.6",
    0.9: "0.9",
    0.99: "0.99",
}  # weights of the past, by their names
_KEYS = (
    "Plus and minus zoom, the arrow keys left and right move, 0 shows the whole run. With a mouse: drag over a part to "
    "zoom, double-click for the whole run."
)
_PALE = 0.28  # of a curve under its moving average


def painted(token: str) -> dict[str, str]:
    """ECharts' `color`: a token, whose value the browser knows."""
    return {":color": f"studioColor('{token}')"}


Best = Literal["", "lowest", "highest"]


@cache
def prefetch_links() -> str:
    """HTML for the head of any page: the browser loads ECharts, 1.1 MB, before the first page with a chart asks for it.

    A run would otherwise be drawn a third of a second later: a component of NiceGUI asks for a module, which asks for
    ECharts. Empty where another version of NiceGUI keeps it elsewhere.
    """
    links = ""
    for key, module in esm_modules.items():
        if module.name == "nicegui-echart":
            text = (module.path / "index.js").read_text(encoding="utf-8")
            names = ["index.js", *re.findall(r'"\./([\w-]+\.js)"', text)]
            address = f"/_nicegui/{__version__}/esm/{key}"
            links += "".join(
                f'<link rel="prefetch" as="script" href="{address}/{name}">' for name in names
            )
    return links


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as the plan's figure."""

    name: str
    value: float


@dataclass(frozen=True)
class ChartMark:
    """A vertical line at a step. Checkpoints, of which there are many, are faint."""

    step: int
    text: str
    is_checkpoint: bool = False


class Curves(Protocol):
    """Points of a curve by its name, between two positions on the horizontal axis."""

    def points(self, name: str, first: float = 0, last: float | None = None) -> Points: ...


class SmoothCurves(Curves, Protocol):
    """Curves that know their moving averages."""

    def smoothed(
        self, name: str, weight: float, first: float = 0, last: float | None = None
    ) -> Points: ...


@final
class LineChart:
    """Mutable: curves over one axis, the whole run always in view; a zoom loads more points of its part.

    With `smoothing`, each curve is pale under its moving average. `is_logarithmic`: the vertical axis, where all values
    are above 0.
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        *,
        labels: Mapping[str, str] | None = None,
        unit: str = "",
        levels: Sequence[Level] = (),
        has_legend: bool = True,
        across: Axis = "step",
        is_lead: bool = False,
        best: Best = "",
        color: int = 0,
    ) -> None:
        """`labels`: of the curves, by name; a curve without one shows its name. `has_legend`: where there is more than
        one curve. `is_lead`: the large one of a page. `best`: which of the dots is marked. `color`: of the first curve.
        """
        self.title = title
        self.names = tuple(names)
        self.smoothing = 0.0
        self.is_logarithmic = False
        self._labels = labels or {}
        self._has_legend = has_legend
        self._across = across
        self._best = best
        self._first_color = color
        self._is_lead = is_lead
        self._points: dict[str, Points] = dict.fromkeys(self.names, NO_POINTS)
        self._smooth: dict[str, Points] = {}
        self._extra: dict[str, Points] = {}
        self._marks: tuple[ChartMark, ...] = ()
        self._is_new = True
        self._zoom: tuple[float, float] | None = None
        self._end: float | None = None
        self._levels = tuple(levels)
        with ui.element("section").classes("card chart-card") as self.box:
            with ui.element("div").classes("chart-head"):
                with text(title, "h3", "card-title"):
                    text(unit, "small")
                self.tools = ui.element("div").classes("toolbar")
            self.element = ui.echart(self._options()).classes("chart lead" if is_lead else "chart")
            self.element.options["tooltip"][":formatter"] = (
                f"values => studioTooltip({self.element.id}, values)"
            )
            # As an application, so that a screen reader passes the keys on. What describes it is read though hidden.
            keys = ui.label(_KEYS).classes("hidden")
            self.element.props(
                f"role=application aria-roledescription=chart tabindex=0 aria-describedby={keys.html_id}"
                f' aria-label="{_attribute(title)} over {across}"'
            )
            self.element.on("keydown", js_handler=f"event => studioKeys({self.element.id}, event)")
            self.element.on("chart:finished", js_handler=f"() => studioChart({self.element.id})")
        self.element.on("chart:datazoom", self._on_zoom, throttle=0.2)
        self._curves: Curves | None = None

    def delete(self) -> None:
        self.box.delete()

    def move(self, place: int) -> None:
        """To this place among the charts of its element."""
        self.box.move(target_index=place)

    def change(self, *, smoothing: float | None = None, is_logarithmic: bool | None = None) -> None:
        """What a reader has chosen."""
        if smoothing is not None:
            self.smoothing = smoothing
        if is_logarithmic is not None:
            self.is_logarithmic = is_logarithmic
        self._is_new = True
        if self._curves is not None:
            self.show(self._curves, extra=self._extra, marks=self._marks, end=self._end)

    def show(
        self,
        curves: Curves,
        *,
        extra: dict[str, Points] | None = None,
        marks: Sequence[ChartMark] = (),
        end: float | None = None,
    ) -> None:
        """Draws what has changed. `extra`: points that are drawn as dots, such as evaluations. `end`: of the horizontal
        axis, where it is known; else it ends with the curves."""
        self._curves = curves
        points = {name: self._visible(curves.points, name) for name in self.names}
        smooth: dict[str, Points] = {}
        if self.smoothing:
            average = partial(_smoothed, cast("SmoothCurves", curves), self.smoothing)
            smooth = {name: self._visible(average, name) for name in self.names}
        dots = extra or {}
        shown_marks = tuple(marks)
        series = [*points.items(), *smooth.items(), *dots.items()]
        known = [*self._points.items(), *self._smooth.items(), *self._extra.items()]
        tails: list[tuple[int, int, list[list[float]]]] = []
        is_redrawn = self._is_new or end != self._end
        is_redrawn |= shown_marks != self._marks or [n for n, _ in series] != [n for n, _ in known]
        num_curves = len(points) + len(smooth)
        for index, ((_, new), (_, old)) in enumerate(zip(series, known, strict=False)):
            same = _common(old, new)
            if same == len(old) == len(new):
                continue
            # Points in the middle have changed: the width of the buckets has doubled, or the run went back.
            # So has a second point, after one that was a dot; and the best of the dots.
            is_redrawn = is_redrawn or same < len(old) - 3 or len(old) == 1 or index >= num_curves
            tails.append((index, same, new[same:].tolist()))
        self._points = points
        self._smooth = smooth
        self._extra = dots
        self._marks = shown_marks
        self._end = end
        self._is_new = False
        # Without the suspension each change of the options would send all of them.
        with self.element.props.suspend_updates():
            options = self.element.options
            options["series"] = self._series()
            has_legend = self._has_legend and len(points) + len(dots) > 1
            options["legend"]["show"] = has_legend
            names = [self._label(name) for name in points] + [*dots]
            options["legend"]["data"] = [
                {
                    "name": name,
                    "itemStyle": {**painted(token_of(index + self._first_color)), "borderWidth": 0},
                }
                for index, name in enumerate(names)
            ]
            options["grid"]["top"] = 34 if has_legend else 12
            options["xAxis"]["max"] = "dataMax" if end is None else end
            options["yAxis"] = self._vertical()
        if is_redrawn:
            self.element.update()
        elif tails:
            ui.run_javascript(f"studioTails({self.element.id}, {json.dumps(tails)})")

    def _visible(self, read: Callable[..., Points], name: str) -> Points:
        points = read(name)
        if self._zoom is None:
            return points
        first, last = self._zoom
        detail = read(name, first, last)
        steps = points[:, 0]
        return np.concatenate([points[steps < first], detail, points[steps > last]])

    def _on_zoom(self, event: GenericEventArguments) -> None:
        arguments = event.args if isinstance(event.args, dict) else {}
        batch = arguments.get("batch") or [arguments]
        bounds = batch[0] if isinstance(batch[0], dict) else {}
        curves = self._curves
        ends = [float(points[-1, 0]) for points in self._points.values() if len(points)]
        if curves is None or not ends:
            return
        end = max(ends) if self._end is None else self._end
        first = _bound(bounds.get("startValue"), bounds.get("start"), end, 0.0)
        last = _bound(bounds.get("endValue"), bounds.get("end"), end, end)
        self._zoom = None if first <= 0 and last >= end else (first, last)
        self.show(curves, extra=self._extra, marks=self._marks, end=self._end)

    def _label(self, name: str) -> str:
        return self._labels.get(name, name)

    def _series(self) -> list[dict[str, Any]]:
        series: list[dict[str, Any]] = []
        for index, (name, points) in enumerate(self._points.items()):
            is_pale = bool(self._smooth) and len(points) > 1
            line = self._line(self._label(name), points, index, width=1.0 if is_pale else 1.6)
            line["lineStyle"]["opacity"] = _PALE if is_pale else 1
            if index == 0:
                line["markLine"] = self._mark_lines()
            series.append(line)
        for index, (name, points) in enumerate(self._smooth.items()):
            series.append(self._line(f"{self._label(name)}, smoothed", points, index, width=2.0))
        for index, (name, points) in enumerate(self._extra.items()):
            line = self._line(name, points, index + len(self._points), width=2.0)
            token = token_of(index + len(self._points) + self._first_color)
            line |= {"showSymbol": True, "symbolSize": 8}
            # Rings, filled as the card below them is.
            ring = {":borderColor": f"studioColor('{token}')", "borderWidth": 2}
            line["itemStyle"] = {**painted("card"), **ring}
            line["lineStyle"] |= painted(token)
            if (best := self._best_of(points)) is not None:
                line["markPoint"] = self._mark_of_best(best, index + len(self._points))
            series.append(line)
        return series

    def _line(self, name: str, points: Points, index: int, *, width: float) -> dict[str, Any]:
        return {
            "name": name,
            "type": "line",
            "showSymbol": len(points) == 1,  # a single point has no line
            "symbol": "circle",
            "symbolSize": 7,
            "data": points,
            "lineStyle": {"width": width, "type": dash_of(index)},
            "itemStyle": painted(token_of(index + self._first_color)),
            "emphasis": {"disabled": True},
        }

    def _best_of(self, points: Points) -> Points | None:
        if not self._best or not len(points):
            return None
        values = points[:, 1]
        best: Points = points[np.argmin(values) if self._best == "lowest" else np.argmax(values)]
        return best

    def _mark_of_best(self, best: Points, index: int) -> dict[str, Any]:
        step, value = best.tolist()
        color = painted(token_of(index + self._first_color))
        end = self._end or max(float(p[-1, 0]) for p in self._points.values() if len(p))
        return {
            "symbol": "circle",
            "symbolSize": 11,
            "animation": False,
            "silent": True,
            "itemStyle": color,
            "label": {
                "formatter": f"best {value:.4g}",
                # Inside the chart, also at its end.
                "position": "left" if step > 0.8 * end else "right",
                "offset": [0, -12 if self._best == "lowest" else 12],
                "fontWeight": 600,
                "fontSize": 12,
                # The curve may pass behind it.
                ":backgroundColor": "studioColor('card', 0.8)",
                "padding": [1, 4],
                "borderRadius": 3,
                **color,
            },
            "data": [{"coord": [step, value]}],
        }

    def _mark_lines(self) -> dict[str, Any]:
        lines: list[dict[str, Any]] = [
            {
                "name": level.name,
                "yAxis": level.value,
                "lineStyle": {**painted("ink-3"), "type": "dashed"},
                "label": {"formatter": "{b}", "position": "insideEndTop", **painted("ink-3")},
            }
            for level in self._levels
        ]
        lines += [
            {
                "name": mark.text,
                "xAxis": mark.step,
                "lineStyle": {
                    **painted("ink-3"),
                    "type": "dotted",
                    "opacity": (0.25 if mark.is_checkpoint else 0.8)
                    * (1 if self._is_lead else 0.5),
                },
                "label": {"show": False},
            }
            for mark in self._marks
        ]
        return {
            "symbol": "none",
            "animation": False,
            "data": lines,
            "silent": True,  # the tooltip has their texts
        }

    def _ticks(self) -> dict[str, Any]:
        """How the horizontal axis is labeled."""
        if self._across == "step":
            return {"minInterval": 1}
        labels = {**_axis()["axisLabel"], "showMaxLabel": False}  # the end is no round number
        if self._across == "hours":
            return {"axisLabel": {**labels, "formatter": "{value} h"}}
        return {"axisLabel": {**labels, ":formatter": _SHORT}}

    def _vertical(self) -> dict[str, Any]:
        axis = {**_axis(), "splitLine": {"lineStyle": painted("line")}, "axisLine": {"show": False}}
        values = [points[:, 1] for points in (*self._points.values(), *self._extra.values())]
        known = np.concatenate(values) if values else np.empty(0)
        if self.is_logarithmic and len(known) and known.min() > 0:
            # A base with which a handful of its powers lie between the lowest and the highest value.
            ratio = float(known.max() / known.min())
            base = next((b for b in (1.02, 1.05, 1.1, 1.25, 1.5, 2.0) if b**6 > ratio), 10.0)
            labels = {**axis["axisLabel"], ":formatter": "v => +v.toPrecision(3)"}
            return {**axis, "type": "log", "logBase": base, "scale": True, "axisLabel": labels}
        levels = [level.value for level in self._levels]
        vertical: dict[str, Any] = {**axis, "type": "value", "scale": True, "splitNumber": 4}
        if levels:  # a line of the plan above every measured value stays in view
            vertical |= {"min": 0, ":max": f"value => Math.max(value.max, {max(levels)}) * 1.08"}
            vertical["axisLabel"] = {
                **axis["axisLabel"],
                "showMaxLabel": False,  # no round number; its digits would still take room
                ":formatter": "v => (+v.toPrecision(3)).toLocaleString('en')",
            }
        return vertical

    def _options(self) -> dict[str, Any]:
        across = {
            **_axis(),
            "splitLine": {"show": False},
            "axisLine": {"lineStyle": painted("line")},
        }
        return {
            "animation": False,
            "textStyle": {":fontFamily": "getComputedStyle(document.body).fontFamily"},
            "grid": {"left": 2, "right": 14, "top": 12, "bottom": 2, "containLabel": True},
            "xAxis": {**across, "type": "value", "min": 0, "max": "dataMax"} | self._ticks(),
            "yAxis": self._vertical(),
            "tooltip": {
                "trigger": "axis",
                "confine": True,
                "axisPointer": {"lineStyle": painted("ink-3")},
                ":backgroundColor": "studioColor('card')",
                ":borderColor": "studioColor('line-strong')",
                "textStyle": {**painted("ink"), "fontSize": 12},
                "extraCssText": "white-space: pre-wrap; overflow-wrap: anywhere; max-width: 28rem",
            },
            "legend": {
                "type": "scroll",
                "top": 0,
                "left": 0,
                "icon": "roundRect",
                "itemWidth": 14,
                "itemHeight": 3,
                "textStyle": painted("ink-2"),
                "show": False,
            },
            # Without a picture: studioChart takes it, and a drag with the mouse zooms.
            "toolbox": {
                "itemSize": 0,
                "top": -40,
                "feature": {"dataZoom": {"yAxisIndex": "none", "brushStyle": {"opacity": 0.15}}},
            },
            # A finger that moves over a chart moves the page: charts fill the width of a phone.
            "dataZoom": [
                {
                    "type": "inside",
                    "zoomOnMouseWheel": "ctrl",
                    "filterMode": "none",
                    ":preventDefaultMouseMove": "!matchMedia('(pointer: coarse)').matches",
                }
            ],
            "series": self._series(),
        }


_SHORT = "v => v >= 1e9 ? v / 1e9 + 'B' : v >= 1e6 ? v / 1e6 + 'M' : v >= 1e3 ? v / 1e3 + 'k' : v"


def _axis() -> dict[str, Any]:
    return {
        "axisLabel": {**painted("ink-3"), "hideOverlap": True, "fontSize": 11},
        "axisTick": {"show": False},
    }


def _smoothed(
    curves: SmoothCurves, weight: float, name: str, first: float = 0, last: float | None = None
) -> Points:
    return curves.smoothed(name, weight, first, last)


# Of the report's classes: a token, and how opaque it is.
HEAT_COLORS = {
    "dead": ("ink", 1.0),
    "low3": ("c2", 1.0),
    "low2": ("c2", 0.6),
    "low1": ("c2", 0.3),
    "fair": ("sunk", 1.0),
    "high1": ("c1", 0.35),
    "high2": ("c1", 0.65),
    "high3": ("c1", 1.0),
}


def heat_options(rows: Sequence[tuple[int, Sequence[float]]]) -> dict[str, Any]:
    """ECharts' options of a map of ratios, layers by experts."""
    begins = [*(begin for begin, _, _ in HEAT[1:]), None]
    pieces: list[dict[str, Any]] = []
    for (begin, name, label), end in zip(HEAT, begins, strict=True):
        token, opacity = HEAT_COLORS[name]
        color = f"studioColor('{token}', {opacity})"
        piece: dict[str, Any] = {"gte": begin, "label": label, ":color": color}
        pieces.append(piece if end is None else {**piece, "lt": end})
    axis = {
        "type": "category",
        **_axis(),
        "axisLine": {"show": False},
        "nameTextStyle": painted("ink-3"),
    }
    columns = len(rows[0][1])
    return {
        "animation": False,
        "grid": {"left": 8, "right": 30, "top": 56, "bottom": 24, "containLabel": True},
        "xAxis": {**axis, "data": list(range(columns)), "name": "expert", "nameLocation": "middle"},
        "yAxis": {**axis, "data": [layer for layer, _ in rows], "inverse": True, "name": "layer"},
        "tooltip": {
            "confine": True,
            ":formatter": "p => `layer ${p.data[3]}, expert ${p.data[0]}: ${p.data[2]}`",
        },
        "visualMap": {
            "type": "piecewise",
            "dimension": 2,
            "orient": "horizontal",
            "top": 0,
            "left": 0,
            "itemWidth": 12,
            "itemHeight": 10,
            "textStyle": painted("ink-2"),
            "pieces": pieces,
        },
        "series": [
            {
                "type": "heatmap",
                "progressive": 0,
                "data": [
                    [column, place, ratio, layer]
                    for place, (layer, ratios) in enumerate(rows)
                    for column, ratio in enumerate(ratios)
                ],
            }
        ],
    }


@final
class LoadMap:
    """Mutable: the load of each expert in the newest step that reports it, layers by experts."""

    def __init__(self, rows: Sequence[tuple[int, Sequence[float]]]) -> None:
        with ui.element("section").classes("card"):
            with text("Load of each expert", "h2", "card-title"):
                self._heading = text("", "small")
            height = min(36, 10 + 2 * len(rows))
            self.element = ui.echart(heat_options(rows)).classes("w-full")
            self.element.style(f"height: {height}rem")
            label = "Load of each expert, layers by experts"
            self.element.props(f'role=img aria-label="{label}"')
        self._step = -1

    def show(self, step: int, rows: Sequence[tuple[int, Sequence[float]]]) -> None:
        if step == self._step:
            return
        self._step = step
        self._heading.text = f"step {step:,}, relative to an even one"
        with self.element.props.suspend_updates():
            self.element.options.update(heat_options(rows))
        self.element.update()


def token_of(index: int) -> str:
    """Of the curve with this index in a chart."""
    return f"c{index % NUM_COLORS + 1}"


def color_of(index: int) -> str:
    """The same for a rule of CSS."""
    return f"var(--{token_of(index)})"


def dash_of(index: int) -> str:
    """Of the curve with this index: another where the colors begin again."""
    return DASHES[index // NUM_COLORS % len(DASHES)]


def marks_of(timeline: Sequence[Incident]) -> list[ChartMark]:
    """The newest events that explain a curve, of those that are listed from the newest on: not the end of the run."""
    marks = [
        ChartMark(i.step, i.text[:MARK_CHARACTERS], is_checkpoint=i.kind == "save")
        for i in timeline
        if i.kind not in ("end", "stop", "failure") and (i.kind != "warning" or i.step)
    ]
    checkpoints = [mark for mark in marks if mark.is_checkpoint][:MOST_MARKS]
    others = [mark for mark in marks if not mark.is_checkpoint][:MOST_MARKS]
    return [*reversed(checkpoints), *reversed(others)]


def _common(old: Points, new: Points) -> int:
    """How many first points are equal."""
    num_both = min(len(old), len(new))
    differ = np.flatnonzero((old[:num_both] != new[:num_both]).any(axis=1))
    return int(differ[0]) if len(differ) else num_both


def _bound(value: object, percent: object, end: float, default: float) -> float:
    if isinstance(value, int | float):
        return value
    if isinstance(percent, int | float):
        return percent / 100 * end
    return default


def _attribute(text: str) -> str:
    return text.replace('"', "'")
