"""What keeps a machine from training, found by rules over its record. Nothing here looks at the machine itself."""

from dataclasses import replace

from bloomery.hardware import doctor_access, doctor_driver, doctor_probes, doctor_system, doctor_torch
from bloomery.hardware.doctor_finding import NUMBER, Finding, Rule
from bloomery.hardware.machine import Machine

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
    doctor_probes.bad_probes,
    doctor_probes.experimental_attention,
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
    doctor_probes.flash_attention,
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
