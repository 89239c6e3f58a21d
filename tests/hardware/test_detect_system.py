"""Drivers, rights, containers and clusters, read from constructed trees."""

import os
import sys
import time
from pathlib import Path

import pytest

from bloomery.core.child import output_of
from bloomery.hardware import detect as detect_system
from bloomery.hardware.detect import (
    newest,
    openings,
    read_access,
    read_driver,
    read_surroundings,
    system_rocm,
    version_key,
)
from kfd_trees import drm_device, write

CLUSTER = (
    "SLURM_CLUSTER_NAME",
    "LMOD_SYSTEM_NAME",
    "PAWSEY_CLUSTER",
    "LOADEDMODULES",
    "ROCM_PATH",
    "ROCM_HOME",
)
CONTAINERS = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "KUBERNETES_SERVICE_HOST")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (*CLUSTER, *CONTAINERS):
        monkeypatch.delenv(name, raising=False)


def test_a_version_is_never_read_as_one_digit():
    assert version_key("7.2.4") < version_key("7.14.0") < version_key("10.1.0")
    assert newest(["6.4.0-47", "10.1.0", "7.14", "rocm", "6"]) == "10.1.0"
    assert newest([]) == ""


def test_the_newest_rocm_of_any_source_counts(tmp_path, monkeypatch):
    write(tmp_path / "opt/rocm/.info/version", "7.2.0-43\n")
    assert system_rocm(tmp_path) == "7.2.0"
    (tmp_path / "opt/rocm-10.1.0").mkdir()
    assert system_rocm(tmp_path) == "10.1.0"
    monkeypatch.setenv("LOADEDMODULES", "PrgEnv-gnu/8.7.0:rocm/11.0.2")
    assert system_rocm(tmp_path) == "11.0.2"


def test_a_distributions_own_rocm_counts_too(tmp_path):
    write(tmp_path / "usr/lib/x86_64-linux-gnu/libamdhip64.so.5.7.31921", "")
    assert system_rocm(tmp_path) == "5.7"
    write(tmp_path / "opt/rocm/.info/version", "6.1.2-129\n")
    assert system_rocm(tmp_path) == "6.1.2"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024",
            "550.54.14",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build",
            "580.82.07",
        ),
    ],
)
def test_nvidias_driver(tmp_path, line, version):
    write(tmp_path / "proc/driver/nvidia/version", line + "\nGCC version: 12\n")
    assert read_driver(tmp_path).nvidia == version


def test_an_in_tree_driver_has_no_version(tmp_path):
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    driver = read_driver(tmp_path)
    assert (driver.amdgpu, driver.amdgpu_version) == (True, "")
    write(tmp_path / "sys/module/amdgpu/version", "6.12.12\n")
    assert read_driver(tmp_path).amdgpu_version == "6.12.12"


@pytest.mark.parametrize(
    ("text", "kept_out"),
    [
        ("blacklist amdgpu\n", True),
        ("# blacklist amdgpu\n", False),
        ("blacklist amdgpu_old\n", False),
        ("install amdgpu /bin/false\n", True),
        ("options amdgpu ppfeaturemask=0xffffffff\n", False),
    ],
)
def test_a_file_keeps_the_driver_out(tmp_path, text, kept_out):
    write(tmp_path / "etc/modprobe.d/gpu.conf", text)
    assert read_driver(tmp_path).blacklisted == ("/etc/modprobe.d/gpu.conf" if kept_out else "")


def test_boot_words_that_matter(tmp_path):
    line = "BOOT_IMAGE=/vmlinuz root=UUID=1 ro quiet amd_iommu=on iommu=pt nomodeset amdgpu.mcbp=0 nomodule\n"
    write(tmp_path / "proc/cmdline", line)
    write(tmp_path / "proc/sys/kernel/numa_balancing", "1\n")
    driver = read_driver(tmp_path)
    assert driver.boot == "amd_iommu=on iommu=pt nomodeset amdgpu.mcbp=0"
    assert driver.numa_balancing is True
    write(tmp_path / "proc/cmdline", "quiet modprobe.blacklist=nouveau,amdgpu\n")
    assert "amdgpu in /proc/cmdline" in read_driver(tmp_path).blacklisted


