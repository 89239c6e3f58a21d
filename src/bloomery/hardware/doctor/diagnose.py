"""The doctor's rules about GPU access, probes and the rest of the machine, and all rules in their order.

Access: driver, devices, groups, containers, WSL, Slurm, masks; and the command that starts a container with the GPUs of
this machine.
"""

import re
import shlex
from collections.abc import Iterator
from typing import Any, Literal

from bloomery.core.units import GIB, format_bytes
from bloomery.hardware.doctor import drivers, software
from bloomery.hardware.doctor.symptoms import (
    NUMBER,
    PCI_VENDORS,
    PROBE,
    Finding,
    Level,
    Rule,
    from_table,
    is_gpu,
    match,
    vendors,
)
from bloomery.hardware.intel import INTEL_VENDOR, listed_products
from bloomery.hardware.machine import Machine, hidden, runtime_number
from bloomery.hardware.profile import (
    best_device,
    build_profile,
    hidden_integrated,
    install,
    mask_without_integrated,
)
from bloomery.hardware.specs import arch_spec
from bloomery.hardware.vendors import VENDORS

AMD = VENDORS["amd"].pci_vendor
NVIDIA = VENDORS["nvidia"].pci_vendor
SELINUX = ("fedora", "rhel", "centos", "rocky", "almalinux")


def driver(machine: Machine) -> Iterator[Finding]:
    """GPUs on the PCI bus without their kernel driver, outside of containers and WSL."""
    host = machine.host
    if host.around.container or host.around.wsl or machine.accelerators:
        return
    amd = [display for display in host.displays if display.vendor == AMD]
    nvidia = [display for display in host.displays if display.vendor == NVIDIA]
    if amd and host.driver.blacklisted:  # by a line of a modprobe file, or by a boot parameter
        source = host.driver.blacklisted
        other_driver = amd[0].driver
        if source.startswith("/"):
            fix = [
                f"sudo sed -i.bak -E '/^ *(blacklist|install) +amdgpu( |$)/d' {shlex.quote(source)}"
            ]
        else:
            edit = r"s/((modprobe\.blacklist|module_blacklist)=[^ \"]*)\bamdgpu\b,?/\1/"
            fix = [f"sudo sed -i.bak -E '{edit}' /etc/default/grub"]
        if other_driver == "vfio-pci":
            fix.append(
                "# remove the PCI ID of the GPU from `options vfio-pci ids=` in the same folder"
            )
            other_driver += ", for virtual machines"
        fix.append(
            _rebuild_and_reboot(
                "initramfs" if source.startswith("/") else "grub", host.distribution
            )
        )
        bound = (
            f"; the GPU at {amd[0].address} is bound to {other_driver}"
            if other_driver not in ("", "amdgpu")
            else ""
        )
        yield from_table("driver-blacklisted", fix=fix, source=source, bound=bound)
    elif amd and "nomodeset" in host.driver.boot.split():
        reboot = _rebuild_and_reboot("grub", host.distribution)
        yield from_table("driver-switched-off", address=amd[0].address, boot=reboot)
    elif amd and not host.driver.amdgpu:
        holder = amd[0].driver or "no driver"
        yield from_table(
            "driver-not-loaded", address=amd[0].address, holder=holder, kernel=host.driver.kernel
        )
    if nvidia and not host.driver.nvidia:
        yield from_table(
            "nvidia-driver-missing",
            address=nvidia[0].address,
            holder=nvidia[0].driver or "no driver",
        )
    intel = [display for display in host.displays if display.vendor == INTEL_VENDOR]
    unserved = [
        display
        for display in intel
        if is_gpu(display) and display.driver not in VENDORS["intel"].drivers
    ]
    if unserved:
        yield from_table(
            "intel-driver-missing",
            address=unserved[0].address,
            name=listed_products()[unserved[0].device_id]["name"],
            holder=unserved[0].driver or "no driver",
            kernel=host.driver.kernel,
        )


