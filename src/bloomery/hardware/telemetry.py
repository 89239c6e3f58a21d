"""Sensors of the devices: utilization, memory, temperature, power, clock. Imports neither torch nor pydantic.

Source of the files: the kernel's amdgpu_pm.c ("DOC: hwmon") and the sysfs interface of hwmon. A file can be missing, or
fail with EBUSY or ENODATA while a GPU sleeps: its value is then None. A read can also hang, and vendor libraries hang
and crash. Runs therefore read in a child process: `SensorReader` asks `python -m bloomery.hardware.telemetry`. It never
waits longer than its deadline, also not for the child to exit: a process that is stuck in a driver does not.
"""

import importlib
import os
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from bloomery.core.child import Child, accept, reply, requests
from bloomery.core.units import GIB
from bloomery.hardware.kfd import file_text

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine

CPU_DEVICE = -1  # as `SensorReading.device`
DEADLINE_SECONDS = 8.0  # for one read, including the start of the process
DYING_SECONDS = 0.5
MODULE = "bloomery.hardware.telemetry"
# MI250X, MI250: two dies on one board, whose power sensor belongs to the first.
DUAL_DIE = frozenset((0x7408, 0x740C))


def device_name(device: int) -> str:
    """As figures, charts and messages name it: GPU 0, or CPU."""
    return "CPU" if device == CPU_DEVICE else f"GPU {device}"


@final
@dataclass(frozen=True, kw_only=True)
class SensorDevice:
    """An accelerator and the paths to its sensors."""

    index: int
    vendor: str  # amd, nvidia, intel
    name: str = ""
    node: str = ""  # /dev/dri/renderD128
    pci_address: str = ""  # 0000:03:00.0
    device_id: int = 0


def sensor_devices(machine: "Machine") -> list[SensorDevice]:
    return [
        SensorDevice(
            index=gpu.index,
            vendor=gpu.vendor,
            name=gpu.name,
            node=gpu.node,
            pci_address=gpu.pci_address,
            device_id=gpu.device_id,
        )
        for gpu in machine.accelerators
    ]


@final
@dataclass(frozen=True, kw_only=True)
class SensorReading:
    """The sensors of one device at one time; None: not available."""

    device: int  # index of the accelerator, or CPU_DEVICE
    name: str = ""
    source: str = ""  # sysfs, amdsmi, nvml, xe, proc
    utilization: float | None = None  # percent
    memory_gib: float | None = None  # used by all processes
    memory_total_gib: float | None = None
    temperature: float | None = None  # degrees Celsius, at the junction if available
    critical: float | None = None  # the temperature of thermal throttling or shutdown
    power: float | None = None  # watts; for both dies of a board with two
    clock_mhz: float | None = None
    throttled: str | None = None  # why the clocks are reduced; "": they are not
    shared_with: int | None = None  # the device whose sensor includes the power of this one

    @property
    def has_sensors(self) -> bool:
        """Whether a source returned more than the memory."""
        return any(
            figure is not None for figure in (self.utilization, self.temperature, self.power)
        )


class SensorSource(Protocol):
    """A way to read sensors. `read` can raise anything, and leaves out devices that it does not support."""

    name: str

    def read(self, devices: Sequence[SensorDevice]) -> Iterator[SensorReading]: ...


def sample(
    devices: Sequence[SensorDevice],
    sources: Sequence[SensorSource],
    *,
    trying: Callable[[str], None] | None = None,
) -> list[SensorReading]:
    """The sensors of each device, from the first source that has them; later sources fill in missing values.

    `trying` is called with the name of a source before it is read, so that a source that hangs is known. A source that
    raises is skipped.
    """
    results: dict[int, SensorReading] = {}
    for source in sources:
        unread = [
            device for device in devices if not ((r := results.get(device.index)) and r.has_sensors)
        ]
        if not unread:
            break
        if trying is not None:
            trying(source.name)
        try:
            readings = list(source.read(unread))
        except Exception:  # any error of a driver's library
            continue
        for reading in readings:
            results[reading.device] = merged(results.get(reading.device), reading)
    return shared_power(
        [results[device.index] for device in devices if device.index in results], devices
    )


