"""The doctor's rules about PyTorch: build, kernels, override, companion packages, pin; its driver and ROCm versions.

Sources: AMD's "User and AMD GPU Driver support matrix" (driver and user space up to two releases apart, up to a year
from ROCm 6.4 on; its lists for drivers 30.10 and 30.30 reach 13 months), OLCF's pytorch_frontier.rst (the module
matches the wheel), NVIDIA's "CUDA Compatibility" (CUDA 12 from driver 525 on, 13 from 580 on) and its release notes
(12.8 is the first CUDA with Blackwell, 13 the first without Volta).

`idle_settings`: for `plan`, the effect of the environment variables that a user has set on this machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from bloomery.core.errors import UserError
from bloomery.hardware.detect import version_key
from bloomery.hardware.doctor.symptoms import (
    PIN,
    PROBE,
    Finding,
    from_table,
    install_steps,
    to_install,
    vendors,
)
from bloomery.hardware.machine import Accelerator, Machine, Setting, visible_devices
from bloomery.hardware.profile import (
    ALLOCATORS,
    Profile,
    best_device,
    family_name,
    fitting_builds,
    install,
)
from bloomery.hardware.wheels import OLDEST_TORCH, TorchBuild, series, torch_builds, wheel_table

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
BUILDS = {"cpu": ("CPU", "CPUs only"), "cuda": ("CUDA", "NVIDIA"), "rocm": ("ROCm", "AMD")}
TOGETHER_SECONDS = 120.0  # packages installed within this time belong to one pip command
SHARED_KERNELS = {
    "gfx1150": "gfx115x",
    "gfx1151": "gfx115x",
    "gfx1152": "gfx115x",
    "gfx1153": "gfx115x",
}
RELEASES_APART = 2
MONTHS_APART = 13
INBOX_FROM = (6, 10)  # the first Linux whose own amdgpu AMD supports without its package
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}  # major version of CUDA -> of the NVIDIA driver
BLACKWELL_DRIVER = 570
BLACKWELL = 100
TURING = 75


def missing(machine: Machine) -> Iterator[Finding]:
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
    attribute, vendor = ("hip", "AMD") if device.vendor == "amd" else ("cuda", "NVIDIA")
    build, maker = BUILDS[software.build]
    if maker == vendor:
        return
    evidence = [f"torch.version.{attribute} is None"]
    torch = next((package for package in software.packages if package.name == "torch"), None)
    if torch is not None and torch.installed:
        moment = datetime.fromtimestamp(torch.installed)
        requested = "requested" if torch.requested else "not requested"
        evidence.append(
            f"installed on {moment:%B} {moment.day}, {moment:%H:%M}, {requested} by name"
        )
        for other in software.packages:
            together = abs(other.installed - torch.installed) <= TOGETHER_SECONDS
            if (
                together
                and not torch.requested
                and other.requested
                and other.requires_torch
                and other.name != "torch"
            ):
                evidence.append(
                    f"with {other.name} {other.version}, which requires {other.requires_torch}"
                )
    fields = {"build": build, "maker": maker, "vendor": vendor, "evidence": "; ".join(evidence)}
    yield to_install("wrong-build", machine, **fields)


def two_vendors(machine: Machine) -> Iterator[Finding]:
    """GPUs of AMD and of NVIDIA: an environment has a PyTorch for one of them."""
    used = best_device(machine)
    others = [
        one
        for one in machine.accelerators
        if used and one.vendor != used.vendor and not one.integrated
    ]
    if used and others and not used.integrated:
        torch = machine.software.torch or "is not installed"
        yield from_table("two-vendors", used=used.name, other=others[0].name, torch=torch)


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
        one = to_install("arch-not-in-wheel", machine, **fields)
        yield one.model_copy(update={"fix": (*one.fix, *override)})


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


def _override(machine: Machine) -> tuple[str, tuple[Setting, ...]]:
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
    where = (
        " and ".join(f"{one.file} line {one.line}" for one in lines)
        or "the environment of this process"
    )
    fields: dict[str, Any] = {
        "value": value,
        "where": where,
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
    both = [p for p in machine.software.packages if p.name in ("torchvision", "torchaudio")]
    fits = (local, local.split(".git")[0])
    if others := [p for p in both if p.version.partition("+")[2].split(".git")[0] not in fits]:
        names = [package.name for package in others]
        yield from_table(
            "companions-mismatch",
            both=" and ".join(names),
            names=" ".join(names),
            first=names[0],
            versions=", ".join(f"{p.name} {p.version}" for p in others),
            torch=machine.software.torch,
        )


def bitsandbytes(machine: Machine) -> Iterator[Finding]:
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
    where = f"Python {machine.software.python} in {machine.software.prefix or 'this environment'}"
    return UserError("PyTorch is not installed", where=where, fix=steps)


def tested(driver: str, rocm: str) -> bool:
    """Whether AMD tests the `driver` of one ROCm release with the libraries of `rocm`: "6.4" and "7.2"."""
    releases = wheel_table().rocm
    order = list(releases)
    (one, month) = releases[driver]["month"]
    (other, later) = releases[rocm]["month"]
    apart = abs(order.index(driver) - order.index(rocm))
    return apart <= RELEASES_APART or abs(12 * (other - one) + later - month) <= MONTHS_APART


def release_of(version: str) -> str | None:
    """The listed release of a ROCm version such as 7.1.25424; None if it is older than all."""
    return next(
        (one for one in reversed(wheel_table().rocm) if version_key(one) <= version_key(version)),
        None,
    )


def wheel_rocm(machine: Machine) -> str:
    """The ROCm version that the installed PyTorch includes, 7.1; empty for other builds."""
    local = re.search(r"\+rocm(\d+\.\d+)", machine.software.torch or "")
    version = local or re.match(r"(\d+\.\d+)", machine.software.hip)
    return version[1] if version and machine.software.build == "rocm" else ""


def amd_driver(machine: Machine) -> Iterator[Finding]:
    """AMD's driver and the wheel's ROCm are further apart than AMD tests."""
    driver = machine.host.driver
    wheel = release_of(wheel_rocm(machine) or "0")
    device = best_device(machine)
    if (
        device is None
        or device.vendor != "amd"
        or wheel is None
        or machine.host.around.wsl
        or not driver.amdgpu
    ):
        return
    works = any(
        probe.name.startswith("matmul") and probe.outcome == "ok" for probe in machine.probes
    )
    # the kernel's own driver: AMD requires its package before a certain Linux
    if not driver.amdgpu_version:
        kernel = version_key(driver.kernel)[:2]
        if works or version_key(wheel) < (7, 0) or not kernel or kernel >= INBOX_FROM:
            return
        fix = (
            f"{PROBE}  # if all probes pass, change nothing; otherwise:",
            *_newer_driver(machine, wheel),
        )
        yield from_table(
            "amd-driver-inbox", fix=fix, kernel=".".join(map(str, kernel)), wheel=wheel
        )
        return
    drivers = [(rocm, row) for rocm, row in wheel_table().rocm.items() if "driver" in row]
    listed = [
        each
        for each in drivers
        if version_key(each[1]["driver"]) <= version_key(driver.amdgpu_version)
    ]
    # of a driver such as 6.14.14; the oldest listed for older ones
    rocm, row = (listed or drivers[:1])[-1]
    if tested(rocm, wheel):
        return
    version = driver.amdgpu_version
    torch = machine.software.torch
    evidence = f"amdgpu {version} belongs to ROCm {rocm}, torch {torch} includes ROCm {wheel}"
    if version_key(rocm) > version_key(wheel):
        yield from_table("amd-driver-newer", package=row["package"], wheel=wheel, evidence=evidence)
        return
    older = _build_for_driver(machine, device, rocm)
    run = (
        older.command.replace("pip install ", "pip install --force-reinstall ", 1) if older else ""
    )
    build = [f"{run}  # or: the newest PyTorch that supports this driver"] if older else []
    yield from_table(
        "amd-driver-old",
        level="note" if works else "blocks",
        fix=(*_newer_driver(machine, wheel), *build),
        run=run,
        rocm=rocm,
        wheel=wheel,
        works="; the probes pass nevertheless" if works else "",
        evidence=evidence,
    )


def _newer_driver(machine: Machine, wheel: str) -> tuple[str, ...]:
    """How to install a driver for ROCm `wheel`; on a cluster only its administrators can."""
    around = machine.host.around
    drivers = [
        (rocm, row["package"]) for rocm, row in wheel_table().rocm.items() if "driver" in row
    ]
    name = next(
        (name for rocm, name in reversed(drivers) if version_key(rocm) <= version_key(wheel)), ""
    )
    if around.slurm or around.site:
        return (
            f"# ask the cluster's administrators for amdgpu {name} or newer: the driver belongs to the nodes",
        )
    tool = {"debian": "apt", "ubuntu": "apt", "sles": "zypper"}.get(
        machine.host.distribution.partition(" ")[0], "dnf"
    )
    repository = f"https://repo.radeon.com/amdgpu/{name}"
    return (
        f"sudo {tool} install amdgpu-dkms && sudo reboot  # after adding the repository {repository}",
    )


def _build_for_driver(machine: Machine, device: Accelerator, driver: str) -> TorchBuild | None:
    """The newest build with kernels for the GPU whose ROCm was tested with a driver."""
    python = version_key(machine.software.python)
    for major, minor in sorted(map(series, wheel_table().pytorch_rocm), reverse=True):
        torch = f"{major}.{minor}.{1 if minor == 9 else 0}"
        for build in torch_builds(device.arch, python=(python[0], python[1]), torch=torch):
            rocm = re.search(r"\+rocm(\d+\.\d+)", build.requirement)
            release = release_of(rocm[1]) if rocm and not build.environment else None
            if release is not None and tested(driver, release):
                return build
    return None


def loaded_rocm(machine: Machine) -> Iterator[Finding]:
    """Another ROCm on the library path, from a module or a variable: its libraries mix with those of the wheel."""
    wheel = wheel_rocm(machine)
    others = [
        (where, v) for where, v in _on_library_path(machine) if version_key(v) != version_key(wheel)
    ]
    if not wheel or not others:
        return
    where, version = others[0]
    same_major = version_key(version)[0] == version_key(wheel)[0]
    build = fitting_builds(machine, best_device(machine))[0]
    modules = (
        build.before
        if build.before and build.requirement == f"torch=={machine.software.torch}"
        else ()
    )
    if where.startswith("module "):
        loaded = where.partition(" ")[2].partition("/")[0]
        command = f"module swap {loaded} rocm/{wheel}.0  # `module avail rocm` lists the versions"
    else:
        command = "export LD_LIBRARY_PATH=$(echo \"$LD_LIBRARY_PATH\" | tr ':' '\\n' | grep -v rocm | paste -sd:)"
    yield from_table(
        "rocm-mixed",
        level="note" if same_major else "blocks",
        fix=modules or (command,),
        version=version,
        wheel=wheel,
        compatible="; the same major version usually works" if same_major else "",
        names=", ".join(where for where, _ in others),
        torch=machine.software.torch,
    )


def _on_library_path(machine: Machine) -> Iterator[tuple[str, str]]:
    """(where it is set, major.minor) of each ROCm that the dynamic loader finds before the wheel's own."""
    for module in machine.host.around.modules:
        if version := re.match(r"(?:rocm|amd-rocm)[/-]v?(\d+\.\d+)", module, re.IGNORECASE):
            yield f"module {module}", version[1]
    for folder in machine.software.environment.get("LD_LIBRARY_PATH", "").split(":"):
        version = re.search(r"/rocm[-/]v?(\d+\.\d+)", folder)
        if version is None and re.search(r"/rocm(?:/|$)", folder):
            version = re.match(r"(\d+\.\d+)", machine.host.driver.rocm)
        if version:
            yield f"LD_LIBRARY_PATH contains {folder}", version[1]


