"""How hard the devices work right now: load, memory, temperature, power, clock; no torch, no pydantic.

Facts of the files: the kernel's amdgpu_pm.c ("DOC: hwmon") and hwmon's sysfs interface. Every one of them may be
missing, or answer EBUSY or ENODATA while a card sleeps: that figure is then None. A read may also never return, and
vendors' libraries have hung and crashed. So runs read in a child process, which can be given up: `Reader` asks,
`python -m bloomery.hardware.telemetry` answers. `Reader` waits for nothing longer than its deadline, not even for the
child's death: who is stuck in a driver does not die.
"""

import importlib
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, final

from bloomery.core.child import Child, accept, requests, tell
from bloomery.core.units import GIB

CPU_DEVICE = -1  # as `Reading.device`
DEADLINE_SECONDS = 8.0  # for one look, and its process must be started
DYING_SECONDS = 0.5
MODULE = "bloomery.hardware.telemetry"
# MI250X, MI250: two dies on one card, whose power sensor belongs to the first.
DUAL_DIE = frozenset((0x7408, 0x740C))


@final
@dataclass(frozen=True, kw_only=True)
class Device:
    """What must be known of an accelerator to find its sensors."""

    index: int
    vendor: str  # amd, nvidia
    name: str = ""
    node: str = ""  # /dev/dri/renderD128
    pci_address: str = ""  # 0000:03:00.0
    device_id: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at one device; None is what nothing here could read."""

    device: int  # of the machine's accelerators, or PROCESSOR
    name: str = ""
    source: str = ""  # that was asked: sysfs, amdsmi, nvml, proc
    utilization: float | None = None  # percent
    memory_gib: float | None = None  # in use by everybody
    memory_total_gib: float | None = None
    temperature: float | None = None  # degrees Celsius, at the junction where it is known
    critical: float | None = None  # the temperature at which the hardware saves itself
    power: float | None = None  # watts; of a card with two dies for both
    clock_mhz: float | None = None
    throttled: str | None = None  # why it runs slower than it could, "" when it does not
    shared_with: int | None = None  # the device whose sensor measures this one's power, too

    @property
    def says_something(self) -> bool:
        """Whether a source knew more than the size of the memory."""
        return any(figure is not None for figure in (self.utilization, self.temperature, self.power))


class Source(Protocol):
    """Somebody who can be asked about devices. Raises anything; what it does not know is left out."""

    name: str

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]: ...


def sample(
    devices: Sequence[Device], sources: Sequence[Source], *, trying: Callable[[str], None] | None = None
) -> list[Reading]:
    """One look at each device, from the first source that says something of it, with what later ones add.

    `trying` hears the name of a source before it is asked: whoever waits for this knows then which one hangs. A source
    that raises is passed over.
    """
    found: dict[int, Reading] = {}
    for source in sources:
        silent = [device for device in devices if not _known(found.get(device.index))]
        if not silent:
            break
        if trying is not None:
            trying(source.name)
        try:
            told = list(source.read(silent))
        except Exception:  # whatever a driver's library may raise: telemetry does without it
            continue
        for reading in told:
            found[reading.device] = merged(found.get(reading.device), reading)
    complete = [found[device.index] for device in devices if device.index in found]
    return shared_power(complete, devices)


def _known(reading: Reading | None) -> bool:
    return reading is not None and reading.says_something


def merged(first: Reading | None, second: Reading) -> Reading:
    """What `first` says, and what only `second` knows."""
    if first is None:
        return second
    missing = {f.name: getattr(second, f.name) for f in fields(Reading) if getattr(first, f.name) in (None, "")}
    return replace(first, **missing)


def shared_power(readings: Sequence[Reading], devices: Sequence[Device]) -> list[Reading]:
    """Of two dies on one card, the one without a sensor says whose power includes its own."""
    dies = [device for device in devices if device.device_id in DUAL_DIE]
    dies.sort(key=lambda device: (device.pci_address, device.index))
    by_index = {reading.device: reading for reading in readings}
    for first, second in zip(dies[::2], dies[1::2], strict=False):
        even, odd = by_index.get(first.index), by_index.get(second.index)
        if even and odd and even.power and not odd.power:
            by_index[odd.device] = replace(odd, power=None, shared_with=even.device)
    return [by_index[reading.device] for reading in readings]


@final
class Sysfs:
    """AMD GPUs through the kernel's own files: no library, no process, a tenth of a millisecond a card."""

    name = "sysfs"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]:
        for device in devices:
            folder = self._folder(device)
            if device.vendor == "amd" and folder is not None:
                yield read_amdgpu(folder, device)

    def _folder(self, device: Device) -> Path | None:
        """The PCI device's folder, by its render node or its address; never by a number that masks may shift."""
        by_node = self._root / "sys/class/drm" / Path(device.node).name / "device"
        by_address = self._root / "sys/bus/pci/devices" / device.pci_address
        if device.node and by_node.is_dir():
            return by_node
        return by_address if device.pci_address and by_address.is_dir() else None


