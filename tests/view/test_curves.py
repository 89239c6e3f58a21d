"""Curves against the values that they are made of."""

import math
import random
import struct
from itertools import groupby

import pytest

from bloomery.monitor.events import DeviceStats, Resumed
from bloomery.view.curves import MOST_BUCKETS, Curve, CurveTable
from bloomery.view.run_view import RunView
from bloomery.view.summary import summary_of
from runs_for_tests import made_up_run, step_done


def table_of(values: list[float]) -> CurveTable:
    """With one curve, "y", from step 1 on."""
    table = CurveTable()
    table.add(range(1, len(values) + 1), {"y": values})
    return table


def curve_of(values: list[float]) -> Curve:
    return table_of(values).curves["y"]


@pytest.mark.parametrize("count", [1, 2, 599, 600, 601, 5000])
def test_every_bucket_keeps_its_lowest_and_its_highest_value(count: int) -> None:
    generator = random.Random(count)
    values = [float(generator.randrange(10_000)) for _ in range(count)]

    points = curve_of(values).points().tolist()

    # The oracle: buckets of the smallest power of two that leaves at most MOST_BUCKETS.
    width = next(2**power for power in range(20) if -(-count // 2**power) <= MOST_BUCKETS)
    numbered = enumerate(values, 1)
    extremes = [
        value
        for _, bucket in groupby(numbered, key=lambda pair: pair[0] // width)
        for members in [[value for _, value in bucket]]
        for value in (min(members), max(members))
    ]
    assert len(points) <= 2 * (MOST_BUCKETS + 1) + 1
    assert sorted({value for _, value in points}) == sorted({*extremes, values[-1]})
    assert points[-1] == [count, values[-1]]
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert all(values[int(step) - 1] == value for step, value in points)


def test_a_spike_of_one_step_stays_in_a_long_run() -> None:
    values = [2.0] * 100_000
    values[77_777] = 50.0
    assert [77_778, 50.0] in curve_of(values).points().tolist()


def test_new_steps_change_only_the_last_bucket_until_the_width_doubles() -> None:
    table = table_of([float(step % 7) for step in range(1, 2001)])
    curve = table.curves["y"]
    before = curve.points().tolist()
    table.add([2001], {"y": [3.0]})
    assert curve.points().tolist()[: len(before) - 3] == before[:-3]


def test_points_that_are_looked_at_again_and_again_are_those_of_one_look() -> None:
    generator = random.Random(0)
    table = CurveTable()
    for step in range(1, 3000):
        # Not every step has a value, and the last ones have none.
        value = generator.random() if step % 3 and step < 2950 else math.nan
        table.add([step], {"y": [value], "other": [1.0]})
        if step % 37 == 0:
            table.curves["y"].points().tolist()
        if step == 1500:
            table.cut(1290)
        if step == 2000:
            table.cut(100)
    curve = table.curves["y"]
    fresh = Curve(curve.steps[:], curve.values[:])
    assert curve.points().tolist() == fresh.points().tolist()


def test_a_zoom_has_every_value_of_its_part() -> None:
    values = [float(step % 11) for step in range(1, 50_001)]
    points = curve_of(values).points(1000, 1400).tolist()
    assert points == [[step, values[step - 1]] for step in range(1000, 1401)]


def test_a_resume_discards_the_steps_that_are_repeated() -> None:
    view = RunView()
    for step in range(1, 11):
        view.add(step_done(step, loss=float(step)))
    view.add(Resumed(step=6, path="checkpoints/step-00000006"))
    view.add(step_done(7, loss=70.0))
    assert view.curves.points("loss").tolist() == [
        *([step, float(step)] for step in range(1, 7)),
        [7, 70.0],
    ]


def test_a_skipped_step_and_an_unknown_sensor_have_no_point() -> None:
    view = RunView()
    view.add(step_done(1, loss=None))
    view.add(DeviceStats(step=1, device=0, temperature=None, power=90.0))
    curves = view.curves
    assert "loss" not in curves.by_name
    assert "temperature of GPU 0" not in curves.by_name
    assert curves.points("power of GPU 0").tolist() == [[1, 90.0]]


@pytest.mark.parametrize("step", [-1, 2**32, 10**30])
def test_a_step_that_no_run_has_is_left_out(step: int) -> None:
    view = RunView()
    view.add(step_done(1))
    view.add(step_done(step))
    view.add(step_done(2))
    assert view.curves.points("loss").tolist() == [[1, 2.0], [2, 2.0]]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_a_value_that_no_chart_shows_is_left_out(value: float) -> None:
    assert curve_of([1.0, value, 3.0]).points().tolist() == [[1, 1.0], [3, 3.0]]


def test_a_sample_of_an_earlier_step_is_left_out() -> None:
    table = table_of([1.0, 2.0, 3.0])
    table.add([2, 4, 3, 5], {"y": [9.0, 4.0, 9.0, 5.0]})
    assert table.curves["y"].points().tolist() == [[step, float(step)] for step in range(1, 6)]


def test_a_step_beyond_any_run_is_left_out() -> None:
    table = table_of([1.0, 2.0])
    table.add([2**40, 3], {"y": [9.0, 3.0]})
    assert table.curves["y"].points().tolist() == [[1, 1.0], [2, 2.0], [3, 3.0]]


def test_many_steps_at_once_are_the_steps_one_by_one() -> None:
    """Curves and figures, of a run that is killed, skips a step and has a metric that begins late."""
    events = list(made_up_run())
    events += [step_done(step, metrics={"accuracy": step / 100}) for step in range(41, 60)]
    events += [step_done(step, loss=None, metrics={"accuracy": 1.0}) for step in range(60, 64)]
    one_by_one = RunView()
    for event in events:
        one_by_one.add(event)
    together = RunView()
    together.add_all(events)
    contents = [
        {name: (c.steps.tobytes(), c.values.tobytes()) for name, c in view.curves.by_name.items()}
        for view in (one_by_one, together)
    ]
    assert contents[0] == contents[1]
    assert len(one_by_one.curves.by_name) == 8
    assert one_by_one.curves.points("accuracy").tolist()[0] == [41, 0.41]
    assert summary_of(events) == one_by_one.summary == together.summary
    assert one_by_one.incidents == together.incidents


@pytest.mark.parametrize("weight", [0.6, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 500])
def test_a_moving_average_is_that_of_the_summary(count: int, weight: float) -> None:
    """The oracle goes value by value; a step without one has none and changes nothing."""
    generator = random.Random(count)
    values = [math.nan if number % 7 == 3 else generator.random() for number in range(count)]
    # In two parts, as a run that trains.
    middle = (count + 1) // 2
    table = table_of(values[:middle])
    table.curves["y"].smoothed(weight)
    if later := values[middle:]:
        table.add(range(middle + 1, count + 1), {"y": later})

    expected = []
    mean = known = 0.0
    for step, value in enumerate(values, 1):
        if not math.isnan(value):
            value = struct.unpack("f", struct.pack("f", value))[0]  # as a curve keeps it
            mean = weight * mean + (1 - weight) * value
            known += 1
            expected.append([float(step), mean / (1 - weight**known)])
    points = table.curves["y"].smoothed(weight)
    assert points[:, 0].tolist() == [step for step, _ in expected]
    assert points[:, 1].tolist() == pytest.approx([value for _, value in expected], rel=1e-5)


def test_a_moving_average_of_a_long_run_has_the_last_value_of_each_bucket() -> None:
    values = [float(number % 100) for number in range(5000)]
    whole = dict(curve_of(values).smoothed(0.9, 4000, 4300).tolist())
    points = curve_of(values).smoothed(0.9)
    assert len(points) <= MOST_BUCKETS + 1
    assert points[-1, 0] == 5000
    assert {step: value for step, value in points.tolist() if step in whole} == {
        step: whole[step] for step, _ in points.tolist() if step in whole
    }
    assert set(whole) & set(points[:, 0].tolist())


def test_a_moving_average_forgets_the_steps_that_a_resume_repeats() -> None:
    table = table_of([1.0, 2.0, 3.0, 9.0])
    table.curves["y"].smoothed(0.9)
    table.cut(2)
    table.add([3, 4], {"y": [3.0, 4.0]})
    assert table.curves["y"].smoothed(0.9).tolist() == curve_of([1, 2, 3, 4]).smoothed(0.9).tolist()