def level_zero(machine: Machine) -> Iterator[Finding]:
    """Intel's driver in user space, without which PyTorch lists no GPU."""
    gpus = [device for device in machine.accelerators if device.vendor == "intel"]
    if not gpus or machine.host.driver.level_zero != "":
        return
    name = machine.host.distribution.partition(" ")[0]
    packages = {
        "arch": "pacman -S level-zero-loader intel-compute-runtime",
        "fedora": "dnf install intel-level-zero intel-compute-runtime",
    }
    command = packages.get(name, "apt install libze1 libze-intel-gpu1")
    yield from_table("level-zero-missing", name=gpus[0].name, command=command)


def _rebuild_and_reboot(target: Literal["initramfs", "grub"], distribution: str) -> str:
    """The distribution's command that rebuilds the initramfs or the GRUB configuration, then reboots."""
    name = distribution.partition(" ")[0]
    dracut = name in (*SELINUX, "sles", "opensuse-leap", "opensuse-tumbleweed")
    if target == "initramfs":
        rebuild = (
            "dracut --force"
            if dracut
            else "mkinitcpio -P"
            if name == "arch"
            else "update-initramfs -u"
        )
    elif name in SELINUX:
        rebuild = "grub2-mkconfig -o /boot/grub2/grub.cfg"
    elif dracut:
        rebuild = "update-bootloader"
    else:
        rebuild = "grub-mkconfig -o /boot/grub/grub.cfg" if name == "arch" else "update-grub"
    return f"sudo {rebuild} && sudo reboot"


def compute_device(machine: Machine) -> Iterator[Finding]:
    """/dev/kfd is missing although an AMD GPU has its driver."""
    around = machine.host.around
    access = machine.host.access
    # Old recordings of machines do not know whether the device can be opened.
    unchecked = any(
        device.vendor == "amd" and device.access is None for device in machine.accelerators
    )
    if access.kfd != "absent" or "amd" not in vendors(machine) or around.wsl or unchecked:
        return
    if around.container:
        masked = (
            f"; {around.masked_gpus} GPU hidden by the control group" if around.masked_gpus else ""
        )
        yield from_table(
            "container-without-gpu",
            level="note" if machine.software.build == "cpu" else "blocks",
            container=around.container,
            missing="the GPU's compute device" if machine.accelerators else "the GPU",
            evidence=f"/dev/kfd does not exist in it{masked}",
        )
    elif machine.host.driver.amdgpu:
        yield from_table("no-compute-device", kernel=machine.host.driver.kernel)


def hung(machine: Machine) -> Iterator[Finding]:
    """Opening a device never returned: the driver waits for a GPU that does not respond."""
    nodes = [device.node for device in machine.accelerators if device.access == "hung"]
    silent = [*(["/dev/kfd"] if machine.host.access.kfd == "hung" else []), *nodes]
    if silent:
        yield from_table("driver-hung", silent=" and ".join(silent[:3]))


def gpu_without_compute(machine: Machine) -> Iterator[Finding]:
    """An AMD GPU with its driver and /dev/kfd that the kernel does not list for compute."""
    access = machine.host.access
    around = machine.host.around
    amd = [
        display
        for display in machine.host.displays
        if display.vendor == AMD and display.driver == "amdgpu"
    ]
    elsewhere = around.wsl or around.slurm or around.site or around.masked_gpus
    if machine.accelerators or not amd or elsewhere or access.kfd in ("absent", "hung"):
        return
    level: Level = "blocks" if machine.software.build == "rocm" else "note"
    yield from_table("gpu-without-compute", level=level, address=amd[0].address)


