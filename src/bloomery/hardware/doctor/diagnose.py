"""The doctor's rules about probes: what failed, crashed, hung or was wrong when it was tried."""

from collections.abc import Iterator
from dataclasses import replace

from bloomery.hardware.doctor import access as doctor_access
from bloomery.hardware.doctor import driver as doctor_driver
from bloomery.hardware.doctor import system as doctor_system
from bloomery.hardware.doctor import torch_build as doctor_torch
from bloomery.hardware.doctor.finding import NUMBER, PROBE, Finding, Rule
from bloomery.hardware.doctor.symptoms import Level, match
from bloomery.hardware.fitting import best_device, install
from bloomery.hardware.machine import Machine, Probe
from bloomery.hardware.profile import build_profile
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
    "bitsandbytes": ("bitsandbytes", "note", "quantize.base=none"),
    "flash": ("flash-attn", "note", "train.attention=blockwise"),
    "blas": ("a matrix library", "note", ""),
    "bandwidth": ("copying on the GPU", "slows", ""),
    "p2p": ("copying between GPUs", "slows", ""),
    "all": ("an all-reduce", "slows", ""),
    "device": ("the GPU", "stops", ""),
    "matmul": ("a matrix product", "slows", ""),
}


def experimental_attention(machine: Machine) -> Iterator[Finding]:
    """Fused attention is there and switched off."""
    off = [probe for probe in machine.probes if EXPERIMENTAL in probe.said and probe.outcome != "ok"]
    if off and machine.software.environment.get(EXPERIMENTAL) != "1":
        yield Finding(
            id="attention-is-math",
            level="slows",
            what="PyTorch computes attention with plain products here: fused kernels exist and are switched off",
            evidence=f"{', '.join(probe.name for probe in off)}: {off[0].said}",
            mend=(f"export {EXPERIMENTAL}=1  # Bloomery's own runs set it",),
            prove=PROBE,
        )


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
    mend = _around(probe, kind, machine)
    mend += (known[0].remedy if known else _remedy(probe, kind, machine)) if probe.outcome != "wrong" else []
    return Finding(
        id=f"probe-{probe.name}",
        level=_level(probe, kind, machine),
        what=f"{subject} {SAID[probe.outcome]} on this machine" + (f": {known[0].cause}" if known else ""),
        evidence=f"{probe.name}: {probe.said or probe.outcome}{off}",
        mend=_without_repeats(mend or ["bloomery doctor --bundle report.json  # what a maintainer needs"]),
        prove=PROBE,
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
        return "stops"
    unused = {
        "matmul": probe.name != f"matmul-{table.dtype.value}",
        "attention": probe.name == "attention-math" or table.attention.value != "fused",
        "compile": not table.compile.value,
    }
    return "note" if unused.get(kind) else SUBJECTS.get(kind, ("", "note", ""))[1]


def _remedy(probe: Probe, kind: str, machine: Machine) -> list[str]:
    if kind == "device" and machine.accelerators:
        return [install(machine) + "  # the build that has this chip's kernels"]
    return [] if probe.outcome != "crashed" else ["bloomery doctor --bundle report.json  # what a maintainer needs"]


def flash_attention(machine: Machine) -> Iterator[Finding]:
    """flash-attn is absent and would be of use: PyTorch has no fused kernel of its own for this chip."""
    device = best_device(machine)
    spec = arch_spec(device.arch) if device else None
    absent = next((p for p in machine.probes if p.name == "flash-attn" and p.outcome == "absent"), None)
    line = absent.facts.get("build") if absent else None
    if device and line and (spec is None or spec.fused_attention != "yes"):
        yield Finding(
            id="flash-attn-absent",
            level="note",
            what=f"PyTorch has no settled fused attention for {device.arch}; the package flash-attn has",
            evidence=absent.said if absent else "",
            mend=(f"{line}  # half an hour of compiling; Bloomery's blockwise attention does without",),
            prove=PROBE,
        )


RULES: tuple[Rule, ...] = (
    doctor_access.driver,
    doctor_access.compute_device,
    doctor_access.silent_nvidia,
    doctor_access.hung,
    doctor_access.groups,
    doctor_access.wsl,
    doctor_access.slurm,
    doctor_access.hiding,
    doctor_torch.missing,
    doctor_torch.wrong_build,
    doctor_torch.kernels,
    doctor_torch.override,
    doctor_driver.nvidia,
    doctor_driver.amd_driver,
    doctor_driver.loaded_rocm,
    doctor_driver.site_modules,
    bad_probes,
    experimental_attention,
    doctor_torch.allocator,
    doctor_system.iommu,
    doctor_system.numa,
    doctor_system.shared_memory,
    doctor_system.used_by_others,
    doctor_system.compiler,
    doctor_system.disk,
    doctor_access.nothing,
    doctor_access.idle_card,
    doctor_access.processor_graphics,
    doctor_access.masked,
    doctor_system.lent_memory,
    doctor_torch.two_makers,
    doctor_torch.companions,
    doctor_torch.bitsandbytes,
    doctor_driver.system_rocm,
    flash_attention,
    doctor_torch.pin,
)
ORDER = {"stops": 0, "slows": 1, "note": 2}


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """Every finding, what stops first; a finding's number is its place, counted from 1."""
    found = [finding for rule in RULES for finding in rule(machine)]
    ordered = sorted(found, key=lambda finding: ORDER[finding.level])
    return tuple(_numbered(finding, number) for number, finding in enumerate(ordered, start=1))


def _numbered(finding: Finding, number: int) -> Finding:
    return replace(finding, mend=tuple(step.replace(NUMBER, str(number)) for step in finding.mend))


def ready(findings: tuple[Finding, ...]) -> bool:
    """Whether training can start: nothing stops it."""
    return not any(finding.level == "stops" for finding in findings)
