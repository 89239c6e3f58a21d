"""Sensors: constructed kernel trees, answers of libraries, and sources that hang, raise or crash."""

import errno
import os
import struct
import sys
import time
from pathlib import Path

import pytest

from bloomery.hardware import telemetry
from bloomery.hardware.telemetry import (
    CPU_DEVICE,
    AmdSmi,
    CpuSensors,
    IntelSysfs,
    Nvml,
    SensorDevice,
    SensorReader,
    SensorReading,
    Sysfs,
    library_number,
    merged,
    nvidia_reasons,
    sample,
    shared_power,
    throttle_reason,
    unread_sensors,
)

CARD = SensorDevice(
    index=0, vendor="amd", name="RX 6700 XT", node="/dev/dri/renderD128", pci_address="0000:03:00.0"
)


def files(folder: Path, **contents: str | bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else f"{content}\n".encode()
        )


def card(root: Path, minor: int = 128, **sensors: str) -> Path:
    """The folder of a card's PCI device; `sensors` lie in its hwmon."""
    folder = root / f"sys/class/drm/renderD{minor}/device"
    files(
        folder,
        gpu_busy_percent="97",
        mem_info_vram_used=str(3 * 2**30),
        mem_info_vram_total=str(12 * 2**30),
    )
    files(folder / "hwmon/hwmon3", **sensors)
    return folder


WARM = {
    "temp1_label": "edge",
    "temp1_input": "61000",
    "temp1_crit": "100000",
    "temp2_label": "junction",
    "temp2_input": "78000",
    "temp2_crit": "110000",
    "power1_average": "183000000",
    "freq1_input": "2424000000",
}


def test_a_card_is_read_at_its_junction(tmp_path):
    card(tmp_path, **WARM)
    (reading,) = sample([CARD], [Sysfs(tmp_path)])
    assert reading == SensorReading(
        device=0,
        name="RX 6700 XT",
        source="sysfs",
        utilization=97.0,
        memory_gib=3.0,
        memory_total_gib=12.0,
        temperature=78.0,
        critical=110.0,
        power=183.0,
        clock_mhz=2424.0,
    )


def test_newer_cards_have_only_power1_input_and_some_only_an_edge(tmp_path):
    card(tmp_path, temp1_label="edge", temp1_input="40000", power1_input="9500000")
    (reading,) = sample([CARD], [Sysfs(tmp_path)])
    assert (reading.temperature, reading.power, reading.critical) == (40.0, 9.5, None)


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENODATA, errno.EPERM])
def test_a_sleeping_card_has_figures_missing_and_nothing_breaks(tmp_path, monkeypatch, code):
    folder = card(tmp_path, **WARM)
    opened = Path.open

    def asleep(path: Path, *words, **named):
        if "hwmon" in str(path) or path == folder / "gpu_busy_percent":
            raise OSError(code, os.strerror(code))
        return opened(path, *words, **named)

    monkeypatch.setattr(Path, "open", asleep)
    (reading,) = sample([CARD], [Sysfs(tmp_path)])
    assert reading.memory_gib == 3.0 and not reading.has_sensors


def test_a_card_is_found_by_its_address_where_its_render_node_is_hidden(tmp_path):
    files(tmp_path / "sys/bus/pci/devices/0000:03:00.0", gpu_busy_percent="5")
    assert sample([CARD], [Sysfs(tmp_path)])[0].utilization == 5.0


def dies(root: Path, odd_power: dict[str, str]) -> list[SensorDevice]:
    card(root, 128, temp2_label="junction", temp2_input="50000", power1_average="402000000")
    card(root, 129, temp2_label="junction", temp2_input="49000", **odd_power)
    facts = {"vendor": "amd", "device_id": 0x7408}
    return [
        SensorDevice(index=0, node="/dev/dri/renderD128", pci_address="0000:c1:00.0", **facts),
        SensorDevice(index=1, node="/dev/dri/renderD129", pci_address="0000:c6:00.0", **facts),
    ]


