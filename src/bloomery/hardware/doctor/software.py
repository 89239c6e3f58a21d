"""The doctor's rules about PyTorch: build, kernels, override, companion packages, pin."""

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from bloomery.core.errors import UserError
from bloomery.hardware.doctor.symptoms import (
    PIN,
    Finding,
    from_table,
    install_steps,
    to_install,
    vendors,
)
from bloomery.hardware.machine import Accelerator, Machine, ShellSetting
from bloomery.hardware.profile import (
    best_device,
    fitting_builds,
    install,
)
from bloomery.hardware.vendors import BUILD_NAMES, VENDORS
from bloomery.hardware.wheels import OLDEST_TORCH, series, wheel_table

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
TOGETHER_SECONDS = 120.0  # packages installed within this time belong to one pip command
SHARED_KERNELS = {
    "gfx1150": "gfx115x",
    "gfx1151": "gfx115x",
    "gfx1152": "gfx115x",
    "gfx1153": "gfx115x",
}


def missing_torch(machine: Machine) -> Iterator[Finding]:
    software = machine.software
    if software.torch is None:
        steps = (
            *install_steps(machine, reinstall=False),
            "# or `make setup` in a checkout of Bloomery: also pins it",
        )
        yield from_table(
            "no-torch",
            fix=steps,
            python=software.python,
            prefix=software.prefix or "this environment",
        )
    elif series(software.torch) < OLDEST_TORCH:
        oldest = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
        yield to_install(
            "torch-too-old",
            machine,
            torch=software.torch,
            oldest=oldest,
            folder=software.torch_folder,
        )


def wrong_build(machine: Machine) -> Iterator[Finding]:
    """A CUDA or CPU build with an AMD GPU, and the like; with the package that installed it."""
    software = machine.software
    device = best_device(machine)
    if device is None or software.build is None:
        return
    vendor = VENDORS[device.vendor]
    build = BUILD_NAMES[software.build]
    if software.build == vendor.build:
        return
    makers = (other.name for other in VENDORS.values() if other.build == software.build != "cpu")
    maker = next(makers, "CPUs only")
    evidence = [f"torch.version.{vendor.version} is None"]
    torch = next((package for package in software.packages if package.name == "torch"), None)
    if torch is not None and torch.installed:
        moment = datetime.fromtimestamp(torch.installed)
        requested = "requested" if torch.requested else "not requested"
        evidence.append(
            f"installed on {moment:%B} {moment.day}, {moment:%H:%M}, {requested} by name"
        )
        # A package that you asked for may have brought this torch along.
        requested_packages = (
            [] if torch.requested else [p for p in software.packages if p.requested]
        )
        for package in requested_packages:
            together = abs(package.installed - torch.installed) <= TOGETHER_SECONDS
            if together and package.requires_torch and package.name != "torch":
                evidence.append(
                    f"with {package.name} {package.version}, which requires {package.requires_torch}"
                )
    fields = {
        "build": build,
        "maker": maker,
        "vendor": vendor.name,
        "evidence": "; ".join(evidence),
    }
    yield to_install("wrong-build", machine, **fields)


def two_vendors(machine: Machine) -> Iterator[Finding]:
    """GPUs of AMD and of NVIDIA: an environment has a PyTorch for one of them."""
    best = best_device(machine)
    other_gpus = [
        device
        for device in machine.accelerators
        if best and device.vendor != best.vendor and not device.integrated
    ]
    if best and other_gpus and not best.integrated:
        torch = machine.software.torch or "is not installed"
        yield from_table("two-vendors", used=best.name, other=other_gpus[0].name, torch=torch)


def amd_wheel(machine: Machine) -> bool:
    """Whether the installed build is one of AMD's own, with a kernel package per GPU architecture."""
    local = (machine.software.torch or "").partition("+")[2]
    shared = any(
        package.name.startswith("amd-torch-device-") for package in machine.software.packages
    )
    return shared or local in wheel_table().amd_wheels.values()


def kernels_of(machine: Machine) -> frozenset[str] | None:
    """The AMD architectures that the installed build can train on; None: not known."""
    torch = machine.software.torch or ""
    local = torch.partition("+")[2]
    if machine.software.build != "rocm":
        return None
    if amd_wheel(machine):
        names = [
            p.name for p in machine.software.packages if p.name.startswith("amd-torch-device-")
        ]
        packaged = {name.removeprefix("amd-torch-device-") for name in names}
        return frozenset(
            packaged | {arch for arch, shared in SHARED_KERNELS.items() if shared in packaged}
        )
    table = wheel_table()
    if local == "rocm6.3":
        return frozenset(table.pytorch_kernels["rocm6.4"].split())
    listed = table.pytorch_kernels.get(local)
    return frozenset(listed.split()) - frozenset(table.not_from_pytorch) if listed else None


def kernels(machine: Machine) -> Iterator[Finding]:
    """The build is for AMD, but not for this GPU."""
    device = best_device(machine)
    archs = kernels_of(machine)
    if device is None or device.vendor != "amd" or archs is None or device.arch in archs:
        return
    arch = device.arch
    torch = machine.software.torch or ""
    if _override_helps(machine, device):
        return
    if amd_wheel(machine):
        yield to_install("device-package-missing", machine, arch=arch)
    elif reason := wheel_table().not_from_pytorch.get(arch):
        yield to_install("wheel-unfit", machine, arch=arch, torch=torch, reason=reason)
    else:
        settings = next(
            (b.environment for b in fitting_builds(machine, device) if b.environment), ()
        )
        override = [
            f"export {name}={value}  # or, with the installed wheel"
            for name, value in dict(settings).items()
        ]
        fields = {"arch": arch, "local": torch.partition("+")[2], "archs": ", ".join(sorted(archs))}
        finding = to_install("arch-not-in-wheel", machine, **fields)
        yield finding.model_copy(update={"fix": (*finding.fix, *override)})