def silent_nvidia(machine: Machine) -> Iterator[Finding]:
    """An NVIDIA GPU that nvidia-smi does not list: the container, WSL, or a driver that was updated halfway."""
    around = machine.host.around
    loaded_driver = machine.host.driver.nvidia
    nvidia = [display for display in machine.host.displays if display.vendor == NVIDIA]
    through_windows = around.wsl and around.dxg and machine.software.build == "cuda"
    if machine.accelerators or around.slurm or around.site or not (nvidia or through_windows):
        return
    level: Level = "note" if machine.software.build == "cpu" else "blocks"
    if around.container and not around.wsl:
        yield from_table(
            "container-without-gpu",
            level=level,
            container=around.container,
            missing="the GPU",
            evidence=f"NVIDIA GPU at {nvidia[0].address}, but nvidia-smi lists none in the container",
            fix=(
                "docker run --gpus all ...  # on the host; `bloomery doctor --docker` prints the whole command",
            ),
            verify="nvidia-smi",
        )
    elif around.wsl:
        yield from_table("wsl-nvidia", level=level)
    elif loaded_driver:
        yield from_table(
            "nvidia-silent", level=level, loaded=loaded_driver, address=nvidia[0].address
        )


def groups(machine: Machine) -> Iterator[Finding]:
    """Permission denied for /dev/kfd or a render node."""
    access = machine.host.access
    nodes = [
        device.node
        for device in machine.accelerators
        if device.access == "denied" and VENDORS[device.vendor].opens_render_node
    ]
    if access.kfd != "denied" and not nodes:
        return
    nodes = list(dict.fromkeys(nodes))
    closed_nodes = " and ".join([*(["/dev/kfd"] if access.kfd == "denied" else []), *nodes])
    group = access.kfd_group or "render"
    fields: dict[str, Any] = {
        "closed": closed_nodes,
        "group": group,
        "groups": ", ".join(access.groups),
    }
    if machine.host.around.container:
        gid = f"{access.kfd_gid}" if access.kfd_gid is not None else "$(stat -c %g /dev/kfd)"
        yield from_table("container-group", gid=gid, **fields)
    elif group in access.groups:
        selinux = machine.host.distribution.partition(" ")[0] in SELINUX
        denials = (
            "sudo ausearch -m avc -ts recent | grep -E 'kfd|renderD'  # lists what SELinux denied"
        )
        rights = f"ls -l {closed_nodes.replace(' and ', ' ')}  # an access control list or a udev rule denies access"
        note = "; SELinux is active" if selinux else ""
        yield from_table(
            "access-denied", fix=(denials if selinux else rights,), selinux=note, **fields
        )
    else:
        yield from_table(
            "login-again" if group in access.listed_groups else "not-in-group", **fields
        )


def masked(machine: Machine) -> Iterator[Finding]:
    """GPUs that the control group hides from a process that has others."""
    count = machine.host.around.masked_gpus
    if count and machine.accelerators:
        yield from_table(
            "masked-gpus", gpus=f"{count} more GPU is" if count == 1 else f"{count} more GPUs are"
        )


def wsl(machine: Machine) -> Iterator[Finding]:
    around = machine.host.around
    software = machine.software
    if not around.wsl or machine.accelerators:
        return
    if not around.dxg:
        yield from_table("wsl-without-gpu")
    elif software.build == "rocm" and software.environment.get("HSA_ENABLE_DXG_DETECTION") != "1":
        yield from_table("wsl-detection-off")


def hiding(machine: Machine) -> Iterator[Finding]:
    """Environment variables that select GPUs and contradict each other, or hide every GPU."""
    environment = machine.software.environment
    masks = [name for name in VENDORS["amd"].masks if environment.get(name)]
    mask = hidden(machine) if machine.accelerators else ""
    if len(masks) > 1 and masks[0] == "ROCR_VISIBLE_DEVICES" and "amd" in vendors(machine):
        num_visible = len(environment[masks[0]].split(","))
        beyond = [
            int(number)
            for number in re.findall(r"\d+", environment[masks[1]])
            if int(number) >= num_visible
        ]
        yield from_table(
            "two-maskings",
            level="blocks" if beyond or mask else "note",
            first=masks[0],
            second=masks[1],
            values=", ".join(f"{name}={environment[name]}" for name in masks),
        )
    elif mask:
        lines = [
            f"{setting.file} line {setting.line}"
            for setting in machine.software.settings
            if setting.name == mask
        ]
        places = ", set in " + " and ".join(lines) if lines else ""
        yield from_table("all-gpus-hidden", name=mask, value=environment[mask], places=places)


