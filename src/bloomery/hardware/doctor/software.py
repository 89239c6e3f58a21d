"""The doctor's rules about PyTorch: build, kernels, override, companions, pin; the drivers and ROCm that it meets.

Sources: AMD's "User and AMD GPU Driver support matrix" (driver and user space up to two releases apart, from ROCm 6.4
on up to a year; its lists for drivers 30.10 and 30.30 reach 13 months), ROCm's release notes (months), the names of
AMD's amdgpu-dkms packages (6.10.5.60300, 6.14.14.30100100), ROCm/rocm-install-on-linux#684 (30.20.1 is 6.16.6),
OLCF's pytorch_frontier.rst (the module follows the wheel), NVIDIA's "CUDA Compatibility" (CUDA 12 from driver 525 on,
13 from 580 on) and its release notes (12.8 is the first CUDA with Blackwell, 13 the first without Volta).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from bloomery.core.errors import UserError
from bloomery.hardware.detect.system import version_key
from bloomery.hardware.doctor.symptoms import PIN, PROBE, Finding, found, install_steps, to_install, vendors
from bloomery.hardware.machine import Accelerator, Machine, Setting
from bloomery.hardware.profile import best_device, fitting_builds, install
from bloomery.hardware.specs.wheels import (
    AMD_WHEELS,
    NOT_FROM_PYTORCH,
    OLDEST_TORCH,
    PYTORCH_ROCM,
    TorchBuild,
    series,
    torch_builds,
)

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
MAKERS = {"cpu": "for CPUs alone", "cuda": "for NVIDIA", "rocm": "for AMD"}
TOGETHER_SECONDS = 120.0  # packages written this close to each other came from one command
SHARED_KERNELS = {"gfx1150": "gfx115x", "gfx1151": "gfx115x", "gfx1152": "gfx115x", "gfx1153": "gfx115x"}
RELEASED = {  # ROCm -> year, month
    "5.5": (2023, 5), "5.6": (2023, 6), "5.7": (2023, 9), "6.0": (2023, 12), "6.1": (2024, 4), "6.2": (2024, 8),
    "6.3": (2024, 12), "6.4": (2025, 4), "7.0": (2025, 9), "7.1": (2025, 10), "7.2": (2026, 1), "7.14": (2026, 7),
    "10.0": (2026, 8), "10.1": (2026, 10),
}  # fmt: skip
RELEASES = tuple(RELEASED)
# What /sys/module/amdgpu/version says of AMD's driver package -> the ROCm that came with it, the package's own name.
DRIVERS = (
    ("6.0.5", "5.5", "5.5"), ("6.1.5", "5.6", "5.6"), ("6.2.4", "5.7", "5.7"), ("6.3.6", "6.0", "6.0"),
    ("6.7.0", "6.1", "6.1"), ("6.8.5", "6.2", "6.2"), ("6.10.5", "6.3", "6.3"), ("6.12.12", "6.4", "6.4"),
    ("6.14.14", "7.0", "30.10"), ("6.16.6", "7.1", "30.20"), ("6.16.13", "7.2", "30.30"), ("6.19.14", "7.14", "31.40"),
)  # fmt: skip
RELEASES_APART, MONTHS_APART = 2, 13
INBOX_FROM = (6, 10)  # Linux whose own amdgpu AMD takes in place of its package
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}  # CUDA, major -> NVIDIA's driver, major
BLACKWELL_DRIVER = 570
BLACKWELL, TURING = 100, 75


def missing(machine: Machine) -> Iterator[Finding]:
    software = machine.software
    if software.torch is None:
        steps = (*install_steps(machine, anew=False), "# in a checkout of Bloomery, make setup does it and pins it")
        yield found("no-torch", fix=steps, python=software.python, prefix=software.prefix or "this environment")
    elif series(software.torch) < OLDEST_TORCH:
        oldest = f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
        yield to_install("torch-too-old", machine, torch=software.torch, oldest=oldest, folder=software.torch_folder)


def wrong_build(machine: Machine) -> Iterator[Finding]:
    """A CUDA or CPU build beside an AMD card, and the like; with who brought it."""
    software, device = machine.software, best_device(machine)
    if device is None or software.build is None:
        return
    wanted, card = ("hip", "AMD") if device.vendor == "amd" else ("cuda", "NVIDIA")
    if software.build == {"hip": "rocm"}.get(wanted, wanted):
        return
    evidence = "; ".join([f"torch.version.{wanted} is None", *_who_brought(machine)])
    yield to_install("wrong-build", machine, maker=MAKERS[software.build], card=card, evidence=evidence)


def two_makers(machine: Machine) -> Iterator[Finding]:
    """Cards of AMD and of NVIDIA: an environment has a PyTorch for one of them."""
    used = best_device(machine)
    others = [one for one in machine.accelerators if used and one.vendor != used.vendor and not one.integrated]
    if used and others and not used.integrated:
        torch = machine.software.torch or "is not installed"
        yield found("two-makers", used=used.name, other=others[0].name, torch=torch)


def _who_brought(machine: Machine) -> Iterator[str]:
    """When torch was written, whether somebody asked for it, and who else came in the same minutes and wants it."""
    packages = machine.software.packages
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
    arch, torch = device.arch, machine.software.torch or ""
    if amd_wheel(machine):
        yield to_install("device-package-missing", machine, arch=arch)
    elif arch in NOT_FROM_PYTORCH:
        yield to_install("wheel-unfit", machine, arch=arch, torch=torch, why=NOT_FROM_PYTORCH[arch])
    else:
        builds = fitting_builds(machine, device)
        borrowed = next((dict(build.environment) for build in builds if build.environment), {})
        loan = [f"export {name}={value}  # or, with the wheel that is here" for name, value in borrowed.items()]
        chips = ", ".join(sorted(known))
        one = to_install("arch-not-in-wheel", machine, arch=arch, local=torch.partition("+")[2], known=chips)
        yield replace(one, fix=(*one.fix, *loan))


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
    facts: dict[str, Any] = {"value": value, "where": where, "remark": "  # and delete that line" if lines else ""}
    if _borrows(machine, device):
        facts |= {"arch": device.arch, "torch": machine.software.torch or "", "install": install(machine)}
        yield found("override-helps", claims=claims, reason=fitting_builds(machine, device)[0].reason, **facts)
    elif claims == device.arch and _one_chip(machine):
        yield found("override-needless", **facts)
    else:
        everything = "the card" if _one_chip(machine) else "every AMD GPU here"
        facts |= {"everything": everything, "claims": claims or "no chip that exists"}
        yield found("override-harms", harm=_harm(machine, device, claims), **facts)


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
    if software.torch is None or not (software.build == "rocm" or "amd" in vendors(machine)):
        return
    if software.pinned.replace(" ", "") == f"torch=={software.torch}" or " @ " in software.pinned:
        return
    evidence = "no pip constraint of this environment names torch; PyPI's build is for NVIDIA"
    if software.pinned:
        evidence = f"pip's constraints say {software.pinned}, installed is {software.torch}"
    do = "replace this PyTorch" if software.build == "rocm" else "undo this"
    yield found("torch-not-pinned", run=PIN, do=do, evidence=evidence)


def companions(machine: Machine) -> Iterator[Finding]:
    """torchvision and torchaudio of another index than torch."""
    local = (machine.software.torch or "").partition("+")[2]
    if machine.software.build != "rocm":
        return
    others = [p for p in machine.software.packages if p.name in ("torchvision", "torchaudio")]
    foreign = [p for p in others if p.version.partition("+")[2].split(".git")[0] not in (local, local.split(".git")[0])]
    if foreign:
        names = [package.name for package in foreign]
        yield found(
            "companions-mismatch",
            both=" and ".join(names),
            names=" ".join(names),
            first=names[0],
            versions=", ".join(f"{p.name} {p.version}" for p in foreign),
            torch=machine.software.torch,
        )


def bitsandbytes(machine: Machine) -> Iterator[Finding]:
    device = best_device(machine)
    package = next((p for p in machine.software.packages if p.name == "bitsandbytes"), None)
    if package is None or device is None or device.vendor != "amd":
        return
    if re.fullmatch("gfx90[06]|gfx101.", device.arch):
        yield found("bitsandbytes-without-arch", arch=device.arch, version=package.version)
    elif series(package.version) < (0, 50):
        yield found("bitsandbytes-old", version=package.version)


def allocator(machine: Machine) -> Iterator[Finding]:
    """Expandable segments on HIP do nothing, or hang."""
    environment = machine.software.environment
    names = [n for n, v in environment.items() if n.endswith("ALLOC_CONF") and "expandable_segments:true" in v.lower()]
    if names and machine.software.build == "rocm":
        yield found("expandable-segments", name=names[0], value=environment[names[0]])


def torch_missing(machine: Machine) -> UserError:
    """For a command that needs PyTorch where none is installed: the lines that install the build for this machine."""
    steps = "\n       ".join(install_steps(machine, anew=False))
    where = f"Python {machine.software.python} in {machine.software.prefix or 'this environment'}"
    return UserError("PyTorch is not installed here", where=where, fix=steps)


def tested(driver: str, rocm: str) -> bool:
    """Whether AMD tests the driver that came with one ROCm under the libraries of another: "6.4" and "7.2"."""
    apart = abs(RELEASES.index(driver) - RELEASES.index(rocm))
    (one, month), (other, later) = RELEASED[driver], RELEASED[rocm]
    return apart <= RELEASES_APART or abs(12 * (other - one) + later - month) <= MONTHS_APART


def release_of(version: str) -> str | None:
    """The listed release that a ROCm such as 7.1.25424 belongs to; None for one older than all."""
    return next((one for one in reversed(RELEASES) if version_key(one) <= version_key(version)), None)


def driver_release(version: str) -> tuple[str, str]:
    """(ROCm, name of the package) of AMD's driver package 6.14.14; the oldest listed where it is older than that."""
    listed = [(rocm, name) for number, rocm, name in DRIVERS if version_key(number) <= version_key(version)]
    return listed[-1] if listed else DRIVERS[0][1:]