def system_rocm(machine: Machine) -> Iterator[Finding]:
    """ROCM_PATH names another major version: training does not use it, but extensions that you compile link to it."""
    wheel = wheel_rocm(machine)
    system = machine.host.driver.rocm
    path = machine.software.environment.get("ROCM_PATH", "")
    if not (wheel and system and path) or version_key(system)[0] == version_key(wheel)[0]:
        return
    if not any(_on_library_path(machine)):  # otherwise `loaded_rocm` reports it
        yield from_table("rocm-path-other", system=system, wheel=wheel, path=path)


def site_modules(machine: Machine) -> Iterator[Finding]:
    """The modules that a cluster's documentation loads for exactly this PyTorch."""
    build = fitting_builds(machine, best_device(machine))[0]
    loaded = machine.host.around.modules
    required = [
        word
        for step in build.before
        if step.startswith("module load ")
        for word in step.split()[2:]
    ]
    missing = [module for module in required if module.startswith("rocm/") and module not in loaded]
    if (
        not missing
        or build.requirement != f"torch=={machine.software.torch}"
        or any(_on_library_path(machine))
    ):
        return  # `loaded_rocm` reports another loaded ROCm
    yield from_table(
        "site-modules-missing",
        fix=build.before,
        module=missing[0],
        site=machine.host.around.site,
        loaded=", ".join(loaded) or "none",
        reason=build.reason,
    )


