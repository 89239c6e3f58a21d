"""Detection reads constructed trees in the kernel's own format, and this machine without importing torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.hardware.detect import detect, parse_nvidia_smi, parse_torch_version
from bloomery.hardware.kfd import gfx_name, read_kfd
from bloomery.hardware.machine import Machine

CPU_NODE = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\n"
RX_6700_XT = (
    "cpu_cores_count 0\nsimd_count 80\nlds_size_in_kb 64\nwave_front_size 32\nsimd_per_cu 2\n"
    "gfx_target_version 100301\nvendor_id 4098\ndevice_id 29663\nlocation_id 768\ndomain 0\n"
    "drm_render_minor 128\nlocal_mem_size 0\nnum_xcc 1\n"
)
IGPU = RX_6700_XT.replace("100301", "100306").replace("29663", "5710").replace("minor 128", "minor 129")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def node(root: Path, number: int, properties: str, *, bank_bytes: int = 0) -> None:
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    write(folder / "properties", properties)
    if bank_bytes:
        bank = f"heap_type 1\nsize_in_bytes {bank_bytes}\nflags 0\nwidth 192\nmem_clk_max 1000\n"
        write(folder / "mem_banks/0/properties", bank)


@pytest.fixture
def root(tmp_path):
    """A desktop with an RX 6700 XT and processor graphics."""
    write(
        tmp_path / "proc/cpuinfo",
        "processor : 0\nmodel name\t: AMD Ryzen 7\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n",
    )
    write(tmp_path / "proc/meminfo", "MemTotal:       32000000 kB\nMemFree: 1000 kB\nMemAvailable:   16000000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/job\n")
    node(tmp_path, 0, CPU_NODE)
    node(tmp_path, 1, RX_6700_XT, bank_bytes=12868124672)
    node(tmp_path, 2, IGPU, bank_bytes=536870912)
    write(tmp_path / "sys/class/drm/renderD128/device/revision", "0xc1\n")
    write(tmp_path / "sys/class/drm/renderD128/device/mem_info_vram_used", "655360000\n")
    write(tmp_path / "usr/share/libdrm/amdgpu.ids", "# comment\n1.0.0\n73DF,\tC1,\tAMD Radeon RX 6700 XT\n")
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
    assert (card.compute_units, card.wave_size, card.pci_address) == (40, 32, "0000:03:00.0")


def test_a_masked_device_is_absent(root, monkeypatch):
    real = Path.read_text

    def masked(self, *args, **kwargs):
        if str(self).endswith("nodes/1/properties"):
            raise PermissionError(1, "Operation not permitted")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", masked)
    assert [device.arch for device in detect(root=root).accelerators] == ["gfx1036"]


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
    assert (host.memory_bytes, host.memory_free_bytes, host.cpu_cores) == (4_000_000_000, 3_000_000_000, 1)


def test_nvidia_smi_rows():
    text = "0, NVIDIA H200, 143771, 512, 9.0\n1, NVIDIA GB10, [N/A], [N/A], 12.1\nNo devices were found\n"
    card, shared = parse_nvidia_smi(text, start=1)
    assert (card.index, card.name, card.arch, card.memory_bytes) == (1, "NVIDIA H200", "sm_90", 143771 * 2**20)
    assert (shared.arch, shared.integrated, shared.memory_bytes) == ("sm_121", True, 0)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", ("2.13.0+cpu", "cpu")),
        (
            "__version__ = '2.9.1+rocm6.3'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.3.42'\n",
            ("2.9.1+rocm6.3", "rocm"),
        ),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ("2.13.0", "cuda")),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(lines, found):
    assert parse_torch_version(lines) == found


def test_this_machine_is_detected_without_torch_and_survives_json():
    code = (
        "import sys; from bloomery.hardware.detect import detect; m = detect(); print(m.model_dump_json());"
        "assert 'torch' not in sys.modules"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    machine = Machine.model_validate_json(answer.stdout)
    assert machine.host.cpu_cores >= 1
    assert 0 < machine.host.memory_free_bytes <= machine.host.memory_bytes
    assert machine.software.torch


def test_a_recorded_machine_of_a_newer_version_loads():
    machine = detect()
    newer = machine.model_dump() | {"surprise": 1}
    assert Machine.model_validate(newer) == machine
