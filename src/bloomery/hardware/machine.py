"""What was found on a machine, as values that go to JSON and back; which of its devices masks let a process see."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole


class Frozen(BaseModel, frozen=True, extra="ignore"):
    """Recorded machines of newer versions still load."""


Version = Annotated[str, Field(pattern=r"^\d{1,9}\.\d{1,9}")]  # 2.13.0+rocm7.2, 3.12.4
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # a record of another hand may hold 400 digits
Opening = Literal["open", "denied", "absent", "hung"]  # hung: the driver did not answer


class Accelerator(Frozen):
    """One device as the operating system exposes it (a GCD of an MI250X is one)."""

    index: Whole
    vendor: Literal["amd", "nvidia"]
    name: str
    arch: str  # gfx90a, sm_90
    memory_bytes: Whole
    memory_used_bytes: Whole = 0
    integrated: bool = False
    node: str = ""  # /dev/dri/renderD128
    access: Opening | None = None  # whether this process may open `node`; None: nobody looked
    pci_address: str = ""  # 0000:03:00.0
    device_id: Whole = 0  # PCI
    unique_id: str = ""  # of the die: two GCDs of one card differ
    compute_units: Whole = 0
    gtt_bytes: Whole = 0  # system memory that the driver lends to the GPU: what processor graphics really have
    hive_id: str = ""  # devices with the same one are joined by xGMI
    number: Whole | None = None  # among its vendor's, kept where others were left out; None: its place among them

    @property
    def usable_bytes(self) -> int:
        """Processor graphics draw on system memory that the driver lends; a card has its own alone."""
        return max(self.memory_bytes, self.gtt_bytes) if self.integrated else self.memory_bytes


class Display(Frozen):
    """A display or accelerator device on the PCI bus, whether or not a driver has it."""

    address: str  # 0000:03:00.0
    vendor: Whole  # 0x1002 AMD, 0x10de NVIDIA, 0x8086 Intel
    device_id: Whole
    driver: str = ""  # amdgpu, nvidia, nouveau, vfio-pci; empty: none has it


class Access(Frozen):
    """What this process may open, and whose right it would be."""

    kfd: Opening | None = None  # /dev/kfd, AMD's compute device; None: nobody looked
    kfd_group: str = ""  # the group that owns it: its name, or its number where it has none here
    kfd_gid: Whole | None = None
    render_gid: Whole | None = None
    groups: tuple[str, ...] = ()  # that this process runs in
    listed_groups: tuple[str, ...] = ()  # that /etc/group puts the user in: more than `groups` before a new login


class Driver(Frozen):
    """The kernel's side."""

    kernel: str = ""  # 6.12.9
    amdgpu: bool = False  # loaded
    amdgpu_version: str = ""  # of DKMS builds only; an in-tree driver has none
    nvidia: str = ""  # 580.82.07
    blacklisted: str = ""  # the file that keeps amdgpu from loading
    boot: str = ""  # the words of /proc/cmdline that matter: iommu=, amd_iommu=, nomodeset
    rocm: str = ""  # of the system, 6.4.0; PyTorch's wheels bring their own
    numa_balancing: bool | None = None


class Surroundings(Frozen):
    """What stands around this process."""

    wsl: bool = False
    dxg: bool = False  # /dev/dxg, WSL's way to the GPU
    container: str = ""  # docker, podman, apptainer, lxc
    masked_gpus: Whole = 0  # that the kernel lists and the control group hides: not ours, not broken
    shared_memory_bytes: Whole | None = None  # of /dev/shm
    slurm: dict[str, str] = {}  # SLURM_JOB_ID, SLURM_GPUS_ON_NODE, SLURM_LOCALID, ...
    site: str = ""  # frontier, lumi, setonix: a cluster with rules of its own
    modules: tuple[str, ...] = ()  # loaded environment modules, rocm/7.1.1


class Package(Frozen):
    """An installed distribution that has to do with torch."""

    name: str
    version: str
    installed: Annotated[float, Field(ge=0, le=2**35)] = 0.0  # seconds since 1970
    requested: bool = False  # somebody asked pip for it by name
    requires_torch: str = ""  # its requirement, "torch>=2.8"


class Setting(Frozen):
    """A line of a shell file that sets one of the variables that matter."""

    name: str
    value: str
    file: str  # the home folder as ~
    line: Whole


class Probe(Frozen):
    """The result of a test of torch in a child process. `message`: the error in one line; `seconds`: the time."""

    name: str  # device, matmul-bfloat16, attention-flash, compile, bitsandbytes, all-reduce, ...
    outcome: Literal["ok", "wrong", "failed", "crashed", "hung", "absent"]
    message: str = ""
    seconds: float | None = None
    error: float | None = None  # greatest relative difference from the float64 reference
    facts: dict[str, str] = {}  # gcnArchName, arch list, ...


