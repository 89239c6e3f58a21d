"""The devices of a run: their newest values, and figures over the whole run."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, final

from bloomery.core.units import JOULES_IN_KWH
from bloomery.hardware.telemetry import device_name
from bloomery.monitor.events import CPU_DEVICE, DeviceStats

_NOW = ("utilization", "temperature", "power", "clock_mhz", "throttled")


@final
@dataclass
class DeviceSummary:
    """Mutable: figures of one device after the samples that `add` was given."""

    latest: DeviceStats  # the newest value of each field
    seconds: float = 0.0  # covered by samples
    busy_seconds: float = 0.0  # utilization x time
    utilization_seconds: float = 0.0  # in which utilization is known
    peak_utilization: float | None = None
    peak_temperature: float | None = None
    peak_gib: float | None = None
    joules: float = 0.0
    power_seconds: float = 0.0  # in which power is known
    throttled_seconds: dict[str, float] = field(default_factory=dict)  # by reason

    def add(self, event: DeviceStats) -> None:
        known: dict[str, Any] = {
            f.name: v for f in fields(event) if (v := getattr(event, f.name)) is not None
        }
        if event.seconds:  # a sample of the device: a value that it lacks is no longer known
            known = {**dict.fromkeys(_NOW), **known}
        self.latest = replace(self.latest, **known)
        self.seconds += event.seconds
        peaks = {
            "peak_utilization": event.utilization,
            "peak_temperature": event.temperature,
            "peak_gib": event.memory_gib,
        }
        for name, value in peaks.items():
            if value is not None:
                setattr(self, name, max(getattr(self, name) or value, value))
        if event.utilization is not None:
            self.busy_seconds += event.utilization / 100 * event.seconds
            self.utilization_seconds += event.seconds
        if event.power is not None:
            self.joules += event.power * event.seconds
            self.power_seconds += event.seconds
        for reason in filter(None, (event.throttled or "").split(", ")):
            self.throttled_seconds[reason] = self.throttled_seconds.get(reason, 0.0) + event.seconds

    @property
    def name(self) -> str:
        return device_name(self.latest.device)

    @property
    def mean_utilization(self) -> float | None:
        """Percent."""
        return (
            100 * self.busy_seconds / self.utilization_seconds if self.utilization_seconds else None
        )

    @property
    def mean_power(self) -> float | None:
        """Watts."""
        return self.joules / self.power_seconds if self.power_seconds else None


@final
@dataclass
class Devices:
    """Mutable: all devices of a run, by number."""

    by_number: dict[int, DeviceSummary] = field(default_factory=dict)

    def add(self, event: DeviceStats) -> None:
        self.by_number.setdefault(event.device, DeviceSummary(latest=event)).add(event)

    @property
    def all(self) -> list[DeviceSummary]:
        """GPUs in order, then the CPU."""
        return sorted(
            self.by_number.values(),
            key=lambda device: (device.latest.device == CPU_DEVICE, device.latest.device),
        )

    @property
    def newest(self) -> list[DeviceStats]:
        """The newest values of each device, in the order of `all`."""
        return [device.latest for device in self.all]

    @property
    def joules(self) -> float | None:
        """Of every device whose power is known; None without any."""
        known_joules = [device.joules for device in self.by_number.values() if device.power_seconds]
        return sum(known_joules) if known_joules else None

    @property
    def covered_seconds(self) -> float:
        """The longest time over which the power of a device is known."""
        return max((device.power_seconds for device in self.by_number.values()), default=0.0)


def device_figures(device: DeviceSummary) -> dict[str, Any]:
    """A device in metrics.json."""

    def short(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        "device": device.latest.device,
        "name": device.latest.name,
        "seconds": round(device.seconds, 1),
        "utilization_mean": short(device.mean_utilization),
        "utilization_peak": short(device.peak_utilization),
        "temperature_peak": short(device.peak_temperature),
        "power_mean": short(device.mean_power),
        "energy_kwh": device.joules / JOULES_IN_KWH if device.power_seconds else None,
        "memory_peak_gib": short(device.peak_gib),
        "power_shared_with": device.latest.shared_with,
        "throttled_seconds": {
            reason: round(seconds, 1) for reason, seconds in device.throttled_seconds.items()
        },
        "reserved_gib": short(device.latest.reserved_gib),
        "fragmentation": short(device.latest.fragmentation),
        "alloc_retries": device.latest.alloc_retries,
    }
