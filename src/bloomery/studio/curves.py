"""Curves of a run: every value in memory, and as many points as a chart has pixels. Does not import torch."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import numpy as np

from bloomery.monitor.events import DeviceStats, Event, Recovered, Resumed, StepDone

MOST_BUCKETS = 600  # of a curve; each is drawn as its lowest and its highest value
Point = list[float]  # step and value, as ECharts reads it
Axis = Literal["step", "tokens", "hours"]
AXES: tuple[Axis, ...] = ("step", "tokens", "hours")


@final
@dataclass
class Curve:
    """Mutable: values by step, 12 bytes each."""

    steps: "array[int]" = field(default_factory=lambda: array("Q"))
    values: "array[float]" = field(default_factory=lambda: array("f"))

    def add(self, step: int, value: float) -> None:
        """Leaves out a value of an earlier step: a second process may have sampled it."""
        if not self.steps or step >= self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Discards the values after `step`."""
        num_kept = bisect_right(self.steps, step)
        del self.steps[num_kept:], self.values[num_kept:]

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
        last bucket alone until the width doubles.
        """
        start = bisect_left(self.steps, first)
        end = len(self.steps) if last is None else bisect_right(self.steps, last)
        if start >= end:
            return []
        # Copies: an array with a view of it cannot grow.
        steps = np.array(self.steps[start:end], dtype=np.int64)
        values = np.array(self.values[start:end], dtype=np.float64)
        span = int(steps[-1] - steps[0]) + 1
        width = 1 << max(0, (-(-span // MOST_BUCKETS) - 1).bit_length())

        # Each bucket begins where the number of the bucket changes.
        buckets = steps // width
        begins = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
        ends = np.append(begins[1:], len(steps))
        points: list[Point] = []
        for begin, after in zip(begins.tolist(), ends.tolist(), strict=True):
            lowest = begin + int(np.argmin(values[begin:after]))
            highest = begin + int(np.argmax(values[begin:after]))
            points += [
                [int(steps[index]), float(f"{values[index]:.6g}")]
                for index in sorted(
                    {lowest, highest, *([after - 1] if after == len(steps) else [])}
                )
            ]
        return points


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
