"""The doctor's rules about reaching a GPU: driver, devices, groups, containers, WSL, Slurm, variables that hide it; and
the line that starts a container with this machine's GPUs in it.
"""

import re
import shlex
from collections.abc import Iterator
from typing import Any, Literal

from bloomery.hardware.doctor.symptoms import Finding, Level, found, vendors
from bloomery.hardware.machine import MASKS, Display, Host, Machine, hidden
from bloomery.hardware.profile import best_device

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
        yield found("driver-switched-off", address=amd[0].address, boot=_boot_again("grub", host.distribution))
    elif amd and not host.driver.amdgpu:
        holder = amd[0].driver or "nothing"
        yield found("driver-not-loaded", address=amd[0].address, holder=holder, kernel=host.driver.kernel)
    if nvidia and not host.driver.nvidia:
        yield found("nvidia-driver-missing", address=nvidia[0].address, holder=nvidia[0].driver or "nothing")


def _blacklisted(display: Display, host: Host) -> Finding:
    """By a line of a file of modprobe's, or by a parameter of the boot loader's."""
    says, others = host.driver.blacklisted, display.driver not in ("", "amdgpu")
    machines = " for virtual machines" if display.driver == "vfio-pci" else ""
    if says.startswith("/"):
        fix = [f"sudo sed -i.bak -E '/^ *(blacklist|install) +amdgpu( |$)/d' {shlex.quote(says)}"]
    else:
        edit = r"s/((modprobe\.blacklist|module_blacklist)=[^ \"]*)\bamdgpu\b,?/\1/"
        fix = [f"sudo sed -i.bak -E '{edit}' /etc/default/grub"]
    if display.driver == "vfio-pci":
        fix.append("# take the card's number out of `options vfio-pci ids=` in the same folder")
    fix.append(_boot_again("initramfs" if says.startswith("/") else "grub", host.distribution))
    held = f"; {display.driver} holds the card {display.address}{machines}" if others else ""
    return found("driver-blacklisted", fix=fix, says=says, held=held)


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
    if access.kfd != "absent" or "amd" not in vendors(machine) or around.wsl or unasked:
        return
    if around.container:
        masked = f"; {around.masked_gpus} GPU is masked, not broken" if around.masked_gpus else ""
        yield found(
            "container-without-gpu",
            level="note" if machine.software.build == "cpu" else "blocks",
            container=around.container,
            part="'s compute device" if machine.accelerators else "",
            evidence=f"/dev/kfd is not in it{masked}",
        )
    elif machine.host.driver.amdgpu:
        yield found("no-compute-device", kernel=machine.host.driver.kernel)


def hung(machine: Machine) -> Iterator[Finding]:
    """Opening a device never returned: the driver waits for a GPU that does not answer."""
    nodes = [device.node for device in machine.accelerators if device.access == "hung"]
    silent = [*(["/dev/kfd"] if machine.host.access.kfd == "hung" else []), *nodes]
    if silent:
        yield found("driver-hung", silent=" and ".join(silent[:3]))


def idle_card(machine: Machine) -> Iterator[Finding]:
    """An AMD card with its driver and /dev/kfd, and yet nothing that computes."""
    access, around = machine.host.access, machine.host.around
    amd = [display for display in machine.host.displays if display.vendor == AMD and display.driver == "amdgpu"]
    elsewhere = around.wsl or around.slurm or around.site or around.masked_gpus
    if machine.accelerators or not amd or elsewhere or access.kfd in ("absent", "hung"):
        return
    level: Level = "blocks" if machine.software.build == "rocm" else "note"
    yield found("card-cannot-compute", level=level, address=amd[0].address)


