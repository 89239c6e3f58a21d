"""Curves of a run: their values in memory, and as many points as a chart has pixels. Does not import torch."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bloomery.hardware.telemetry import device_name
from bloomery.monitor.events import DeviceStats, Event, last_kept_step
from bloomery.view.step_columns import StepColumns

MOST_BUCKETS = 600  # of a curve; each is drawn as its lowest and its highest value
HIGHEST_STEP = 2**32 - 1
HIGHEST_VALUE = 3e38  # of a float of 4 bytes
NAN = float("nan")
DIGITS = 6  # of a value that is drawn
Points = NDArray[np.float64]  # a row of step and value each: 16 bytes, a list of lists 140
Axis = Literal["step", "tokens", "hours"]
ValueType = Literal["f", "d"]  # of 4 or 8 bytes
AXES: tuple[Axis, ...] = ("step", "tokens", "hours")


def rounded_points(steps: ArrayLike, values: ArrayLike) -> Points:
    """With values of DIGITS significant digits, which are as exact as floats of 4 bytes, and shorter."""
    exact = np.asarray(values, np.float64)
    with np.errstate(divide="ignore"):  # the logarithm of 0
        exponents = np.floor(np.log10(np.abs(exact)))
    shift = np.clip(DIGITS - 1 - np.nan_to_num(exponents, neginf=0.0), -300, 300)
    # A division by a whole power of ten gives the number that is nearest to the decimal one.
    scale = 10.0 ** np.abs(shift)
    up = np.rint(exact * scale) / scale
    down = np.rint(exact / scale) * scale
    return np.column_stack([np.asarray(steps, np.float64), np.where(shift >= 0, up, down)])


NO_POINTS: Points = np.empty((0, 2))


class _Extremes(NamedTuple):
    """`num_complete`: points before the last bucket. `last_bucket`: the index of its first value."""

    points: Points
    num_complete: int = 0
    last_bucket: int = 0


def _width_of_buckets(span: int) -> int:
    """Of so many steps: the power of two with which at most MOST_BUCKETS hold them."""
    return 1 << max(0, (-(-span // MOST_BUCKETS) - 1).bit_length())


_BLOCK = 64  # values that one row of a product of matrices averages


@cache
def _block_of_weights(weight: float) -> NDArray[np.float64]:
    """Lower triangular: row i has the weights of values 0 to i in the average after value i."""
    distance = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    powers = (1 - weight) * weight ** np.maximum(distance, 0.0)
    block: NDArray[np.float64] = np.where(distance >= 0, powers, 0.0)
    return block


@final
@dataclass
class MovingAverages:
    """Mutable: after each value the exponential average of those so far, bias-corrected as `MovingAverage` is: what is
    not known (NaN) changes nothing. `weight`: of the past, from 0 to below 1."""

    weight: float
    values: "array[float]" = field(default_factory=lambda: array("d"))
    _mean: float = 0.0
    _num_known: int = 0

    def extend(self, values: "array[float]") -> None:
        """`values`: all of them, of which those before `len(self.values)` are averaged already."""
        new = np.frombuffer(values, values.typecode)[len(self.values) :].astype(np.float64)
        is_known = ~np.isnan(new)
        known = new[is_known]
        # In blocks: within each without those before it, then with what they leave, which fades by `decay`.
        num_blocks = -(-len(known) // _BLOCK)
        padded = np.zeros(num_blocks * _BLOCK)
        padded[: len(known)] = known
        means = padded.reshape(num_blocks, _BLOCK) @ _block_of_weights(self.weight).T
        fading = self.weight ** np.arange(1, _BLOCK + 1)
        before = np.empty(num_blocks)
        mean = self._mean
        for index, own in enumerate(means[:, -1].tolist()):
            before[index] = mean
            mean = own + mean * fading[-1]
        averages = (means + np.outer(before, fading)).ravel()[: len(known)]
        if len(known):
            self._mean = float(averages[-1])
            counts = self._num_known + np.arange(1, len(known) + 1)
            averages /= 1 - self.weight**counts
            self._num_known += len(known)
        # A step without a value shows none.
        all_averages = np.full(len(new), NAN)
        all_averages[is_known] = averages
        self.values.frombytes(all_averages.tobytes())


@final
@dataclass
class Curve:
    """Mutable: values by step; NaN where a step has none. `steps`: shared by the curves of a table."""

    steps: "array[int]"
    values: "array[float]"
    # Points of the whole curve before its last bucket, with the width of the buckets and the index of the last.
    _complete: Points = field(default_factory=lambda: NO_POINTS, compare=False)
    _width: int = field(default=0, compare=False)
    _last_bucket: int = field(default=0, compare=False)
    _averages: "dict[float, MovingAverages]" = field(default_factory=dict, compare=False)

    def values_by_step(self) -> Points:
        """Every known value as it is kept, for a chart that takes means."""
        values = np.frombuffer(self.values, self.values.typecode)
        known = ~np.isnan(values)
        return np.column_stack([np.frombuffer(self.steps, np.uint32)[known], values[known]])

    def cut(self, num_kept: int) -> None:
        """Discards the later values."""
        del self.values[num_kept:]
        self._width = 0
        self._averages.clear()

    def drop_every_second(self) -> None:
        del self.values[1::2]
        self._width = 0
        self._averages.clear()

    def smoothed(self, weight: float, first: float = 0, last: float | None = None) -> Points:
        """The moving average with this weight of the past, between two steps: its last value of each bucket.

        From every value of the curve, not from the points that are drawn. New steps change the last bucket alone, as in
        `points`.
        """
        averages = self._averages.setdefault(weight, MovingAverages(weight))
        averages.extend(self.values)
        start = bisect_left(self.steps, first)
        end = len(self.steps) if last is None else bisect_right(self.steps, last)
        if start >= end:
            return NO_POINTS
        steps = np.frombuffer(self.steps, np.uint32)[start:end]
        values = np.frombuffer(averages.values, np.float64)[start:end]
        numbers = steps // np.uint32(_width_of_buckets(int(steps[-1]) - int(steps[0]) + 1))
        ends = np.append(np.flatnonzero(numbers[1:] != numbers[:-1]), len(steps) - 1)
        ends = ends[~np.isnan(values[ends])]
        return rounded_points(steps[ends], values[ends])

    def at(self, steps: ArrayLike) -> NDArray[np.float64]:
        """The values at these steps, interpolated between those that are known."""
        known_values = np.frombuffer(self.values, self.values.typecode)
        known = ~np.isnan(known_values)
        known_steps = np.frombuffer(self.steps, np.uint32)[known]
        values = np.interp(np.asarray(steps), known_steps, known_values[known])
        at: NDArray[np.float64] = rounded_points(steps, values)[:, 1]
        return at

    def step_of(self, value: float) -> int:
        """The last step whose value is at most this one, of values that never fall."""
        index = bisect_right(self.values, value)
        return self.steps[index - 1] if index else 0

    def points(self, first: float = 0, last: float | None = None) -> Points:
        """The lowest and the highest value of each bucket between two steps, in the order of their steps, and the last.

        The width of a bucket is the power of two with which at most MOST_BUCKETS hold all steps: new steps change the
        last bucket alone until the width doubles. Of the whole curve, complete buckets are looked at once.
        """
        start = bisect_left(self.steps, first)
        end = len(self.steps) if last is None else bisect_right(self.steps, last)
        if start >= end:
            return NO_POINTS
        span = self.steps[end - 1] - self.steps[start] + 1
        width = _width_of_buckets(span)
        if start or last is not None:
            return self._extremes(start, end, width).points

        if width != self._width:
            self._width = width
            self._complete = NO_POINTS
            self._last_bucket = 0
        begin = self._last_bucket
        extremes = self._extremes(begin, end, width)
        points = np.concatenate([self._complete, extremes.points])
        self._complete = points[: len(self._complete) + extremes.num_complete]
        self._last_bucket = begin + extremes.last_bucket
        return points

    def _extremes(self, start: int, end: int, width: int) -> _Extremes:
        """The lowest and the highest value of each bucket of `width` steps, and the last value, by step."""
        # Without a copy of what may be millions of values, where all of them are known.
        steps = np.frombuffer(self.steps, np.uint32)[start:end]
        values = np.frombuffer(self.values, self.values.typecode)[start:end]
        unknown = np.isnan(values)
        known = np.flatnonzero(~unknown) if unknown.any() else None
        if known is not None:
            steps = steps[known]
            values = values[known]
        if not len(values):
            return _Extremes(NO_POINTS)
        # Each bucket begins where the number of the bucket changes.
        numbers = steps // np.uint32(width)
        begins = np.append(0, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1)
        lengths = np.diff(begins, append=len(steps))
        chosen = [np.array([len(steps) - 1])]
        for best in (np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)):
            equal = np.flatnonzero(values == np.repeat(best, lengths))
            _, firsts = np.unique(numbers[equal], return_index=True)  # of each bucket
            chosen.append(equal[firsts])
        indices = np.unique(np.concatenate(chosen))
        points = rounded_points(steps[indices], values[indices])
        last_begin = int(begins[-1])
        last_bucket = last_begin if known is None else int(known[last_begin])
        return _Extremes(points, int(np.searchsorted(indices, last_begin)), last_bucket)


@final
@dataclass
class CurveTable:
    """Mutable: curves over the same steps. `typecode`: of values, as of an array."""

    typecode: ValueType = "f"
    steps: "array[int]" = field(default_factory=lambda: array("I"))
    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """A value of each column for each step. Leaves out steps before the last one, which a second process may have
        sampled, and what no chart shows."""
        if min(steps) < 0 or max(steps) > HIGHEST_STEP:
            shown = [index for index, step in enumerate(steps) if 0 <= step <= HIGHEST_STEP]
            columns = {name: [column[index] for index in shown] for name, column in columns.items()}
            steps = [steps[index] for index in shown]
        new_steps = np.array(steps, dtype=np.int64)
        last_step = self.steps[-1] if self.steps else 0
        later = new_steps >= np.maximum(np.maximum.accumulate(new_steps), last_step)
        num_before = len(self.steps)
        self.steps.frombytes(new_steps[later].astype(np.uint32).tobytes())
        for name, column in columns.items():
            values = np.array(column, dtype=np.float64)[later]
            values[~(np.abs(values) < HIGHEST_VALUE)] = NAN
            if name not in self.curves:
                if np.isnan(values).all():
                    continue
                unknown = array(self.typecode, [NAN]) * num_before
                self.curves[name] = Curve(self.steps, unknown)
            self.curves[name].values.frombytes(values.astype(self.typecode).tobytes())
        for curve in self.curves.values():
            curve.values.extend([NAN] * (len(self.steps) - len(curve.values)))

    def cut(self, step: int) -> None:
        """Discards the values after `step`."""
        num_kept = bisect_right(self.steps, step)
        if num_kept < len(self.steps):
            del self.steps[num_kept:]
            for curve in self.curves.values():
                curve.cut(num_kept)

    def thin(self) -> None:
        """Drops every second step."""
        del self.steps[1::2]
        for curve in self.curves.values():
            curve.drop_every_second()


@final
@dataclass(frozen=True)
class KeptCurves:
    """What a view keeps of its curves. `names`: None for all; `most_steps`: above, every second one is dropped."""

    names: frozenset[str] | None = None
    typecode: ValueType = "f"
    most_steps: int | None = None


@final
@dataclass
class RunCurves:
    """Mutable: the curves of a run by name, from its events in the order of the file."""

    kept: KeptCurves = KeptCurves()
    by_name: dict[str, Curve] = field(default_factory=dict)
    # Curves that are multiples of others: the name of the other one, and the factor.
    scaled: dict[str, tuple[str, float]] = field(default_factory=dict)
    metrics: dict[str, None] = field(default_factory=dict)  # names of those of the objective
    _tables: dict[int | None, CurveTable] = field(
        default_factory=dict
    )  # of devices; None: of steps

    def add(self, event: Event) -> None:
        """Any event but a step."""
        if (last_kept := last_kept_step(event)) is not None:
            for table in self._tables.values():
                table.cut(last_kept)
        if isinstance(event, DeviceStats):
            name = device_name(event.device)
            values = {
                f"{kind} of {name}": [NAN if value is None else value]
                for kind, value in (("temperature", event.temperature), ("power", event.power))
            }
            self._add(event.device, [event.step], values)

    def add_steps(self, steps: StepColumns, seconds_at_steps: Sequence[float]) -> None:
        """`seconds_at_steps`: of training until the end of each step."""
        hours = [seconds / 3600 for seconds in seconds_at_steps]
        memory = [peak or NAN for peak in steps.memory_gib]  # 0: not measured
        self.metrics |= dict.fromkeys(steps.metrics)
        columns: dict[str, Sequence[float]] = {
            "tokens": steps.tokens,
            "loss": steps.loss,
            "learning rate": steps.learning_rate,
            "gradient norm": steps.grad_norm,
            "tokens per second": steps.tokens_per_second,
            "memory": memory,
            "hours": hours,
        }
        self._add(None, steps.step, {**steps.metrics, **columns})

    def _add(
        self,
        device: int | None,
        steps: Sequence[int],
        columns: Mapping[str, Sequence[float]],
    ) -> None:
        names = self.kept.names
        if names is not None:
            columns = {name: column for name, column in columns.items() if name in names}
            if not columns:
                return
        table = self._tables.setdefault(device, CurveTable(self.kept.typecode))
        num_before = len(table.curves)
        table.add(steps, columns)
        while self.kept.most_steps is not None and len(table.steps) > self.kept.most_steps:
            table.thin()
        if len(table.curves) > num_before:
            self.by_name |= table.curves

    def points(self, name: str, first: float = 0, last: float | None = None) -> Points:
        if name in self.scaled:
            other, factor = self.scaled[name]
            points = self.points(other, first, last)
            return rounded_points(points[:, 0], factor * points[:, 1])
        curve = self.by_name.get(name)
        return NO_POINTS if curve is None else curve.points(first, last)

    def smoothed(
        self, name: str, weight: float, first: float = 0, last: float | None = None
    ) -> Points:
        """The moving average of a curve, as points."""
        if name in self.scaled:
            other, factor = self.scaled[name]
            points = self.smoothed(other, weight, first, last)
            return rounded_points(points[:, 0], factor * points[:, 1])
        curve = self.by_name.get(name)
        return NO_POINTS if curve is None else curve.smoothed(weight, first, last)

    def points_over(
        self, axis: Axis, name: str, first: float = 0, last: float | None = None
    ) -> Points:
        """As `points`, with positions on this axis; `first` and `last` are such positions, too."""
        positions = self.by_name.get(axis)
        if positions is None:  # it is the step, or no step has been taken
            return self.points(name, first, last)
        until = None if last is None else positions.step_of(last)
        return self.moved(axis, self.points(name, positions.step_of(first), until))

    def moved(self, axis: Axis, points: Points) -> Points:
        """Points by step as points on this axis."""
        positions = self.by_name.get(axis)
        if positions is None or not len(points):
            return points
        return np.column_stack([positions.at(points[:, 0]), points[:, 1]])