def merged(first: SensorReading | None, second: SensorReading) -> SensorReading:
    """The values of `first`; those of `second` where they are missing."""
    if first is None:
        return second
    missing_values = {
        f.name: getattr(second, f.name)
        for f in fields(SensorReading)
        if getattr(first, f.name) in (None, "")
    }
    return replace(first, **missing_values)


def shared_power(
    readings: Sequence[SensorReading], devices: Sequence[SensorDevice]
) -> list[SensorReading]:
    """Sets `shared_with` for the second die of a board, which has no power sensor."""
    dies = [device for device in devices if device.device_id in DUAL_DIE]
    dies.sort(key=lambda device: (device.pci_address, device.index))
    by_index = {reading.device: reading for reading in readings}
    for first_die, second_die in zip(dies[::2], dies[1::2], strict=False):
        even = by_index.get(first_die.index)
        odd = by_index.get(second_die.index)
        if even and odd and even.power and not odd.power:
            by_index[odd.device] = replace(odd, power=None, shared_with=even.device)
    return [by_index[reading.device] for reading in readings]


@final
class Sysfs:
    """AMD GPUs through the kernel's sysfs files: no library, no process, 0.1 ms per GPU."""

    name = "sysfs"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, devices: Sequence[SensorDevice]) -> Iterator[SensorReading]:
        for device in devices:
            folder = pci_folder(self._root, device)
            if device.vendor == "amd" and folder is not None:
                yield read_amdgpu(folder, device)


def pci_folder(root: Path, device: SensorDevice) -> Path | None:
    """The folder of the PCI device, by its render node or address; never by a number, which masks change."""
    by_node = root / "sys/class/drm" / Path(device.node).name / "device"
    by_address = root / "sys/bus/pci/devices" / device.pci_address
    if device.node and by_node.is_dir():
        return by_node
    return by_address if device.pci_address and by_address.is_dir() else None


def read_amdgpu(folder: Path, device: SensorDevice) -> SensorReading:
    """The sensors in the folder of a PCI device."""
    sensors = next(iter(sorted((folder / "hwmon").glob("hwmon*"))), folder / "hwmon")
    labels = {
        file_text(path).strip(): path.name.removesuffix("_label")
        for path in sorted(sensors.glob("temp*_label"))
    }
    sensor = labels.get("junction") or labels.get("edge") or next(iter(labels.values()), "temp1")
    watts = _number(sensors / "power1_average", 1e6)
    power = watts if watts else _number(sensors / "power1_input", 1e6)
    try:
        metrics = (folder / "gpu_metrics").read_bytes()
    except OSError:  # missing, not readable, or the GPU sleeps (EBUSY, ENODATA)
        metrics = b""
    return SensorReading(
        device=device.index,
        name=device.name,
        source=Sysfs.name,
        utilization=_number(folder / "gpu_busy_percent"),
        memory_gib=_number(folder / "mem_info_vram_used", GIB),
        memory_total_gib=_number(folder / "mem_info_vram_total", GIB),
        temperature=_number(sensors / f"{sensor}_input", 1e3),
        critical=_number(sensors / f"{sensor}_crit", 1e3),
        power=power or None,  # a die without its own sensor reads 0
        clock_mhz=_number(sensors / "freq1_input", 1e6),
        throttled=throttle_reason(metrics),
    )


# linux, amdgpu_smu.h: sixteen bits each for power, current and temperature, the rest for other reasons. The power limit
# is left out: a GPU reaches it at full load.
THROTTLE_KINDS = (("current limit", 16), ("temperature", 32))


