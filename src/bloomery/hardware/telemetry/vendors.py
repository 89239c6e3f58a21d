"""Sensors of GPUs through vendors' tools and libraries, where the kernel's files say nothing. Standard library only.

Each of them has hung or crashed somewhere: they are only called in the child process of `telemetry_child`. What they
print drifts with their version, so keys are sought by what they contain, and a number may come as text, as "N/A", or as
`{"value": 42.5, "unit": "%"}`.
"""

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from bloomery.hardware.telemetry.sysfs import Device, Reading, Source, Sysfs

TOOL_SECONDS = 4.0
MIB_IN_GIB = 1024.0


def sources_for(devices: Sequence[Device], root: Path = Path("/"), *, without: Sequence[str] = ()) -> list[Source]:
    """What is worth asking about these devices, cheapest and safest first."""
    vendors = {device.vendor for device in devices}
    amd: list[Source] = [Sysfs(root), AmdSmiLibrary(), AmdSmi(), RocmSmi()] if "amd" in vendors else []
    nvidia: list[Source] = [Nvml(), NvidiaSmi()] if "nvidia" in vendors else []
    return [source for source in (*amd, *nvidia) if source.name not in without]


def figure(value: object) -> float | None:
    """A number however a tool writes it; None for "N/A", "[Not Supported]" and whatever is none."""
    if isinstance(value, Mapping):
        return figure(value.get("value"))
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    found = re.match(r"\s*(-?\d+(?:\.\d+)?)", str(value))
    return float(found[1]) if found else None


def _ask(program: str, *words: str) -> str:
    """Raises OSError or SubprocessError."""
    path = shutil.which(program)
    if path is None:
        raise FileNotFoundError(program)
    return subprocess.run(
        [path, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True
    ).stdout


def _same_card(device: Device, address: str) -> bool:
    """PCI addresses come with a domain of four digits, of eight, or with none."""
    ours, theirs = device.pci_address.lower().split(":"), address.lower().strip().split(":")
    if len(ours) < 2 or ours[-2:] != theirs[-2:]:
        return False
    return len(ours) < 3 or len(theirs) < 3 or int(ours[-3], 16) == int(theirs[-3], 16)


@final
class RocmSmi:
    """`rocm-smi --json`: texts everywhere, keys that changed case and wording between releases."""

    name = "rocm-smi"

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]:
        words = (
            "--showtemp",
            "--showpower",
            "--showuse",
            "--showmeminfo",
            "vram",
            "--showclocks",
            "--showbus",
            "--json",
        )
        yield from parse_rocm_smi(_ask(self.name, *words), devices)


def parse_rocm_smi(text: str, devices: Sequence[Device]) -> Iterator[Reading]:
    """Cards by PCI address where the answer has one; else in order, which masks of visible devices do not change."""
    cards = json.loads(text[text.index("{") :])
    rows = [
        {key.lower(): value for key, value in facts.items()}
        for name, facts in sorted(cards.items(), key=lambda card: _trailing_number(card[0]))
        if re.fullmatch(r"card\d+", name) and isinstance(facts, dict)
    ]
    for device in devices:
        facts = _row_of(device, rows)
        if facts is not None:
            used = figure(_like(facts, "vram total used memory (b)"))
            total = figure(_like(facts, "vram total memory (b)"))
            junction = _like(facts, "temperature (sensor junction)")
            yield Reading(
                device=device.index,
                name=device.name,
                source=RocmSmi.name,
                utilisation=figure(_like(facts, "gpu use (%)")),
                memory_gib=None if used is None else used / 2**30,
                memory_total_gib=None if total is None else total / 2**30,
                temperature=figure(junction if figure(junction) is not None else _like(facts, "sensor edge")),
                power=figure(_like(facts, "package power (w)")) or None,
                clock_mhz=figure(str(_like(facts, "sclk clock speed")).strip("(")),
            )


def _trailing_number(name: str) -> int:
    found = re.search(r"\d+$", name)
    return int(found[0]) if found else 0


def _row_of(device: Device, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    addressed = [(str(_like(facts, "pci bus") or ""), facts) for facts in rows]
    if device.pci_address and any(address for address, _ in addressed):
        return next((facts for address, facts in addressed if _same_card(device, address)), None)
    return rows[device.index] if device.index < len(rows) else None


def _like(facts: Mapping[str, Any], part: str) -> object:
    return next((value for key, value in facts.items() if part in key), None)


@final
class AmdSmi:
    """`amd-smi metric --json`."""

    name = "amd-smi"

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]:
        addresses = json.loads(_ask(self.name, "list", "--json"))
        yield from parse_amd_smi(_ask(self.name, "metric", "--json"), devices, addresses)