@pytest.mark.parametrize("odd_power", [{}, {"power1_average": "0"}])
def test_the_odd_die_of_an_mi250x_is_shown_as_shared(tmp_path, odd_power):
    even, odd = sample(dies(tmp_path, odd_power), [Sysfs(tmp_path)])
    assert (even.power, even.shared_with) == (402.0, None)
    assert (odd.power, odd.shared_with, odd.temperature) == (None, 0, 49.0)


def test_an_mi210_is_one_die_and_shares_nothing():
    lone = [SensorDevice(index=number, vendor="amd", device_id=0x740F) for number in (0, 1)]
    readings = [SensorReading(device=0, power=90.0), SensorReading(device=1)]
    assert shared_power(readings, lone) == readings


def metrics(bits: int, minor: int = 3) -> bytes:
    return struct.pack("<HBB", 120, 1, minor) + bytes(108) + struct.pack("<Q", bits)


def test_throttling_is_read_from_gpu_metrics():
    hot, powerful = 1 << 36, 1 << 0  # SMU_THROTTLER_TEMP_HOTSPOT_BIT, SMU_THROTTLER_PPT0_BIT
    assert throttle_reason(metrics(hot | powerful)) == "temperature"
    assert throttle_reason(metrics(powerful)) == ""
    assert throttle_reason(metrics(0)) == ""
    for unknown in (metrics(hot, minor=4), metrics(2**64 - 1), metrics(0)[:60], b"", b"\x78"):
        assert throttle_reason(unknown) is None


@pytest.mark.parametrize(
    ("told", "number"),
    [
        ("N/A", None),
        (None, None),
        ("[Not Supported]", None),
        ("35.0", 35.0),
        (7, 7.0),
        ({"value": "12 W"}, 12.0),
        (True, None),
    ],
)
def test_figures_come_in_many_ways(told, number):
    assert library_number(told) == number


def test_what_slows_an_nvidia_gpu_down():
    assert nvidia_reasons(0x4 | 0x40) == "temperature" and nvidia_reasons(0x1 | 0x4) == ""


def test_amdsmi_where_the_kernels_files_say_nothing(monkeypatch):
    """As ROCm's package answers: MiB of memory, texts for what a card does not have, addresses with a domain."""

    class Library:
        class AmdSmiTemperatureType:
            JUNCTION = 1

        class AmdSmiTemperatureMetric:
            CURRENT = 0

        amdsmi_init = staticmethod(lambda: None)
        amdsmi_get_processor_handles = staticmethod(lambda: ["one", "other"])
        amdsmi_get_gpu_device_bdf = staticmethod(
            {"one": "0000:83:00.0", "other": "0000:03:00.0"}.get
        )
        amdsmi_get_gpu_vram_usage = staticmethod(
            lambda handle: {"vram_used": 1024, "vram_total": 196608}
        )
        amdsmi_get_power_info = staticmethod(
            lambda handle: {"current_socket_power": "N/A", "socket_power": 410}
        )
        amdsmi_get_temp_metric = staticmethod(lambda handle, kind, metric: 68)
        amdsmi_get_gpu_activity = staticmethod(
            lambda handle: {"gfx_activity": {"value": 42.5, "unit": "%"}}
        )

    monkeypatch.setitem(sys.modules, "amdsmi", Library)
    (reading,) = AmdSmi().read([CARD])
    assert (reading.device, reading.utilization, reading.temperature, reading.power) == (
        0,
        42.5,
        68.0,
        410.0,
    )
    assert (reading.memory_gib, reading.memory_total_gib) == (1.0, 192.0)


