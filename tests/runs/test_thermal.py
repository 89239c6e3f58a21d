"""A run pauses when a device is too hot and goes on when it is cooler, neither more often than it must."""

import threading
import time

import pytest

from bloomery.hardware.telemetry import CPU_DEVICE, SensorReading
from bloomery.launch.pausing import StepPauses
from bloomery.monitor.events import Phase
from bloomery.runs.telemetry import BLIND_SECONDS, TemperatureGuard
from bloomery.train.requests import Request


def looks(
    guard: TemperatureGuard, *degrees: float | None, critical: float | None = 110.0, device: int = 0
) -> list[str]:
    """What is said at each look, five seconds apart."""
    said = []
    for at, heat in enumerate(degrees):
        change = guard.check(
            [SensorReading(device=device, temperature=heat, critical=critical)], 5.0 * at
        )
        said.append(
            "" if change is None else f"{'pause' if change.paused else 'go on'}: {change.reason}"
        )
    return said


def test_it_pauses_above_the_limit_and_goes_on_ten_degrees_below():
    said = looks(TemperatureGuard("auto"), 90, 106, 107, 104, 96, 95.5, 94, 106, 106)
    paused = "limit 105 °C: paused; training resumes below 95 °C"
    assert {at: text for at, text in enumerate(said) if text} == {
        2: f"pause: GPU 0 at 107 °C, {paused}",
        6: "go on: training resumed after 20 s: GPU 0 at 94 °C",
        8: f"pause: GPU 0 at 106 °C, {paused}",
    }


def test_one_hot_look_is_a_spike_unless_the_hardware_saves_itself():
    assert looks(TemperatureGuard("auto"), 109, 90, 109, 90) == [""] * 4
    assert looks(TemperatureGuard("auto"), 110)[0].startswith("pause: GPU 0 at 110 °C")


@pytest.mark.parametrize(
    ("limit", "critical", "pauses"),
    [(80.0, None, True), ("auto", None, False), (None, 100.0, False), (80.0, 200.0, True)],
)
def test_where_the_limit_comes_from(limit, critical, pauses):
    assert any(looks(TemperatureGuard(limit), 99, 99, critical=critical)) == pauses


def test_the_processor_is_guarded_only_where_it_trains_and_degrees_were_given():
    for guard, pauses in [
        (TemperatureGuard(80.0), False),
        (TemperatureGuard("auto", on_cpu=True), False),
        (TemperatureGuard(80.0, on_cpu=True), True),
    ]:
        assert any(looks(guard, 95, 95, device=CPU_DEVICE, critical=None)) == pauses


def test_a_sensor_that_goes_silent_does_not_hold_a_run_for_ever():
    blind = [None] * (int(BLIND_SECONDS / 5) + 1)
    said = looks(TemperatureGuard("auto"), 106, 106, *blind)
    assert [text for text in said if text.startswith("go on")] == [
        "go on: training resumed after 65 s: GPU 0 without a reading for 60 s"
    ]


def test_the_hottest_of_several_decides():
    guard = TemperatureGuard(80.0)
    hot = [SensorReading(device=0, temperature=60.0), SensorReading(device=1, temperature=90.0)]
    assert guard.check(hot, 0) is None and guard.check(hot, 5).paused
    warm = [SensorReading(device=0, temperature=75.0), SensorReading(device=1, temperature=60.0)]
    assert guard.check(warm, 10) is None
    cool = [SensorReading(device=0, temperature=60.0), SensorReading(device=1, temperature=69.0)]
    assert not guard.check(cool, 15).paused


def test_a_cool_device_does_not_vouch_for_a_hot_one_that_is_silent():
    guard = TemperatureGuard(80.0)
    both = [SensorReading(device=0, temperature=50.0), SensorReading(device=1, temperature=90.0)]
    assert guard.check(both, 0) is None and guard.check(both, 5).paused
    cool, hot = SensorReading(device=0, temperature=50.0), SensorReading(device=0, temperature=75.0)
    silent = SensorReading(device=1, temperature=None)
    assert (
        guard.check([cool, silent], 10) is None and guard.check([cool], 5 + BLIND_SECONDS) is None
    )
    # nor does the silence of one free another
    assert guard.check([hot], 10 + BLIND_SECONDS) is None
    change = guard.check([cool], 15 + BLIND_SECONDS)
    assert not change.paused and "GPU 1 without a reading for 60 s" in change.reason
    assert guard.check(both, 100) is None and guard.check(both, 105).paused
    told = guard.check([cool, SensorReading(device=1, temperature=69.0)], 110)
    assert not told.paused and "after 5 s: GPU 1 at 69 °C" in told.reason


def test_training_waits_between_two_steps_and_says_so(tmp_path):
    told = []
    pauses = StepPauses(told.append, lambda: Request(pause=(tmp_path / "pause").exists()))
    assert not pauses.wait(poll_seconds=0.01) and not told
    (tmp_path / "pause").touch()
    threading.Timer(0.2, (tmp_path / "pause").unlink).start()
    begun = time.monotonic()
    assert not pauses.wait(poll_seconds=0.01)
    assert (
        time.monotonic() - begun > 0.15
        and [type(event) for event in told] == [Phase]
        and told[0].name == "paused"
    )


def test_a_paused_run_still_hears_a_stop():
    asked = iter([False, False, True])
    pauses = StepPauses(lambda event: None, lambda: Request(next(asked), pause=True))
    assert pauses.wait(poll_seconds=0.01) and next(asked, None) is None