def nvidia(machine: Machine) -> Iterator[Finding]:
    """The wheel's CUDA does not match the driver or the GPU."""
    device = best_device(machine)
    software = machine.software
    if device is None or device.vendor != "nvidia" or software.build != "cuda":
        return
    cuda = version_key(software.cuda)
    arch = re.fullmatch(r"sm_(\d+)", device.arch)
    if not cuda or arch is None:
        return
    driver = machine.host.driver.nvidia
    capability = int(arch[1])
    oldest = max(
        OLDEST_DRIVER.get(str(cuda[0]), 0), BLACKWELL_DRIVER if capability >= BLACKWELL else 0
    )
    build = fitting_builds(machine, device)[0]
    fields: dict[str, Any] = {"cuda": software.cuda, "arch": device.arch, "name": device.name}

    def older_than(major: int) -> bool:
        return bool(driver) and version_key(driver)[:1] < (major,)

    if capability < TURING and cuda[0] >= 13:
        evidence = f"{device.arch}; CUDA 13 requires sm_75 or newer"
        yield to_install("cuda-too-new", machine, thing="GPU", evidence=evidence, **fields)
    elif capability >= BLACKWELL and cuda[:2] < (12, 8):
        newest = OLDEST_DRIVER["13"]  # the wheel to install is for CUDA 13
        one = to_install("cuda-too-old", machine, **fields)
        newer = (_nvidia_update(machine, newest),) if older_than(newest) else ()
        yield one.model_copy(update={"fix": (*one.fix, *newer)})
    elif older_than(oldest):
        evidence = f"driver {driver}; {device.arch} with CUDA {cuda[0]} requires {oldest} or newer"
        one = to_install("cuda-too-new", machine, thing="driver", evidence=evidence, **fields)
        update = _nvidia_update(machine, oldest)
        torch = software.torch or ""
        other = build.requirement not in (f"torch=={torch}", f"torch=={torch.partition('+')[0]}")
        major = re.search(r"\+cu(\d\d)", build.requirement)
        if other and not older_than(OLDEST_DRIVER.get(major[1] if major else "13", 0)):
            yield one.model_copy(
                update={"fix": (*one.fix, update + "  # or: to keep this PyTorch")}
            )
        else:
            yield one.model_copy(update={"fix": (update,), "run": ""})