def wheel_rocm(machine: Machine) -> str:
    """The ROCm that the installed PyTorch brings, 7.1; empty where it is no ROCm build."""
    local = re.search(r"\+rocm(\d+\.\d+)", machine.software.torch or "")
    found = local or re.match(r"(\d+\.\d+)", machine.software.hip)
    return found[1] if found and machine.software.build == "rocm" else ""


def amd_driver(machine: Machine) -> Iterator[Finding]:
    """AMD's driver and the wheel's ROCm, further apart than AMD tests them."""
    driver, wheel = machine.host.driver, release_of(wheel_rocm(machine) or "0")
    device = best_device(machine)
    if device is None or device.vendor != "amd" or wheel is None or machine.host.around.wsl or not driver.amdgpu:
        return
    works = any(probe.name.startswith("matmul") and probe.outcome == "ok" for probe in machine.probes)
    if not driver.amdgpu_version:
        yield from () if works else _inbox(machine, wheel)
        return
    rocm, package = driver_release(driver.amdgpu_version)
    if tested(rocm, wheel):
        return
    evidence = (
        f"amdgpu {driver.amdgpu_version} came with ROCm {rocm}, torch {machine.software.torch} brings ROCm {wheel}"
    )
    if RELEASES.index(rocm) > RELEASES.index(wheel):
        yield found("amd-driver-newer", package=package, wheel=wheel, evidence=evidence)
        return
    older = _build_for_driver(machine, device, rocm)
    run = older.command.replace("pip install ", "pip install --force-reinstall ", 1) if older else ""
    build = [f"{run}  # or, with this driver, the newest PyTorch that fits it"] if older else []
    yield found(
        "amd-driver-old",
        level="note" if works else "blocks",
        fix=(*_newer_driver(machine, wheel), *build),
        run=run,
        rocm=rocm,
        wheel=wheel,
        works="; what was probed works all the same" if works else "",
        evidence=evidence,
    )


