"""The doctor's rules about probes and the rest of the machine, and all rules in their order."""

import re
from collections.abc import Iterator

from bloomery.core.units import GIB, format_bytes
from bloomery.hardware.doctor import access, software
from bloomery.hardware.doctor.symptoms import NUMBER, PROBE, Finding, Level, Rule, from_table, match
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import best_device, build_profile, install
from bloomery.hardware.specs.specs import arch_spec

EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
OUTCOMES = {"wrong": "computes wrong values", "failed": "fails", "crashed": "crashes", "hung": "hangs"}
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
    "p2p": ("copying between GPUs", "slows", ""),
    "all": ("all-reduce", "slows", ""),
    "device": ("the GPU", "blocks", ""),
    "matmul": ("matmul", "slows", ""),
}
REPORT = "bloomery doctor --bundle report.json  # collects what a bug report needs"
SMALL_SHM = GIB
USED_SHARE, USED_BYTES = 0.10, 1.5 * GIB  # of GPU memory, by other processes: a desktop uses about 0.5 GiB
LITTLE_DISK, NO_DISK = 10 * GIB, GIB
RESERVED_SHARE = 0.5  # of the system memory that the driver gives an integrated GPU


def experimental_attention(machine: Machine) -> Iterator[Finding]:
    """Fused attention kernels exist and are disabled."""
    off = [probe for probe in machine.probes if EXPERIMENTAL in probe.message and probe.outcome != "ok"]
    if off and machine.software.environment.get(EXPERIMENTAL) != "1":
        yield from_table("attention-is-math", names=", ".join(probe.name for probe in off), message=off[0].message)


def failed_probes(machine: Machine) -> Iterator[Finding]:
    """One finding for each probe that failed; probes of one kind with the same message count once."""
    reported: set[tuple[str, str]] = set()
    profile = build_profile(machine)
    unprobed = build_profile(machine.model_copy(update={"probes": ()}))
    for probe in machine.probes:
        kind, message = probe.name.partition("-")[0], probe.message
        if probe.outcome not in OUTCOMES or EXPERIMENTAL in message or (kind, message) in reported:
            continue
        reported.add((kind, message))
        subject, level, edit = SUBJECTS.get(kind, (probe.name, "note", ""))
        if kind == "matmul":
            subject += f" in {probe.name.partition('-')[2]}"
            edit = f"train.precision={profile.dtype.value}" if probe.name != "matmul-float32" else ""
        automatic = {
            "matmul": True,
            "attention": profile.attention.value != "fused",
            "compile": not profile.compile.value,
        }.get(kind, False)
        unused = {  # a failure matters only to a run that would use the operation
            "matmul": probe.name != f"matmul-{unprobed.dtype.value}",
            "attention": probe.name == "attention-math" or unprobed.attention.value != "fused",
            "compile": not unprobed.compile.value,
        }.get(kind, False)
        known = [one for one in match(message, machine=machine) if one.id not in OUTCOME_SYMPTOMS]
        fix = [f"bloomery train RECIPE {edit}" + "  # `auto` selects it on this machine" * automatic] if edit else []
        if probe.outcome != "wrong" and known:
            fix += known[0].fix
        elif probe.outcome != "wrong" and kind == "device" and machine.accelerators:
            fix.append(install(machine) + "  # the build with kernels for this GPU")
        elif probe.outcome == "crashed":
            fix.append(REPORT)
        commands: dict[str, str] = {}  # each command once, with its first remark
        for step in fix or [REPORT]:
            commands.setdefault(step.partition("  # ")[0], step)
        error = f" (relative error {probe.error:.2g})" if probe.error else ""
        yield Finding(
            id=f"probe-{probe.name}",
            level="blocks" if probe.name == "matmul-float32" else "note" if unused else level,
            what=f"{subject} {OUTCOMES[probe.outcome]} on this machine" + (f": {known[0].cause}" if known else ""),
            evidence=f"{probe.name}: {message or probe.outcome}{error}",
            fix=tuple(commands.values()),
            verify=PROBE,
        )


