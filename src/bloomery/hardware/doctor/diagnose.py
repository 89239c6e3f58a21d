"""The doctor: rules about what was tried and about the machine around the GPU, and all rules in their order."""

import re
from collections.abc import Iterator
from dataclasses import replace

from bloomery.core.units import GIB, format_bytes
from bloomery.hardware.doctor import access, software
from bloomery.hardware.doctor.symptoms import NUMBER, PROBE, Finding, Level, Rule, found, match
from bloomery.hardware.machine import Machine, Probe
from bloomery.hardware.profile import best_device, build_profile, install
from bloomery.hardware.specs.specs import arch_spec

EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
BAD = ("wrong", "failed", "crashed", "hung")
SAID = {"wrong": "computes wrong values", "failed": "fails", "crashed": "crashes", "hung": "hangs"}
SAID_BY_OUTCOME = ("segmentation-fault", "bus-error")  # symptoms that say how a process ended: the outcome says it, too
# What a probe's first word is about, and what to train with when it is bad.
SUBJECTS: dict[str, tuple[str, Level, str]] = {
    "attention": ("fused attention", "slows", "train.attention=blockwise"),
    "backend": ("the attention backend", "slows", "train.attention=blockwise"),
    "compile": ("torch.compile", "slows", "train.compile=false"),
    "bitsandbytes": ("bitsandbytes", "note", "quantize.kind=none"),
    "flash": ("flash-attn", "note", "train.attention=blockwise"),
    "blas": ("a matrix library", "note", ""),
    "bandwidth": ("copying on the GPU", "slows", ""),
    "p2p": ("copying between GPUs", "slows", ""),
    "all": ("an all-reduce", "slows", ""),
    "device": ("the GPU", "blocks", ""),
    "matmul": ("a matrix product", "slows", ""),
}
SMALL_SHM = GIB
USED_SHARE, USED_BYTES = 0.10, 1.5 * GIB  # of a card, by others: a desktop takes about half a GiB
LITTLE_DISK, NO_DISK = 10 * GIB, GIB
CARVED_OUT = 0.5  # of what the driver lends


def experimental_attention(machine: Machine) -> Iterator[Finding]:
    """Fused attention is there and switched off."""
    off = [probe for probe in machine.probes if EXPERIMENTAL in probe.said and probe.outcome != "ok"]
    if off and machine.software.environment.get(EXPERIMENTAL) != "1":
        yield found("attention-is-math", names=", ".join(probe.name for probe in off), said=off[0].said)


def bad_probes(machine: Machine) -> Iterator[Finding]:
    """One finding for each thing that was tried and did not work; those with one cause are told once."""
    told: set[tuple[str, str]] = set()
    for probe in machine.probes:
        kind = probe.name.partition("-")[0]
        if probe.outcome not in BAD or EXPERIMENTAL in probe.said or (kind, probe.said) in told:
            continue
        told.add((kind, probe.said))
        yield _finding(probe, kind, machine)


def _finding(probe: Probe, kind: str, machine: Machine) -> Finding:
    subject = SUBJECTS.get(kind, (probe.name, "note", ""))[0]
    if kind == "matmul":
        subject += f" in {probe.name.partition('-')[2]}"
    known = [one for one in match(probe.said, machine=machine) if one.id not in SAID_BY_OUTCOME]
    off = f" (off by {probe.error:.2g})" if probe.error else ""
    fix = _around(probe, kind, machine)
    fix += (known[0].fix if known else _fix(probe, kind, machine)) if probe.outcome != "wrong" else []
    return Finding(
        id=f"probe-{probe.name}",
        level=_level(probe, kind, machine),
        what=f"{subject} {SAID[probe.outcome]} on this machine" + (f": {known[0].cause}" if known else ""),
        evidence=f"{probe.name}: {probe.said or probe.outcome}{off}",
        fix=_without_repeats(fix or ["bloomery doctor --bundle report.json  # what a maintainer needs"]),
        verify=PROBE,
    )


def _without_repeats(steps: list[str]) -> tuple[str, ...]:
    """Each command once, with the remark that it has first."""
    first: dict[str, str] = {}
    for step in steps:
        first.setdefault(step.partition("  # ")[0], step)
    return tuple(first.values())


def _around(probe: Probe, kind: str, machine: Machine) -> list[str]:
    """The command that trains without what is bad, and whether that happens by itself."""
    profile = build_profile(machine)
    edit = SUBJECTS.get(kind, ("", "note", ""))[2]
    if kind == "matmul":
        edit = f"train.precision={profile.dtype.value}" if probe.name != "matmul-float32" else ""
    itself = {
        "matmul": True,
        "attention": profile.attention.value != "fused",
        "compile": not profile.compile.value,
    }.get(kind, False)
    remark = "  # `auto` chooses it here" if itself else ""
    return [f"bloomery train RECIPE {edit}{remark}"] if edit else []


def _level(probe: Probe, kind: str, machine: Machine) -> Level:
    """What is bad stops or slows only a run that would use it."""
    table = build_profile(machine.model_copy(update={"probes": ()}))
    if probe.name == "matmul-float32":
        return "blocks"
    unused = {
        "matmul": probe.name != f"matmul-{table.dtype.value}",
        "attention": probe.name == "attention-math" or table.attention.value != "fused",
        "compile": not table.compile.value,
    }
    return "note" if unused.get(kind) else SUBJECTS.get(kind, ("", "note", ""))[1]


def _fix(probe: Probe, kind: str, machine: Machine) -> list[str]:
    if kind == "device" and machine.accelerators:
        return [install(machine) + "  # the build that has this chip's kernels"]
    return [] if probe.outcome != "crashed" else ["bloomery doctor --bundle report.json  # what a maintainer needs"]