def integrated_gpu_beside_discrete(machine: Machine) -> Iterator[Finding]:
    """Training hides the integrated GPU; other programs see it."""
    best = best_device(machine)
    if best is None or not (hidden_gpus := hidden_integrated(machine, best)):
        return
    integrated = hidden_gpus[0]
    others = "see it as well, and their collectives can hang"
    if runtime_number(machine, integrated) < runtime_number(machine, best):
        others = f"use it, as device {runtime_number(machine, integrated)}, and crash"
    variables = mask_without_integrated(machine, best).items()
    yield from_table(
        "integrated-gpu-hidden",
        index=integrated.index,
        name=integrated.name,
        arch=integrated.arch,
        discrete=best.name,
        others=others,
        variables=" ".join(f"{name}={value}" for name, value in variables),
    )


def slurm(machine: Machine) -> Iterator[Finding]:
    around = machine.host.around
    visible = len(machine.accelerators)
    if visible:
        allotted = around.slurm.get("SLURM_GPUS_ON_NODE", "")
        if allotted.isdigit() and int(allotted) > visible:
            yield from_table("slurm-shows-fewer", allotted=allotted, visible=visible)
    elif around.slurm:
        yield from_table("slurm-without-gpu", job=around.slurm.get("SLURM_JOB_ID", "?"))
    elif around.site:
        yield from_table("login-node", site=around.site.capitalize())


def no_gpu(machine: Machine) -> Iterator[Finding]:
    """No GPU that is known: training works, on the CPU."""
    around = machine.host.around
    elsewhere = around.wsl or around.slurm or around.site or around.masked_gpus
    if (
        machine.accelerators
        or elsewhere
        or any(
            display.vendor in PCI_VENDORS and is_gpu(display) for display in machine.host.displays
        )
    ):
        return
    displays = ", ".join(
        f"{display.driver or 'no driver'} at {display.address}" for display in machine.host.displays
    )
    yield from_table(
        "no-gpu",
        displays=f"display: {displays}" if displays else "no display or accelerator on the PCI bus",
    )


# Containers


def image_of(machine: Machine) -> str:
    """The image of docker/ that fits: rocm, cuda or cpu."""
    if machine.host.around.dxg and machine.software.build == "rocm":  # WSL lists no AMD GPU
        return "rocm"
    present = {device.vendor for device in machine.accelerators} or vendors(machine)
    return "rocm" if "amd" in present else "cuda" if "nvidia" in present else "cpu"


def run_lines(machine: Machine) -> tuple[str, ...]:
    """Commands, each with an optional remark after two spaces and "# ": build the image once, then run it."""
    image = image_of(machine)
    around = machine.host.around
    access = machine.host.access
    if around.slurm or around.site:
        flag = {"rocm": "--rocm ", "cuda": "--nv ", "cpu": ""}[image]
        return (
            f"apptainer build bloomery-{image}.sif docker-archive://bloomery-{image}.tar  # written by docker save",
            f'srun --gpus-per-task=1 apptainer exec {flag}--bind "$PWD" bloomery-{image}.sif bloomery doctor',
        )
    selinux = machine.host.distribution.partition(" ")[0] in SELINUX
    engine = "podman" if selinux else "docker"
    user = "--userns=keep-id" if selinux else '--user "$(id -u):$(id -g)"'
    if image == "cpu":
        devices = []
    elif image == "cuda":
        cdi = ["--device", "nvidia.com/gpu=all", "--security-opt=label=disable"]
        devices = cdi if selinux else ["--gpus", "all"]
    elif around.wsl:
        devices = [
            "--device=/dev/dxg",
            "-e",
            "HSA_ENABLE_DXG_DETECTION=1",
            "-v",
            "/usr/lib/wsl:/usr/lib/wsl",
        ]
    elif selinux:  # a rootless engine keeps the user's own groups
        keep = ["--group-add=keep-groups", "--security-opt=label=disable"]
        devices = ["--device=/dev/kfd", "--device=/dev/dri", *keep]
    else:  # the numbers of the groups that own the devices: names have other numbers in the container
        owners = [number for number in (access.kfd_gid, access.render_gid) if number is not None]
        # In a record that was made without the device, the shell of the host looks the number up.
        numbers = [str(number) for number in dict.fromkeys(owners)] or ["$(stat -c %g /dev/kfd)"]
        devices = [
            "--device=/dev/kfd",
            "--device=/dev/dri",
            *(f"--group-add={number}" for number in numbers),
        ]
    arguments = [
        engine,
        "run",
        "--rm",
        "-it",
        *devices,
        "--ipc=host",
        user,
        '-v "$PWD":/workspace -w /workspace',
    ]
    return (
        f"{engine} build -f docker/Dockerfile.{image} -t bloomery:{image} .  # once, in a checkout of Bloomery",
        " ".join(arguments) + f" bloomery:{image} bloomery doctor",
    )


EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
OUTCOMES = {
    "wrong": "computes wrong values",
    "failed": "fails",
    "crashed": "crashes",
    "hung": "hangs",
}
OUTCOME_SYMPTOMS = ("segmentation-fault", "bus-error")  # these only repeat the outcome of a probe
# The first part of a probe's name -> what it tests, the level when it fails, an edit of the recipe that avoids it.
SUBJECTS: dict[str, tuple[str, Level, str]] = {
    "attention": ("fused attention", "slows", "train.attention=blockwise"),
    "backend": ("the attention backend", "slows", "train.attention=blockwise"),
    "compile": ("torch.compile", "slows", "train.compile=false"),
    "bitsandbytes": ("bitsandbytes", "note", "quantize.kind=none"),
    "flash": ("flash-attn", "note", "train.attention=blockwise"),
    "blas": ("a BLAS library", "note", ""),
    "bandwidth": ("copying on the GPU", "slows", ""),
    "host": ("copying between the GPU and CPU memory", "slows", "parallel.stream=off"),
    "p2p": ("copying between GPUs", "slows", ""),
    "all": ("all-reduce", "slows", ""),
    "device": ("the GPU", "blocks", ""),
    "matmul": ("matmul", "slows", ""),
    "step": ("a training step", "slows", ""),
}
REPORT = "bloomery doctor --bundle report.json  # collects what a bug report needs"
SMALL_SHM = GIB
# Share of GPU memory that other processes use: a desktop uses about 0.5 GiB.
USED_SHARE = 0.10
USED_BYTES = 1.5 * GIB
LITTLE_DISK = 10 * GIB
NO_DISK = GIB
RESERVED_SHARE = 0.5  # of the system memory that the driver gives an integrated GPU


def experimental_attention(machine: Machine) -> Iterator[Finding]:
    """Fused attention kernels exist and are disabled."""
    disabled_probes = [
        probe for probe in machine.probes if EXPERIMENTAL in probe.message and probe.outcome != "ok"
    ]
    if disabled_probes and machine.software.environment.get(EXPERIMENTAL) != "1":
        yield from_table(
            "attention-is-math",
            names=", ".join(probe.name for probe in disabled_probes),
            message=disabled_probes[0].message,
        )