def read_amdgpu(folder: Path, device: Device) -> Reading:
    """The files below a PCI device's folder."""
    sensors = next(iter(sorted((folder / "hwmon").glob("hwmon*"))), folder / "hwmon")
    place = _hottest_place(sensors)
    watts = _number(sensors / "power1_average", 1e6)
    power = watts if watts else _number(sensors / "power1_input", 1e6)
    return Reading(
        device=device.index,
        name=device.name,
        source=Sysfs.name,
        utilization=_number(folder / "gpu_busy_percent"),
        memory_gib=_number(folder / "mem_info_vram_used", GIB),
        memory_total_gib=_number(folder / "mem_info_vram_total", GIB),
        temperature=_number(sensors / f"{place}_input", 1e3),
        critical=_number(sensors / f"{place}_crit", 1e3),
        power=power or None,  # a die without a sensor of its own reads 0
        clock_mhz=_number(sensors / "freq1_input", 1e6),
        throttled=throttle_reason(_bytes(folder / "gpu_metrics")),
    )


def _hottest_place(sensors: Path) -> str:
    """temp1, temp2 or temp3: the junction where there is one, else the edge, else the first."""
    labels = {_text(path): path.name.removesuffix("_label") for path in sorted(sensors.glob("temp*_label"))}
    return labels.get("junction") or labels.get("edge") or next(iter(labels.values()), "temp1")


# linux, amdgpu_smu.h: sixteen bits each for power, current and temperature, the rest for other reasons. The power limit
# is left out: reaching it is how a GPU works at full load.
THROTTLE_KINDS = (("current limit", 16), ("temperature", 32))


def throttle_reason(metrics: bytes) -> str | None:
    """Why an AMD GPU holds back, from `gpu_metrics` of format 1.3, whose last eight bytes say it alike on every chip.

    None where the format is another one or the chip does not tell (linux, kgd_pp_interface.h).
    """
    if len(metrics) < 4:
        return None
    size, major, minor = struct.unpack_from("<HBB", metrics)
    if (major, minor) != (1, 3) or not 12 <= size <= len(metrics):
        return None
    (bits,) = struct.unpack_from("<Q", metrics, size - 8)
    if bits == 0xFFFF_FFFF_FFFF_FFFF:
        return None
    return ", ".join(name for name, first in THROTTLE_KINDS if bits >> first & 0xFFFF)


@final
class Processor:
    """The processor: load between two looks, package power where RAPL may be read, temperature, memory."""

    name = "proc"

    def __init__(self, root: Path = Path("/"), name: str = "") -> None:
        self._root, self._title = root, name
        self._ticks: tuple[float, float] | None = None  # busy, all
        self._joules: tuple[float, float] | None = None  # and when

    def read(self, now: float) -> Reading:
        """`now`: seconds of any clock. The first look has neither load nor power."""
        used, total = self._memory()
        return Reading(
            device=CPU_DEVICE,
            name=self._title,
            source=self.name,
            utilization=self._load(),
            memory_gib=used,
            memory_total_gib=total,
            temperature=self._temperature(),
            power=self._power(now),
        )

    def _load(self) -> float | None:
        line = _text(self._root / "proc/stat").partition("\n")[0].split()
        if len(line) < 6 or line[0] != "cpu":
            return None
        ticks = [float(word) for word in line[1:9]]  # guests are part of user time
        everything, idle = sum(ticks), ticks[3] + ticks[4]
        before, self._ticks = self._ticks, (everything - idle, everything)
        if before is None or everything <= before[1]:
            return None
        return max(0.0, 100 * (everything - idle - before[0]) / (everything - before[1]))

    def _power(self, now: float) -> float | None:
        """From the energy counters of the packages. Since 2020 only root may read them on most systems."""
        folders = sorted((self._root / "sys/class/powercap").glob("*-rapl:*"))
        packages = [folder for folder in folders if _text(folder / "name").startswith("package")]
        counts = [_number(folder / "energy_uj", 1e6) for folder in packages]
        if not counts or any(count is None for count in counts):
            return None
        joules = sum(count or 0.0 for count in counts)
        before, self._joules = self._joules, (joules, now)
        if before is None or joules < before[0] or now <= before[1]:
            return None  # the first look, or a counter that began anew
        return (joules - before[0]) / (now - before[1])

    def _temperature(self) -> float | None:
        for sensors in sorted((self._root / "sys/class/hwmon").glob("hwmon*")):
            if _text(sensors / "name") in ("k10temp", "zenpower", "coretemp", "cpu_thermal"):
                found = [_number(path, 1e3) for path in sorted(sensors.glob("temp*_input"))]
                known = [degrees for degrees in found if degrees is not None]
                if known:
                    return max(known)
        return None

    def _memory(self) -> tuple[float | None, float | None]:
        text = _text(self._root / "proc/meminfo")
        kib = {key: float(value) for key, value in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.M)}
        if len(kib) < 2:
            return None, None
        total, free = kib["MemTotal"] * 1024 / GIB, kib["MemAvailable"] * 1024 / GIB
        return total - free, total