def throttle_reason(metrics: bytes) -> str | None:
    """Why an AMD GPU throttles: the last eight bytes of `gpu_metrics` format 1.3, which are the same on every GPU.

    None for other formats and GPUs that do not report it (linux, kgd_pp_interface.h).
    """
    if len(metrics) < 4:
        return None
    size, major, minor = struct.unpack_from("<HBB", metrics)
    if (major, minor) != (1, 3) or not 12 <= size <= len(metrics):
        return None
    (bits,) = struct.unpack_from("<Q", metrics, size - 8)
    if bits == 0xFFFF_FFFF_FFFF_FFFF:
        return None
    return ", ".join(name for name, first_bit in THROTTLE_KINDS if bits >> first_bit & 0xFFFF)


# linux, xe_gt_throttle.c and i915's gt/sysfs: each reason is a file of 0 or 1. Power limits (pl1, pl2, pl4) are left
# out: a GPU reaches them at full load.
INTEL_REASONS = {
    "thermal": "temperature",
    "prochot": "temperature",
    "vr_thermalert": "temperature",
    "vr_tdc": "current limit",
}
# What no file of Intel's drivers has: `SensorReading` leaves it out.
INTEL_UNREAD = "utilization and memory in use"


def unread_sensors(devices: Sequence[SensorDevice]) -> str:
    """What the files of these devices never tell, as a sentence; empty where nothing is missing."""
    names = dict.fromkeys(device.name for device in devices if device.vendor == "intel")
    return f"{INTEL_UNREAD} of {', '.join(names)} cannot be read" if names else ""


@final
class IntelSysfs:
    """Intel's GPUs through the kernel's files: temperature, power, clock and throttling.

    Sources: Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon (labels `pkg`, `card`; temperatures since Linux 6.15)
    and -i915-hwmon; xe_gt_freq.c. Power is energy between two reads, so that the first has none. Not run on this
    hardware.
    """

    name = "xe"

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._energy: dict[int, tuple[float, float]] = {}  # by device: joules, and when

    def read(self, devices: Sequence[SensorDevice]) -> Iterator[SensorReading]:
        # The stacks of a board have one address and its sensors: those belong to the first.
        first_of: dict[str, int] = {}
        for device in devices:
            folder = pci_folder(self._root, device)
            if device.vendor != "intel" or folder is None:
                continue
            first = first_of.setdefault(device.pci_address or device.node, device.index)
            reading = self._reading(folder, device)
            if first != device.index:
                reading = replace(reading, power=None, shared_with=first)
            yield reading

    def _reading(self, folder: Path, device: SensorDevice) -> SensorReading:
        sensors = next(iter(sorted((folder / "hwmon").glob("hwmon*"))), folder / "hwmon")
        # xe has a folder per tile and GT; i915 has one per GT below the card.
        xe_folders = sorted(folder.glob("tile*/gt*/freq0"))
        clocks = [_number(path / "act_freq") for path in xe_folders]
        clocks += [
            _number(path) for path in sorted(folder.glob("drm/card*/gt/gt*/rps_act_freq_mhz"))
        ]
        reasons = [
            *(file for path in xe_folders for file in sorted(path.glob("throttle/reason_*"))),
            *sorted(folder.glob("drm/card*/gt/gt*/throttle_reason_*")),
        ]
        return SensorReading(
            device=device.index,
            name=device.name,
            source=self.name,
            temperature=_labelled(sensors, "temp", ("pkg", ""), "input", 1e3),
            critical=_labelled(sensors, "temp", ("pkg", ""), "crit", 1e3),
            power=self._power(sensors, device.index),
            clock_mhz=max((clock for clock in clocks if clock is not None), default=None),
            throttled=_intel_throttling(reasons),
        )

    def _power(self, sensors: Path, device: int) -> float | None:
        joules = _labelled(sensors, "energy", ("card", "pkg", ""), "input", 1e6)
        if joules is None:
            return None
        now = self._clock()
        previous = self._energy.get(device)
        self._energy[device] = (joules, now)
        if previous is None or joules < previous[0] or now <= previous[1]:
            return None  # the first read, or the counter restarted
        return (joules - previous[0]) / (now - previous[1])


