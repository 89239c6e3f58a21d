"""The doctor's rules about reaching a GPU: driver, devices, groups, containers, WSL, Slurm, variables that hide it."""

import re
import shlex
from collections.abc import Iterator
from typing import Literal

from bloomery.hardware.doctor.finding import AGAIN, PROBE, Finding, Fix, has_amd
from bloomery.hardware.doctor.symptoms import Level
from bloomery.hardware.fitting import best_device
from bloomery.hardware.machine import Display, Host, Machine
from bloomery.hardware.visible import MASKS, hidden

AMD, NVIDIA = 0x1002, 0x10DE
SELINUX = ("fedora", "rhel", "centos", "rocky", "almalinux")


def driver(machine: Machine) -> Iterator[Finding]:
    """The kernel's side, outside of containers: amdgpu loaded, NVIDIA's module there."""
    host = machine.host
    if host.around.container or host.around.wsl or machine.accelerators:
        return
    amd = [display for display in host.displays if display.vendor == AMD]
    nvidia = [display for display in host.displays if display.vendor == NVIDIA]
    if amd and host.driver.blacklisted:
        yield _blacklisted(amd[0], host)
    elif amd and "nomodeset" in host.driver.boot.split():
        yield Finding(
            id="driver-switched-off",
            level="stops",
            what="the kernel was started with nomodeset, which keeps graphics drivers out",
            evidence=f"nomodeset is on the kernel's command line; a card at {amd[0].address} waits",
            mend=("sudo sed -i.bak 's/ *nomodeset//' /etc/default/grub", _boot_again("grub", host.distribution)),
        )
    elif amd and not host.driver.amdgpu:
        yield Finding(
            id="driver-not-loaded",
            level="stops",
            what="the amdgpu driver is not loaded",
            evidence=f"an AMD card at {amd[0].address} is driven by {amd[0].driver or 'nothing'} (Linux "
            f"{host.driver.kernel})",
            mend=("sudo modprobe amdgpu  # when it is refused: sudo dmesg | grep amdgpu",),
        )
    if nvidia and not host.driver.nvidia:
        yield Finding(
            id="nvidia-driver-missing",
            level="stops",
            what="NVIDIA's driver is not loaded",
            evidence=f"a card at {nvidia[0].address} is driven by {nvidia[0].driver or 'nothing'}",
            mend=(
                "sudo apt install nvidia-driver-580-open && sudo reboot  # on Ubuntu; other systems name it otherwise",
            ),
            prove="nvidia-smi",
        )


def _blacklisted(display: Display, host: Host) -> Finding:
    """By a line of a file of modprobe's, or by a parameter of the boot loader's."""
    says, others = host.driver.blacklisted, display.driver not in ("", "amdgpu")
    machines = " for virtual machines" if display.driver == "vfio-pci" else ""
    held = f"; {display.driver} holds the card {display.address}{machines}" if others else ""
    if says.startswith("/"):
        mend = [f"sudo sed -i.bak -E '/^ *(blacklist|install) +amdgpu( |$)/d' {shlex.quote(says)}"]
    else:
        edit = r"s/((modprobe\.blacklist|module_blacklist)=[^ \"]*)\bamdgpu\b,?/\1/"
        mend = [f"sudo sed -i.bak -E '{edit}' /etc/default/grub"]
    if display.driver == "vfio-pci":
        mend.append("# take the card's number out of `options vfio-pci ids=` in the same folder")
    return Finding(
        id="driver-blacklisted",
        level="stops",
        what="the amdgpu driver is kept from loading",
        evidence=f"{says} says so{held}",
        mend=(*mend, _boot_again("initramfs" if says.startswith("/") else "grub", host.distribution)),
    )


def _boot_again(what: Literal["initramfs", "grub"], distribution: str) -> str:
    """Makes the kernel's early files, or the boot loader's list, anew as the distribution does, and boots."""
    name = distribution.partition(" ")[0]
    dracut = name in (*SELINUX, "sles", "opensuse-leap", "opensuse-tumbleweed")
    if what == "initramfs":
        made = "dracut --force" if dracut else "mkinitcpio -P" if name == "arch" else "update-initramfs -u"
    elif name in SELINUX:
        made = "grub2-mkconfig -o /boot/grub2/grub.cfg"
    elif dracut:
        made = "update-bootloader"
    else:
        made = "grub-mkconfig -o /boot/grub/grub.cfg" if name == "arch" else "update-grub"
    return f"sudo {made} && sudo reboot"