def failed_probes(machine: Machine) -> Iterator[Finding]:
    """One finding for each probe that failed; probes of one kind with the same message count once."""
    reported: set[tuple[str, str]] = set()
    profile = build_profile(machine)
    unprobed = build_profile(machine.model_copy(update={"probes": ()}))
    for probe in machine.probes:
        kind = probe.name.partition("-")[0]
        message = probe.message
        if probe.outcome not in OUTCOMES or EXPERIMENTAL in message or (kind, message) in reported:
            continue
        reported.add((kind, message))
        subject, level, edit = SUBJECTS.get(kind, (probe.name, "note", ""))
        if kind == "matmul":
            subject += f" in {probe.name.partition('-')[2]}"
            edit = (
                f"train.precision={profile.dtype.value}" if probe.name != "matmul-float32" else ""
            )
        if kind == "step":
            edit = probe.facts.get("fix", "")
        automatic = {
            "matmul": True,
            "attention": profile.attention.value != "fused",
            "compile": not profile.compile.value,
            "step": edit == f"train.precision={profile.dtype.value}",
        }.get(kind, False)
        unused = {  # a failure matters only to a run that would use the operation
            "matmul": probe.name != f"matmul-{unprobed.dtype.value}",
            "attention": probe.name == "attention-math" or unprobed.attention.value != "fused",
            "compile": not unprobed.compile.value,
            "step": probe.name not in (f"step-{unprobed.dtype.value}", "step-compiled"),
        }.get(kind, False)
        symptoms = [
            symptom
            for symptom in match(message, machine=machine)
            if symptom.id not in OUTCOME_SYMPTOMS
        ]
        fix = (
            [f"bloomery train RECIPE {edit}" + "  # `auto` selects it on this machine" * automatic]
            if edit
            else []
        )
        if probe.outcome != "wrong" and symptoms:
            fix += symptoms[0].fix
        elif probe.outcome != "wrong" and kind == "device" and machine.accelerators:
            fix.append(install(machine) + "  # the build with kernels for this GPU")
        elif probe.outcome == "crashed":
            fix.append(REPORT)
        commands: dict[str, str] = {}  # each command once, with its first remark
        for step in fix or [REPORT]:
            commands.setdefault(step.partition("  # ")[0], step)
        what = f"{subject} {OUTCOMES[probe.outcome]} on this machine"
        error = f" (relative error {probe.error:.2g})" if probe.error else ""
        evidence = f"{probe.name}: {message or probe.outcome}{error}"
        if symptoms:
            what += f": {symptoms[0].cause}"
        # A step that is wrong has the name of the part at fault, and of the way out.
        if kind == "step" and probe.outcome == "wrong":
            what = message
            evidence = f"{probe.name}: {probe.facts.get('detail', '')}"
            level = "slows" if edit else "blocks"
        yield Finding(
            id=f"probe-{probe.name}",
            level="blocks" if probe.name == "matmul-float32" else "note" if unused else level,
            what=what,
            evidence=evidence,
            fix=tuple(commands.values()),
            verify=PROBE,
        )


def flash_attention(machine: Machine) -> Iterator[Finding]:
    """flash-attn is not installed and would help: PyTorch has no stable fused attention for this GPU."""
    device = best_device(machine)
    spec = arch_spec(device.arch) if device else None
    absent = next(
        (p for p in machine.probes if p.name == "flash-attn" and p.outcome == "absent"), None
    )
    command = absent.facts.get("build") if absent else None
    if device and absent and command and (spec is None or spec.fused_attention != "yes"):
        yield from_table(
            "flash-attn-absent", arch=device.arch, message=absent.message, command=command
        )


def shared_memory(machine: Machine) -> Iterator[Finding]:
    around = machine.host.around
    size = machine.host.around.shared_memory_bytes
    several = len(machine.accelerators) > 1
    if size is None or size >= SMALL_SHM or not (around.container or several):
        return
    on_the_host = "docker run --ipc=host ...  # or --shm-size=16g: bloomery doctor --docker"
    yield from_table(
        "shm-small",
        level="blocks" if several else "note",
        fix=(on_the_host if around.container else "sudo mount -o remount,size=16G /dev/shm",),
        others="" if several else " or DataLoader workers",
        size=format_bytes(size),
    )


def numa(machine: Machine) -> Iterator[Finding]:
    if machine.host.driver.numa_balancing and len(machine.accelerators) > 1:
        yield from_table("numa-balancing")


def iommu(machine: Machine) -> Iterator[Finding]:
    """RCCL between GPUs without xGMI can hang unless the IOMMU runs in passthrough mode."""
    host = machine.host
    gpus = [
        device
        for device in machine.accelerators
        if device.vendor == "amd" and not device.integrated
    ]
    xgmi = len({gpu.hive_id for gpu in gpus}) == 1 and gpus and gpus[0].hive_id
    passthrough = re.search(
        r"\biommu=(pt|off)\b|\biommu\.passthrough=1\b|\bamd_iommu=off\b", host.driver.boot
    )
    if len(gpus) < 2 or xgmi or passthrough or host.around.wsl or "cray" in host.driver.kernel:
        return
    boot = f" ({host.driver.boot})" if host.driver.boot else ""
    yield from_table("iommu-not-passthrough", gpus=len(gpus), boot=boot)