def _labelled(
    sensors: Path, kind: str, labels: Sequence[str], figure: str, unit: float
) -> float | None:
    """The figure of the sensor of a kind with the first of these labels that is there; "": the first sensor."""
    by_label = {
        file_text(path).strip(): path.name.removesuffix("_label")
        for path in sorted(sensors.glob(f"{kind}*_label"))
    }
    for label in labels:
        name = by_label.get(label) if label else f"{kind}1"
        value = _number(sensors / f"{name}_{figure}", unit) if name else None
        if value is not None:
            return value
    return None


def _intel_throttling(reasons: Sequence[Path]) -> str | None:
    """None where the driver has no such files."""
    if not reasons:
        return None
    names = [path.name.partition("reason_")[2] for path in reasons if _number(path)]
    return ", ".join(dict.fromkeys(INTEL_REASONS[name] for name in names if name in INTEL_REASONS))


@final
class CpuSensors:
    """The CPU: utilization between two reads, package power if RAPL is readable, temperature, memory."""

    name = "proc"

    def __init__(self, root: Path = Path("/"), name: str = "") -> None:
        self._root = root
        self._title = name
        self._ticks: tuple[float, float] | None = None  # busy, all
        self._joules: tuple[float, float] | None = None  # and when

    def read(self, now: float) -> SensorReading:
        """`now`: seconds of any clock. The first read has neither utilization nor power."""
        used_gib, total_gib = self._memory()
        return SensorReading(
            device=CPU_DEVICE,
            name=self._title,
            source=self.name,
            utilization=self._load(),
            memory_gib=used_gib,
            memory_total_gib=total_gib,
            temperature=self._temperature(),
            power=self._power(now),
        )

    def _load(self) -> float | None:
        line = file_text(self._root / "proc/stat").partition("\n")[0].split()
        if len(line) < 6 or line[0] != "cpu":
            return None
        ticks = [float(word) for word in line[1:9]]  # guests are part of user time
        everything = sum(ticks)
        idle = ticks[3] + ticks[4]
        previous = self._ticks
        self._ticks = (everything - idle, everything)
        if previous is None or everything <= previous[1]:
            return None
        return max(0.0, 100 * (everything - idle - previous[0]) / (everything - previous[1]))

    def _power(self, now: float) -> float | None:
        """From the energy counters of the packages, which only root can read on most systems since 2020."""
        folders = sorted((self._root / "sys/class/powercap").glob("*-rapl:*"))
        packages = [
            folder for folder in folders if file_text(folder / "name").startswith("package")
        ]
        counts = [_number(folder / "energy_uj", 1e6) for folder in packages]
        if not counts or any(count is None for count in counts):
            return None
        joules = sum(count or 0.0 for count in counts)
        previous = self._joules
        self._joules = (joules, now)
        if previous is None or joules < previous[0] or now <= previous[1]:
            return None  # the first read, or the counter restarted
        return (joules - previous[0]) / (now - previous[1])

    def _temperature(self) -> float | None:
        """Degrees Celsius: the hottest sensor of the first known CPU driver; None without one."""
        for sensors in sorted((self._root / "sys/class/hwmon").glob("hwmon*")):
            if file_text(sensors / "name").strip() in (
                "k10temp",
                "zenpower",
                "coretemp",
                "cpu_thermal",
            ):
                values = [_number(path, 1e3) for path in sorted(sensors.glob("temp*_input"))]
                if degrees := [value for value in values if value is not None]:
                    return max(degrees)
        return None

    def _memory(self) -> tuple[float | None, float | None]:
        """GiB in use, without caches that the kernel can drop, and in total."""
        text = file_text(self._root / "proc/meminfo")
        kib = {
            key: float(value)
            for key, value in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.M)
        }
        if len(kib) < 2:
            return None, None
        total_gib = kib["MemTotal"] * 1024 / GIB
        free_gib = kib["MemAvailable"] * 1024 / GIB
        return total_gib - free_gib, total_gib


def _number(path: Path, unit: float = 1.0) -> float | None:
    text = file_text(path).strip()
    return float(text) / unit if re.fullmatch(r"-?\d+", text) else None


# Vendor libraries, for values that sysfs does not have


