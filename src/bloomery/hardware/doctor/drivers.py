"""The doctor's rules about drivers and ROCm versions: the kernel's, the wheel's and the system's.

Sources: AMD's "User and AMD GPU Driver support matrix" (driver and user space up to two releases apart, up to a year
from ROCm 6.4 on; its lists for drivers 30.10 and 30.30 reach 13 months), OLCF's pytorch_frontier.rst (the module
matches the wheel), NVIDIA's "CUDA Compatibility" (CUDA 12 from driver 525 on, 13 from 580 on) and its release notes
(12.8 is the first CUDA with Blackwell, 13 the first without Volta).
"""

import re
from collections.abc import Iterator
from typing import Any

from bloomery.hardware.detect import version_key
from bloomery.hardware.doctor.symptoms import (
    PROBE,
    Finding,
    from_table,
    to_install,
)
from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.profile import (
    best_device,
    fitting_builds,
)
from bloomery.hardware.wheels import TorchBuild, series, torch_builds, wheel_table

RELEASES_APART = 2  # releases of ROCm, between driver and libraries
MONTHS_APART = 13
INBOX_FROM = (6, 10)  # the first Linux whose own amdgpu AMD supports without its package
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}  # major version of CUDA -> of the NVIDIA driver
BLACKWELL_DRIVER = 570
BLACKWELL = 100  # compute capabilities, times ten
TURING = 75


def tested(driver: str, rocm: str) -> bool:
    """Whether AMD tests the `driver` of one ROCm release with the libraries of `rocm`: "6.4" and "7.2"."""
    releases = wheel_table().rocm
    order = list(releases)
    driver_year, driver_month = releases[driver]["month"]
    rocm_year, rocm_month = releases[rocm]["month"]
    releases_apart = abs(order.index(driver) - order.index(rocm))
    return (
        releases_apart <= RELEASES_APART
        or abs(12 * (rocm_year - driver_year) + rocm_month - driver_month) <= MONTHS_APART
    )


def release_of(version: str) -> str | None:
    """The listed release of a ROCm version such as 7.1.25424; None if it is older than all."""
    return next(
        (
            release
            for release in reversed(wheel_table().rocm)
            if version_key(release) <= version_key(version)
        ),
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
    # The kernel's own driver: before a certain Linux, AMD requires its package.
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
    # The release of a driver such as 6.14.14; the oldest listed one for older ones.
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
    other_versions = [
        (library, v)
        for library, v in _on_library_path(machine)
        if version_key(v) != version_key(wheel)
    ]
    if not wheel or not other_versions:
        return
    library, version = other_versions[0]
    same_major = version_key(version)[0] == version_key(wheel)[0]
    build = fitting_builds(machine, best_device(machine))[0]
    modules = (
        build.before
        if build.before and build.requirement == f"torch=={machine.software.torch}"
        else ()
    )
    if library.startswith("module "):
        loaded_version = library.partition(" ")[2].partition("/")[0]
        command = (
            f"module swap {loaded_version} rocm/{wheel}.0  # `module avail rocm` lists the versions"
        )
    else:
        command = "export LD_LIBRARY_PATH=$(echo \"$LD_LIBRARY_PATH\" | tr ':' '\\n' | grep -v rocm | paste -sd:)"
    yield from_table(
        "rocm-mixed",
        level="note" if same_major else "blocks",
        fix=modules or (command,),
        version=version,
        wheel=wheel,
        compatible="; the same major version usually works" if same_major else "",
        names=", ".join(library for library, _ in other_versions),
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


def other_system_rocm(machine: Machine) -> Iterator[Finding]:
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
    loaded_modules = machine.host.around.modules
    required = [
        word
        for step in build.before
        if step.startswith("module load ")
        for word in step.split()[2:]
    ]
    missing_modules = [
        module for module in required if module.startswith("rocm/") and module not in loaded_modules
    ]
    if (
        not missing_modules
        or build.requirement != f"torch=={machine.software.torch}"
        or any(_on_library_path(machine))
    ):
        return  # `loaded_rocm` reports another loaded ROCm
    yield from_table(
        "site-modules-missing",
        fix=build.before,
        module=missing_modules[0],
        site=machine.host.around.site,
        loaded=", ".join(loaded_modules) or "none",
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
        finding = to_install("cuda-too-old", machine, **fields)
        newer = (_nvidia_update(machine, newest),) if older_than(newest) else ()
        yield finding.model_copy(update={"fix": (*finding.fix, *newer)})
    elif older_than(oldest):
        evidence = f"driver {driver}; {device.arch} with CUDA {cuda[0]} requires {oldest} or newer"
        finding = to_install("cuda-too-new", machine, thing="driver", evidence=evidence, **fields)
        update = _nvidia_update(machine, oldest)
        torch = software.torch or ""
        is_other = build.requirement not in (f"torch=={torch}", f"torch=={torch.partition('+')[0]}")
        major = re.search(r"\+cu(\d\d)", build.requirement)
        if is_other and not older_than(OLDEST_DRIVER.get(major[1] if major else "13", 0)):
            yield finding.model_copy(
                update={"fix": (*finding.fix, update + "  # or: to keep this PyTorch")}
            )
        else:
            yield finding.model_copy(update={"fix": (update,), "run": ""})


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
