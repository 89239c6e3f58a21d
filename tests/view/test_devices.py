"""What is told of devices: energy, peaks, lines of text, curves, and how often."""

import json
import sys

import pytest

from bloomery.monitor.events import CPU_DEVICE, DeviceStats, EventLog, from_json, to_json
from bloomery.monitor.sinks import CommandSink, LogFile, TrackerSink
from bloomery.monitor.words import sensor_lines
from bloomery.view.devices import device_figures
from bloomery.view.metrics_json import write_metrics
from bloomery.view.summary import summary_of
from runs_for_tests import made_up_run, step_done


def sampled(device=0, time=0.0, seconds=5.0, **figures):
    facts = {
        "utilization": 98.0,
        "temperature": 78.0,
        "power": 200.0,
        "clock_mhz": 2424.0,
        "memory_gib": 10.1,
        "memory_total_gib": 12.0,
        "throttled": "",
    } | figures
    return DeviceStats(
        device=device, name="RX 6700 XT", time=time, step=1, seconds=seconds, **facts
    )


def of_torch(**figures):
    return DeviceStats(
        device=0,
        time=6.0,
        allocated_gib=8.0,
        reserved_gib=9.5,
        fragmentation=0.05,
        alloc_retries=2,
        **figures,
    )


def test_energy_is_power_times_the_seconds_that_each_sample_stands_for():
    samples = [
        sampled(power=200.0),
        sampled(power=100.0, seconds=10.0),
        sampled(power=None, seconds=50.0),
    ]
    summary = summary_of([step_done(1), *samples])
    assert summary.devices.joules == 2000.0 and summary.devices.covered_seconds == 15.0
    assert summary.joules_per_token == pytest.approx(2000 / 8192)
    (device,) = summary.devices.all
    assert device.mean_power == pytest.approx(2000 / 15) and device.mean_utilization == 98.0


def test_without_any_power_there_is_no_energy_rather_than_none_used():
    summary = summary_of([step_done(1), sampled(power=None)])
    assert summary.devices.joules is None and summary.joules_per_token is None
    assert device_figures(summary.devices.all[0])["energy_kwh"] is None


def test_the_odd_die_adds_nothing_and_says_whose_sensor_it_is():
    summary = summary_of([sampled(0, power=402.0), sampled(1, power=None, shared_with=0)])
    assert summary.devices.joules == 2010.0
    assert "with GPU 0" in sensor_lines(summary.devices.newest)[1]


def test_lines_stand_under_each_other_and_leave_out_what_nobody_knows():
    summary = summary_of(
        [sampled(), sampled(1, utilization=7.0, temperature=None, clock_mhz=800.0), of_torch()]
    )
    first, second = sensor_lines(summary.devices.newest)
    assert first == (
        "gpu 0      98%  78 °C  200 W  2,424 MHz  10.1 of 12.0 GiB  tensors 8.0, reserved 9.5"
    )
    assert second == "gpu 1       7%         200 W    800 MHz  10.1 of 12.0 GiB"
    cpu = summary_of([sampled(CPU_DEVICE, power=None, clock_mhz=None, temperature=None)])
    assert sensor_lines(cpu.devices.newest) == ["cpu        98%  10.1 of 12.0 GiB"]
    assert sensor_lines([]) == []


def test_what_a_look_did_not_find_any_more_is_not_shown_as_it_was():
    summary = summary_of([sampled(throttled="temperature"), of_torch(), sampled(power=None)])
    (device,) = summary.devices.all
    assert (
        device.latest.power is None
        and device.latest.throttled == ""
        and device.latest.reserved_gib == 9.5
    )
    assert device.throttled_seconds == {"temperature": 5.0} and device.peak_temperature == 78.0


def test_samples_come_back_equal_and_old_ones_still_load():
    event = sampled(shared_with=None)
    assert from_json(to_json(event)) == event
    old = '{"event": "DeviceStats", "step": 3, "time": 1, "device": 0, "power": 180.5}'
    assert from_json(old).power == 180.5


def test_metrics_hold_each_device_and_what_a_token_cost(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as emit:
        for event in (*made_up_run(), sampled(), sampled(CPU_DEVICE, power=50.0)):
            emit(event)
    metrics = json.loads(write_metrics(tmp_path, {"energy_kwh": 1.5}).read_text())
    assert (
        metrics["energy_kwh"] == pytest.approx(1250 / 3.6e6)
        and metrics["planned"]["energy_kwh"] == 1.5
    )
    assert metrics["joules_per_token"] == pytest.approx(1250 / (40 * 8192))
    assert [device["device"] for device in metrics["devices"]] == [0, CPU_DEVICE]
    assert metrics["devices"][0]["temperature_peak"] == 78.0


def test_the_log_has_a_sample_of_each_device_a_minute(tmp_path):
    log = LogFile(tmp_path / "log.txt")
    for at in range(0, 121, 5):
        log.write(sampled(0, time=float(at)))
        log.write(sampled(1, time=float(at)))
        log.write(of_torch())
    log.close()
    told = (tmp_path / "log.txt").read_text().splitlines()
    assert len(told) == 6 and "gpu 0 98% 78 °C 200 W 2,424 MHz 10.1 of 12.0 GiB" in told[0]


def test_a_hook_hears_of_a_device_once_a_minute(tmp_path):
    (tmp_path / "hook.py").write_text("import sys; open('got.txt', 'a').write(sys.stdin.read())")
    hook = CommandSink(f"{sys.executable} hook.py", tmp_path, pytest.fail)
    for at in (0, 5, 10, 61):
        hook.write(sampled(time=float(at)))
    assert len((tmp_path / "got.txt").read_text().splitlines()) == 2


def test_tensorboard_has_every_sample(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TrackerSink("tensorboard", tmp_path, pytest.fail)
    for event in (
        sampled(time=1.0),
        sampled(time=6.0, power=150.0),
        of_torch(),
        sampled(CPU_DEVICE),
    ):
        sink.write(event)
    sink.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    assert [point.value for point in read.Scalars("gpu0/power")] == [200.0, 150.0]
    assert {"gpu0/reserved_gib", "gpu0/fragmentation", "cpu/utilization"} <= set(
        read.Tags()["scalars"]
    )
