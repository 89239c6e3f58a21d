"""Detection reads constructed trees in the kernel's own format, and this machine without importing torch."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bloomery.hardware.detect import detect, parse_nvidia_smi
from bloomery.hardware.detect_software import assignments, build_of
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.intel import listed_products
from bloomery.hardware.kfd import INTEGRATED, gfx_name, read_kfd
from bloomery.hardware.machine import Machine, Software
from bloomery.hardware.profile import SHARED_MEMORY_SHARE, build_profile
from bloomery.hardware.specs import arch_spec, gpu_table, is_integrated
from bloomery.plan.resolve import local_plan
from bloomery.recipe.load import load_recipe
from kfd_trees import (
    CPU,
    GFX942,
    GFX1031,
    GFX1036,
    GFX1100,
    drm_device,
    pci_device,
    topology_node,
    write,
)


@pytest.fixture
def root(tmp_path):
    """A desktop with an RX 6700 XT and processor graphics."""
    write(
        tmp_path / "proc/cpuinfo",
        "processor : 0\nmodel name\t: AMD Ryzen 7\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n",
    )
    write(
        tmp_path / "proc/meminfo",
        "MemTotal:       32000000 kB\nMemFree: 1000 kB\nMemAvailable:   16000000 kB\n",
    )
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/job\n")
    topology_node(tmp_path, 0, CPU)
    topology_node(tmp_path, 1, GFX1031, bank_bytes=12868124672)
    topology_node(tmp_path, 2, GFX1036, bank_bytes=536870912)
    drm_device(tmp_path, 128, revision="0xc1", mem_info_vram_used="655360000")
    drm_device(tmp_path, 129, revision="0xc9", mem_info_gtt_total="16000000000")
    write(
        tmp_path / "usr/share/libdrm/amdgpu.ids",
        "# comment\n1.0.0\n73DF,\tC1,\tAMD Radeon RX 6700 XT\n",
    )
    return tmp_path


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90006, "gfx906"),
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (100301, "gfx1031"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_gfx_names_are_decoded_as_the_kernel_writes_them(version, name):
    assert gfx_name(version) == name


def test_amd_gpus_come_from_the_topology(root):
    big, small = detect(root=root).accelerators
    assert (big.name, big.arch, big.memory_bytes, big.integrated) == (
        "AMD Radeon RX 6700 XT",
        "gfx1031",
        12868124672,
        False,
    )
    assert (big.memory_used_bytes, big.node) == (655360000, "/dev/dri/renderD128")
    assert (small.name, small.arch, small.integrated) == ("gfx1036", "gfx1036", True)
    card = read_kfd(root / "sys")[0]
    assert (card.compute_units, card.pci_address) == (40, "0000:03:00.0")


def test_a_gpu_that_the_table_calls_integrated_is_one(root, monkeypatch):
    monkeypatch.setattr("bloomery.hardware.kfd.INTEGRATED", frozenset())
    topology_node(root, 2, GFX1036.replace("100306", "110501"))
    big, small = detect(root=root).accelerators
    assert (big.integrated, small.arch, small.integrated) == (False, "gfx1151", True)


def test_set_up_knows_every_integrated_gpu_of_the_table():
    known = {gfx_name(version) for version in INTEGRATED}
    amd = [spec for spec in gpu_table().arch if spec.vendor == "amd"]
    listed = {name for spec in amd for name in spec.names if is_integrated(name)}
    assert listed and listed <= known


def test_processor_graphics_use_what_the_driver_lends(root):
    big, small = detect(root=root).accelerators
    assert (small.gtt_bytes, small.usable_bytes) == (16_000_000_000, 16_000_000_000)
    assert big.usable_bytes == big.memory_bytes


def test_an_integrated_nvidia_gpu_shares_the_machines_memory(root, monkeypatch):
    row = "0, NVIDIA GB10, [N/A], [N/A], 12.1, 0000000F:01:00.0, 0x2E1210DE\n"
    monkeypatch.setattr(
        "bloomery.hardware.detect.nvidia_accelerators",
        lambda root, start: tuple(parse_nvidia_smi(row, start=start)),
    )
    found = detect(root=root)
    shared = found.accelerators[-1]
    assert shared.usable_bytes == found.host.memory_bytes > 0
    machine = found.model_copy(
        update={
            "accelerators": (shared,),
            "software": Software(python="3.12", torch="2.13.0", build="cuda"),
        }
    )
    assert build_profile(machine).accelerator == shared
    assert not [finding for finding in diagnose(machine) if "carved out" in finding.evidence]
    plan, _ = local_plan(load_recipe("go-coder-tiny"), machine=machine)
    assert plan.memory.limit == pytest.approx(SHARED_MEMORY_SHARE * found.host.memory_bytes)


def test_a_real_node_of_an_rx_7900_xtx(tmp_path):
    topology_node(tmp_path, 0, CPU)
    topology_node(tmp_path, 1, GFX1100)
    drm_device(tmp_path, 128, mem_info_vram_total="25753026560", product_name="Radeon RX 7900 XTX")
    (card,) = detect(root=tmp_path).accelerators
    assert (card.arch, card.compute_units, card.memory_bytes) == ("gfx1100", 96, 25753026560)
    assert (card.pci_address, card.device_id, card.unique_id) == (
        "0000:86:00.0",
        0x744C,
        hex(11673270660693242239),
    )
    assert (card.name, card.access, card.hive_id) == ("Radeon RX 7900 XTX", "open", "")


def test_an_mi300x_node(tmp_path):
    topology_node(tmp_path, 0, CPU)
    topology_node(tmp_path, 1, CPU)
    for index in range(8):
        place = f"location_id {(0x05 + 0x20 * index) << 8}\ndrm_render_minor {128 + 8 * index}\nhive_id 8839\n"
        topology_node(tmp_path, 2 + index, GFX942 + place, bank_bytes=196592 * 2**20)
    cards = detect(root=tmp_path).accelerators
    assert [card.index for card in cards] == list(range(8))
    assert {(card.arch, card.compute_units, card.hive_id) for card in cards} == {
        ("gfx942", 304, hex(8839))
    }
    assert len({card.pci_address for card in cards}) == 8


def test_a_masked_device_is_absent(root, monkeypatch):
    real = Path.read_text

    def masked(self, *args, **kwargs):
        if str(self).endswith("nodes/1/properties"):
            raise PermissionError(1, "Operation not permitted")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", masked)
    machine = detect(root=root)
    assert [device.arch for device in machine.accelerators] == ["gfx1036"]
    assert machine.host.around.masked_gpus == 1


def test_the_smallest_group_limits_memory_and_cores(root):
    write(root / "sys/fs/cgroup/user.slice/memory.max", "8000000000\n")
    write(root / "sys/fs/cgroup/user.slice/memory.current", "3000000000\n")
    write(root / "sys/fs/cgroup/user.slice/memory.stat", "anon 5\ninactive_file 1000000000\n")
    write(root / "sys/fs/cgroup/user.slice/job/memory.max", "max\n")
    write(root / "sys/fs/cgroup/user.slice/job/cpu.max", "150000 100000\n")
    host = detect(root=root).host
    assert (host.memory_bytes, host.memory_free_bytes) == (8_000_000_000, 6_000_000_000)
    assert host.cpu_cores == 1  # one and a half cores are one thread
    assert (host.cpu_name, host.cpu_flags) == ("AMD Ryzen 7", ("avx2", "avx512f", "avx512_bf16"))


def test_groups_of_the_first_version_count_too(root):
    write(root / "proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/\n")
    write(root / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4000000000\n")
    write(root / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000000000\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    write(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    host = detect(root=root).host
    assert (host.memory_bytes, host.memory_free_bytes, host.cpu_cores) == (
        4_000_000_000,
        3_000_000_000,
        1,
    )


def test_nvidia_smi_rows():
    text = (
        "0, NVIDIA H200, 143771, 512, 9.0, 00000000:1B:00.0, 0x233510DE\n"
        "1, NVIDIA GB10, [N/A], [N/A], 12.1, 0000000F:01:00.0, 0x2E1210DE\nNo devices were found\n"
    )
    card, shared = parse_nvidia_smi(text, start=1)
    assert (card.index, card.name, card.arch, card.memory_bytes) == (
        1,
        "NVIDIA H200",
        "sm_90",
        143771 * 2**20,
    )
    assert (card.pci_address, card.device_id) == ("0000:1b:00.0", 0x2335)
    assert (shared.arch, shared.integrated, shared.memory_bytes) == ("sm_121", True, 0)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
            ("2.13.0+cpu", "cpu"),
        ),
        (
            "__version__ = '2.9.1+rocm6.3'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.3.42'\n",
            ("2.9.1+rocm6.3", "rocm"),
        ),
        (
            "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            ("2.13.0", "cuda"),
        ),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(lines, found):
    values = assignments(lines)
    assert (values["__version__"], build_of(values)) == found


def test_cards_without_a_driver_are_on_the_bus(tmp_path):
    pci_device(
        tmp_path,
        "0000:0b:00.0",
        kind="0x030000",
        vendor="0x1002",
        device="0x73bf",
        driver="vfio-pci",
    )
    pci_device(tmp_path, "0000:0c:00.0", kind="0x038000", vendor="0x1002", device="0x740c")
    pci_device(
        tmp_path, "0000:0d:00.0", kind="0x020000", vendor="0x8086", device="0x1533", driver="igb"
    )
    machine = detect(root=tmp_path)
    assert machine.accelerators == ()
    assert [(d.address, d.vendor, d.driver) for d in machine.host.displays] == [
        ("0000:0b:00.0", 0x1002, "vfio-pci"),
        ("0000:0c:00.0", 0x1002, ""),
    ]


def test_this_machine_is_detected_at_once():
    detect()
    began = time.process_time()  # other programs may use the cores
    detect()
    assert time.process_time() - began < 1.0  # 0.03 s


def test_this_machine_is_detected_without_torch_and_survives_json():
    code = (
        "import sys; from bloomery.hardware.detect import detect; m = detect(); print(m.model_dump_json());"
        "assert 'torch' not in sys.modules"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    machine = Machine.model_validate_json(answer.stdout)
    assert machine.host.cpu_cores >= 1
    assert 0 < machine.host.memory_free_bytes <= machine.host.memory_bytes
    assert machine.software.torch


def test_a_recorded_machine_of_a_newer_version_loads():
    machine = detect()
    newer = machine.model_dump() | {"surprise": 1}
    assert Machine.model_validate(newer) == machine


def test_what_is_installed_meanwhile_is_seen(root, monkeypatch):
    """What a folder of packages holds is kept until something is installed there."""
    monkeypatch.setattr(sys, "path", [str(root / "site"), str(root / "nowhere")])

    def installed(name: str, at: int) -> list[str]:
        write(root / f"site/{name}-1.dist-info/METADATA", "")
        # the clock of the file system may be slower than this test
        os.utime(root / "site", (at, at))
        return [package.name for package in detect(root=root).software.packages]

    assert installed("torch", 1_700_000_000) == ["torch"]
    assert installed("triton", 1_700_000_001) == ["torch", "triton"]


def intel_device(root: Path, address: str, device: str, *, minor: int = 0, mib: int = 256) -> None:
    """A display of Intel's; with a render node it has the driver xe. `mib`: its largest window on the bus."""
    pci_device(
        root, address, kind="0x030000", vendor="0x8086", device=device, driver="xe" if minor else ""
    )
    folder = root / f"sys/bus/pci/devices/{address}"
    windows = (
        "0x0000000080000000 0x0000000080ffffff 0x0000000000140204",
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        f"0x0000004000000000 {0x4000000000 + mib * 2**20 - 1:#018x} 0x000000000014220c",
    )
    write(folder / "resource", "\n".join(windows) + "\n")
    if minor:
        write(folder / f"drm/renderD{minor}/dev", "226:128\n")
        write(root / f"dev/dri/renderD{minor}", "")