def used_by_others(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    if device is None or device.integrated:
        return
    used_bytes = device.memory_used_bytes
    total_bytes = device.memory_bytes
    if used_bytes >= USED_BYTES and used_bytes >= USED_SHARE * total_bytes:
        command = (
            "nvidia-smi"
            if device.vendor == "nvidia"
            else f"fuser -v /dev/kfd {device.node}".rstrip()
        )
        yield from_table(
            "gpu-memory-used",
            used=used_bytes / GIB,
            total=total_bytes / GIB,
            index=device.index,
            name=device.name,
            command=command,
        )


def system_memory(machine: Machine) -> Iterator[Finding]:
    """An integrated GPU: PyTorch shows the reserved memory, training can use all that the driver provides."""
    device = best_device(machine)
    if device and device.integrated and device.vendor == "amd":
        shared = device.gtt_bytes
        dedicated = device.memory_bytes
        if dedicated <= RESERVED_SHARE * shared:
            yield from_table("shared-memory-gpu", shared=shared / GIB, dedicated=dedicated / GIB)


def compiler(machine: Machine) -> Iterator[Finding]:
    if machine.host.compiler is not None or machine.host.system != "Linux":
        return
    with_compiler = machine.host.model_copy(update={"compiler": "/usr/bin/g++"})
    if not build_profile(machine.model_copy(update={"host": with_compiler})).compile.value:
        return  # torch.compile would not be used
    name = machine.host.distribution.partition(" ")[0]
    tools = dict.fromkeys(SELINUX, "dnf install gcc-c++") | {"arch": "pacman -S gcc"}
    tools |= dict.fromkeys(("sles", "opensuse-leap"), "zypper install gcc-c++")
    slower = ", 10 to 35% slower on a CPU" if best_device(machine) is None else ""
    yield from_table(
        "no-compiler", fix=("sudo " + tools.get(name, "apt install g++"),), slower=slower
    )


def disk(machine: Machine) -> Iterator[Finding]:
    free_bytes = machine.host.disk_free_bytes
    if free_bytes < LITTLE_DISK:
        yield from_table(
            "little-disk",
            level="blocks" if free_bytes < NO_DISK else "note",
            free=format_bytes(free_bytes),
        )


RULES: tuple[Rule, ...] = (
    driver,
    compute_device,
    silent_nvidia,
    hung,
    groups,
    level_zero,
    wsl,
    slurm,
    hiding,
    software.missing_torch,
    software.wrong_build,
    software.kernels,
    software.override,
    drivers.nvidia,
    drivers.amd_driver,
    drivers.loaded_rocm,
    drivers.site_modules,
    failed_probes,
    experimental_attention,
    software.allocator,
    iommu,
    numa,
    shared_memory,
    used_by_others,
    compiler,
    disk,
    no_gpu,
    gpu_without_compute,
    integrated_gpu_beside_discrete,
    masked,
    system_memory,
    software.two_vendors,
    software.companions,
    software.unfit_bitsandbytes,
    drivers.other_system_rocm,
    flash_attention,
    software.pin,
)
ORDER = {"blocks": 0, "slows": 1, "note": 2}


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """All findings, those that block training first; the number of a finding is its position, from 1."""
    findings = sorted(
        (finding for rule in RULES for finding in rule(machine)),
        key=lambda finding: ORDER[finding.level],
    )
    return tuple(
        finding.model_copy(
            update={"fix": tuple(step.replace(NUMBER, str(number)) for step in finding.fix)}
        )
        for number, finding in enumerate(findings, start=1)
    )


def ready(findings: tuple[Finding, ...]) -> bool:
    """Whether training can start: nothing blocks it."""
    return not any(finding.level == "blocks" for finding in findings)
