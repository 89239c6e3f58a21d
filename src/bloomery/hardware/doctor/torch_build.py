"""The doctor's rules about the installed PyTorch: its build, its kernels, the override, its companions, the pip pin."""

import re
from collections.abc import Iterator
from datetime import datetime

from bloomery.core.errors import UserError
from bloomery.hardware.doctor.finding import NUMBER, PROBE, Finding, Fix, has_amd, install_steps, installs
from bloomery.hardware.fitting import best_device, fitting_builds, install
from bloomery.hardware.machine import Accelerator, Machine, Package, Setting
from bloomery.hardware.specs.wheels import AMD_WHEELS, NOT_FROM_PYTORCH, OLDEST_TORCH, PYTORCH_ROCM, series

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
MAKERS = {"cpu": "for CPUs alone", "cuda": "for NVIDIA", "rocm": "for AMD"}
TOGETHER_SECONDS = 120.0  # packages written this close to each other came from one command
SHARED_KERNELS = {"gfx1150": "gfx115x", "gfx1151": "gfx115x", "gfx1152": "gfx115x", "gfx1153": "gfx115x"}


def missing(machine: Machine) -> Iterator[Finding]:
    if machine.software.torch is None:
        yield Finding(
            id="no-torch",
            level="stops",
            what="PyTorch is not installed here",
            evidence=f"Python {machine.software.python} in {machine.software.prefix or 'this environment'}",
            mend=(*install_steps(machine, anew=False), "# in a checkout of Bloomery, make setup does it and pins it"),
        )
    elif series(machine.software.torch) < OLDEST_TORCH:
        yield Finding(
            id="torch-too-old",
            level="stops",
            what=f"PyTorch {machine.software.torch} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
            evidence=machine.software.torch_folder,
            mend=install_steps(machine),
            fixes=installs(machine),
        )


def wrong_build(machine: Machine) -> Iterator[Finding]:
    """A CUDA or CPU build beside an AMD card, and the like; with who brought it."""
    software, device = machine.software, best_device(machine)
    if device is None or software.build is None:
        return
    wanted = "rocm" if device.vendor == "amd" else "cuda"
    if software.build == wanted:
        return
    card = "AMD" if device.vendor == "amd" else "NVIDIA"
    fact = "torch.version.hip is None" if wanted == "rocm" else "torch.version.cuda is None"
    yield Finding(
        id="wrong-build",
        level="stops",
        what=f"PyTorch finds no GPU: it was built {MAKERS[software.build]} and the card is {card}",
        evidence="; ".join([fact, *_who_brought(software.packages)]),
        mend=install_steps(machine),
        prove=PROBE,
        fixes=installs(machine),
    )


def two_makers(machine: Machine) -> Iterator[Finding]:
    """Cards of AMD and of NVIDIA: an environment has a PyTorch for one of them."""
    used = best_device(machine)
    others = [one for one in machine.accelerators if used and one.vendor != used.vendor and not one.integrated]
    if used and others and not used.integrated:
        yield Finding(
            id="two-makers",
            level="note",
            what=f"PyTorch uses {used.name} here and not {others[0].name}: each build is for one maker's GPUs",
            evidence=f"torch {machine.software.torch or 'is not installed'}",
            mend=("# for the other one, a second environment with its own build",),
        )


def _who_brought(packages: tuple[Package, ...]) -> Iterator[str]:
    """When torch was written, whether somebody asked for it, and who else came in the same minutes and wants it."""
    torch = next((package for package in packages if package.name == "torch"), None)
    if torch is None or not torch.installed:
        return
    moment = datetime.fromtimestamp(torch.installed)
    asked = "asked for by name" if torch.requested else "not asked for by name"
    yield f"installed on {moment.day} {moment:%B %H:%M}, {asked}"
    for other in packages:
        near = abs(other.installed - torch.installed) <= TOGETHER_SECONDS
        if near and not torch.requested and other.requested and other.requires_torch and other.name != "torch":
            yield f"{other.name} {other.version} came with it and requires {other.requires_torch}"


def amd_wheel(machine: Machine) -> bool:
    """Whether the installed build is one of AMD's, with a package of kernels per chip."""
    local = (machine.software.torch or "").partition("+")[2]
    shared = any(package.name.startswith("amd-torch-device-") for package in machine.software.packages)
    return shared or local in AMD_WHEELS.values()


def kernels_of(machine: Machine) -> frozenset[str] | None:
    """The AMD chips that the installed build can train on; None: nobody wrote that down."""
    torch = machine.software.torch or ""
    local = torch.partition("+")[2]
    if machine.software.build != "rocm":
        return None
    if amd_wheel(machine):
        names = [p.name for p in machine.software.packages if p.name.startswith("amd-torch-device-")]
        found = {name.removeprefix("amd-torch-device-") for name in names}
        chips = found | {chip for chip, shared in SHARED_KERNELS.items() if shared in found}
        return frozenset(chips) if found else frozenset()
    if local == "rocm6.3":
        return frozenset(PYTORCH_ROCM[2, 9][1].split())
    listed = dict(PYTORCH_ROCM.values())
    if local not in listed:
        return None
    return frozenset(listed[local].split()) - frozenset(NOT_FROM_PYTORCH)


