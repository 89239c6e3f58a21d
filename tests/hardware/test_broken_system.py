"""A system whose files are damaged, strange or gone is still described: detection never raises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.hardware.detect import detect
from kfd_trees import CPU, GFX1031

FILES = {
    "sys/class/kfd/kfd/topology/nodes/0/properties": CPU,
    "sys/class/kfd/kfd/topology/nodes/1/properties": GFX1031,
    "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 12868124672\n",
    "sys/class/drm/renderD128/device/mem_info_vram_total": "0\n",
    "sys/class/drm/renderD128/device/mem_info_vram_used": "655360000\n",
    "sys/class/drm/renderD128/device/mem_info_gtt_total": "8000000000\n",
    "sys/class/drm/renderD128/device/revision": "0xc1\n",
    "sys/class/drm/renderD128/device/product_name": "AMD Radeon RX 6700 XT\n",
    "sys/bus/pci/devices/0000:03:00.0/class": "0x030000\n",
    "sys/bus/pci/devices/0000:03:00.0/vendor": "0x1002\n",
    "sys/bus/pci/devices/0000:03:00.0/device": "0x73df\n",
    "sys/module/amdgpu/version": "6.12\n",
    "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/a/memory.max": "8000000000\n",
    "sys/fs/cgroup/a/memory.current": "1000000000\n",
    "sys/fs/cgroup/a/memory.stat": "inactive_file 1000\n",
    "sys/fs/cgroup/cpu/b/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu/b/cpu.cfs_period_us": "100000\n",
    "usr/share/libdrm/amdgpu.ids": "73DF,\tC1,\tAMD Radeon RX 6700 XT\n",
    "proc/cpuinfo": "model name\t: AMD Ryzen 7\nflags\t\t: avx2\n",
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
    "proc/self/cgroup": "0::/a\n4:cpu:/b\n",
    "proc/cmdline": "iommu=pt\n",
    "proc/version": "Linux\n",
    "proc/1/cgroup": "0::/\n",
    "proc/sys/kernel/osrelease": "6.12.9\n",
    "proc/sys/kernel/numa_balancing": "0\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  580.82.07  x\n",
    "etc/os-release": "ID=debian\n",
    "etc/group": "render:x:992:sam\n",
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/modprobe.d/a.conf": "options amdgpu x=1\n",
    "etc/environment": "HSA_OVERRIDE_GFX_VERSION=10.3.0\n",
    "etc/pip.conf": "[install]\nconstraint = /etc/pins.txt\n",
    "etc/pins.txt": "torch==2.13.0\n",
    "opt/rocm/.info/version": "7.2.1\n",
}
DAMAGES = {
    "empty": b"",
    "binary": b"\xff\xfe\x00\xd8 \x80key \xb2value 1\n\x00",
    "words": b"not what the kernel writes: a b:c = -- %\n",
    "zeros": b"0 0\n",
    "huge": b"9" * 5000 + b"\n",
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_whole_tree_is_read(root):
    machine = detect(root=root)
    assert machine.accelerators[0].name == "AMD Radeon RX 6700 XT"
    assert machine.host.memory_bytes == 8_000_000_000
    assert machine.software.pinned == "torch==2.13.0"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "damage", [*DAMAGES, "a folder", "an error of the disk", "a link to nowhere"]
)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_no_crash(root, name, damage):
    file = root / name
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage == "an error of the disk":
        file.symlink_to("/proc/self/mem")  # reading its beginning answers EIO
    elif damage == "a link to nowhere":
        file.symlink_to(root / "nowhere")
    else:
        file.write_bytes(DAMAGES[damage])
    machine = detect(root=root)
    json.loads(machine.model_dump_json())


def bloomery(
    *words: str, folder: Path, **changes: str | None
) -> subprocess.CompletedProcess[bytes]:
    environment = {
        **os.environb,
        **{name.encode(): os.fsencode(v) for name, v in changes.items() if v is not None},
    }
    for name in (name for name, value in changes.items() if value is None):
        environment.pop(name.encode(), None)
    command = [sys.executable, "-m", "bloomery", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False, timeout=60
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"HOME": None, "LOGNAME": None, "USER": None},
        {"HOME": "/nonexistent"},
        {"HOME": ""},
        {"LD_LIBRARY_PATH": os.fsdecode(b"/opt/\xff\xfe")},
        {"HIP_VISIBLE_DEVICES": os.fsdecode(b"\xff")},
        {"PATH": ""},
        {"PIP_CONSTRAINT": "/dev/nonexistent"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_a_strange_environment_is_no_crash(tmp_path, changes):
    done = bloomery("doctor", "--bundle", "b.json", folder=tmp_path, **changes)
    assert done.returncode in (0, 1), done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr


def test_a_user_without_a_name_or_a_home(tmp_path):
    """As in a container that was started with --user and a number that /etc/passwd does not have."""
    done = bloomery_as("import pwd\npwd.getpwuid = lambda number: {}[number]\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bundle     b.json" in done.stdout


def bloomery_as(before: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")
    }
    script = before + "from bloomery.cli import main; main(['doctor', '--bundle', 'b.json'])"
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_working_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    script = (
        f"import os; os.mkdir({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"
    )
    script += "from bloomery.cli import main; main(['doctor'])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)
