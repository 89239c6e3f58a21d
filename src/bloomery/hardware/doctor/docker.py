"""The line that starts a container with this machine's GPUs in it."""

from bloomery.hardware.doctor.access import SELINUX
from bloomery.hardware.doctor.symptoms import vendors
from bloomery.hardware.machine import Machine

IMAGES = {"amd": "rocm", "nvidia": "cuda"}
MOUNT = '-v "$PWD":/workspace -w /workspace'


def kind(machine: Machine) -> str:
    """Which of our images fits: rocm, cuda or cpu."""
    if machine.host.around.dxg and machine.software.build == "rocm":  # WSL lists no AMD card
        return "rocm"
    here = {device.vendor for device in machine.accelerators} or vendors(machine)
    return next((IMAGES[vendor] for vendor in ("amd", "nvidia") if vendor in here), "cpu")


def run_lines(machine: Machine) -> tuple[str, ...]:
    """Commands with what they do after two blanks and a #: build the image once, then run it."""
    image = kind(machine)
    around = machine.host.around
    if around.slurm or around.site:
        flag = {"rocm": "--rocm ", "cuda": "--nv ", "cpu": ""}[image]
        return (
            f"apptainer build bloomery-{image}.sif docker-archive://bloomery-{image}.tar  # docker save made the tar",
            f'srun --gpus-per-task=1 apptainer exec {flag}--bind "$PWD" bloomery-{image}.sif bloomery doctor',
        )
    selinux = machine.host.distribution.partition(" ")[0] in SELINUX
    engine = "podman" if selinux else "docker"
    yours = "--userns=keep-id" if selinux else '--user "$(id -u):$(id -g)"'
    devices = _devices(machine, image, selinux)
    words = [engine, "run", "--rm", "-it", *devices, "--ipc=host", yours, MOUNT, f"bloomery:{image}"]
    return (
        f"{engine} build -f docker/Dockerfile.{image} -t bloomery:{image} .  # once, in a checkout of Bloomery",
        " ".join(words) + " bloomery doctor",
    )


def _devices(machine: Machine, image: str, selinux: bool) -> list[str]:
    if image == "cuda":
        return ["--gpus", "all"] if not selinux else ["--device", "nvidia.com/gpu=all", "--security-opt=label=disable"]
    if image == "cpu":
        return []
    if selinux:  # a rootless engine keeps the user's own groups
        groups = ["--group-add=keep-groups", "--security-opt=label=disable"]
    else:
        groups = [f"--group-add={number}" for number in _groups(machine)]
    if machine.host.around.wsl:
        return ["--device=/dev/dxg", "-e", "HSA_ENABLE_DXG_DETECTION=1", "-v", "/usr/lib/wsl:/usr/lib/wsl"]
    return ["--device=/dev/kfd", "--device=/dev/dri", *groups]


def _groups(machine: Machine) -> list[str]:
    """The numbers of the groups that own the devices: names mean other numbers inside."""
    access = machine.host.access
    known = [number for number in (access.kfd_gid, access.render_gid) if number is not None]
    asked = "$(stat -c %g /dev/kfd)"  # where this record was made without the device: the host's shell answers
    return [str(number) for number in dict.fromkeys(known)] or [asked]