def reported_arch(value: str) -> str:
    """The architecture that an override selects: "10.3.0" -> gfx1030; empty if `value` is not a version."""
    parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value.strip())
    return f"gfx{parts[1]}{int(parts[2]):x}{int(parts[3]):x}" if parts else ""


def _override_helps(machine: Machine, device: Accelerator) -> bool:
    """Whether the override makes a gfx103x GPU run gfx1030 kernels in a wheel without kernels for the GPU itself."""
    reported = reported_arch(_override(machine)[0])
    return bool(
        re.fullmatch("gfx103[1-6]", device.arch)
        and reported == "gfx1030"
        and reported in (kernels_of(machine) or ())
        and not amd_wheel(machine)
        and _one_arch(machine)
    )


def _one_arch(machine: Machine) -> bool:
    return len({device.arch for device in machine.accelerators if device.vendor == "amd"}) == 1


def _override(machine: Machine) -> tuple[str, tuple[ShellSetting, ...]]:
    """The value, and the lines that set it; a line of a shell file counts for the next shell."""
    lines = tuple(setting for setting in machine.software.settings if setting.name == OVERRIDE)
    value = machine.software.environment.get(OVERRIDE, "")
    return value or (lines[-1].value if lines else ""), lines


def override(machine: Machine) -> Iterator[Finding]:
    """HSA_OVERRIDE_GFX_VERSION: where it harms, where it helps, and where it has no effect."""
    value, lines = _override(machine)
    device = best_device(machine)
    if not value or device is None or device.vendor != "amd":
        return
    reported = reported_arch(value)
    archs = kernels_of(machine)
    one_arch = _one_arch(machine)
    places = (
        " and ".join(f"{setting.file} line {setting.line}" for setting in lines)
        or "the environment of this process"
    )
    fields: dict[str, Any] = {
        "value": value,
        "where": places,
        "remark": "  # and delete that line" if lines else "",
    }
    if _override_helps(machine, device):
        fields |= {
            "arch": device.arch,
            "torch": machine.software.torch or "",
            "install": install(machine),
        }
        reason = fitting_builds(machine, device)[0].reason
        yield from_table("override-helps", reported=reported, reason=reason, **fields)
        return
    if reported == device.arch and one_arch:
        yield from_table("override-needless", **fields)
        return
    if archs is not None and device.arch in archs:
        harm = f"although this PyTorch has kernels for {device.arch}"
    elif not one_arch:
        harm = "although their architectures differ"
    elif re.fullmatch("gfx103[0-6]", device.arch) and reported == "gfx1030":
        harm = "whose kernels the right wheel does not include (older wheels needed the override)"
    else:
        harm = f"whose instruction set {device.arch} does not support"
    fields |= {
        "gpus": "the GPU" if one_arch else "every AMD GPU",
        "reported": reported or "no known architecture",
    }
    yield from_table("override-harms", harm=harm, **fields)


def pin(machine: Machine) -> Iterator[Finding]:
    """pip can replace the ROCm build, or the pin names another build than the installed one."""
    software = machine.software
    if software.torch is None or not (software.build == "rocm" or "amd" in vendors(machine)):
        return
    if software.pinned.replace(" ", "") == f"torch=={software.torch}" or " @ " in software.pinned:
        return
    evidence = "no pip constraint of this environment names torch; PyPI's build is for NVIDIA"
    if software.pinned:
        evidence = f"pip's constraints require {software.pinned}, installed is {software.torch}"
    effect = "replace this PyTorch" if software.build == "rocm" else "undo the fix"
    yield from_table("torch-not-pinned", run=PIN, effect=effect, evidence=evidence)


def companions(machine: Machine) -> Iterator[Finding]:
    """torchvision and torchaudio from another index than torch."""
    local = (machine.software.torch or "").partition("+")[2]
    if machine.software.build != "rocm":
        return
    torch_packages = [
        p for p in machine.software.packages if p.name in ("torchvision", "torchaudio")
    ]
    accepted = (local, local.split(".git")[0])
    if mismatched := [
        p for p in torch_packages if p.version.partition("+")[2].split(".git")[0] not in accepted
    ]:
        names = [package.name for package in mismatched]
        yield from_table(
            "companions-mismatch",
            both=" and ".join(names),
            names=" ".join(names),
            first=names[0],
            versions=", ".join(f"{p.name} {p.version}" for p in mismatched),
            torch=machine.software.torch,
        )


def unfit_bitsandbytes(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    package = next((p for p in machine.software.packages if p.name == "bitsandbytes"), None)
    if package is None or device is None or device.vendor != "amd":
        return
    if re.fullmatch("gfx90[06]|gfx101.", device.arch):
        yield from_table("bitsandbytes-without-arch", arch=device.arch, version=package.version)
    elif series(package.version) < (0, 50):
        yield from_table("bitsandbytes-old", version=package.version)


def allocator(machine: Machine) -> Iterator[Finding]:
    """Expandable segments on HIP have no effect, or hang."""
    environment = machine.software.environment
    names = [
        n
        for n, v in environment.items()
        if n.endswith("ALLOC_CONF") and "expandable_segments:true" in v.lower()
    ]
    if names and machine.software.build == "rocm":
        yield from_table("expandable-segments", name=names[0], value=environment[names[0]])


def torch_missing(machine: Machine) -> UserError:
    """The error of a command that needs PyTorch; its fix installs the build for this machine."""
    steps = "\n       ".join(install_steps(machine, reinstall=False))
    place = f"Python {machine.software.python} in {machine.software.prefix or 'this environment'}"
    return UserError("PyTorch is not installed", where=place, fix=steps)