def test_nvml_without_what_a_card_does_not_know(monkeypatch):
    class Error(Exception):
        pass

    class Library:
        NVMLError = Error
        nvmlInit = nvmlDeviceGetHandleByIndex = staticmethod(lambda *words: "handle")
        nvmlDeviceGetTemperature = staticmethod(lambda handle, sensor: 71)
        nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 301_500)
        nvmlDeviceGetCurrentClocksThrottleReasons = staticmethod(lambda handle: 0x20)

        @staticmethod
        def nvmlDeviceGetUtilizationRates(handle):
            raise Error("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", Library)
    (reading,) = Nvml().read([SensorDevice(index=0, vendor="nvidia")])
    assert (reading.temperature, reading.power, reading.utilization) == (71.0, 301.5, None)
    assert reading.throttled == "temperature"


class Says:
    def __init__(self, name: str, **figures: float) -> None:
        self.name, self._figures = name, figures

    def read(self, devices):
        yield from (
            SensorReading(device=device.index, source=self.name, **self._figures)
            for device in devices
        )


class Raises:
    name = "raises"

    def read(self, devices):
        raise KeyError("libamd_smi.so")


def test_a_source_that_raises_is_passed_over_and_the_next_one_completes():
    asked: list[str] = []
    sources = [
        Raises(),
        Says("memory only", memory_gib=2.0),
        Says("all", power=5.0, memory_gib=9.0),
        Says("never", power=1.0),
    ]
    (reading,) = sample([CARD], sources, trying=asked.append)
    assert (reading.memory_gib, reading.power) == (2.0, 5.0)
    assert asked == ["raises", "memory only", "all"]
    assert merged(None, reading) is reading


def processor(root: Path, ticks: str, microjoules: int) -> None:
    files(
        root / "proc",
        stat=ticks,
        meminfo="MemTotal:  4194304 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB",
    )
    files(root / "sys/class/powercap/intel-rapl:0", name="package-0", energy_uj=str(microjoules))
    files(root / "sys/class/powercap/intel-rapl:0:0", name="core", energy_uj="1")
    files(root / "sys/class/hwmon/hwmon0", name="k10temp", temp1_input="55125", temp3_input="61000")


def test_the_processor_between_two_looks(tmp_path):
    looks = CpuSensors(tmp_path, "EPYC")
    processor(tmp_path, "cpu  100 0 100 800 0 0 0 0 50 0\ncpu0 1", 5_000_000)
    first = looks.read(10.0)
    assert (first.device, first.utilization, first.power, first.memory_gib) == (
        CPU_DEVICE,
        None,
        None,
        3.0,
    )
    processor(tmp_path, "cpu  130 0 100 870 0 0 0 0 90 0", 65_000_000)
    second = looks.read(12.0)
    assert (second.utilization, second.power, second.temperature) == (30.0, 30.0, 61.0)
    processor(tmp_path, "cpu  140 0 100 880 0 0 0 0 90 0", 1_000_000)  # the counter began anew
    assert looks.read(13.0).power is None


def test_a_machine_without_any_of_these_files(tmp_path):
    assert CpuSensors(tmp_path).read(1.0) == SensorReading(device=CPU_DEVICE, source="proc")
    assert sample([CARD], [Sysfs(tmp_path)]) == []


@pytest.fixture
def told() -> list[str]:
    return []


def test_a_look_through_the_child(tmp_path, told):
    card(tmp_path, **WARM)
    processor(tmp_path, "cpu  100 0 100 800 0 0 0 0 50 0", 1)
    reader = SensorReader([CARD], on_problem=told.append, cpu_name="EPYC", root=tmp_path)
    gpu, cpu = reader.read()
    reader.close()
    assert gpu.power == 183.0 and cpu.name == "EPYC" and not told


def test_a_sensor_that_never_answers_is_given_up_once_and_the_rest_goes_on(tmp_path, told):
    folder = card(tmp_path, **WARM)
    processor(tmp_path, "cpu  100 0 100 800 0 0 0 0 50 0", 1)
    (folder / "gpu_busy_percent").unlink()
    os.mkfifo(folder / "gpu_busy_percent")  # a reader waits for a writer that never comes
    reader = SensorReader([CARD], on_problem=told.append, root=tmp_path, deadline=1.5)
    begun = time.monotonic()
    assert reader.read() == []
    assert time.monotonic() - begun < 60  # it would wait forever
    (cpu,) = reader.read()
    reader.close()
    assert cpu.device == CPU_DEVICE
    assert len(told) == 1 and "sensors (sysfs) are no longer read: timed out after 2 s" in told[0]


