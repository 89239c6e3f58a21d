"""How hard the devices work right now: load, memory, temperature, power, clock. Standard library only.

Facts of the files: the kernel's amdgpu_pm.c ("DOC: hwmon") and hwmon's sysfs interface. Every one of them may be
missing, or answer EBUSY or ENODATA while a card sleeps: that figure is then None. A read may also never return, so runs
read in a child process (`telemetry_child`), which can be given up.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, final

PROCESSOR = -1  # as `Reading.device`
GIB = 2.0**30
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
    source: str = ""  # that was asked: sysfs, amdsmi, rocm-smi, nvml, nvidia-smi, proc
    utilisation: float | None = None  # percent
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
        return any(figure is not None for figure in (self.utilisation, self.temperature, self.power))


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
        utilisation=_number(folder / "gpu_busy_percent"),
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
            device=PROCESSOR,
            name=self._title,
            source=self.name,
            utilisation=self._load(),
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
