"""The doctor's rules about drivers and loaded libraries: do the kernel's driver, the system's ROCm and environment
modules, and the CUDA of the installed PyTorch fit each other.

Sources: AMD's "User and AMD GPU Driver support matrix" (driver and user space up to two releases apart, from ROCm 6.4
on up to a year; its lists for drivers 30.10 and 30.30 reach 13 months), ROCm's release notes (months), the names of
AMD's amdgpu-dkms packages (6.10.5.60300, 6.14.14.30100100), ROCm/rocm-install-on-linux#684 (30.20.1 is 6.16.6),
OLCF's pytorch_frontier.rst (the module follows the wheel), NVIDIA's "CUDA Compatibility" (CUDA 12 from driver 525 on,
13 from 580 on) and its release notes (12.8 is the first CUDA with Blackwell, 13 the first without Volta).
"""

import re
from collections.abc import Iterator

from bloomery.hardware.detect.system import version_key
from bloomery.hardware.doctor.finding import AGAIN, PROBE, Finding, Fix, install_steps, installs
from bloomery.hardware.fitting import best_device, fitting_builds
from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.specs.wheels import PYTORCH_ROCM, TorchBuild, torch_builds

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
        yield Finding(
            id="amd-driver-newer",
            level="note",
            what=f"AMD does not test its driver {package} with libraries as old as this PyTorch's ROCm {wheel}",
            evidence=evidence,
            mend=("# usually it works; a PyTorch of a newer ROCm is the way out if it does not",),
            prove=PROBE,
        )
        return
    older = _build_for_driver(machine, device, rocm)
    build = [f"{_command(older)}  # or, with this driver, the newest PyTorch that fits it"] if older else []
    fixes = (Fix(kind="pip", command=_command(older)),) if older else ()
    yield Finding(
        id="amd-driver-old",
        level="note" if works else "stops",
        what=f"AMD's driver here is too old for this PyTorch: of ROCm {rocm}, under libraries of ROCm {wheel}"
        + ("; what was probed works all the same" if works else ""),
        evidence=evidence,
        mend=(*_newer_driver(machine, wheel), *build),
        prove=PROBE,
        fixes=fixes,
    )


def _inbox(machine: Machine, wheel: str) -> Iterator[Finding]:
    """The kernel's own driver: AMD asks for its package below a certain Linux."""
    kernel = version_key(machine.host.driver.kernel)[:2]
    if RELEASES.index(wheel) < RELEASES.index("7.0") or not kernel or kernel >= INBOX_FROM:
        return
    name = ".".join(map(str, kernel))
    yield Finding(
        id="amd-driver-inbox",
        level="note",
        what=f"the amdgpu of Linux {name} itself is older than what AMD tests with ROCm {wheel}",
        evidence="amdgpu-dkms is not installed; only from Linux 6.10 on AMD does without it",
        mend=(f"{PROBE}  # where all works nothing needs to change; else:", *_newer_driver(machine, wheel)),
    )


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


def _command(build: TorchBuild) -> str:
    return build.command.replace("pip install ", "pip install --force-reinstall ", 1)


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
    yield Finding(
        id="rocm-mixed",
        level="stops" if other else "note",
        what=f"libraries of ROCm {version} stand on the loader's path before those of ROCm {wheel} in this PyTorch"
        + ("" if other else "; with the same major version that mostly works"),
        evidence=f"{names}; torch {machine.software.torch}",
        mend=loads or ((swap,) if module else (unset,)),
        prove=PROBE,
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
    yield Finding(
        id="rocm-path-other",
        level="note",
        what=f"extensions compiled here would link to ROCm {system}; this PyTorch brings ROCm {wheel}",
        evidence=f"ROCM_PATH={named}",
        mend=("unset ROCM_PATH  # before building flash-attn or bitsandbytes; training itself does not read it",),
    )


def site_modules(machine: Machine) -> Iterator[Finding]:
    """The modules that a cluster's own instructions load before this very PyTorch."""
    build = fitting_builds(machine, best_device(machine))[0]
    wanted = [word for step in build.before if step.startswith("module load ") for word in step.split()[2:]]
    missing = [word for word in wanted if word.startswith("rocm/") and word not in machine.host.around.modules]
    if not missing or build.requirement != f"torch=={machine.software.torch}":
        return
    if any(_on_the_path(machine)):
        return  # another ROCm is loaded in its place: `loaded_rocm` judges that one
    yield Finding(
        id="site-modules-missing",
        level="note",
        what=f"the module {missing[0]} that belongs to this PyTorch on {machine.host.around.site} is not loaded",
        evidence=f"loaded: {', '.join(machine.host.around.modules) or 'none'}; {build.because}",
        mend=build.before,
        prove=AGAIN,
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
    if capability < TURING and cuda[0] >= 13:
        yield Finding(
            id="cuda-too-new",
            level="stops",
            what=f"this PyTorch's CUDA {software.cuda} is too new for this card",
            evidence=f"{device.arch}; CUDA 13 begins at sm_75",
            mend=install_steps(machine),
            prove=PROBE,
            fixes=installs(machine),
        )
    elif capability >= BLACKWELL and cuda[:2] < (12, 8):
        newest = OLDEST_DRIVER["13"]  # the wheel that is installed instead is CUDA 13's
        yield Finding(
            id="cuda-too-old",
            level="stops",
            what=f"this PyTorch's CUDA {software.cuda} has no kernels for {device.arch}",
            evidence=f"{device.name}; CUDA 12.8 is the first that knows it",
            mend=(*install_steps(machine), *([_nvidia_update(machine, newest)] if _older(said, newest) else [])),
            prove=PROBE,
            fixes=installs(machine),
        )
    elif _older(said, oldest):
        install = install_steps(machine) if served and _runs(build, said) else ()
        update = _nvidia_update(machine, oldest) + ("  # or, to keep this PyTorch" if install else "")
        yield Finding(
            id="cuda-too-new",
            level="stops",
            what=f"this PyTorch's CUDA {software.cuda} is too new for this driver",
            evidence=f"driver {said}; {device.arch} with CUDA {cuda[0]} needs {oldest} or newer",
            mend=(*install, update),
            prove=PROBE,
            fixes=installs(machine) if install else (),
        )


def _older(driver: str, major: int) -> bool:
    return bool(driver) and version_key(driver)[:1] < (major,)


def _runs(build: TorchBuild, driver: str) -> bool:
    """Whether a CUDA build runs on a driver."""
    major = re.search(r"\+cu(\d\d)", build.requirement)
    return version_key(driver)[:1] >= (OLDEST_DRIVER.get(major[1] if major else "13", 0),)


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