def flash_attention(machine: Machine) -> Iterator[Finding]:
    """flash-attn is absent and would be of use: PyTorch has no fused kernel of its own for this chip."""
    device = best_device(machine)
    spec = arch_spec(device.arch) if device else None
    absent = next((p for p in machine.probes if p.name == "flash-attn" and p.outcome == "absent"), None)
    line = absent.facts.get("build") if absent else None
    if device and absent and line and (spec is None or spec.fused_attention != "yes"):
        yield found("flash-attn-absent", arch=device.arch, said=absent.said, line=line)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    around, size = machine.host.around, machine.host.around.shared_memory_bytes
    if size is None or size >= SMALL_SHM or not (around.container or len(machine.accelerators) > 1):
        return
    several = len(machine.accelerators) > 1
    outside = "docker run --ipc=host ...  # or --shm-size=16g: bloomery doctor --docker"
    yield found(
        "shm-small",
        level="blocks" if several else "note",
        fix=(outside if around.container else "sudo mount -o remount,size=16G /dev/shm",),
        others="" if several else " or loader processes",
        size=format_bytes(size),
    )


def numa(machine: Machine) -> Iterator[Finding]:
    if machine.host.driver.numa_balancing and len(machine.accelerators) > 1:
        yield found("numa-balancing")


def iommu(machine: Machine) -> Iterator[Finding]:
    """RCCL between cards without xGMI can hang unless the IOMMU passes their traffic through."""
    host = machine.host
    cards = [one for one in machine.accelerators if one.vendor == "amd" and not one.integrated]
    joined = len({card.hive_id for card in cards}) == 1 and cards and cards[0].hive_id
    through = re.search(r"\biommu=(pt|off)\b|\biommu\.passthrough=1\b|\bamd_iommu=off\b", host.driver.boot)
    if len(cards) < 2 or joined or through or host.around.wsl or "cray" in host.driver.kernel:
        return
    boot = f" ({host.driver.boot})" if host.driver.boot else ""
    yield found("iommu-not-passthrough", cards=len(cards), boot=boot)


def used_by_others(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    if device is None or device.integrated or device.memory_used_bytes < USED_BYTES:
        return
    if device.memory_used_bytes < USED_SHARE * device.memory_bytes:
        return
    show = "nvidia-smi" if device.vendor == "nvidia" else f"fuser -v /dev/kfd {device.node}".rstrip()
    used, total = device.memory_used_bytes / GIB, device.memory_bytes / GIB
    yield found("gpu-memory-used", used=used, total=total, index=device.index, name=device.name, show=show)


def lent_memory(machine: Machine) -> Iterator[Finding]:
    """Processor graphics: PyTorch shows the carve-out, training may use what the driver lends."""
    device = best_device(machine)
    if device is None or not device.integrated or device.vendor != "amd":
        return
    if device.memory_bytes > CARVED_OUT * device.gtt_bytes:
        return
    yield found("shared-memory-gpu", lent=device.gtt_bytes / GIB, carved=device.memory_bytes / GIB)


def compiler(machine: Machine) -> Iterator[Finding]:
    if machine.host.compiler is not None or machine.host.system != "Linux":
        return
    with_one = machine.host.model_copy(update={"compiler": "/usr/bin/g++"})
    if not build_profile(machine.model_copy(update={"host": with_one})).compile.value:
        return  # it would not be used
    name = machine.host.distribution.partition(" ")[0]
    tools = dict.fromkeys(access.SELINUX, "dnf install gcc-c++") | {"arch": "pacman -S gcc"}
    tools |= dict.fromkeys(("sles", "opensuse-leap"), "zypper install gcc-c++")
    slower = ", 10 to 35% slower on a CPU" if best_device(machine) is None else ""
    yield found("no-compiler", fix=("sudo " + tools.get(name, "apt install g++"),), slower=slower)


def disk(machine: Machine) -> Iterator[Finding]:
    free = machine.host.disk_free_bytes
    if free < LITTLE_DISK:
        yield found("little-disk", level="blocks" if free < NO_DISK else "note", free=format_bytes(free))


RULES: tuple[Rule, ...] = (
    access.driver,
    access.compute_device,
    access.silent_nvidia,
    access.hung,
    access.groups,
    access.wsl,
    access.slurm,
    access.hiding,
    software.missing,
    software.wrong_build,
    software.kernels,
    software.override,
    software.nvidia,
    software.amd_driver,
    software.loaded_rocm,
    software.site_modules,
    bad_probes,
    experimental_attention,
    software.allocator,
    iommu,
    numa,
    shared_memory,
    used_by_others,
    compiler,
    disk,
    access.nothing,
    access.idle_card,
    access.processor_graphics,
    access.masked,
    lent_memory,
    software.two_makers,
    software.companions,
    software.bitsandbytes,
    software.system_rocm,
    flash_attention,
    software.pin,
)
ORDER = {"blocks": 0, "slows": 1, "note": 2}


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """Every finding, what stops first; a finding's number is its place, counted from 1."""
    found = [finding for rule in RULES for finding in rule(machine)]
    ordered = sorted(found, key=lambda finding: ORDER[finding.level])
    return tuple(_numbered(finding, number) for number, finding in enumerate(ordered, start=1))


def _numbered(finding: Finding, number: int) -> Finding:
    return replace(finding, fix=tuple(step.replace(NUMBER, str(number)) for step in finding.fix))


def ready(findings: tuple[Finding, ...]) -> bool:
    """Whether training can start: nothing stops it."""
    return not any(finding.level == "blocks" for finding in findings)