def kernels(machine: Machine) -> Iterator[Finding]:
    """The build is for AMD, but not for this chip."""
    device, known = best_device(machine), kernels_of(machine)
    if device is None or device.vendor != "amd" or known is None or device.arch in known or _borrows(machine, device):
        return
    local = (machine.software.torch or "").partition("+")[2]
    builds = fitting_builds(machine, device)
    if amd_wheel(machine):
        yield Finding(
            id="device-package-missing",
            level="stops",
            what=f"AMD's PyTorch is installed without the kernels of {device.arch}",
            evidence=f"there is no package amd-torch-device-{device.arch}",
            mend=install_steps(machine),
            prove=PROBE,
            fixes=installs(machine),
        )
    elif device.arch in NOT_FROM_PYTORCH:
        yield Finding(
            id="wheel-unfit",
            level="stops",
            what=f"this PyTorch does not work on {device.arch}",
            evidence=f"{machine.software.torch}: {NOT_FROM_PYTORCH[device.arch]}",
            mend=install_steps(machine),
            prove=PROBE,
            fixes=installs(machine),
        )
    else:
        borrowed = next((dict(build.environment) for build in builds if build.environment), {})
        loan = [f"export {name}={value}  # or, with the wheel that is here" for name, value in borrowed.items()]
        yield Finding(
            id="arch-not-in-wheel",
            level="stops",
            what=f"this PyTorch has no kernels for {device.arch}",
            evidence=f"the wheels of {local} bring {', '.join(sorted(known))}",
            mend=(*install_steps(machine), *loan),
            prove=PROBE,
            fixes=installs(machine),
        )


def claimed(value: str) -> str:
    """ "10.3.0" -> gfx1030; empty where it is no version."""
    parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", value.strip())
    return f"gfx{parts[1]}{int(parts[2]):x}{int(parts[3]):x}" if parts else ""


def _borrows(machine: Machine, device: Accelerator) -> bool:
    """Whether the override makes a chip run its twin's kernels in a wheel that has none for the chip itself."""
    claims = claimed(_override(machine)[0])
    known = kernels_of(machine)
    return bool(
        re.fullmatch("gfx103[1-6]", device.arch)
        and claims == "gfx1030"
        and known is not None
        and claims in known
        and not amd_wheel(machine)
        and _one_chip(machine)
    )


def _one_chip(machine: Machine) -> bool:
    return len({device.arch for device in machine.accelerators if device.vendor == "amd"}) == 1


def _override(machine: Machine) -> tuple[str, tuple[Setting, ...]]:
    """Its value, and the lines that set it; a line of a shell file counts for the next shell."""
    lines = tuple(setting for setting in machine.software.settings if setting.name == OVERRIDE)
    value = machine.software.environment.get(OVERRIDE, "")
    return value or (lines[-1].value if lines else ""), lines


def override(machine: Machine) -> Iterator[Finding]:
    """HSA_OVERRIDE_GFX_VERSION where it harms, where it helps, and where it does nothing."""
    value, lines = _override(machine)
    device = best_device(machine)
    if not value or device is None or device.vendor != "amd":
        return
    claims = claimed(value)
    where = " and ".join(f"{one.file} line {one.line}" for one in lines) or "the environment of this process"
    fixes = tuple(Fix(kind="unset", name=OVERRIDE, file=one.file, line=one.line) for one in lines)
    mend = (f"unset {OVERRIDE}" + ("  # and delete that line" if lines else ""),)
    if _borrows(machine, device):
        best = fitting_builds(machine, device)[0]
        yield Finding(
            id="override-helps",
            level="note",
            what=f"{device.arch} runs the kernels of {claims}, because {OVERRIDE}={value} says so",
            evidence=f"{where}; the wheel {machine.software.torch} has none of its own",
            mend=(f"{install(machine)}  # {best.because}; unset the override then",),
            prove=PROBE,
        )
    elif claims == device.arch and _one_chip(machine):
        yield Finding(
            id="override-needless",
            level="note",
            what=f"{OVERRIDE}={value} says what the chip says itself",
            evidence=where,
            mend=mend,
            fixes=fixes,
        )
    else:
        yield Finding(
            id="override-harms",
            level="stops",
            what=f"{OVERRIDE}={value} makes {_everything(machine)} claim to be {claims or 'no chip that exists'}, "
            + _harm(machine, device, claims),
            evidence=where,
            mend=mend,
            prove=PROBE,
            fixes=fixes,
        )