def compute_device(machine: Machine) -> Iterator[Finding]:
    """/dev/kfd is missing although the driver has the card."""
    around, access = machine.host.around, machine.host.access
    unasked = any(one.vendor == "amd" and one.access is None for one in machine.accelerators)  # a record that is older
    if access.kfd != "absent" or not has_amd(machine) or around.wsl or unasked:
        return
    if around.container:
        masked = f"; {around.masked_gpus} GPU is masked, not broken" if around.masked_gpus else ""
        yield Finding(
            id="container-without-gpu",
            level="note" if machine.software.build == "cpu" else "stops",
            what=f"this {around.container} container was started without the GPU"
            + ("'s compute device" if machine.accelerators else ""),
            evidence=f"/dev/kfd is not in it{masked}",
            mend=("bloomery doctor --docker  # the run line, to be typed outside of the container",),
        )
    elif machine.host.driver.amdgpu:
        yield Finding(
            id="no-compute-device",
            level="stops",
            what="the driver has the card, but offers no /dev/kfd to compute with",
            evidence=f"amdgpu is loaded on Linux {machine.host.driver.kernel}, /dev/kfd is absent",
            mend=("sudo dmesg | grep -i kfd  # says whether this chip or this kernel lacks it",),
        )


def hung(machine: Machine) -> Iterator[Finding]:
    """Opening a device never returned: the driver waits for a GPU that does not answer."""
    access = machine.host.access
    nodes = [device.node for device in machine.accelerators if device.access == "hung"]
    silent = [*(["/dev/kfd"] if access.kfd == "hung" else []), *nodes]
    if silent:
        yield Finding(
            id="driver-hung",
            level="stops",
            what="the GPU's driver has hung: opening its devices never returns",
            evidence=f"{' and '.join(silent[:3])} gave no answer",
            mend=("sudo dmesg | grep -iE 'amdgpu|kfd' | tail  # why: a ring's timeout, a failed reset", "sudo reboot"),
        )


def idle_card(machine: Machine) -> Iterator[Finding]:
    """An AMD card with its driver and /dev/kfd, and yet nothing that computes."""
    access, around = machine.host.access, machine.host.around
    amd = [display for display in machine.host.displays if display.vendor == AMD and display.driver == "amdgpu"]
    elsewhere = around.wsl or around.slurm or around.site or around.masked_gpus
    if machine.accelerators or not amd or elsewhere or access.kfd in ("absent", "hung"):
        return
    yield Finding(
        id="card-cannot-compute",
        level="stops" if machine.software.build == "rocm" else "note",
        what="an AMD GPU is here and its driver, but the kernel offers none to compute with: all runs on the CPU",
        evidence=f"amdgpu has the card {amd[0].address}, /sys/class/kfd lists no GPU",
        mend=("sudo dmesg | grep -i kfd  # says why: a chip before gfx8, too old a kernel, no PCIe atomics",),
    )


def silent_nvidia(machine: Machine) -> Iterator[Finding]:
    """NVIDIA's card is here, and nvidia-smi lists none: the container, WSL, or a driver that is half updated."""
    around, loaded = machine.host.around, machine.host.driver.nvidia
    cards = [display for display in machine.host.displays if display.vendor == NVIDIA]
    through_windows = around.wsl and around.dxg and machine.software.build == "cuda"
    if machine.accelerators or around.slurm or around.site or not (cards or through_windows):
        return
    level: Level = "note" if machine.software.build == "cpu" else "stops"
    if around.container and not around.wsl:
        yield Finding(
            id="container-without-gpu",
            level=level,
            what=f"this {around.container} container was started without the GPU",
            evidence=f"a card is at {cards[0].address}, nvidia-smi lists none here",
            mend=("docker run --gpus all ...  # outside; `bloomery doctor --docker` prints the whole line",),
            prove="nvidia-smi",
        )
    elif around.wsl:
        yield Finding(
            id="wsl-nvidia",
            level=level,
            what="under WSL nvidia-smi lists no GPU: the driver is Windows' own, and must not be installed in WSL",
            evidence="/dev/dxg is there, /usr/lib/wsl/lib/nvidia-smi lists nothing",
            mend=(
                "wsl.exe --shutdown  # after NVIDIA's driver for Windows was installed",
                "/usr/lib/wsl/lib/nvidia-smi",
            ),
        )
    elif loaded:
        yield Finding(
            id="nvidia-silent",
            level=level,
            what="NVIDIA's driver is loaded, and nvidia-smi lists no GPU",
            evidence=f"driver {loaded}; a card is at {cards[0].address}",
            mend=("nvidia-smi 2>&1 | bloomery doctor --explain -  # what it says, explained", "sudo reboot"),
            prove="nvidia-smi",
        )


