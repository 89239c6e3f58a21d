"""Curves of a run: every value in memory, and as many points as a chart has pixels. Does not import torch."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from bloomery.monitor.events import DeviceStats, Event, Recovered, Resumed, StepDone

MOST_BUCKETS = 600  # of a curve; each is drawn as its lowest and its highest value
HIGHEST_STEP = 2**32 - 1
HIGHEST_VALUE = 3e38  # of a float of 4 bytes
Point = list[float]  # step and value, as ECharts reads it
Axis = Literal["step", "tokens", "hours"]
AXES: tuple[Axis, ...] = ("step", "tokens", "hours")


@final
@dataclass
class Curve:
    """Mutable: values by step, 8 bytes each."""

    steps: "array[int]" = field(default_factory=lambda: array("I"))
    values: "array[float]" = field(default_factory=lambda: array("f"))
    # Points of the whole curve before its last bucket, with the width of the buckets and the index of the last.
    _complete: list[Point] = field(default_factory=list)
    _width: int = 0
    _last_bucket: int = 0

    def add(self, step: int, value: float) -> None:
        """Leaves out a value of an earlier step, which a second process may have sampled, and what no chart shows."""
        if not (0 <= step <= HIGHEST_STEP and -HIGHEST_VALUE < value < HIGHEST_VALUE):
            return
        if not self.steps or step >= self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Discards the values after `step`."""
        num_kept = bisect_right(self.steps, step)
        if num_kept < len(self.steps):
            del self.steps[num_kept:], self.values[num_kept:]
            self._width = 0

    def at(self, steps: Sequence[float]) -> list[float]:
        """The values at these steps, interpolated between those that are known."""
        known_steps = np.array(self.steps[:], dtype=np.float64)
        known_values = np.array(self.values[:], dtype=np.float64)
        values: list[float] = np.interp(steps, known_steps, known_values).tolist()
        return [float(f"{value:.6g}") for value in values]

    def step_of(self, value: float) -> int:
        """The last step whose value is at most this one, of values that never fall."""
        index = bisect_right(self.values, value)
        return self.steps[index - 1] if index else 0

    def points(self, first: float = 0, last: float | None = None) -> list[Point]:
        """The lowest and the highest value of each bucket between two steps, in the order of their steps, and the last.

        The width of a bucket is the power of two with which at most MOST_BUCKETS hold all steps: new steps change the
        last bucket alone until the width doubles. Of the whole curve, complete buckets are looked at once.
        """
        start = bisect_left(self.steps, first)
        end = len(self.steps) if last is None else bisect_right(self.steps, last)
        if start >= end:
            return []
        span = self.steps[end - 1] - self.steps[start] + 1
        width = 1 << max(0, (-(-span // MOST_BUCKETS) - 1).bit_length())
        if start or last is not None:
            buckets = _extremes(self.steps[start:end], self.values[start:end], width)
            return [point for _, bucket in buckets for point in bucket]

        if width != self._width:
            self._width = width
            self._complete = []
            self._last_bucket = 0
        begin = self._last_bucket
        *complete, (last_begin, last_points) = _extremes(
            self.steps[begin:], self.values[begin:], width
        )
        for _, bucket in complete:
            self._complete += bucket
        self._last_bucket = begin + last_begin
        return [*self._complete, *last_points]


def _extremes(
    step_array: "array[int]", value_array: "array[float]", width: int
) -> list[tuple[int, list[Point]]]:
    """For each bucket of `width` steps the index of its first value, and its lowest and highest value by step.

    The last bucket has its last value, too.
    """
    steps = np.array(step_array, dtype=np.int64)
    values = np.array(value_array, dtype=np.float64)
    # Each bucket begins where the number of the bucket changes.
    numbers = steps // width
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    ends = np.append(begins[1:], len(steps))
    buckets: list[tuple[int, list[Point]]] = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        indices = {
            begin + int(np.argmin(values[begin:end])),
            begin + int(np.argmax(values[begin:end])),
        }
        if end == len(steps):
            indices.add(end - 1)
        points = [[int(steps[index]), float(f"{values[index]:.6g}")] for index in sorted(indices)]
        buckets.append((begin, points))
    return buckets


@final
@dataclass
class RunCurves:
    """Mutable: the curves of a run by name, from its events in the order of the file."""

    by_name: dict[str, Curve] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        match event:
            case StepDone():
                self._append("tokens", event.step, event.tokens)
                self._append("loss", event.step, event.loss)
                self._append("learning rate", event.step, event.learning_rate)
                self._append("gradient norm", event.step, event.grad_norm)
                self._append("tokens per second", event.step, event.tokens_per_second)
                self._append("memory", event.step, event.memory_gib or None)
                for name, value in event.metrics.items():
                    self._append(name, event.step, value)
            case DeviceStats() if event.device >= 0:
                gpu = f"GPU {event.device}"
                self._append(f"temperature of {gpu}", event.step, event.temperature)
                self._append(f"power of {gpu}", event.step, event.power)
            case Resumed() | Recovered():  # steps after it are repeated
                for curve in self.by_name.values():
                    curve.cut(event.step)

    def add_hours(self, step: int, seconds: float) -> None:
        """The wall time at a step, for the comparison of runs."""
        self._append("hours", step, seconds / 3600)

    def _append(self, name: str, step: int, value: float | None) -> None:
        if value is None:
            return
        curve = self.by_name.get(name)
        if curve is None:
            curve = self.by_name[name] = Curve()
        curve.add(step, value)

    def points(self, name: str, first: float = 0, last: float | None = None) -> list[Point]:
        curve = self.by_name.get(name)
        return [] if curve is None else curve.points(first, last)

    def points_over(
        self, axis: Axis, name: str, first: float = 0, last: float | None = None
    ) -> list[Point]:
        """As `points`, with positions on this axis; `first` and `last` are such positions, too."""
        positions = self.by_name.get(axis)
        if positions is None:  # it is the step, or no step has been taken
            return self.points(name, first, last)
        until = None if last is None else positions.step_of(last)
        return self.moved(axis, self.points(name, positions.step_of(first), until))

    def moved(self, axis: Axis, points: list[Point]) -> list[Point]:
        """Points by step as points on this axis."""
        positions = self.by_name.get(axis)
        if positions is None or not points:
            return points
        across = positions.at([step for step, _ in points])
        return [[x, value] for x, (_, value) in zip(across, points, strict=True)]