class Host(Frozen):
    system: str  # Linux
    cpu_name: str
    cpu_cores: Annotated[int, Field(ge=1, le=2**20)]  # that this process may use: affinity and cgroup
    cpu_flags: tuple[str, ...] = ()  # those that matter: avx2, avx512f, avx512_bf16, amx_bf16
    memory_bytes: Whole  # the cgroup's limit where there is one
    memory_free_bytes: Whole
    disk_free_bytes: Whole
    compiler: str | None = None  # a C++ compiler that torch.compile can use
    processor: str = "x86_64"
    distribution: str = ""  # of /etc/os-release: debian 12
    displays: tuple[Display, ...] = ()
    driver: Driver = Driver()
    access: Access = Access()
    around: Surroundings = Surroundings()


class Software(Frozen):
    python: Version
    torch: Version | None = None  # the installed version, read without importing it
    build: Literal["cpu", "cuda", "rocm"] | None = None
    triton: str | None = None
    environment: dict[str, str] = {}  # the variables that matter, such as HSA_OVERRIDE_GFX_VERSION
    hip: str = ""  # the ROCm that torch was built for, 7.2.53211; empty: none
    cuda: str = ""  # the CUDA that torch was built for, 13.0
    prefix: str = ""  # of the Python environment, the home folder as ~
    torch_folder: str = ""  # where torch lies: outside `prefix` it is a site's or a container's own
    packages: tuple[Package, ...] = ()
    settings: tuple[Setting, ...] = ()
    pinned: str = ""  # how the environment's own pip constraints name torch; empty: nothing stops pip


class Machine(Frozen):
    accelerators: tuple[Accelerator, ...]
    host: Host
    software: Software
    probes: tuple[Probe, ...] = ()  # empty: not probed
    origin: str = ""  # of a file: "recorded" or "constructed", and from what


def read_machine(path: Path) -> Machine:
    """A recorded machine. Raises UserError when the file is damaged."""
    try:
        return Machine.model_validate_json(read_whole(path))
    except (OSError, ValidationError) as error:
        fix = "delete it: resuming then plans again for the machine at hand"
        raise UserError("the record of the run's machine cannot be read", where=str(path), fix=fix) from error


# In the order in which they apply. Not GPU_DEVICE_ORDINAL, which Slurm sets, too: AMD's runtime asks it for OpenCL
# alone (CLR, rocdevice.cpp).
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
CUDA_ORDER = "CUDA_DEVICE_ORDER"  # PCI_BUS_ID: counted as nvidia-smi does; unset: the fastest card first


def visible_devices(machine: Machine) -> tuple[Accelerator, ...]:
    """In the order that PyTorch numbers them. ROCR's mask comes first, HIP's counts in what that leaves."""
    said = machine.software.environment
    amd = _numbered(machine, "amd")
    if "ROCR_VISIBLE_DEVICES" in said:
        amd = dict(enumerate(_masked(amd, said["ROCR_VISIBLE_DEVICES"])))
    hip = said.get("HIP_VISIBLE_DEVICES", said.get("CUDA_VISIBLE_DEVICES"))
    return (*_masked(amd, hip), *_masked(_numbered(machine, "nvidia"), said.get("CUDA_VISIBLE_DEVICES")))


def number_of(machine: Machine, device: Accelerator) -> int:
    """How the runtime of its vendor counts a device of this machine."""
    return next(number for number, each in _numbered(machine, device.vendor).items() if each == device)


def only(machine: Machine, indices: Collection[int]) -> Machine:
    """The machine without its other accelerators; those left keep their numbers."""
    left = [device for device in machine.accelerators if device.index in indices]
    if len(left) < len(machine.accelerators):
        left = [device.model_copy(update={"number": number_of(machine, device)}) for device in left]
    return machine.model_copy(update={"accelerators": tuple(left)})


def mask_of(machine: Machine, vendor: str) -> str:
    """The variable with which the user chooses among the devices of a vendor; empty when none is set."""
    names = MASKS if vendor == "amd" else MASKS[-1:]
    return next((name for name in names if name in machine.software.environment), "")


def hidden(machine: Machine) -> str:
    """The variable that masks every accelerator of this machine; empty when none does."""
    if not machine.accelerators or visible_devices(machine):
        return ""
    return next((name for name in MASKS if name in machine.software.environment), "")


def _numbered(machine: Machine, vendor: str) -> dict[int, Accelerator]:
    devices = [device for device in machine.accelerators if device.vendor == vendor]
    return {place if each.number is None else each.number: each for place, each in enumerate(devices)}


def _masked(devices: Mapping[int, Accelerator], mask: str | None) -> list[Accelerator]:
    """Those that a list of numbers or identities names, up to the first word that names none; None: all of them."""
    if mask is None:
        return list(devices.values())
    chosen: list[Accelerator] = []
    for word in (word.strip() for word in mask.split(",")):
        found = _named(devices, word)
        if found is None:
            break
        if found in chosen:  # named twice: the runtime then shows none at all
            return []
        chosen.append(found)
    return chosen


def _named(devices: Mapping[int, Accelerator], word: str) -> Accelerator | None:
    if word.isdigit():
        return devices.get(int(word))
    identity = word.lower().removeprefix("gpu-")
    known = (each for each in devices.values() if each.unique_id)
    return next((each for each in known if identity and each.unique_id.lower().removeprefix("0x") == identity), None)