def flash_attention(machine: Machine) -> Iterator[Finding]:
    """flash-attn is not installed and would help: PyTorch has no stable fused attention for this GPU."""
    device = best_device(machine)
    spec = arch_spec(device.arch) if device else None
    absent = next((p for p in machine.probes if p.name == "flash-attn" and p.outcome == "absent"), None)
    command = absent.facts.get("build") if absent else None
    if device and absent and command and (spec is None or spec.fused_attention != "yes"):
        yield from_table("flash-attn-absent", arch=device.arch, message=absent.message, command=command)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    around, size = machine.host.around, machine.host.around.shared_memory_bytes
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
    gpus = [one for one in machine.accelerators if one.vendor == "amd" and not one.integrated]
    xgmi = len({gpu.hive_id for gpu in gpus}) == 1 and gpus and gpus[0].hive_id
    passthrough = re.search(r"\biommu=(pt|off)\b|\biommu\.passthrough=1\b|\bamd_iommu=off\b", host.driver.boot)
    if len(gpus) < 2 or xgmi or passthrough or host.around.wsl or "cray" in host.driver.kernel:
        return
    boot = f" ({host.driver.boot})" if host.driver.boot else ""
    yield from_table("iommu-not-passthrough", gpus=len(gpus), boot=boot)


def used_by_others(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    if device is None or device.integrated:
        return
    used, total = device.memory_used_bytes, device.memory_bytes
    if used >= USED_BYTES and used >= USED_SHARE * total:
        command = "nvidia-smi" if device.vendor == "nvidia" else f"fuser -v /dev/kfd {device.node}".rstrip()
        yield from_table(
            "gpu-memory-used",
            used=used / GIB,
            total=total / GIB,
            index=device.index,
            name=device.name,
            command=command,
        )


def system_memory(machine: Machine) -> Iterator[Finding]:
    """An integrated GPU: PyTorch shows the reserved memory, training can use all that the driver provides."""
    device = best_device(machine)
    if device and device.integrated and device.vendor == "amd":
        shared, dedicated = device.gtt_bytes, device.memory_bytes
        if dedicated <= RESERVED_SHARE * shared:
            yield from_table("shared-memory-gpu", shared=shared / GIB, dedicated=dedicated / GIB)


def compiler(machine: Machine) -> Iterator[Finding]:
    if machine.host.compiler is not None or machine.host.system != "Linux":
        return
    with_compiler = machine.host.model_copy(update={"compiler": "/usr/bin/g++"})
    if not build_profile(machine.model_copy(update={"host": with_compiler})).compile.value:
        return  # torch.compile would not be used
    name = machine.host.distribution.partition(" ")[0]
    tools = dict.fromkeys(access.SELINUX, "dnf install gcc-c++") | {"arch": "pacman -S gcc"}
    tools |= dict.fromkeys(("sles", "opensuse-leap"), "zypper install gcc-c++")
    slower = ", 10 to 35% slower on a CPU" if best_device(machine) is None else ""
    yield from_table("no-compiler", fix=("sudo " + tools.get(name, "apt install g++"),), slower=slower)


def disk(machine: Machine) -> Iterator[Finding]:
    free = machine.host.disk_free_bytes
    if free < LITTLE_DISK:
        yield from_table("little-disk", level="blocks" if free < NO_DISK else "note", free=format_bytes(free))


RULES: tuple[Rule, ...] = (
    access.driver, access.compute_device, access.silent_nvidia, access.hung, access.groups, access.wsl, access.slurm,
    access.hiding, software.missing, software.wrong_build, software.kernels, software.override, software.nvidia,
    software.amd_driver, software.loaded_rocm, software.site_modules, failed_probes, experimental_attention,
    software.allocator, iommu, numa, shared_memory, used_by_others, compiler, disk, access.no_gpu,
    access.gpu_without_compute, access.integrated_gpu_first, access.masked, system_memory, software.two_vendors,
    software.companions, software.bitsandbytes, software.system_rocm, flash_attention, software.pin,
)  # fmt: skip
ORDER = {"blocks": 0, "slows": 1, "note": 2}


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """All findings, those that block training first; the number of a finding is its position, from 1."""
    findings = sorted((one for rule in RULES for one in rule(machine)), key=lambda one: ORDER[one.level])
    return tuple(
        one.model_copy(update={"fix": tuple(step.replace(NUMBER, str(number)) for step in one.fix)})
        for number, one in enumerate(findings, start=1)
    )


def ready(findings: tuple[Finding, ...]) -> bool:
    """Whether training can start: nothing blocks it."""
    return not any(finding.level == "blocks" for finding in findings)
