"""Runs as lines across axes, one for each setting and one for the figure that ranks them. Does not import torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from nicegui import ui

from bloomery.core.text import harmless

MOST_TICKS = 7  # of values that are named; an axis with more of them is marked evenly
LOG_RATIO = 30.0  # from which on values are spread by their logarithm


@final
@dataclass(frozen=True)
class Line:
    """A run. `name`: as a screen reader says it. `address`: of its page. `figure`: None where it has none yet."""

    name: str
    address: str
    settings: Mapping[str, str]
    figure: float | None
    is_done: bool = True


@final
@dataclass(frozen=True)
class Axis:
    """`places`: of each run from 0 at the bottom to 1, None where it has no value. `ticks`: places and their texts."""

    name: str
    places: tuple[float | None, ...]
    ticks: tuple[tuple[float, str], ...]


def setting_axis(name: str, texts: Sequence[str]) -> Axis:
    """Numbers by size, and by their logarithm where they span more than LOG_RATIO or are learning rates; else the
    values evenly, in the order in which they come.
    """
    values = list(dict.fromkeys(texts))
    numbers = {text: _number(text) for text in values}
    known = [number for number in numbers.values() if number is not None]
    if len(known) < len(values):
        places = {text: _evenly(index, len(values)) for index, text in enumerate(values)}
        ticks = [(places[text], text) for text in values]
        return Axis(name, tuple(places[text] for text in texts), tuple(ticks))
    low, high = min(known), max(known)
    is_log = low > 0 and (high >= LOG_RATIO * low or "learning_rate" in name)
    places = {
        text: _place(number, low, high, is_log=is_log)
        for text, number in numbers.items()
        if number is not None
    }
    ticks = [(places[text], text) for text in values]
    if len(values) > MOST_TICKS:
        ticks = _even_ticks(low, high, is_log=is_log)
    return Axis(name, tuple(places[text] for text in texts), tuple(ticks))


def figure_axis(name: str, figures: Sequence[float | None], *, lower_is_better: bool) -> Axis:
    """The best figure is at the top."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return Axis(name, tuple(None for _ in figures), ())
    low, high = min(known), max(known)

    def place(figure: float) -> float:
        share = _place(figure, low, high, is_log=False)
        return 1 - share if lower_is_better else share

    places = tuple(None if figure is None else place(figure) for figure in figures)
    ticks = {low, high} | ({(low + high) / 2} if high > low else set())
    return Axis(name, places, tuple((place(tick), f"{tick:.4g}") for tick in sorted(ticks)))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _evenly(index: int, count: int) -> float:
    return index / (count - 1) if count > 1 else 0.5


def _place(value: float, low: float, high: float, *, is_log: bool) -> float:
    if high <= low:
        return 0.5
    if is_log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _even_ticks(low: float, high: float, *, is_log: bool) -> list[tuple[float, str]]:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    values = [
        low * (high / low) ** share if is_log else low + share * (high - low) for share in shares
    ]
    return [(share, f"{value:.3g}") for share, value in zip(shares, values, strict=True)]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each key, where no other key has it."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def parallel_axes(lines: Sequence[Line], metric: str, *, lower_is_better: bool) -> None:
    """A picture whose lines are links: Tab goes through the runs from the best on, and the pointer chooses one."""
    ordered = sorted(lines, key=lambda line: _rank(line.figure, lower_is_better=lower_is_better))
    keys = list(dict.fromkeys(key for line in ordered for key in line.settings))
    shown_names = short_names(keys)
    axes = [setting_axis(key, [line.settings.get(key, "–") for line in ordered]) for key in keys]
    result = figure_axis(metric, [line.figure for line in ordered], lower_is_better=lower_is_better)
    axes.append(result)
    parts = list[str]()
    for index in reversed(range(len(ordered))):  # the best is drawn last, above the others
        share = 1 - _evenly(index, len(ordered))
        parts.append(_drawn(ordered[index], [axis.places[index] for axis in axes], metric, share))
    marks = list[str]()
    for number, axis in enumerate(axes):
        title = escape(harmless(shown_names.get(axis.name, axis.name)))
        ticks = "".join(
            f'<span class="parallel-tick" style="bottom: {100 * place:.2f}%">{escape(harmless(text))}</span>'
            for place, text in axis.ticks
        )
        marks.append(
            f'<div class="parallel-axis" style="left: {100 * _evenly(number, len(axes)):.2f}%">'
            f'<b title="{escape(harmless(axis.name), quote=True)}">{title}</b>{ticks}</div>'
        )
    ui.html(
        f'<div class="parallel" role="group" aria-label="Settings and {escape(metric)} of each run">'
        f'<div class="parallel-plot" style="min-width: {len(axes) * 4.5:.1f}rem">{"".join(marks)}'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(parts)}</svg></div></div>'
        '<p class="parallel-said" role="status">Point at a line, or go through them with Tab.</p>',
        sanitize=False,
    ).classes("w-full")


def _rank(figure: float | None, *, lower_is_better: bool) -> float:
    if figure is None:
        return math.inf
    return figure if lower_is_better else -figure


def _drawn(line: Line, places: Sequence[float | None], metric: str, share: float) -> str:
    """A link over the line; it ends where a value is not known. `share`: of the color, 1 for the best run."""
    known = [
        (100 * _evenly(number, len(places)), 100 - 100 * place)
        for number, place in enumerate(places)
        if place is not None
    ]
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in known)
    figure = "no figure yet" if line.figure is None else f"{metric} {line.figure:.4f}"
    said = f"{line.name}: {figure}" + ("" if line.is_done else ", stopped early")
    kind = "" if line.is_done and line.figure is not None else ' class="unfinished"'
    return (
        f'<a href="{escape(line.address, quote=True)}"{kind} style="--share: {100 * share:.0f}" '
        f'aria-label="{escape(harmless(said), quote=True)}"><polyline class="hit" points="{points}"/>'
        f'<polyline points="{points}"/></a>'
    )
