"""Charts of studio: ECharts, which NiceGUI ships, with the points that have changed alone on the wire."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, final

import numpy as np
from nicegui import __version__, ui
from nicegui.dependencies import esm_modules
from nicegui.events import GenericEventArguments

from bloomery.report.charts import HEAT
from bloomery.view.curves import NO_POINTS, Axis, Points
from bloomery.view.incidents import Incident

COLORS = ("#2a78c2", "#d0661c", "#2f9160", "#a04fb0", "#b58a12", "#c2405a", "#268a96", "#7a6ad6")
DASHES = ("solid", "dashed", "dotted")
PLANNED = "#8a8f98"
MOST_MARKS = 40  # of checkpoints, and of other events
MARK_CHARACTERS = 120
_TEXT = "#8a8f98"  # legible on light and on dark
_GRID = "rgba(138, 143, 152, 0.25)"
_KEYS = "Plus and minus zoom, the arrow keys left and right move, 0 shows the whole run."


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


@final
class LineChart:
    """Mutable: curves over one axis, the whole run always in view; a zoom loads more points of its part."""

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
    ) -> None:
        """`labels`: of the curves, by name; a curve without one shows its name. `has_legend`: where there is more than
        one curve."""
        self.title = title
        self.names = tuple(names)
        self._labels = labels or {}
        self._has_legend = has_legend
        self._across = across
        self._points: dict[str, Points] = dict.fromkeys(self.names, NO_POINTS)
        self._extra: dict[str, Points] = {}
        self._marks: tuple[ChartMark, ...] = ()
        self._is_new = True
        self._zoom: tuple[float, float] | None = None
        self._levels = tuple(levels)
        heading = f"{title}, {unit}" if unit else title
        with ui.column().classes("w-full gap-0") as self._box:
            ui.label(heading).classes("text-sm font-medium")
            self.element = ui.echart(self._options()).classes("w-full h-56")
            tooltip = f"values => studioTooltip({self.element.id}, values)"
            self.element.options["tooltip"][":formatter"] = tooltip
            # As an application, so that a screen reader passes the keys on. What describes it is read though hidden.
            keys = ui.label(_KEYS).classes("hidden")
            self.element.props(
                f"role=application aria-roledescription=chart tabindex=0 aria-describedby={keys.html_id}"
                f' aria-label="{_attribute(title)} over {across}"'
            )
            self.element.on("keydown", js_handler=f"event => studioKeys({self.element.id}, event)")
        self.element.on("chart:datazoom", self._on_zoom, throttle=0.2)
        self._curves: Curves | None = None

    def delete(self) -> None:
        self._box.delete()

    def move(self, place: int) -> None:
        """To this place among the charts of its element."""
        self._box.move(target_index=place)

    def show(
        self,
        curves: Curves,
        *,
        extra: dict[str, Points] | None = None,
        marks: Sequence[ChartMark] = (),
    ) -> None:
        """Draws what has changed. `extra`: points that are drawn as dots, such as evaluations."""
        self._curves = curves
        points = {name: self._visible(curves, name) for name in self.names}
        dots = extra or {}
        shown_marks = tuple(marks)
        series = [*points.items(), *dots.items()]
        known = [*self._points.items(), *self._extra.items()]
        tails: list[tuple[int, int, list[list[float]]]] = []
        is_redrawn = self._is_new
        is_redrawn |= shown_marks != self._marks or [n for n, _ in series] != [n for n, _ in known]
        for index, ((_, new), (_, old)) in enumerate(zip(series, known, strict=False)):
            same = _common(old, new)
            if same == len(old) == len(new):
                continue
            # Points in the middle have changed: the width of the buckets has doubled, or the run went back.
            # So has a second point, after one that was a dot.
            is_redrawn = is_redrawn or same < len(old) - 3 or len(old) == 1
            tails.append((index, same, new[same:].tolist()))
        self._points = points
        self._extra = dots
        self._marks = shown_marks
        self._is_new = False
        # Without the suspension each change of the options would send all of them.
        with self.element.props.suspend_updates():
            options = self.element.options
            options["series"] = self._series()
            options["legend"]["show"] = self._has_legend and len(series) > 1
        if is_redrawn:
            self.element.update()
        elif tails:
            ui.run_javascript(f"studioTails({self.element.id}, {json.dumps(tails)})")

    def _visible(self, curves: Curves, name: str) -> Points:
        points = curves.points(name)
        if self._zoom is None:
            return points
        first, last = self._zoom
        detail = curves.points(name, first, last)
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
        end = max(ends)
        first = _bound(bounds.get("startValue"), bounds.get("start"), end, 0.0)
        last = _bound(bounds.get("endValue"), bounds.get("end"), end, end)
        self._zoom = None if first <= 0 and last >= end else (first, last)
        self.show(curves, extra=self._extra, marks=self._marks)

    def _series(self) -> list[dict[str, Any]]:
        series: list[dict[str, Any]] = []
        for index, (name, points) in enumerate(self._points.items()):
            line: dict[str, Any] = {
                "name": self._labels.get(name, name),
                "type": "line",
                "showSymbol": len(points) == 1,  # a single point has no line
                "symbolSize": 6,
                "data": points,
                "lineStyle": {"width": 1.4, "type": dash_of(index)},
                "itemStyle": {"color": color_of(index)},
                "emphasis": {"disabled": True},
            }
            if index == 0:
                line["markLine"] = self._mark_lines()
            series.append(line)
        for index, (name, points) in enumerate(self._extra.items()):
            series.append(
                {
                    "name": name,
                    "type": "line",
                    "showSymbol": True,
                    "symbolSize": 6,
                    "data": points,
                    "itemStyle": {"color": color_of(index + len(self._points))},
                }
            )
        return series

    def _mark_lines(self) -> dict[str, Any]:
        lines: list[dict[str, Any]] = [
            {
                "name": level.name,
                "yAxis": level.value,
                "lineStyle": {"color": PLANNED, "type": "dashed"},
                "label": {"formatter": "{b}", "position": "insideStartTop", "color": _TEXT},
            }
            for level in self._levels
        ]
        lines += [
            {
                "name": mark.text,
                "xAxis": mark.step,
                "lineStyle": {
                    "color": _TEXT,
                    "type": "dotted",
                    "opacity": 0.35 if mark.is_checkpoint else 1,
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

    def _ticks(self, axis: dict[str, Any]) -> dict[str, Any]:
        """How the horizontal axis is labeled."""
        if self._across == "step":
            return {"minInterval": 1}
        labels = {**axis["axisLabel"], "showMaxLabel": False}  # the end is no round number
        if self._across == "hours":
            return {"axisLabel": {**labels, "formatter": "{value} h"}}
        short = "v => v >= 1e9 ? v / 1e9 + 'B' : v >= 1e6 ? v / 1e6 + 'M' : v >= 1e3 ? v / 1e3 + 'k' : v"
        return {"axisLabel": {**labels, ":formatter": short}}

    def _options(self) -> dict[str, Any]:
        axis: dict[str, Any] = {
            "axisLabel": {"color": _TEXT, "hideOverlap": True},
            "splitLine": {"lineStyle": {"color": _GRID}},
            "axisLine": {"lineStyle": {"color": _GRID}},
        }
        levels = [level.value for level in self._levels]
        vertical: dict[str, Any] = {**axis, "type": "value", "scale": True}
        if levels:  # a line of the plan above every measured value stays in view
            vertical |= {"min": 0, ":max": f"value => Math.max(value.max, {max(levels)}) * 1.08"}
            vertical["axisLabel"] = {
                **axis["axisLabel"],
                "showMaxLabel": False,  # no round number; its digits would still take room
                ":formatter": "v => (+v.toPrecision(3)).toLocaleString('en')",
            }
        return {
            "animation": False,
            "grid": {"left": 8, "right": 30, "top": 30, "bottom": 8, "containLabel": True},
            "xAxis": {**axis, "type": "value", "min": 0, "max": "dataMax"} | self._ticks(axis),
            "yAxis": vertical,
            "tooltip": {
                "trigger": "axis",
                "confine": True,
                "extraCssText": "white-space: pre-wrap; overflow-wrap: anywhere; max-width: 28rem",
            },
            "legend": {
                "type": "scroll",
                "top": 0,
                "left": 0,
                "right": 60,
                "textStyle": {"color": _TEXT},
                "show": False,
            },
            "toolbox": {
                "right": 8,
                "top": 0,
                "itemSize": 13,
                "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {}},
                "iconStyle": {"borderColor": _TEXT},
            },
            "dataZoom": [{"type": "inside", "zoomOnMouseWheel": "ctrl", "filterMode": "none"}],
            "series": self._series(),
        }


# Of the report's classes, legible on light and on dark.
HEAT_COLORS = {
    "dead": "#a04fb0",
    "low3": "#2a78c2",
    "low2": "rgba(42, 120, 194, 0.6)",
    "low1": "rgba(42, 120, 194, 0.3)",
    "fair": "rgba(138, 143, 152, 0.18)",
    "high1": "rgba(208, 102, 28, 0.35)",
    "high2": "rgba(208, 102, 28, 0.65)",
    "high3": "#d0661c",
}


def heat_options(rows: Sequence[tuple[int, Sequence[float]]]) -> dict[str, Any]:
    """ECharts' options of a map of ratios, layers by experts."""
    begins = [*(begin for begin, _, _ in HEAT[1:]), None]
    pieces: list[dict[str, Any]] = []
    for (begin, name, label), end in zip(HEAT, begins, strict=True):
        piece: dict[str, Any] = {"gte": begin, "label": label, "color": HEAT_COLORS[name]}
        pieces.append(piece if end is None else {**piece, "lt": end})
    axis = {
        "type": "category",
        "axisLabel": {"color": _TEXT, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": _GRID}},
        "nameTextStyle": {"color": _TEXT},
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
            "textStyle": {"color": _TEXT},
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
        with ui.column().classes("w-full gap-0"):
            self._heading = ui.label().classes("text-sm font-medium")
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
        self._heading.text = f"Load of each expert, step {step:,}, relative to an even one"
        with self.element.props.suspend_updates():
            self.element.options.update(heat_options(rows))
        self.element.update()


def color_of(index: int) -> str:
    """Of the curve with this index in a chart."""
    return COLORS[index % len(COLORS)]


def dash_of(index: int) -> str:
    """Of the curve with this index: another where the colors begin again."""
    return DASHES[index // len(COLORS) % len(DASHES)]


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