def silent_nvidia(machine: Machine) -> Iterator[Finding]:
    """NVIDIA's card is here, and nvidia-smi lists none: the container, WSL, or a driver that is half updated."""
    around, loaded = machine.host.around, machine.host.driver.nvidia
    cards = [display for display in machine.host.displays if display.vendor == NVIDIA]
    through_windows = around.wsl and around.dxg and machine.software.build == "cuda"
    if machine.accelerators or around.slurm or around.site or not (cards or through_windows):
        return
    level: Level = "note" if machine.software.build == "cpu" else "blocks"
    if around.container and not around.wsl:
        yield found(
            "container-without-gpu",
            level=level,
            container=around.container,
            part="",
            evidence=f"a card is at {cards[0].address}, nvidia-smi lists none here",
            fix=("docker run --gpus all ...  # outside; `bloomery doctor --docker` prints the whole line",),
            verify="nvidia-smi",
        )
    elif around.wsl:
        yield found("wsl-nvidia", level=level)
    elif loaded:
        yield found("nvidia-silent", level=level, loaded=loaded, address=cards[0].address)


def groups(machine: Machine) -> Iterator[Finding]:
    """/dev/kfd or a render node may not be opened by this user."""
    access = machine.host.access
    nodes = [device.node for device in machine.accelerators if device.access == "denied" and device.vendor == "amd"]
    if access.kfd != "denied" and not nodes:
        return
    closed = " and ".join([*(["/dev/kfd"] if access.kfd == "denied" else []), *nodes])
    facts: dict[str, Any] = {
        "closed": closed,
        "belong": "belong" if " and " in closed else "belongs",
        "group": access.kfd_group or "render",
        "groups": ", ".join(access.groups),
    }
    if machine.host.around.container:
        gid = f"{access.kfd_gid}" if access.kfd_gid is not None else "$(stat -c %g /dev/kfd)"
        yield found("container-group", gid=gid, **facts)
    elif facts["group"] in access.groups:
        selinux = machine.host.distribution.partition(" ")[0] in SELINUX
        refusals = "sudo ausearch -m avc -ts recent | grep -E 'kfd|renderD'  # SELinux's refusals"
        rights = f"ls -l {closed.replace(' and ', ' ')}  # an access list or a udev rule forbids it"
        said = "; this system has SELinux" if selinux else ""
        yield found("access-denied", fix=(refusals if selinux else rights,), selinux=said, **facts)
    else:
        yield found("login-again" if facts["group"] in access.listed_groups else "not-in-group", **facts)


def masked(machine: Machine) -> Iterator[Finding]:
    """GPUs that the control group hides from a process that has others."""
    count = machine.host.around.masked_gpus
    if count and machine.accelerators:
        yield found("masked-gpus", count=count, gpus="GPU is" if count == 1 else "GPUs are")


def wsl(machine: Machine) -> Iterator[Finding]:
    around, software = machine.host.around, machine.software
    if not around.wsl or machine.accelerators:
        return
    if not around.dxg:
        yield found("wsl-without-gpu")
    elif software.build == "rocm" and software.environment.get("HSA_ENABLE_DXG_DETECTION") != "1":
        yield found("wsl-detection-off")


def hiding(machine: Machine) -> Iterator[Finding]:
    """Variables that choose among GPUs."""
    environment = machine.software.environment
    named = [name for name in MASKS if environment.get(name)]
    everything = hidden(machine) if machine.accelerators else ""
    if len(named) > 1 and named[0] == "ROCR_VISIBLE_DEVICES" and "amd" in vendors(machine):
        left = len(environment[named[0]].split(","))
        beyond = [int(word) for word in re.findall(r"\d+", environment[named[1]]) if int(word) >= left]
        yield found(
            "two-maskings",
            level="blocks" if beyond or everything else "note",
            first=named[0],
            second=named[1],
            values=", ".join(f"{name}={environment[name]}" for name in named),
        )
    elif everything:
        lines = [f"{one.file} line {one.line}" for one in machine.software.settings if one.name == everything]
        places = ", set in " + " and ".join(lines) if lines else ""
        yield found("all-gpus-hidden", name=everything, value=environment[everything], places=places)


def processor_graphics(machine: Machine) -> Iterator[Finding]:
    """An iGPU is device 0 and the card another."""
    amd = [device for device in machine.accelerators if device.vendor == "amd"]
    best = best_device(machine)
    chosen = any(machine.software.environment.get(name) for name in MASKS)
    if len(amd) > 1 and amd[0].integrated and best is not None and not best.integrated and not chosen:
        yield found("igpu-is-device-0", arch=amd[0].arch, graphics=amd[0].name, card=best.name, index=best.index)


