"""What a run's devices did, summed up from their samples: load, heat, memory, energy; and each as a line of text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

from bloomery.monitor.events import PROCESSOR, GpuSampled

JOULES_IN_KWH = 3.6e6
_NOW = ("utilisation", "temperature", "power", "clock_mhz", "throttled")


@final
@dataclass
class DeviceTally:
    """Mutable: one device after the samples that `add` was given."""

    latest: GpuSampled  # each figure as it was told last
    seconds: float = 0.0  # that samples stand for
    busy_seconds: float = 0.0  # the load, as if it had been all or nothing
    load_seconds: float = 0.0  # in which a load was told
    peak_load: float | None = None
    peak_heat: float | None = None
    peak_gib: float | None = None
    joules: float = 0.0
    power_seconds: float = 0.0  # in which a power was told
    slowed_seconds: dict[str, float] = field(default_factory=dict)  # by reason

    def add(self, event: GpuSampled) -> None:
        told: dict[str, Any] = {f.name: value for f in fields(event) if (value := getattr(event, f.name)) is not None}
        if event.seconds:  # a look at the device: what it did not tell is not known any more
            told = {**dict.fromkeys(_NOW), **told}
        self.latest = replace(self.latest, **told)
        self.seconds += event.seconds
        self.peak_load = _higher(self.peak_load, event.utilisation)
        self.peak_heat = _higher(self.peak_heat, event.temperature)
        self.peak_gib = _higher(self.peak_gib, event.memory_gib)
        if event.utilisation is not None:
            self.busy_seconds += event.utilisation / 100 * event.seconds
            self.load_seconds += event.seconds
        if event.power is not None:
            self.joules += event.power * event.seconds
            self.power_seconds += event.seconds
        for reason in filter(None, (event.throttled or "").split(", ")):
            self.slowed_seconds[reason] = self.slowed_seconds.get(reason, 0.0) + event.seconds

    @property
    def name(self) -> str:
        return "processor" if self.latest.device == PROCESSOR else f"GPU {self.latest.device}"

    @property
    def mean_load(self) -> float | None:
        """Percent."""
        return 100 * self.busy_seconds / self.load_seconds if self.load_seconds else None

    @property
    def mean_power(self) -> float | None:
        """Watts."""
        return self.joules / self.power_seconds if self.power_seconds else None


def _higher(before: float | None, value: float | None) -> float | None:
    return max((number for number in (before, value) if number is not None), default=None)


@final
@dataclass
class Devices:
    """Mutable: all devices of a run, by number."""

    by_number: dict[int, DeviceTally] = field(default_factory=dict)

    def add(self, event: GpuSampled) -> None:
        self.by_number.setdefault(event.device, DeviceTally(latest=event)).add(event)

    @property
    def all(self) -> list[DeviceTally]:
        """GPUs in order, then the processor."""
        return sorted(
            self.by_number.values(), key=lambda device: (device.latest.device == PROCESSOR, device.latest.device)
        )

    @property
    def joules(self) -> float | None:
        """Of every device whose power was told; None when none was."""
        known = [device.joules for device in self.by_number.values() if device.power_seconds]
        return sum(known) if known else None

    @property
    def covered_seconds(self) -> float:
        """For how long a power was told by the device that told it longest."""
        return max((device.power_seconds for device in self.by_number.values()), default=0.0)


_SPARE = (7, 4)  # cells that a narrow screen does without: what PyTorch holds, then the clock


def lines(devices: Iterable[DeviceTally], width: int = 100) -> list[str]:
    """A line a device, as it is now; what is not known, or has no room, is left out. Figures stand under each other."""
    rows = [_cells(device) for device in devices]
    shown = [at for at in range(len(rows[0])) if any(row[at] for row in rows)] if rows else []
    told = _aligned(rows, shown)
    for spare in _SPARE:
        if max(map(len, told), default=0) > width and spare in shown:
            shown.remove(spare)
            told = _aligned(rows, shown)
    return [line[:width] for line in told]


def _aligned(rows: Sequence[tuple[str, ...]], shown: Sequence[int]) -> list[str]:
    widths = {at: max(len(row[at]) for row in rows) for at in shown}
    words = (6, 7)  # the rest are figures, whose last digits stand under each other
    cells = (
        [row[at].ljust(widths[at]) if at in words else row[at].rjust(widths[at]) for at in shown[1:]] for row in rows
    )
    return ["  ".join([f"{row[0]:<9}", *told]).rstrip() for row, told in zip(rows, cells, strict=True)]


def short_lines(devices: Iterable[DeviceTally], width: int = 80) -> list[str]:
    """Two devices a line: load, temperature, power and memory in use, and whether it is slowed."""
    cells = []
    for device in devices:
        name, load, heat, power, _, _, slowed, _ = _cells(device)
        memory = _figure(device.latest.memory_gib, ".0f", " GiB")
        told = f"{name:<5}{load:>5}{heat:>7}{power.replace('GPU ', ''):>8}{memory:>9}"
        cells.append(f"{told} slow" if slowed else told)
    half = width // 2
    pairs = zip(cells[::2], [*cells[1::2], ""], strict=False)
    return [f"{left:<{half}}{right}".rstrip()[:width] for left, right in pairs]


def _cells(device: DeviceTally) -> tuple[str, ...]:
    now = device.latest
    power = f"with GPU {now.shared_with}" if now.shared_with is not None else _figure(now.power, ",.0f", " W")
    memory = ""
    if now.memory_gib is not None:
        whole = f" of {now.memory_total_gib:.1f}" if now.memory_total_gib else ""
        memory = f"{now.memory_gib:.1f}{whole} GiB"
    held = ""
    if now.reserved_gib is not None and now.allocated_gib is not None:
        held = f"tensors {now.allocated_gib:.1f}, held {now.reserved_gib:.1f}"
    return (
        "cpu" if now.device == PROCESSOR else f"gpu {now.device}",
        _figure(now.utilisation, ".0f", "%"),
        _figure(now.temperature, ".0f", " °C"),
        power,
        _figure(now.clock_mhz, ",.0f", " MHz"),
        memory,
        f"slowed: {now.throttled}" if now.throttled else "",
        held,
    )


def _figure(value: float | None, spec: str, unit: str) -> str:
    return "" if value is None else f"{value:{spec}}{unit}"


def format_joules(joules: float) -> str:
    """As Wh or kWh, three digits."""
    kwh = joules / JOULES_IN_KWH
    if kwh >= 100:
        return f"{kwh:,.0f} kWh"
    return f"{kwh:.3g} kWh" if kwh >= 1 else f"{kwh * 1000:.3g} Wh"


def summary(device: DeviceTally) -> dict[str, Any]:
    """What metrics.json holds of a device."""
    return {
        "device": device.latest.device,
        "name": device.latest.name,
        "seconds": round(device.seconds, 1),
        "utilisation_mean": _short(device.mean_load),
        "utilisation_peak": _short(device.peak_load),
        "temperature_peak": _short(device.peak_heat),
        "power_mean": _short(device.mean_power),
        "energy_kwh": device.joules / JOULES_IN_KWH if device.power_seconds else None,
        "memory_peak_gib": _short(device.peak_gib),
        "power_shared_with": device.latest.shared_with,
        "slowed_seconds": {reason: round(seconds, 1) for reason, seconds in device.slowed_seconds.items()},
        "reserved_gib": _short(device.latest.reserved_gib),
        "fragmentation": _short(device.latest.fragmentation),
        "alloc_retries": device.latest.alloc_retries,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
