"""The devices of a run on its page: curves over time, and the energy that they used."""

from collections.abc import Callable, Sequence

from bloomery.core.units import format_seconds
from bloomery.monitor.console.words import format_joules
from bloomery.monitor.events import PROCESSOR, GpuSampled
from bloomery.monitor.tally import JOULES_IN_KWH, DeviceTally
from bloomery.report.charts import Point, Series, line_chart
from bloomery.report.html import Html, el, join, table
from bloomery.report.record import Record

_DRAWN = 8  # devices that a chart has colours for
_TOGETHER = 1.05  # of the run's time: a little more is rounding
_LOWEST = 0.95


def devices(record: Record) -> Html | None:
    """None when no sample was told."""
    if not record.device_samples:
        return None
    return join(_curves(record), _table(record), energy(record), _note(record))


def _curves(record: Record) -> Html:
    samples = [sample for sample in record.device_samples if sample.seconds]
    charts = [
        _curve(record, samples, "Load", "%", lambda s: s.utilisation, from_zero=True),
        _curve(record, samples, "Temperature", "°C", lambda s: s.temperature),
        _curve(record, samples, "Power", "W", lambda s: s.power, from_zero=True),
        _curve(record, samples, "Clock", "MHz", lambda s: s.clock_mhz),
        _curve(record, samples, "Memory in use", "GiB", lambda s: s.memory_gib, from_zero=True),
        _held(record),
    ]
    return el("div", *charts, class_="two")


def _curve(
    record: Record,
    samples: Sequence[GpuSampled],
    title: str,
    unit: str,
    figure: Callable[[GpuSampled], float | None],
    *,
    from_zero: bool = False,
) -> Html | None:
    """One line a device over the minutes of the run; None when nobody told this figure."""
    series = [
        Series(device.name, _points(record, samples, device.latest.device, figure), f"d{at}")
        for at, device in enumerate(record.tally.devices.all[:_DRAWN])
    ]
    drawn = [one for one in series if one.points]
    return line_chart(title, drawn, unit=unit, from_zero=from_zero, across="minute") if drawn else None


def _points(
    record: Record, samples: Sequence[GpuSampled], device: int, figure: Callable[[GpuSampled], float | None]
) -> list[Point]:
    began = record.tally.began or 0.0
    told = ((sample.time, figure(sample)) for sample in samples if sample.device == device)
    return [((when - began) / 60, value) for when, value in told if value is not None]


def _held(record: Record) -> Html | None:
    """What PyTorch's allocator held and what of it tensors used, of the training process."""
    told = [sample for sample in record.device_samples if sample.reserved_gib is not None]
    if not told:
        return None
    first = told[0].device
    series = [
        Series("held by PyTorch", _points(record, told, first, lambda s: s.reserved_gib), "d0"),
        Series("used by tensors", _points(record, told, first, lambda s: s.allocated_gib), "d1"),
    ]
    return line_chart("PyTorch's memory", series, unit="GiB", from_zero=True, across="minute")


def _table(record: Record) -> Html:
    head = ["", "load", "hottest", "power", "energy", "memory, peak", "slowed down"]
    rows: list[list[str | Html]] = [_row(device) for device in record.tally.devices.all]
    known = [at for at in range(len(head)) if any(row[at] for row in rows)]
    return table([head[at] for at in known], [[row[at] for at in known] for row in rows], class_="numbers named")


def _row(device: DeviceTally) -> list[str | Html]:
    shared = device.latest.shared_with
    slowed = ", ".join(f"{format_seconds(seconds)} ({reason})" for reason, seconds in device.slowed_seconds.items())
    return [
        join(device.name, el("small", f" {device.latest.name}")),
        _figure(device.mean_load, ".0f", "%"),
        _figure(device.peak_heat, ".0f", " °C"),
        f"with GPU {shared}" if shared is not None else _figure(device.mean_power, ",.0f", " W"),
        format_joules(device.joules) if device.power_seconds else "",
        _figure(device.peak_gib, ".1f", " GiB"),
        slowed or ("never" if device.latest.throttled is not None else ""),
    ]


def _figure(value: float | None, spec: str, unit: str) -> str:
    return "" if value is None else f"{value:{spec}}{unit}"


def energy(record: Record) -> Html | None:
    """What the run used, a token's share of it, and what the plan had said; None where no power was told."""
    tally, planned = record.tally, record.plan.energy_kwh if record.plan else None
    joules, each = tally.devices.joules, tally.joules_per_token
    if joules is None:
        return None
    finished = planned * JOULES_IN_KWH if planned and record.state == "done" else None
    rows = [("energy", format_joules(joules), format_joules(finished) if finished else "")]
    if each is not None:
        total = record.plan.total_tokens if record.plan else None
        said = planned * JOULES_IN_KWH / total if planned and total else None
        rows.append(("of a token", f"{each:.3g} J", f"{said:.3g} J" if said else ""))
        rows.append(("of a million tokens", format_joules(each * 1e6), format_joules(said * 1e6) if said else ""))
    if any(plan for *_, plan in rows):
        return table(["", "run", "plan"], [[*row] for row in rows])
    return table(["", "run"], [[title, figure] for title, figure, _ in rows])


def _note(record: Record) -> Html:
    """What the figures hold, and what they do not."""
    known, told = record.tally.devices, ["Load and power are means over the run."]
    if known.joules is None:
        told.append(
            "Nothing here tells its power, so there is no energy: on most systems only root reads a processor's."
        )
    else:
        parts = {d.latest.device == PROCESSOR for d in known.all if d.power_seconds}
        what = "boards and processor" if len(parts) == 2 else "the processor" if True in parts else "the boards"
        told.append(f"Energy is that of {what} as their sensors tell it; the rest of the machine is not in it.")
        share = known.covered_seconds / record.tally.seconds if record.tally.seconds else 1.0
        if not _LOWEST <= share <= _TOGETHER:
            told.append(f"Power was told for {share:.0%} of the time between the first event and the last.")
    if len(known.all) > _DRAWN:
        told.append(f"The curves show {_DRAWN} of {len(known.all)} devices.")
    return el("p", " ".join(told), class_="note")