def _nvidia_update(machine: Machine, oldest: int) -> str:
    around = machine.host.around
    name = machine.host.distribution.partition(" ")[0]
    if around.wsl:
        return f"# install NVIDIA driver {oldest} or newer in Windows, then: wsl --shutdown"
    if around.slurm or around.site:
        return f"# ask the cluster's administrators for NVIDIA driver {oldest} or newer: it belongs to the nodes"
    if name == "ubuntu":
        return f"sudo apt install nvidia-driver-{oldest} && sudo reboot"
    commands = {"debian": "apt install nvidia-driver", "arch": "pacman -Syu nvidia-open"}
    return f"sudo {commands.get(name, 'dnf install nvidia-driver')} && sudo reboot"


EffectKind = Literal["nothing", "works", "slows", "harms"]
HIP_SEGMENTS_SINCE = (2, 12)  # the first torch whose HIP allocator supports expandable segments


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A variable that is set, and its effect on this machine."""

    name: str
    value: str
    kind: EffectKind
    reason: str

    def __str__(self) -> str:
        if self.reason.startswith(self.name):
            return self.reason
        effect = {
            "nothing": "has no effect",
            "works": "works",
            "slows": "slows training",
            "harms": "harms",
        }[self.kind]
        return f"{self.name}={self.value} {effect}: {self.reason}"


def idle_settings(machine: Machine, profile: Profile) -> tuple[Effect, ...]:
    """The effect of each supported environment variable that is set, in the order of their names."""
    effects = []
    for name, value in sorted(machine.software.environment.items()):
        effect_of = _allocator if name in ALLOCATORS else _effect
        if (effect := effect_of(name, value, machine, profile)) is not None:
            effects.append(Effect(name=name, value=value, kind=effect[0], reason=effect[1]))
    return tuple(effects)


def _allocator(
    name: str, value: str, machine: Machine, profile: Profile
) -> tuple[EffectKind, str] | None:
    vendor = profile.accelerator.vendor if profile.accelerator else ""
    torch = machine.software.torch
    if not vendor:
        return "nothing", "training runs on the CPU, which uses another allocator"
    if (name, vendor) == ("PYTORCH_HIP_ALLOC_CONF", "nvidia"):
        return "nothing", "it is read by ROCm builds only, and the GPU is from NVIDIA"
    if vendor == "nvidia" or "expandable_segments:true" not in value.lower():
        return "works", "it replaces the allocator settings of Bloomery"
    if torch is not None and series(torch) < HIP_SEGMENTS_SINCE:
        return (
            "nothing",
            f"PyTorch {torch} does not support expandable segments on HIP: it warns and ignores them",
        )
    if "max_split_size_mb" in value:
        return "harms", "expandable segments and max_split_size_mb cannot be combined"
    return "harms", "expandable segments are new on HIP and can hang while memory is mapped"


def _effect(
    name: str, value: str, machine: Machine, profile: Profile
) -> tuple[EffectKind, str] | None:
    """For any other variable; None: not supported here, or it works as documented."""
    environment = machine.software.environment
    spec = profile.arch
    vendor, arch = (
        (profile.accelerator.vendor, profile.accelerator.arch) if profile.accelerator else ("", "")
    )
    nodes = machine.host.around.slurm.get("SLURM_JOB_NUM_NODES", "1")
    # one device in one process: no communication
    alone = len(visible_devices(machine)) <= 1 and nodes == "1"
    amd = any(device.vendor == "amd" for device in machine.accelerators)
    on = value not in ("", "0")
    match name:
        case "AMD_LOG_LEVEL":
            return ("slows", "the runtime logs every call") if on and vendor == "amd" else None
        case (
            "AMD_SERIALIZE_COPY"
            | "AMD_SERIALIZE_KERNEL"
            | "CUDA_LAUNCH_BLOCKING"
            | "HIP_LAUNCH_BLOCKING"
        ) if on:
            debugging: tuple[EffectKind, str] = (
                "slows",
                "for debugging: the CPU waits for every kernel",
            )
            return debugging if vendor else ("nothing", "no GPU is used")
        case "CUDA_VISIBLE_DEVICES":
            if not machine.accelerators:
                return "nothing", "this machine has no GPU"
            if (
                all(each.vendor == "amd" for each in machine.accelerators)
                and "HIP_VISIBLE_DEVICES" in environment
            ):
                return "nothing", "HIP_VISIBLE_DEVICES is set and takes precedence"
        case "FLASH_ATTENTION_TRITON_AMD_ENABLE":
            return "nothing", "it applies to the package flash-attn, which Bloomery does not use"
        case "HIP_VISIBLE_DEVICES" | "ROCR_VISIBLE_DEVICES":
            if not amd:
                return "nothing", "this machine has no AMD GPU"
            if "HIP_VISIBLE_DEVICES" in environment and "ROCR_VISIBLE_DEVICES" in environment:
                first = f"ROCR_VISIBLE_DEVICES={environment['ROCR_VISIBLE_DEVICES']} applies first"
                return (
                    "works",
                    f"{first}, HIP_VISIBLE_DEVICES numbers the remaining GPUs; set only one of them",
                )
        case "HSA_ENABLE_DXG_DETECTION":
            return None if machine.host.around.wsl else ("nothing", "this is not WSL")
        case "HSA_FORCE_FINE_GRAIN_PCIE":
            if vendor != "amd":
                return "nothing", "it applies to AMD GPUs"
            return ("nothing", "it applies to memory shared by several GPUs") if alone else None
        case "HSA_OVERRIDE_GFX_VERSION":
            if not amd:
                return "nothing", "this machine has no AMD GPU"
            if (finding := next(override(machine), None)) is not None:
                kinds: dict[str, EffectKind] = {
                    "override-needless": "nothing",
                    "override-helps": "works",
                }
                return kinds.get(finding.id, "harms"), finding.what
        case "HSA_XNACK" if on and vendor == "amd":
            if not arch.startswith("gfx9"):
                return "nothing", f"{arch} does not support page migration"
            return "slows", "memory pages can migrate between CPU and GPU while kernels run"
        case "MIOPEN_CUSTOM_CACHE_DIR" | "MIOPEN_USER_DB_PATH":
            return "nothing", "MIOpen computes convolutions, and language models have none"
        case "PYTORCH_NO_HIP_MEMORY_CACHING":
            if vendor != "amd":
                return "nothing", "it applies to PyTorch's allocator on AMD GPUs"
            return "slows", "for debugging: the driver allocates every tensor"
        case "ROCBLAS_INTERNAL_FP16_ALT_IMPL":
            return None if arch == "gfx90a" else ("nothing", "it applies to float16 on MI200 only")
        case "TORCHDYNAMO_DISABLE" | "TORCH_COMPILE_DISABLE":
            return ("works", "it disables torch.compile") if value == "1" else None
        case "TORCH_BLAS_PREFER_HIPBLASLT":
            return _hipblaslt(value != "0", vendor, arch, spec.hipblaslt if spec else "unknown")
        case "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL":
            if vendor != "amd" or spec is None:
                return "nothing", "it applies to fused attention on AMD GPUs"
            kernels = spec.attention_in(machine.software.torch)
            if kernels == "none":
                return "nothing", f"PyTorch has no fused attention kernels for {family_name(arch)}"
            if kernels == "yes":
                return "nothing", f"fused attention is enabled on {arch} by default"
            return "works", f"it enables fused attention on {arch}"
        case "TRITON_INTERPRET" if value == "1":
            return "slows", "Triton kernels run as Python code on the CPU"
        # TORCH_NCCL_ASYNC_ERROR_HANDLING is set by torchrun.
        case _ if (
            name.startswith(("NCCL_", "RCCL_", "TORCH_NCCL_"))
            and alone
            and not name.endswith("_HANDLING")
        ):
            return "nothing", "one device in one process does not communicate"
    return None


def _hipblaslt(
    requested: bool, vendor: str, arch: str, support: str
) -> tuple[EffectKind, str] | None:
    if vendor != "amd":
        return "nothing", "it applies to AMD GPUs, and training does not run on one"
    if support == "none":
        return "nothing", f"hipBLASLt does not support {family_name(arch)}: PyTorch uses rocBLAS"
    if support == "default" and requested:
        return "nothing", f"PyTorch uses hipBLASLt on {arch} by default"
    if support == "supported" and not requested:
        return "nothing", f"PyTorch uses rocBLAS on {arch} by default"
    if support == "unknown":
        return None
    return "works", f"matmuls on {arch} use {'hipBLASLt' if requested else 'rocBLAS'}"