def test_groups_of_the_process_and_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [27, 4321])
    write(
        tmp_path / "etc/passwd", "root:x:0:0::/root:/bin/sh\nsam:x:1000:1000::/home/sam:/bin/bash\n"
    )
    write(
        tmp_path / "etc/group",
        "sudo:x:27:sam\nrender:x:992:ci,sam\nvideo:x:44:sampson\nsam:x:1000:\n",
    )
    access, _ = read_access(tmp_path)
    assert access.groups == ("sudo", "sam", "4321")
    assert access.listed_groups == ("sam", "sudo", "render")


def test_devices_are_really_opened(tmp_path):
    write(tmp_path / "dev/kfd", "")
    drm_device(tmp_path, 128)
    access, nodes = read_access(tmp_path)
    assert access.kfd == "open"
    assert nodes == {"/dev/dri/renderD128": "open"}
    assert access.kfd_gid == access.render_gid == os.getegid()
    assert read_access(tmp_path / "dev")[0].kfd == "absent"


def test_a_device_that_refuses_is_denied(tmp_path):
    folder = tmp_path / "kfd"  # opening a folder for writing fails for every user, root included
    folder.mkdir()
    assert openings([folder, tmp_path / "gone"]) == {folder: "denied", tmp_path / "gone": "absent"}


def test_a_driver_that_hangs_is_said_and_not_waited_for(tmp_path, monkeypatch):
    fifo = tmp_path / "kfd"
    os.mkfifo(fifo)
    monkeypatch.setattr(detect_system, "OPEN_SECONDS", 0.5)
    # waits forever
    monkeypatch.setattr(
        detect_system, "OPENER", "import os, sys; os.open(sys.argv[1], os.O_RDONLY)"
    )
    began = time.monotonic()
    assert openings([fifo]) == {fifo: "hung"}
    assert time.monotonic() - began < 60  # it would wait forever


def test_an_answer_has_a_time_limit():
    assert output_of([sys.executable, "-c", "print('here')"], seconds=30) == "here\n"
    assert output_of([sys.executable, "-c", "raise SystemExit(1)"], seconds=30) == ""
    assert output_of(["/no/such/program"], seconds=1) == ""
    assert output_of([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2) is None


def _docker(root: Path) -> None:
    write(root / ".dockerenv", "")


def _podman(root: Path) -> None:
    write(root / "run/.containerenv", "")


def _lxc(root: Path) -> None:
    write(root / "run/systemd/container", "lxc\n")


def _kubernetes(root: Path) -> None:
    write(root / "proc/1/cgroup", "0::/kubepods/besteffort/pod12\n")


@pytest.mark.parametrize(
    ("make", "kind"),
    [(_docker, "docker"), (_podman, "podman"), (_lxc, "lxc"), (_kubernetes, "kubernetes")],
)
def test_containers_are_known(tmp_path, make, kind):
    assert read_surroundings(tmp_path).container == ""
    make(tmp_path)
    assert read_surroundings(tmp_path).container == kind


def test_apptainer_says_so_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/torch.sif")
    assert read_surroundings(tmp_path).container == "apptainer"


def test_wsl(tmp_path):
    write(
        tmp_path / "proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@build)\n"
    )
    write(tmp_path / "dev/dxg", "")
    around = read_surroundings(tmp_path)
    assert (around.wsl, around.dxg) == (True, True)


def test_a_slurm_job_on_frontier(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "frontier")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("LOADEDMODULES", "rocm/7.1.1:craype-accel-amd-gfx90a")
    around = read_surroundings(tmp_path)
    assert around.site == "frontier"
    assert around.slurm["SLURM_JOB_ID"] == "77"
    assert around.modules == ("rocm/7.1.1", "craype-accel-amd-gfx90a")