def _bytes(path: Path) -> bytes:
    """Empty where the file is missing, sleeps (EBUSY, ENODATA) or is not ours to read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace").strip()


def _number(path: Path, unit: float = 1.0) -> float | None:
    text = _text(path)
    return float(text) / unit if re.fullmatch(r"-?\d+", text) else None


# The libraries of vendors, where the kernel's files say nothing


def figure(value: object) -> float | None:
    """A number however a library gives it: as text, as `{"value": 42.5}`; None for "N/A" and whatever is none."""
    if isinstance(value, Mapping):
        return figure(value.get("value"))
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", str(value))
    return float(found[1]) if found else None


def _same_card(device: Device, address: str) -> bool:
    """PCI addresses come with a domain of four digits, of eight, or with none."""
    ours, theirs = device.pci_address.lower().split(":"), address.lower().strip().split(":")
    if len(ours) < 2 or ours[-2:] != theirs[-2:]:
        return False
    return len(ours) < 3 or len(theirs) < 3 or int(ours[-3], 16) == int(theirs[-3], 16)


def _first(facts: Mapping[str, Any], *names: str) -> float | None:
    return next((number for name in names if (number := figure(facts.get(name))) is not None), None)


@final
class AmdSmi:
    """The `amdsmi` Python package, which comes with ROCm. Raises where it or its library is missing."""

    name = "amdsmi"

    def __init__(self) -> None:
        self._handles: list[tuple[str, Any]] | None = None

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]:
        library = importlib.import_module("amdsmi")
        if self._handles is None:
            library.amdsmi_init()
            handles = library.amdsmi_get_processor_handles()
            self._handles = [(str(library.amdsmi_get_gpu_device_bdf(handle)), handle) for handle in handles]
        for device in devices:
            for address, handle in self._handles:
                if _same_card(device, address):
                    yield _through_amdsmi(library, handle, device)


def _through_amdsmi(library: Any, handle: Any, device: Device) -> Reading:
    memory, power = library.amdsmi_get_gpu_vram_usage(handle), library.amdsmi_get_power_info(handle)
    used, total = figure(memory.get("vram_used")), figure(memory.get("vram_total"))
    heat = library.amdsmi_get_temp_metric(
        handle, library.AmdSmiTemperatureType.JUNCTION, library.AmdSmiTemperatureMetric.CURRENT
    )
    return Reading(
        device=device.index,
        name=device.name,
        source=AmdSmi.name,
        utilization=figure(library.amdsmi_get_gpu_activity(handle).get("gfx_activity")),
        memory_gib=None if used is None else used / 1024,
        memory_total_gib=None if total is None else total / 1024,
        temperature=figure(heat),
        power=_first(power, "current_socket_power", "average_socket_power", "socket_power") or None,
    )


# nvml.h: why the clocks are not what was asked for. 0x04, the power limit, is left out: it is met at any full load.
NVIDIA_REASONS = ((0x60, "temperature"), (0x80, "power brake"), (0x08, "hardware slowdown"))


def nvidia_reasons(bits: int) -> str:
    """The reasons that slow a GPU down; idling, full load and clocks that somebody set are none."""
    return ", ".join(name for mask, name in NVIDIA_REASONS if bits & mask)


@final
class Nvml:
    """NVIDIA's library through `pynvml`, of the package nvidia-ml-py. Raises where it is missing."""

    name = "nvml"

    def __init__(self) -> None:
        self._library: Any = None

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]:
        if self._library is None:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            self._library = library
        for device in devices:
            if device.vendor == "nvidia":
                yield _through_nvml(self._library, _nvml_handle(self._library, device), device)