def _inbox(machine: Machine, wheel: str) -> Iterator[Finding]:
    """The kernel's own driver: AMD asks for its package below a certain Linux."""
    kernel = version_key(machine.host.driver.kernel)[:2]
    if RELEASES.index(wheel) < RELEASES.index("7.0") or not kernel or kernel >= INBOX_FROM:
        return
    fix = (f"{PROBE}  # where all works nothing needs to change; else:", *_newer_driver(machine, wheel))
    yield found("amd-driver-inbox", fix=fix, kernel=".".join(map(str, kernel)), wheel=wheel)


def _newer_driver(machine: Machine, wheel: str) -> tuple[str, ...]:
    """What brings a driver that fits ROCm `wheel`; of a cluster's nodes only its administrators can."""
    around = machine.host.around
    name = next((name for _, rocm, name in reversed(DRIVERS) if version_key(rocm) <= version_key(wheel)), "")
    if around.slurm or around.site:
        return (f"# ask the cluster's administrators for amdgpu {name} or newer: it is the nodes' driver",)
    tool = {"debian": "apt", "ubuntu": "apt", "sles": "zypper"}.get(machine.host.distribution.partition(" ")[0], "dnf")
    return (
        f"sudo {tool} install amdgpu-dkms && sudo reboot"
        f"  # after adding https://repo.radeon.com/amdgpu/{name} as a source",
    )