def slurm(machine: Machine) -> Iterator[Finding]:
    around, seen = machine.host.around, len(machine.accelerators)
    if seen:
        allotted = around.slurm.get("SLURM_GPUS_ON_NODE", "")
        if allotted.isdigit() and int(allotted) > seen:
            yield found("slurm-shows-fewer", allotted=allotted, seen=seen)
    elif around.slurm:
        yield found("slurm-without-gpu", job=around.slurm.get("SLURM_JOB_ID", "?"))
    elif around.site:
        yield found("login-node", site=around.site.capitalize())


def nothing(machine: Machine) -> Iterator[Finding]:
    """No GPU at all: not an illness, but what it means should be said."""
    around = machine.host.around
    elsewhere = around.wsl or around.slurm or around.site or around.masked_gpus
    if machine.accelerators or elsewhere or any(d.vendor in (AMD, NVIDIA) for d in machine.host.displays):
        return
    shown = ", ".join(f"{display.driver or 'no driver'} at {display.address}" for display in machine.host.displays)
    yield found("no-gpu", shown=f"display: {shown}" if shown else "no display or accelerator is on the bus")


# Containers


def image_of(machine: Machine) -> str:
    """Which of our images fits: rocm, cuda or cpu."""
    if machine.host.around.dxg and machine.software.build == "rocm":  # WSL lists no AMD card
        return "rocm"
    here = {device.vendor for device in machine.accelerators} or vendors(machine)
    return "rocm" if "amd" in here else "cuda" if "nvidia" in here else "cpu"


def run_lines(machine: Machine) -> tuple[str, ...]:
    """Commands with what they do after two blanks and a #: build the image once, then run it."""
    image, around, access = image_of(machine), machine.host.around, machine.host.access
    if around.slurm or around.site:
        flag = {"rocm": "--rocm ", "cuda": "--nv ", "cpu": ""}[image]
        return (
            f"apptainer build bloomery-{image}.sif docker-archive://bloomery-{image}.tar  # docker save made the tar",
            f'srun --gpus-per-task=1 apptainer exec {flag}--bind "$PWD" bloomery-{image}.sif bloomery doctor',
        )
    selinux = machine.host.distribution.partition(" ")[0] in SELINUX
    engine = "podman" if selinux else "docker"
    yours = "--userns=keep-id" if selinux else '--user "$(id -u):$(id -g)"'
    if image == "cpu":
        devices = []
    elif image == "cuda":
        cdi = ["--device", "nvidia.com/gpu=all", "--security-opt=label=disable"]
        devices = cdi if selinux else ["--gpus", "all"]
    elif around.wsl:
        devices = ["--device=/dev/dxg", "-e", "HSA_ENABLE_DXG_DETECTION=1", "-v", "/usr/lib/wsl:/usr/lib/wsl"]
    elif selinux:  # a rootless engine keeps the user's own groups
        keep = ["--group-add=keep-groups", "--security-opt=label=disable"]
        devices = ["--device=/dev/kfd", "--device=/dev/dri", *keep]
    else:  # numbers of the groups that own the devices: names mean other numbers inside
        owners = [number for number in (access.kfd_gid, access.render_gid) if number is not None]
        # Where this record was made without the device the host's shell answers.
        numbers = [str(number) for number in dict.fromkeys(owners)] or ["$(stat -c %g /dev/kfd)"]
        devices = ["--device=/dev/kfd", "--device=/dev/dri", *(f"--group-add={number}" for number in numbers)]
    words = [engine, "run", "--rm", "-it", *devices, "--ipc=host", yours, '-v "$PWD":/workspace -w /workspace']
    return (
        f"{engine} build -f docker/Dockerfile.{image} -t bloomery:{image} .  # once, in a checkout of Bloomery",
        " ".join(words) + f" bloomery:{image} bloomery doctor",
    )
