"""What the report says of devices: curves, who shares a sensor, and what a token cost."""

import re
from pathlib import Path

from bloomery.core.units import format_joules
from bloomery.monitor.events import CPU_DEVICE, DeviceStats, Event, EventLog, RunEnded, StepDone
from bloomery.report import write_report


def step(number: int) -> StepDone:
    return StepDone(
        step=number,
        time=10.0 * number,
        loss=2.0,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens=1000 * number,
        tokens_per_second=100.0,
        sequences_per_second=1.0,
        step_seconds=10.0,
        data_wait_seconds=0.0,
        memory_gib=3.0,
    )


def page(folder: Path, samples: list[DeviceStats]) -> str:
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: {preset: go-coder-tiny}\ndata: {path: corpus}\n")
    told: list[Event] = [
        *(step(number) for number in range(1, 11)),
        *samples,
        RunEnded(status="done", step=10, time=100.0),
    ]
    with EventLog(folder / "events.jsonl") as emit:
        for event in sorted(told, key=lambda event: event.time):
            emit(event)
    return re.sub(r"<[^>]+>", "|", write_report(folder).read_text(encoding="utf-8"))


def sample(device: int, at: float, **figures: float | str | None) -> DeviceStats:
    facts = {
        "device": device,
        "name": "a card",
        "time": at,
        "seconds": 10.0,
        "utilization": 90.0,
        "temperature": 60.0,
    }
    return DeviceStats(**{**facts, **figures})


def test_two_dies_of_a_card_and_the_processor(tmp_path):
    times = [10.0 * number for number in range(1, 11)]
    told = page(
        tmp_path / "run",
        [
            one
            for at in times
            for one in (
                sample(
                    0,
                    at,
                    power=360.0,
                    clock_mhz=1600.0,
                    memory_gib=40.0,
                    throttled="temperature" if at > 90 else "",
                ),
                sample(1, at, shared_with=0, throttled=""),
                sample(CPU_DEVICE, at, power=90.0),
            )
        ],
    )
    for part in (
        "Utilization",
        "Temperature",
        "Power",
        "Clock",
        "Memory in use",
        "minute",
        "with GPU 0",
        "10 s (temperature)",
    ):
        assert part in told, part
    assert "12.5 Wh" in told  # (360 W + 90 W) over 100 s
    assert "4.5 J" in told  # of which 10,000 tokens were made
    assert "GPUs and CPU" in told and "only root" not in told


def test_without_a_power_there_is_no_energy_and_the_reason_is_said(tmp_path):
    told = page(tmp_path / "run", [sample(CPU_DEVICE, 10.0), sample(CPU_DEVICE, 20.0)])
    assert "energy is unknown" in told and " Wh" not in told and "J per token" not in told
    # a column without a figure is none
    assert "|mean utilization|" in told and "|energy|" not in told


def test_a_run_whose_devices_nobody_looked_at_has_no_such_section(tmp_path):
    assert "|Devices|" not in page(tmp_path / "run", [])


def test_energy_is_written_in_the_unit_that_fits():
    assert [format_joules(joules) for joules in (900.0, 3.6e6, 3.6e9)] == [
        "0.25 Wh",
        "1 kWh",
        "1,000 kWh",
    ]