def _everything(machine: Machine) -> str:
    return "the card" if _one_chip(machine) else "every AMD GPU here"


def _harm(machine: Machine, device: Accelerator, claims: str) -> str:
    known = kernels_of(machine)
    if known is not None and device.arch in known:
        return f"and this PyTorch has kernels for {device.arch} itself"
    if not _one_chip(machine):
        return "and they are not the same"
    if re.fullmatch("gfx103[0-6]", device.arch) and claims == "gfx1030":
        return "whose kernels the right wheel does not bring (the advice was right for older wheels)"
    return f"whose instructions {device.arch} does not have"


def pin(machine: Machine) -> Iterator[Finding]:
    """Nothing keeps pip from replacing the ROCm build, or the pin names another build than the installed one."""
    software = machine.software
    if software.torch is None or not (software.build == "rocm" or has_amd(machine)):
        return
    if software.pinned.replace(" ", "") == f"torch=={software.torch}" or " @ " in software.pinned:
        return
    yield Finding(
        id="torch-not-pinned",
        level="note",
        what="the next `pip install` can " + ("replace this PyTorch" if software.build == "rocm" else "undo this"),
        evidence=f"pip's constraints say {software.pinned}, installed is {software.torch}"
        if software.pinned
        else "no pip constraint of this environment names torch; PyPI's build is for NVIDIA",
        mend=(f"bloomery doctor --fix {NUMBER}  # pins torch in this environment's pip constraints",),
        fixes=(Fix(kind="pin"),),
    )


def companions(machine: Machine) -> Iterator[Finding]:
    """torchvision and torchaudio of another index than torch."""
    local = (machine.software.torch or "").partition("+")[2]
    if machine.software.build != "rocm":
        return
    others = [p for p in machine.software.packages if p.name in ("torchvision", "torchaudio")]
    foreign = [p for p in others if p.version.partition("+")[2].split(".git")[0] not in (local, local.split(".git")[0])]
    if foreign:
        names = " ".join(package.name for package in foreign)
        yield Finding(
            id="companions-mismatch",
            level="note",
            what=f"{names.replace(' ', ' and ')} came from another index than PyTorch and will not import",
            evidence=", ".join(f"{p.name} {p.version}" for p in foreign) + f" beside torch {machine.software.torch}",
            mend=(f"pip uninstall {names}  # Bloomery needs neither",),
            prove=f"python -c 'import {foreign[0].name}'",
        )


def bitsandbytes(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    package = next((p for p in machine.software.packages if p.name == "bitsandbytes"), None)
    if package is None or device is None or device.vendor != "amd":
        return
    if re.fullmatch("gfx90[06]|gfx101.", device.arch):
        yield Finding(
            id="bitsandbytes-without-arch",
            level="note",
            what=f"bitsandbytes has no kernels for {device.arch} in any release: quantised training fails",
            evidence=f"bitsandbytes {package.version}",
            mend=(
                "git clone https://github.com/bitsandbytes-foundation/bitsandbytes && cd bitsandbytes",
                f"cmake -DCOMPUTE_BACKEND=hip -DBNB_ROCM_ARCH={device.arch} -S . && make && pip install --no-deps .",
            ),
            prove="python -m bitsandbytes",
        )
    elif series(package.version) < (0, 50):
        yield Finding(
            id="bitsandbytes-old",
            level="note",
            what="this bitsandbytes computes wrong 4-bit values on AMD GPUs",
            evidence=f"bitsandbytes {package.version}; 0.50.0 mended it",
            mend=("pip install --no-deps 'bitsandbytes>=0.50.0'",),
            prove=PROBE,
        )


def allocator(machine: Machine) -> Iterator[Finding]:
    """Expandable segments on HIP do nothing, or hang."""
    environment = machine.software.environment
    names = [n for n, v in environment.items() if n.endswith("ALLOC_CONF") and "expandable_segments:true" in v.lower()]
    if names and machine.software.build == "rocm":
        yield Finding(
            id="expandable-segments",
            level="slows",
            what="expandable memory segments do nothing on most ROCm builds and can hang on the others",
            evidence=f"{names[0]}={environment[names[0]]}",
            mend=(f"unset {names[0]}  # Bloomery chooses the allocator's settings",),
            fixes=tuple(
                Fix(kind="unset", name=one.name, file=one.file, line=one.line)
                for one in machine.software.settings
                if one.name == names[0]
            ),
        )


def torch_missing(machine: Machine) -> UserError:
    """For a command that needs PyTorch where none is installed: the lines that install the build for this machine."""
    steps = "\n       ".join(install_steps(machine, anew=False))
    where = f"Python {machine.software.python} in {machine.software.prefix or 'this environment'}"
    return UserError("PyTorch is not installed here", where=where, remedy=steps)