def _nvml_handle(library: Any, device: Device) -> Any:
    if device.pci_address:
        return library.nvmlDeviceGetHandleByPciBusId(device.pci_address)
    return library.nvmlDeviceGetHandleByIndex(device.index)


def _through_nvml(library: Any, handle: Any, device: Device) -> Reading:
    def ask(name: str, *words: Any) -> Any:
        """None for what this card or this driver does not know."""
        try:
            return getattr(library, name)(handle, *words)
        except (library.NVMLError, AttributeError):
            return None

    load, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    milliwatts = ask("nvmlDeviceGetPowerUsage")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits  # as older releases call it
    return Reading(
        device=device.index,
        name=device.name,
        source=Nvml.name,
        utilization=None if load is None else float(load.gpu),
        memory_gib=None if memory is None else memory.used / 2**30,
        memory_total_gib=None if memory is None else memory.total / 2**30,
        temperature=figure(ask("nvmlDeviceGetTemperature", 0)),  # 0: NVML_TEMPERATURE_GPU
        critical=figure(ask("nvmlDeviceGetTemperatureThreshold", 1)),  # 1: NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        power=None if milliwatts is None else milliwatts / 1000,
        clock_mhz=figure(ask("nvmlDeviceGetClockInfo", 1)),  # 1: NVML_CLOCK_SM
        throttled=None if bits is None else nvidia_reasons(bits),
    )


# In a child


@final
class Reader:
    """`look` asks once. A source that does not answer in time, or takes its process down, is not asked again.

    `said` hears of each source that is given up, once.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        said: Callable[[str], None],
        processor: str = "",
        root: Path = Path("/"),
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        told = [asdict(device) for device in devices]
        self._job: dict[str, Any] = {"devices": told, "root": str(root), "processor": processor}
        self._without: list[str] = []
        self._said, self._deadline = said, deadline
        self._child: Child | None = None
        self._trying = ""
        self._hopeless = False

    def look(self) -> list[Reading]:
        """Empty when nothing answered in time."""
        if self._hopeless:
            return []
        until = time.monotonic() + self._deadline
        try:
            if self._child is None:
                job = self._job | {"without": self._without}
                self._child = Child(MODULE, job, environment=os.environ, dying_seconds=DYING_SECONDS).start()
            told = self._child.ask({}, seconds=self._deadline)
            while isinstance(told, dict) and "readings" not in told:
                self._trying = told["trying"]
                told = self._child.next(until - time.monotonic())
            if isinstance(told, dict):
                return [Reading(**facts) for facts in told["readings"]]
            ended = "failed (its process ended)"
            self._give_up(ended if told == "ended" else f"did not answer within {self._deadline:.0f} s")
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._give_up(f"failed ({error})")
        return []

    def _give_up(self, problem: str) -> None:
        """The source that was being asked is left alone from now on; the next look starts another process."""
        self.close()
        name, self._trying = self._trying, ""
        if not name:
            self._hopeless = True
            self._said(f"the sensors of this machine cannot be read: their reader {problem}; training goes on without")
            return
        self._without.append(name)
        self._said(f"reading sensors through {name} {problem}: it is not asked again, training goes on")

    def close(self) -> None:
        """Ends the process. One that is stuck in a driver is left behind; it ends when the driver lets it."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def main() -> None:
    """The child: `{"trying": NAME}` before each source that it asks, then `{"readings": [...]}`, for each request."""
    job = accept()
    devices = [Device(**facts) for facts in job["devices"]]
    root = Path(job["root"])
    vendors = {device.vendor for device in devices}  # of each the cheapest and safest source first
    amd: list[Source] = [Sysfs(root), AmdSmi()] if "amd" in vendors else []
    nvidia: list[Source] = [Nvml()] if "nvidia" in vendors else []
    sources = [source for source in (*amd, *nvidia) if source.name not in job["without"]]
    processor = None if Processor.name in job["without"] else Processor(root, job["processor"])
    for _ in requests(job):
        readings = sample(devices, sources, trying=lambda name: tell(job, {"trying": name}))
        if processor is not None:
            tell(job, {"trying": processor.name})
            readings.append(processor.read(time.monotonic()))
        tell(job, {"readings": [asdict(reading) for reading in readings]})


if __name__ == "__main__":
    main()