def library_number(value: object) -> float | None:
    """The number in a result of a library: text, `{"value": 42.5}`; None for "N/A" and anything else."""
    if isinstance(value, Mapping):
        return library_number(value.get("value"))
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", str(value))
    return float(match[1]) if match else None


def _same_gpu(device: SensorDevice, address: str) -> bool:
    """Compares PCI addresses, whose domain has four digits, eight or none."""
    device_parts = device.pci_address.lower().split(":")
    address_parts = address.lower().strip().split(":")
    if len(device_parts) < 2 or device_parts[-2:] != address_parts[-2:]:
        return False
    return (
        len(device_parts) < 3
        or len(address_parts) < 3
        or int(device_parts[-3], 16) == int(address_parts[-3], 16)
    )


@final
class AmdSmi:
    """The `amdsmi` Python package, which comes with ROCm. Raises if it or its library is missing."""

    name = "amdsmi"

    _handles: list[tuple[str, Any]] | None = None

    def read(self, devices: Sequence[SensorDevice]) -> Iterator[SensorReading]:
        library = importlib.import_module("amdsmi")
        if self._handles is None:
            library.amdsmi_init()
            handles = library.amdsmi_get_processor_handles()
            self._handles = [
                (str(library.amdsmi_get_gpu_device_bdf(handle)), handle) for handle in handles
            ]
        for device in devices:
            for handle in (
                handle for address, handle in self._handles if _same_gpu(device, address)
            ):
                memory = library.amdsmi_get_gpu_vram_usage(handle)
                power = library.amdsmi_get_power_info(handle)
                used_mib = library_number(memory.get("vram_used"))
                total = library_number(memory.get("vram_total"))
                watts = (
                    library_number(power.get(f"{kind}socket_power"))
                    for kind in ("current_", "average_", "")
                )
                heat = library.amdsmi_get_temp_metric(
                    handle,
                    library.AmdSmiTemperatureType.JUNCTION,
                    library.AmdSmiTemperatureMetric.CURRENT,
                )
                yield SensorReading(
                    device=device.index,
                    name=device.name,
                    source=self.name,
                    utilization=library_number(
                        library.amdsmi_get_gpu_activity(handle).get("gfx_activity")
                    ),
                    memory_gib=None if used_mib is None else used_mib / 1024,
                    memory_total_gib=None if total is None else total / 1024,
                    temperature=library_number(heat),
                    power=next((number for number in watts if number is not None), None) or None,
                )


# nvml.h: why the clocks are reduced. 0x04, the power limit, is left out: a GPU reaches it at full load.
NVIDIA_REASONS = ((0x60, "temperature"), (0x80, "power brake"), (0x08, "hardware slowdown"))


def nvidia_reasons(bits: int) -> str:
    """The reasons why a GPU throttles, without idling, full load and clocks set by the user."""
    return ", ".join(name for mask, name in NVIDIA_REASONS if bits & mask)


@final
class Nvml:
    """NVIDIA's library through `pynvml`, of the package nvidia-ml-py. Raises if it is missing."""

    name = "nvml"

    _library: Any = None

    def read(self, devices: Sequence[SensorDevice]) -> Iterator[SensorReading]:
        if self._library is None:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            self._library = library
        for device in devices:
            if device.vendor == "nvidia":
                yield _through_nvml(self._library, device)


def _through_nvml(library: Any, device: SensorDevice) -> SensorReading:
    if device.pci_address:
        handle = library.nvmlDeviceGetHandleByPciBusId(device.pci_address)
    else:
        handle = library.nvmlDeviceGetHandleByIndex(device.index)

    def ask(name: str, *arguments: Any) -> Any:
        """None if this GPU or driver does not support it."""
        try:
            return getattr(library, name)(handle, *arguments)
        except (library.NVMLError, AttributeError):
            return None

    load = ask("nvmlDeviceGetUtilizationRates")
    memory = ask("nvmlDeviceGetMemoryInfo")
    milliwatts = ask("nvmlDeviceGetPowerUsage")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    # Older releases of NVML have the other name.
    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits
    return SensorReading(
        device=device.index,
        name=device.name,
        source=Nvml.name,
        utilization=None if load is None else float(load.gpu),
        memory_gib=None if memory is None else memory.used / 2**30,
        memory_total_gib=None if memory is None else memory.total / 2**30,
        temperature=library_number(ask("nvmlDeviceGetTemperature", 0)),  # 0: NVML_TEMPERATURE_GPU
        # 1: NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        critical=library_number(ask("nvmlDeviceGetTemperatureThreshold", 1)),
        power=None if milliwatts is None else milliwatts / 1000,
        clock_mhz=library_number(ask("nvmlDeviceGetClockInfo", 1)),  # 1: NVML_CLOCK_SM
        throttled=None if bits is None else nvidia_reasons(bits),
    )


