"""The doctor's rules about the machine around the GPU: memory of others, shared memory, NUMA, IOMMU, compiler, disk."""

import re
from collections.abc import Iterator

from bloomery.core.units import GIB, format_bytes
from bloomery.hardware.doctor.finding import PROBE, Finding
from bloomery.hardware.fitting import best_device
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile

SMALL_SHM = GIB
USED_SHARE, USED_BYTES = 0.10, 1.5 * GIB  # of a card, by others: a desktop takes about half a GiB
LITTLE_DISK, NO_DISK = 10 * GIB, GIB
CARVED_OUT = 0.5  # of what the driver lends


def shared_memory(machine: Machine) -> Iterator[Finding]:
    around, size = machine.host.around, machine.host.around.shared_memory_bytes
    if size is None or size >= SMALL_SHM or not (around.container or len(machine.accelerators) > 1):
        return
    several = len(machine.accelerators) > 1
    yield Finding(
        id="shm-small",
        level="stops" if several else "note",
        what="/dev/shm is too small" + (" for several GPUs" if several else " for several GPUs or loader processes"),
        evidence=f"{format_bytes(size)}; ranks of one machine exchange through it",
        mend=(
            "docker run --ipc=host ...  # or --shm-size=16g: bloomery doctor --docker"
            if around.container
            else "sudo mount -o remount,size=16G /dev/shm",
        ),
        prove="df -h /dev/shm",
    )


def numa(machine: Machine) -> Iterator[Finding]:
    if machine.host.driver.numa_balancing and len(machine.accelerators) > 1:
        yield Finding(
            id="numa-balancing",
            level="slows",
            what="the kernel moves memory between processors while the GPUs use it",
            evidence="kernel.numa_balancing is 1",
            mend=("sudo sysctl kernel.numa_balancing=0  # to keep it, a line in /etc/sysctl.d/",),
            prove="sysctl kernel.numa_balancing",
        )


def iommu(machine: Machine) -> Iterator[Finding]:
    """RCCL between cards without xGMI can hang unless the IOMMU passes their traffic through."""
    host = machine.host
    cards = [one for one in machine.accelerators if one.vendor == "amd" and not one.integrated]
    joined = len({card.hive_id for card in cards}) == 1 and cards and cards[0].hive_id
    through = re.search(r"\biommu=(pt|off)\b|\biommu\.passthrough=1\b|\bamd_iommu=off\b", host.driver.boot)
    if len(cards) < 2 or joined or through or host.around.wsl or "cray" in host.driver.kernel:
        return
    yield Finding(
        id="iommu-not-passthrough",
        level="slows",
        what=f"{len(cards)} GPUs talk through the IOMMU: that is slow, and on some boards the first all-reduce hangs",
        evidence="iommu=pt is not on the kernel's command line"
        + (f" ({host.driver.boot})" if host.driver.boot else ""),
        mend=(
            """sudo sed -i.bak 's/^GRUB_CMDLINE_LINUX="/&amd_iommu=on iommu=pt /' /etc/default/grub""",
            "sudo update-grub && sudo reboot  # until then: export NCCL_P2P_DISABLE=1",
        ),
        prove="grep -o iommu=pt /proc/cmdline",
    )


def used_by_others(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    if device is None or device.integrated or device.memory_used_bytes < USED_BYTES:
        return
    if device.memory_used_bytes < USED_SHARE * device.memory_bytes:
        return
    show = "nvidia-smi" if device.vendor == "nvidia" else f"fuser -v /dev/kfd {device.node}".rstrip()
    yield Finding(
        id="gpu-memory-used",
        level="slows",
        what=f"others hold {device.memory_used_bytes / GIB:.1f} of the card's {device.memory_bytes / GIB:.1f} GiB",
        evidence=f"GPU {device.index}, {device.name}",
        mend=(f"{show}  # who they are; end them, or train with a smaller micro-batch",),
    )


def lent_memory(machine: Machine) -> Iterator[Finding]:
    """Processor graphics: PyTorch shows the carve-out, training may use what the driver lends."""
    device = best_device(machine)
    if device is None or not device.integrated or device.vendor != "amd":
        return
    if device.memory_bytes > CARVED_OUT * device.gtt_bytes:
        return
    yield Finding(
        id="shared-memory-gpu",
        level="note",
        what=f"this GPU shares the machine's memory: {device.gtt_bytes / GIB:.1f} GiB that the driver lends",
        evidence=f"{device.memory_bytes / GIB:.1f} GiB are carved out, and some programs show those alone",
        mend=("# more: amdgpu.gttsize or ttm.pages_limit on the kernel's command line",),
    )


def compiler(machine: Machine) -> Iterator[Finding]:
    if machine.host.compiler is not None or machine.host.system != "Linux":
        return
    device = best_device(machine)
    with_one = machine.host.model_copy(update={"compiler": "/usr/bin/g++"})
    if not build_profile(machine.model_copy(update={"host": with_one})).compile.value:
        return  # it would not be used
    yield Finding(
        id="no-compiler",
        level="slows",
        what="there is no C++ compiler: training runs uncompiled"
        + (", 10 to 35% slower on a CPU" if device is None else ""),
        evidence="neither $CXX nor g++, c++ or clang++ is on PATH",
        mend=(_install_compiler(machine.host.distribution),),
        prove=PROBE,
    )


def _install_compiler(distribution: str) -> str:
    name = distribution.partition(" ")[0]
    if name in ("fedora", "rhel", "centos", "rocky", "almalinux"):
        return "sudo dnf install gcc-c++"
    if name == "arch":
        return "sudo pacman -S gcc"
    return "sudo zypper install gcc-c++" if name in ("sles", "opensuse-leap") else "sudo apt install g++"


def disk(machine: Machine) -> Iterator[Finding]:
    free = machine.host.disk_free_bytes
    if free < LITTLE_DISK:
        yield Finding(
            id="little-disk",
            level="stops" if free < NO_DISK else "note",
            what=f"{format_bytes(free)} are free where runs are written",
            evidence="a checkpoint holds weights and optimizer: 12 bytes a parameter, several are kept",
            mend=("bloomery runs  # what each run takes", "df -h . ~/.cache"),
            prove="df -h .",
        )