def _build_for_driver(machine: Machine, device: Accelerator, driver: str) -> TorchBuild | None:
    """The newest build whose ROCm was tested with a driver, with kernels for the card."""
    python = version_key(machine.software.python)
    for major, minor in sorted(PYTORCH_ROCM, reverse=True):
        builds = torch_builds(
            device.arch, python=(python[0], python[1]), torch=f"{major}.{minor}.{1 if minor == 9 else 0}"
        )
        for build in builds:
            brought = re.search(r"\+rocm(\d+\.\d+)", build.requirement)
            release = release_of(brought[1]) if brought and not build.environment else None
            if release is not None and tested(driver, release):
                return build
    return None


def loaded_rocm(machine: Machine) -> Iterator[Finding]:
    """A ROCm on the loader's path, by a module or a variable, that is not the wheel's: its libraries get mixed in."""
    wheel = wheel_rocm(machine)
    if not wheel:
        return
    strays = [
        (where, version) for where, version in _on_the_path(machine) if version_key(version) != version_key(wheel)
    ]
    if not strays:
        return
    where, version = strays[0]
    other = version_key(version)[0] != version_key(wheel)[0]
    module = where.startswith("module ")
    names = ", ".join(where for where, _ in strays)
    site = fitting_builds(machine, best_device(machine))[0]
    loads = site.before if site.before and site.requirement == f"torch=={machine.software.torch}" else ()
    swap = f"module swap {where.partition(' ')[2].partition('/')[0]} rocm/{wheel}.0  # `module avail rocm` lists them"
    unset = "export LD_LIBRARY_PATH=$(echo \"$LD_LIBRARY_PATH\" | tr ':' '\\n' | grep -v rocm | paste -sd:)"
    yield found(
        "rocm-mixed",
        level="blocks" if other else "note",
        fix=loads or ((swap,) if module else (unset,)),
        version=version,
        wheel=wheel,
        mostly="" if other else "; with the same major version that mostly works",
        names=names,
        torch=machine.software.torch,
    )


def _on_the_path(machine: Machine) -> Iterator[tuple[str, str]]:
    """(where it says so, major.minor) of every ROCm that the dynamic loader finds before the wheel's own."""
    for module in machine.host.around.modules:
        named = re.match(r"(?:rocm|amd-rocm)[/-]v?(\d+\.\d+)", module, re.IGNORECASE)
        if named:
            yield f"module {module}", named[1]
    for folder in machine.software.environment.get("LD_LIBRARY_PATH", "").split(":"):
        named = re.search(r"/rocm[-/]v?(\d+\.\d+)", folder)
        system = re.match(r"(\d+\.\d+)", machine.host.driver.rocm) if re.search(r"/rocm(?:/|$)", folder) else None
        if named or system:
            yield f"LD_LIBRARY_PATH has {folder}", (named or system)[1]  # type: ignore[index]