def groups(machine: Machine) -> Iterator[Finding]:
    """/dev/kfd or a render node may not be opened by this user."""
    access, around = machine.host.access, machine.host.around
    nodes = [device.node for device in machine.accelerators if device.access == "denied" and device.vendor == "amd"]
    if access.kfd != "denied" and not nodes:
        return
    closed = " and ".join([*(["/dev/kfd"] if access.kfd == "denied" else []), *nodes])
    group = access.kfd_group or "render"
    if around.container:
        number = f"{access.kfd_gid}" if access.kfd_gid is not None else "$(stat -c %g /dev/kfd)"
        yield Finding(
            id="container-group",
            level="stops",
            what="the container may not open the GPU's devices",
            evidence=f"{closed} {_belong(closed)} to group {number} of the host, and this process is not in it",
            mend=(f"docker run --group-add {number} ...  # outside; `bloomery doctor --docker` prints the whole line",),
        )
    elif group in access.groups:
        selinux = machine.host.distribution.partition(" ")[0] in SELINUX
        yield Finding(
            id="access-denied",
            level="stops",
            what=f"{closed} may not be opened, although this user is in the group {group}",
            evidence=f"groups: {', '.join(access.groups)}" + ("; this system has SELinux" if selinux else ""),
            mend=(
                "sudo ausearch -m avc -ts recent | grep -E 'kfd|renderD'  # SELinux's refusals"
                if selinux
                else f"ls -l {closed.replace(' and ', ' ')}  # an access list or a udev rule forbids it",
            ),
        )
    elif group in access.listed_groups:
        yield Finding(
            id="login-again",
            level="stops",
            what=f"you were added to the group {group}, but this login is older",
            evidence=f"/etc/group has you in {group}; this process runs in {', '.join(access.groups)}",
            mend=(f"newgrp {group}  # in this shell; for all others log out and in again",),
        )
    else:
        yield Finding(
            id="not-in-group",
            level="stops",
            what=f"you may not open the GPU: {closed} {_belong(closed)} to the group {group}",
            evidence=f"this process runs in {', '.join(access.groups)}",
            mend=("sudo usermod -a -G render,video $LOGNAME", f"newgrp {group}  # or log out and in again"),
        )


def _belong(closed: str) -> str:
    return "belong" if " and " in closed else "belongs"


def masked(machine: Machine) -> Iterator[Finding]:
    """GPUs that the control group hides from a process that has others."""
    count = machine.host.around.masked_gpus
    if count and machine.accelerators:
        yield Finding(
            id="masked-gpus",
            level="note",
            what=f"{count} more {'GPU is' if count == 1 else 'GPUs are'} here and masked: not yours, not broken",
            evidence="the kernel lists them, the control group of this job or container hides them",
            mend=("# ask for them when the job or the container is started",),
        )


def wsl(machine: Machine) -> Iterator[Finding]:
    around, software = machine.host.around, machine.software
    if not around.wsl or machine.accelerators:
        return
    if not around.dxg:
        yield Finding(
            id="wsl-without-gpu",
            level="stops",
            what="this WSL has no way to the GPU",
            evidence="/dev/dxg is missing",
            mend=("wsl.exe --update  # then, in Windows: wsl --shutdown; WSL 2 is needed",),
        )
    elif software.build == "rocm" and software.environment.get("HSA_ENABLE_DXG_DETECTION") != "1":
        yield Finding(
            id="wsl-detection-off",
            level="stops",
            what="under WSL ROCm looks for the card only when it is told to",
            evidence="/dev/dxg is there, HSA_ENABLE_DXG_DETECTION is not set",
            mend=(
                "export HSA_ENABLE_DXG_DETECTION=1  # and put that line into ~/.bashrc",
                "ls /opt/rocm/lib/librocdxg.so  # AMD's ROCm for WSL brings it; Ubuntu 24.04",
            ),
            prove=PROBE,
        )