# In a child


@final
class SensorReader:
    """Reads sensors in a child process. A source that times out or crashes is not used again.

    `on_problem` is called once for each source that is not used any more.
    """

    def __init__(
        self,
        devices: Sequence[SensorDevice],
        *,
        on_problem: Callable[[str], None],
        cpu_name: str = "",
        root: Path = Path("/"),
        deadline: float = DEADLINE_SECONDS,
    ) -> None:
        as_json = [asdict(device) for device in devices]
        self._job: dict[str, Any] = {"devices": as_json, "root": str(root), "cpu_name": cpu_name}
        self._without: list[str] = []
        self._on_problem = on_problem
        self._deadline = deadline
        self._child: Child | None = None
        self._trying = ""
        self._failed = False

    def read(self) -> list[SensorReading]:
        """Empty if no source answered in time."""
        if self._failed:
            return []
        until = time.monotonic() + self._deadline
        try:
            if self._child is None:
                job = self._job | {"without": self._without}
                self._child = Child(
                    MODULE, job, environment=os.environ, dying_seconds=DYING_SECONDS
                ).start()
            answer = self._child.ask({}, seconds=self._deadline)
            while isinstance(answer, dict) and "readings" not in answer:
                self._trying = answer["trying"]
                answer = self._child.next(until - time.monotonic())
            if isinstance(answer, dict):
                return [SensorReading(**values) for values in answer["readings"]]
            timeout = f"timed out after {self._deadline:.0f} s"
            self._disable(
                "the process that reads sensors crashed" if answer == "ended" else timeout
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._disable(f"failed ({error})")
        return []

    def _disable(self, problem: str) -> None:
        """The current source is not used again; the next read starts another process."""
        self.close()
        name = self._trying
        self._trying = ""
        if not name:
            self._failed = True
            self._on_problem(f"cannot read sensors: {problem}")
            return
        self._without.append(name)
        self._on_problem(f"sensors ({name}) are no longer read: {problem}")

    def close(self) -> None:
        """Ends the process. One that is stuck in a driver is left running and ends later."""
        child = self._child
        self._child = None
        if child is not None:
            child.close()


def main() -> None:
    """The child: for each request `{"trying": NAME}` before each source, then `{"readings": [...]}`."""
    job = accept()
    devices = [SensorDevice(**values) for values in job["devices"]]
    root = Path(job["root"])
    # For each vendor the fastest and safest source comes first.
    by_vendor: dict[str, list[SensorSource]] = {
        "amd": [Sysfs(root), AmdSmi()],
        "nvidia": [Nvml()],
        "intel": [IntelSysfs(root)],
    }
    vendors = {device.vendor for device in devices}
    sources = [
        source
        for vendor, sources_of_vendor in by_vendor.items()
        for source in sources_of_vendor
        if vendor in vendors and source.name not in job["without"]
    ]
    cpu = None if CpuSensors.name in job["without"] else CpuSensors(root, job["cpu_name"])
    for _ in requests(job):
        readings = sample(devices, sources, trying=lambda name: reply(job, {"trying": name}))
        if cpu is not None:
            reply(job, {"trying": cpu.name})
            readings.append(cpu.read(time.monotonic()))
        reply(job, {"readings": [asdict(reading) for reading in readings]})


if __name__ == "__main__":
    main()