def test_intels_gpus_are_found_by_their_device_ids(tmp_path):
    intel_device(tmp_path, "0000:00:02.0", "0x4680", minor=128)  # UHD 770, in a processor
    intel_device(tmp_path, "0000:03:00.0", "0x56a0", minor=129, mib=16384)
    intel_device(tmp_path, "0000:04:00.0", "0x56a0", minor=130)  # a window of 256 MiB tells nothing
    intel_device(tmp_path, "0000:05:00.0", "0x0bd5", minor=131, mib=131072)
    intel_device(tmp_path, "0000:06:00.0", "0xe20b")  # no driver
    write(tmp_path / "usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1.6.33578", "")
    found = detect(root=tmp_path)
    assert [
        (gpu.index, gpu.name, gpu.arch, gpu.memory_bytes >> 30) for gpu in found.accelerators
    ] == [
        (0, "Arc A770", "xe-hpg", 16),
        (1, "Arc A770", "xe-hpg", 8),
        (2, "Data Center GPU Max 1550 (one stack)", "xe-hpc", 64),
        (3, "Data Center GPU Max 1550 (one stack)", "xe-hpc", 64),
    ]
    assert {gpu.vendor for gpu in found.accelerators} == {"intel"}
    assert found.accelerators[0].access == "open"
    assert found.host.driver.level_zero == "1.6.33578"
    assert [display.driver for display in found.host.displays] == ["xe", "xe", "xe", "xe", ""]
    assert {"intel-driver-missing", "level-zero-missing"}.isdisjoint(
        finding.id for finding in diagnose(found)
    )


def test_every_gpu_of_intels_has_its_own_device_ids():
    ids = [device_id for gpu in gpu_table().gpu for device_id in gpu.pci_ids]
    assert len(ids) == len(set(ids)) >= 12
    assert listed_products().keys() == set(ids)
    intels = {gpu.arch for gpu in gpu_table().gpu if arch_spec(gpu.arch).vendor == "intel"}
    assert intels == {gpu["arch"] for gpu in listed_products().values()}