def system_rocm(machine: Machine) -> Iterator[Finding]:
    """ROCM_PATH names another major version: nothing of it runs in training, what is compiled here links to it."""
    wheel, system = wheel_rocm(machine), machine.host.driver.rocm
    named = machine.software.environment.get("ROCM_PATH", "")
    if not (wheel and system and named) or version_key(system)[0] == version_key(wheel)[0]:
        return
    if any(_on_the_path(machine)):
        return  # it is loaded, too: `loaded_rocm` has said so
    yield found("rocm-path-other", system=system, wheel=wheel, named=named)


def site_modules(machine: Machine) -> Iterator[Finding]:
    """The modules that a cluster's own instructions load before this very PyTorch."""
    build = fitting_builds(machine, best_device(machine))[0]
    wanted = [word for step in build.before if step.startswith("module load ") for word in step.split()[2:]]
    missing = [word for word in wanted if word.startswith("rocm/") and word not in machine.host.around.modules]
    if not missing or build.requirement != f"torch=={machine.software.torch}":
        return
    if any(_on_the_path(machine)):
        return  # another ROCm is loaded in its place: `loaded_rocm` judges that one
    yield found(
        "site-modules-missing",
        fix=build.before,
        module=missing[0],
        site=machine.host.around.site,
        loaded=", ".join(machine.host.around.modules) or "none",
        reason=build.reason,
    )


def nvidia(machine: Machine) -> Iterator[Finding]:
    """The wheel's CUDA against the driver, and against the chip."""
    device, software = best_device(machine), machine.software
    if device is None or device.vendor != "nvidia" or software.build != "cuda":
        return
    cuda, chip = version_key(software.cuda), re.fullmatch(r"sm_(\d+)", device.arch)
    if not cuda or chip is None:
        return
    said, capability = machine.host.driver.nvidia, int(chip[1])
    oldest = max(OLDEST_DRIVER.get(str(cuda[0]), 0), BLACKWELL_DRIVER if capability >= BLACKWELL else 0)
    build = fitting_builds(machine, device)[0]
    served = build.requirement not in (f"torch=={software.torch}", f"torch=={(software.torch or '').partition('+')[0]}")
    facts: dict[str, Any] = {"cuda": software.cuda, "arch": device.arch, "name": device.name}
    if capability < TURING and cuda[0] >= 13:
        yield to_install(
            "cuda-too-new", machine, thing="card", evidence=f"{device.arch}; CUDA 13 begins at sm_75", **facts
        )
    elif capability >= BLACKWELL and cuda[:2] < (12, 8):
        newest = OLDEST_DRIVER["13"]  # the wheel that is installed instead is CUDA 13's
        one = to_install("cuda-too-old", machine, **facts)
        update = (_nvidia_update(machine, newest),) if _older(said, newest) else ()
        yield replace(one, fix=(*one.fix, *update))
    elif _older(said, oldest):
        evidence = f"driver {said}; {device.arch} with CUDA {cuda[0]} needs {oldest} or newer"
        brought = re.search(r"\+cu(\d\d)", build.requirement)
        runs = version_key(said)[:1] >= (OLDEST_DRIVER.get(brought[1] if brought else "13", 0),)
        one = to_install("cuda-too-new", machine, thing="driver", evidence=evidence, **facts)
        update_it = _nvidia_update(machine, oldest)
        if served and runs:
            yield replace(one, fix=(*one.fix, update_it + "  # or, to keep this PyTorch"))
        else:
            yield replace(one, fix=(update_it,), run="")


def _older(driver: str, major: int) -> bool:
    return bool(driver) and version_key(driver)[:1] < (major,)


def _nvidia_update(machine: Machine, oldest: int) -> str:
    around, name = machine.host.around, machine.host.distribution.partition(" ")[0]
    if around.wsl:
        return f"# install NVIDIA's driver {oldest} or newer in Windows, then: wsl --shutdown"
    if around.slurm or around.site:
        return f"# ask the cluster's administrators for driver {oldest} or newer: it is the nodes'"
    if name == "ubuntu":
        return f"sudo apt install nvidia-driver-{oldest} && sudo reboot"
    commands = {"debian": "apt install nvidia-driver", "arch": "pacman -Syu nvidia-open"}
    return f"sudo {commands.get(name, 'dnf install nvidia-driver')} && sudo reboot"