def hiding(machine: Machine) -> Iterator[Finding]:
    """Variables that choose among GPUs."""
    environment = machine.software.environment
    named = [name for name in MASKS if environment.get(name)]
    everything = hidden(machine) if machine.accelerators else ""
    if len(named) > 1 and named[0] == "ROCR_VISIBLE_DEVICES" and has_amd(machine):
        left = len(environment[named[0]].split(","))
        beyond = [int(word) for word in re.findall(r"\d+", environment[named[1]]) if int(word) >= left]
        yield Finding(
            id="two-maskings",
            level="stops" if beyond or everything else "note",
            what=f"{named[0]} and {named[1]} both choose GPUs: the second counts within what the first leaves",
            evidence=", ".join(f"{name}={environment[name]}" for name in named),
            mend=(f"unset {named[1]}  # keep one",),
            prove=PROBE,
            fixes=_fixes(machine, named[1]),
        )
    elif everything:
        yield Finding(
            id="all-gpus-hidden",
            level="stops",
            what=f"{everything} hides every GPU",
            evidence=f"{everything}={environment[everything]!r}" + _set_in(machine, everything),
            mend=(f"unset {everything}",),
            fixes=_fixes(machine, everything),
        )


def processor_graphics(machine: Machine) -> Iterator[Finding]:
    """An iGPU is device 0 and the card another."""
    amd = [device for device in machine.accelerators if device.vendor == "amd"]
    best = best_device(machine)
    chosen = any(machine.software.environment.get(name) for name in MASKS)
    if len(amd) < 2 or not amd[0].integrated or best is None or best.integrated or chosen:
        return
    yield Finding(
        id="igpu-is-device-0",
        level="note",
        what=f"device 0 is the processor's graphics ({amd[0].arch}), the card is device {best.index}",
        evidence=f"{amd[0].name} before {best.name}; other programs take device 0 and crash, Bloomery takes the card",
        mend=(f"export HIP_VISIBLE_DEVICES={best.index}  # or switch the graphics off in the firmware",),
        prove=PROBE,
    )


def slurm(machine: Machine) -> Iterator[Finding]:
    around = machine.host.around
    if machine.accelerators:
        allotted = around.slurm.get("SLURM_GPUS_ON_NODE", "")
        if allotted.isdigit() and int(allotted) > len(machine.accelerators):
            yield Finding(
                id="slurm-shows-fewer",
                level="note",
                what=f"the job has {allotted} GPUs on this node, this task sees {len(machine.accelerators)}",
                evidence="--gpus-per-task or --gpu-bind gives each task its own; each takes device 0 then",
                mend=("srun --gpu-bind=none ...  # shows every task all of them",),
            )
    elif around.slurm:
        yield Finding(
            id="slurm-without-gpu",
            level="stops",
            what="this Slurm job was given no GPU",
            evidence=f"job {around.slurm.get('SLURM_JOB_ID', '?')}; no GPU may be opened",
            mend=("srun --gpus-per-task=1 --gpu-bind=closest ...  # or sbatch --gpus-per-node=8",),
        )
    elif around.site:
        yield Finding(
            id="login-node",
            level="stops",
            what=f"this is a login node of {around.site.capitalize()}: it has no GPU to train on",
            evidence="no GPU is here and no Slurm job runs",
            mend=("salloc -A ACCOUNT -N 1 -t 00:30:00  # then bloomery doctor on the node",),
            prove=AGAIN,
        )


def nothing(machine: Machine) -> Iterator[Finding]:
    """No GPU at all: not an illness, but what it means should be said."""
    around = machine.host.around
    elsewhere = around.wsl or around.slurm or around.site or around.masked_gpus
    if machine.accelerators or elsewhere or any(d.vendor in (AMD, NVIDIA) for d in machine.host.displays):
        return
    shown = ", ".join(f"{display.driver or 'no driver'} at {display.address}" for display in machine.host.displays)
    yield Finding(
        id="no-gpu",
        level="note",
        what="no GPU here can train: all runs on the CPU, which suits models of a few million parameters",
        evidence=f"display: {shown}" if shown else "no display or accelerator is on the bus",
        mend=(
            "bloomery demo  # a small model, on this machine",
            'bloomery plan go-coder-125m --gpu "RX 6700 XT"  # what a card would do, before you buy one',
        ),
    )


def _set_in(machine: Machine, name: str) -> str:
    lines = [f"{one.file} line {one.line}" for one in machine.software.settings if one.name == name]
    return ", set in " + " and ".join(lines) if lines else ""


def _fixes(machine: Machine, name: str) -> tuple[Fix, ...]:
    return tuple(
        Fix(kind="unset", name=name, file=one.file, line=one.line)
        for one in machine.software.settings
        if one.name == name
    )