def parse_amd_smi(text: str, devices: Sequence[Device], addresses: object = None) -> Iterator[Reading]:
    """`addresses`: what `amd-smi list --json` said, which numbers the cards as `metric` does; without it, in order."""
    by_number = {entry.get("gpu"): str(entry.get("bdf", "")) for entry in _entries(addresses)}
    entries = list(_entries(json.loads(text)))
    for device in devices:
        facts = next((e for e in entries if _same_card(device, by_number.get(e.get("gpu"), ""))), None)
        if facts is None and not any(by_number.values()) and device.index < len(entries):
            facts = entries[device.index]
        if facts is None:
            continue
        memory = facts.get("mem_usage") or facts.get("vram") or facts.get("fb_memory_usage") or {}
        heat, power = facts.get("temperature") or {}, facts.get("power") or {}
        used = figure(memory.get("used_vram", memory.get("vram_used")))
        total = figure(memory.get("total_vram", memory.get("vram_total")))
        yield Reading(
            device=device.index,
            name=device.name,
            source=AmdSmi.name,
            utilisation=figure((facts.get("usage") or {}).get("gfx_activity")),
            memory_gib=None if used is None else used / MIB_IN_GIB,
            memory_total_gib=None if total is None else total / MIB_IN_GIB,
            temperature=_first(heat, "hotspot", "junction", "edge"),
            power=_first(power, "socket_power", "current_socket_power", "average_socket_power") or None,
            clock_mhz=figure(((facts.get("clock") or {}).get("gfx_0") or {}).get("clk")),
        )


def _entries(document: object) -> Iterator[dict[str, Any]]:
    """A bare list in old releases, later under a key."""
    if isinstance(document, dict):
        document = document.get("gpu_data", document.get("gpus", []))
    if isinstance(document, list):
        yield from (entry for entry in document if isinstance(entry, dict))


def _first(facts: Mapping[str, Any], *names: str) -> float | None:
    return next((number for name in names if (number := figure(facts.get(name))) is not None), None)


@final
class AmdSmiLibrary:
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
        source=AmdSmiLibrary.name,
        utilisation=figure(library.amdsmi_get_gpu_activity(handle).get("gfx_activity")),
        memory_gib=None if used is None else used / MIB_IN_GIB,
        memory_total_gib=None if total is None else total / MIB_IN_GIB,
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
        utilisation=None if load is None else float(load.gpu),
        memory_gib=None if memory is None else memory.used / 2**30,
        memory_total_gib=None if memory is None else memory.total / 2**30,
        temperature=figure(ask("nvmlDeviceGetTemperature", 0)),  # 0: NVML_TEMPERATURE_GPU
        critical=figure(ask("nvmlDeviceGetTemperatureThreshold", 1)),  # 1: NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        power=None if milliwatts is None else milliwatts / 1000,
        clock_mhz=figure(ask("nvmlDeviceGetClockInfo", 1)),  # 1: NVML_CLOCK_SM
        throttled=None if bits is None else nvidia_reasons(bits),
    )


@final
class NvidiaSmi:
    """`nvidia-smi --query-gpu`."""

    name = "nvidia-smi"
    query = (
        "pci.bus_id,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,clocks.sm,"
        "clocks_throttle_reasons.active"
    )

    def read(self, devices: Sequence[Device]) -> Iterator[Reading]:
        words = (f"--query-gpu={self.query}", "--format=csv,noheader,nounits")
        yield from parse_nvidia_smi(_ask(self.name, *words), devices)


def parse_nvidia_smi(text: str, devices: Sequence[Device]) -> Iterator[Reading]:
    """Rows of the query above, in the order of the tool."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 7]
    for device in devices:
        match = [row for row in rows if _same_card(device, row[0])]
        row = match[0] if match else rows[device.index] if not device.pci_address and device.index < len(rows) else None
        if row is None or device.vendor != "nvidia":
            continue
        load, used, total, heat, power, clock = (figure(cell) for cell in row[1:7])
        yield Reading(
            device=device.index,
            name=device.name,
            source=NvidiaSmi.name,
            utilisation=load,
            memory_gib=None if used is None else used / MIB_IN_GIB,
            memory_total_gib=None if total is None else total / MIB_IN_GIB,
            temperature=heat,
            power=power,
            clock_mhz=clock,
            throttled=nvidia_reasons(int(row[7], 16)) if re.fullmatch(r"0x[0-9A-Fa-f]+", row[7]) else None,
        )
