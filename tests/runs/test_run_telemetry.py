"""The thread beside a run: what it tells, how it pauses, and that a sensor which never answers holds nobody up."""

import os
import time
from pathlib import Path

import pytest
from runs_of_bloomery import Bloomery, losses

from bloomery.core.errors import UserError
from bloomery.hardware.telemetry import SensorDevice, SensorReader, SensorReading
from bloomery.monitor.events import CPU_DEVICE, DeviceStats, Phase, RunEnded, StepDone, Warned
from bloomery.runs import telemetry
from bloomery.runs.telemetry import Stretch, TemperatureGuard, Watcher


def test_a_stretch_is_means_over_time_the_highest_temperature_and_the_last_of_the_rest():
    stretch = Stretch()
    stretch.add(
        SensorReading(
            device=0, power=100.0, temperature=70.0, utilization=50.0, throttled="temperature"
        ),
        1.0,
    )
    stretch.add(
        SensorReading(device=0, power=200.0, temperature=60.0, memory_gib=3.0, throttled=""), 3.0
    )
    event = stretch.event(step=7)
    assert (event.step, event.seconds, event.power, event.temperature) == (7, 4.0, 175.0, 70.0)
    assert (event.utilization, event.memory_gib, event.throttled) == (50.0, 3.0, "temperature")


class Script:
    """A reader that knows what it will say."""

    def __init__(self, *looks: list[SensorReading]) -> None:
        self._looks = list(looks)

    def read(self) -> list[SensorReading]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def close(self) -> None:
        pass


def until(moment, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not moment():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_hot_device_makes_the_file_that_training_waits_for_and_a_cool_one_takes_it_away(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.05)
    hot, cool = (
        [SensorReading(device=0, temperature=108.0, critical=110.0)],
        [SensorReading(device=0, temperature=80.0, critical=110.0)],
    )
    told, pause = [], tmp_path / "pause"
    pause.touch()  # as a killed run leaves it
    watcher = Watcher(
        Script(hot, hot, hot, hot, cool), TemperatureGuard("auto"), told.append, pause
    )
    watcher.begin()
    until(lambda: any("paused" in event.reason for event in told if isinstance(event, Warned)))
    until(
        lambda: any("resumed after" in event.reason for event in told if isinstance(event, Warned))
    )
    assert not pause.exists()
    watcher.end()
    assert max(event.temperature for event in told if isinstance(event, DeviceStats)) == 108.0


def test_the_end_of_a_run_takes_the_file_away(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.05)
    pause = tmp_path / "pause"
    watcher = Watcher(
        Script([SensorReading(device=0, temperature=120.0, critical=110.0)]),
        TemperatureGuard("auto"),
        lambda event: None,
        pause,
    )
    watcher.begin()
    until(pause.exists)
    watcher.end()
    assert not pause.exists()


@pytest.mark.parametrize(
    "error",
    [
        UserError("an event could not be written", where="", fix=""),
        OSError(28, "No space left on device"),
    ],
)
def test_when_it_can_tell_nothing_any_more_it_holds_nobody(tmp_path, monkeypatch, error):
    """The disk is full at the very moment in which the run was paused."""
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.05)
    pause, seen = tmp_path / "pause", []

    def emit(event):
        seen.append(pause.exists())
        raise error

    watcher = Watcher(
        Script([SensorReading(device=0, temperature=120.0, critical=110.0)]),
        TemperatureGuard("auto"),
        emit,
        pause,
    )
    watcher.begin()
    until(lambda: bool(seen) and not watcher._thread.is_alive())
    assert seen == [True] and not pause.exists()


def test_a_sensor_that_never_answers_does_not_hold_up_the_end_of_a_run(tmp_path):
    folder = tmp_path / "sys/class/drm/renderD128/device"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "gpu_busy_percent")
    gpu = SensorDevice(index=0, vendor="amd", node="/dev/dri/renderD128")
    reader = SensorReader([gpu], on_problem=lambda text: None, root=tmp_path)
    watcher = Watcher(reader, TemperatureGuard("auto"), lambda event: None, tmp_path / "pause")
    watcher.begin()
    time.sleep(0.5)
    begun = time.monotonic()
    watcher.end()
    assert time.monotonic() - begun < 6  # the read would take 8


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
def test_a_run_tells_how_hard_the_processor_works_and_ends_after_that(undisturbed: Bloomery):
    events = undisturbed.events()
    samples = [event for event in events if isinstance(event, DeviceStats)]
    assert samples and {event.device for event in samples} == {CPU_DEVICE}
    assert all(0 <= event.utilization <= 100 and event.seconds > 0 for event in samples)
    assert isinstance(events[-1], RunEnded) and not (undisturbed.run_dir / "pause").exists()


def test_a_run_waits_while_the_file_is_there_and_loses_nothing(
    bloomery: Bloomery, undisturbed: Bloomery
):
    words = ("train", "tiny.yaml", "--run-dir", "runs/one")
    with bloomery.start(*words) as process:
        until(bloomery.saw(StepDone, 2), 120)
        (bloomery.run_dir / "pause").touch()
        until(bloomery.saw(Phase), 60)
        until(
            lambda: any(isinstance(e, Phase) and e.name == "paused" for e in bloomery.events()), 60
        )
        count = len(losses(bloomery.run_dir))
        time.sleep(1)
        assert len(losses(bloomery.run_dir)) == count < 16
        (bloomery.run_dir / "pause").unlink()
        process.communicate(timeout=120)
    assert losses(bloomery.run_dir) == losses(undisturbed.run_dir)