def test_a_reader_that_cannot_start_is_said_once(monkeypatch, told):
    monkeypatch.setattr(telemetry, "MODULE", "bloomery.no_such_module")
    reader = SensorReader([CARD], on_problem=told.append)
    assert reader.read() == reader.read() == []
    assert len(told) == 1 and "cannot read sensors" in told[0]


def test_a_crash_in_a_library_costs_that_source_alone(tmp_path, told, monkeypatch):
    package = tmp_path / "amdsmi.py"
    package.write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    processor(tmp_path, "cpu  100 0 100 800 0 0 0 0 50 0", 1)
    reader = SensorReader([CARD], on_problem=told.append, root=tmp_path)
    assert reader.read() == []
    assert [reading.device for reading in reader.read()] == [CPU_DEVICE]
    reader.close()
    assert (
        len(told) == 1
        and "sensors (amdsmi) are no longer read: the process that reads sensors crashed" in told[0]
    )


def test_the_child_knows_no_torch_and_no_pydantic():
    code = "import sys, bloomery.hardware.telemetry; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


ARC = SensorDevice(
    index=0, vendor="intel", name="Arc B580", node="/dev/dri/renderD128", pci_address="0000:03:00.0"
)


def test_intels_power_is_its_energy_between_two_reads(tmp_path):
    folder = tmp_path / "sys/class/drm/renderD128/device"
    sensors = {
        "temp2_label": "pkg",
        "temp2_input": "71000",
        "temp3_label": "vram",
        "temp3_input": "84000",
    }
    energies = {"energy1_label": "card", "energy1_input": "5000000", "energy2_label": "pkg"}
    files(
        folder / "hwmon/hwmon4", **sensors, **energies, energy2_input="3000000", temp2_crit="100000"
    )
    files(folder / "tile0/gt0/freq0", act_freq="2850")
    files(folder / "tile0/gt1/freq0", act_freq="1200")
    throttle = folder / "tile0/gt0/freq0/throttle"
    files(throttle, status="1", reason_pl1="1", reason_thermal="1", reason_prochot="1")
    now = iter((10.0, 15.0))
    source = IntelSysfs(tmp_path, clock=lambda: next(now))
    (first,) = sample([ARC], [source])
    assert first == SensorReading(
        device=0,
        name="Arc B580",
        source="xe",
        temperature=71.0,
        critical=100.0,
        clock_mhz=2850.0,
        throttled="temperature",
    )
    files(folder / "hwmon/hwmon4", energy1_input="805000000")
    (second,) = sample([ARC], [source])
    assert second.power == 160.0
    assert unread_sensors([ARC]) == "utilization and memory in use of Arc B580 cannot be read"
    assert unread_sensors([CARD]) == ""


def test_i915_has_its_files_below_the_card_and_two_stacks_share_a_sensor(tmp_path):
    folder = tmp_path / "sys/bus/pci/devices/0000:03:00.0"
    files(folder / "hwmon/hwmon4", energy1_input="1000000")
    files(folder / "drm/card1/gt/gt0", rps_act_freq_mhz="2100", throttle_reason_pl1="1")
    stacks = [SensorDevice(index=i, vendor="intel", pci_address="0000:03:00.0") for i in (0, 1)]
    now = iter((1.0, 1.0, 2.0, 2.0))
    source = IntelSysfs(tmp_path, clock=lambda: next(now))
    list(source.read(stacks))
    files(folder / "hwmon/hwmon4", energy1_input="301000000")
    first, second = source.read(stacks)
    assert (first.power, first.shared_with, first.clock_mhz, first.throttled) == (
        300.0,
        None,
        2100,
        "",
    )
    assert (second.power, second.shared_with) == (None, 0)
