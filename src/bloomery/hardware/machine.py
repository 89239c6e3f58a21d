"""The hardware and software of a machine, as values that are stored as JSON; the devices that masks make visible."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.hardware.vendors import VENDORS, Build, Vendor


class Frozen(BaseModel, frozen=True, extra="ignore"):
    """Recorded machines of newer versions still load."""


Version = Annotated[str, Field(pattern=r"^\d{1,9}\.\d{1,9}")]  # 2.13.0+rocm7.2, 3.12.4
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # a file from elsewhere can hold 400 digits
Opening = Literal["open", "denied", "absent", "hung"]  # hung: the driver does not respond


class Accelerator(Frozen):
    """One device as the operating system exposes it (a GCD of an MI250X is one)."""

    index: Whole
    vendor: Vendor
    name: str
    arch: str  # gfx90a, sm_90
    memory_bytes: Whole
    memory_used_bytes: Whole = 0
    integrated: bool = False
    node: str = ""  # /dev/dri/renderD128
    access: Opening | None = None  # whether this process can open `node`; None: not checked
    pci_address: str = ""  # 0000:03:00.0
    device_id: Whole = 0  # PCI
    unique_id: str = ""  # of the die: the two GCDs of an MI250X differ
    compute_units: Whole = 0
    gtt_bytes: Whole = 0  # system memory available to the GPU: what an integrated GPU uses
    hive_id: str = ""  # devices with the same one are joined by xGMI
    number: Whole | None = (
        # Number among the GPUs of its vendor, kept when others are left out; None: its position
        # among them.
        None
    )

    @property
    def usable_bytes(self) -> int:
        """An integrated GPU also uses system memory; a discrete GPU only its own."""
        return max(self.memory_bytes, self.gtt_bytes) if self.integrated else self.memory_bytes


class Display(Frozen):
    """A display or accelerator device on the PCI bus, whether or not a driver has it."""

    address: str  # 0000:03:00.0
    vendor: Whole  # 0x1002 AMD, 0x10de NVIDIA, 0x8086 Intel
    device_id: Whole
    driver: str = ""  # amdgpu, nvidia, nouveau, vfio-pci; empty: no driver


class Access(Frozen):
    """The devices that this process can open, and the groups that they belong to."""

    kfd: Opening | None = None  # /dev/kfd, AMD's compute device; None: not checked
    kfd_group: str = ""  # the group that owns it: its name, or its number without a name
    kfd_gid: Whole | None = None
    render_gid: Whole | None = None
    groups: tuple[str, ...] = ()  # of this process
    # Groups of the user in /etc/group: more than `groups` until the next login.
    listed_groups: tuple[str, ...] = ()


class Driver(Frozen):
    """Kernel drivers and boot parameters."""

    kernel: str = ""  # 6.12.9
    amdgpu: bool = False  # loaded
    amdgpu_version: str = ""  # of DKMS builds only; the in-tree driver has none
    nvidia: str = ""  # 580.82.07
    blacklisted: str = ""  # the file that blacklists amdgpu
    boot: str = ""  # relevant parameters of /proc/cmdline: iommu=, amd_iommu=, nomodeset
    rocm: str = ""  # of the system, 6.4.0; PyTorch wheels include their own
    # Intel's driver for Level Zero in user space, 1.3.29735, which no wheel includes; None: not looked for.
    level_zero: str | None = None
    numa_balancing: bool | None = None

    @property
    def versions(self) -> str:
        """Of all that a GPU's kernels run on."""
        known = filter(None, (self.nvidia, self.amdgpu_version, self.rocm, f"Linux {self.kernel}"))
        return " ".join(known)


class Surroundings(Frozen):
    """WSL, container, Slurm job and cluster of this process."""

    wsl: bool = False
    dxg: bool = False  # /dev/dxg exists: the GPU device of WSL
    container: str = ""  # docker, podman, apptainer, lxc
    masked_gpus: Whole = 0  # that the kernel lists and the control group hides
    shared_memory_bytes: Whole | None = None  # of /dev/shm
    slurm: dict[str, str] = {}  # SLURM_JOB_ID, SLURM_GPUS_ON_NODE, SLURM_LOCALID, ...
    site: str = ""  # frontier, lumi, setonix: a cluster with its own PyTorch
    modules: tuple[str, ...] = ()  # loaded environment modules, rocm/7.1.1


class Package(Frozen):
    """An installed distribution that is related to torch."""

    name: str
    version: str
    installed: Annotated[float, Field(ge=0, le=2**35)] = 0.0  # seconds since 1970
    requested: bool = False  # the user installed it by name
    requires_torch: str = ""  # its requirement, "torch>=2.8"


class ShellSetting(Frozen):
    """A line of a shell file that sets a relevant variable."""

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
    error: float | None = None  # largest relative difference from the float64 reference
    facts: dict[str, str] = {}  # gcnArchName, arch list, ...


class ProductRates(Frozen):
    """GFLOP/s of one core in products of 1,024 tokens with a matrix of `width` inputs and twice as many outputs.

    `forward` makes outputs, `inputs` the gradient of what is multiplied, `weights` that of the matrix; `narrow`: all
    six products of a pair of matrices of rank 16, forward and backward.
    """

    width: Annotated[int, Field(ge=1)]
    forward: Annotated[float, Field(gt=0)]
    inputs: Annotated[float, Field(gt=0)]
    weights: Annotated[float, Field(gt=0)]
    narrow: Annotated[float, Field(gt=0)]


class CpuCheck(Frozen):
    """What one core reached in the check of `hardware.cpu_check`, at its best."""

    gflops: dict[str, Annotated[float, Field(gt=0)]]  # of matrix products, by dtype
    copy_gbs: Annotated[float, Field(gt=0)]  # read and written
    # Seconds of a fixed loop of Python: compiling is Python and C++ code.
    python_seconds: Annotated[float, Field(gt=0)]
    # By dtype, in the order of width; none in checks that timed one product.
    products: dict[str, tuple[ProductRates, ...]] = {}


class Host(Frozen):
    system: str  # Linux
    cpu_name: str
    # Cores available to this process: by its affinity and its cgroup.
    cpu_cores: Annotated[int, Field(ge=1, le=2**20)]
    cpu_flags: tuple[str, ...] = ()  # the relevant ones: avx2, avx512f, avx512_bf16, amx_bf16
    memory_bytes: Whole  # or the limit of the cgroup
    memory_free_bytes: Whole
    # Where `memory_bytes` is from: of this machine, assumed for a GPU that is planned for, or set by the user.
    memory_origin: Literal["read", "assumed", "set"] = "read"
    disk_free_bytes: Whole
    compiler: str | None = None  # a C++ compiler for torch.compile
    cpu_arch: str = "x86_64"
    distribution: str = ""  # from /etc/os-release: debian 12
    displays: tuple[Display, ...] = ()
    driver: Driver = Driver()
    access: Access = Access()
    around: Surroundings = Surroundings()


class Software(Frozen):
    python: Version
    torch: Version | None = None  # the installed version, read without importing it
    build: Build | None = None
    triton: str | None = None
    environment: dict[str, str] = {}  # relevant variables, such as HSA_OVERRIDE_GFX_VERSION
    hip: str = ""  # the ROCm that torch was built for, 7.2.53211; empty: none
    cuda: str = ""  # the CUDA that torch was built for, 13.0
    xpu: str = ""  # the SYCL compiler that torch was built with, 20250301
    prefix: str = ""  # of the Python environment, the home folder as ~
    # The folder of torch. Outside of `prefix` it is the torch of a cluster or a container.
    torch_folder: str = ""
    packages: tuple[Package, ...] = ()
    settings: tuple[ShellSetting, ...] = ()
    pinned: str = ""  # torch in the environment's pip constraints; empty: pip can replace it

    @property
    def runtimes(self) -> dict[str, str]:
        """That torch was built for, as `Calibration` names them."""
        return {"rocm": self.hip, "cuda": self.cuda, "xpu": self.xpu}


class Machine(Frozen):
    accelerators: tuple[Accelerator, ...]
    host: Host
    software: Software
    probes: tuple[Probe, ...] = ()  # empty: not probed
    cpu_check: CpuCheck | None = None  # None: not checked
    # The user named unequal GPUs: all of `accelerators` train together, in their order.
    together: bool = False
    # Integrated GPUs that are no longer among `accelerators`: discrete ones were chosen, and not by the user.
    hidden_integrated: tuple[Accelerator, ...] = ()
    origin: str = ""  # of a file: "recorded" or "constructed", and from what


def read_machine(path: Path) -> Machine:
    """A recorded machine. Raises UserError if the file is damaged."""
    try:
        return Machine.model_validate_json(read_whole(path))
    except (OSError, ValidationError) as error:
        fix = "delete it: `bloomery resume` then plans for this machine"
        raise UserError("cannot read machine.json of the run", where=str(path), fix=fix) from error


MASKS = tuple(dict.fromkeys(mask for vendor in VENDORS.values() for mask in vendor.masks))


def visible_devices(machine: Machine) -> tuple[Accelerator, ...]:
    """The visible devices in PyTorch's order. ROCR's mask applies first, HIP's numbers the remaining devices."""
    variables = machine.software.environment
    amd = _numbered(machine, "amd")
    if "ROCR_VISIBLE_DEVICES" in variables:
        amd = dict(enumerate(_masked(amd, variables["ROCR_VISIBLE_DEVICES"])))
    hip = variables.get("HIP_VISIBLE_DEVICES", variables.get("CUDA_VISIBLE_DEVICES"))
    devices = _masked(amd, hip)
    for vendor, facts in VENDORS.items():
        if vendor != "amd":
            mask = variables.get(facts.masks[0]) if facts.masks else None
            devices += _masked(_numbered(machine, vendor), mask)
    return tuple(devices)


def runtime_number(machine: Machine, device: Accelerator) -> int:
    """The number of a device in the runtime of its vendor."""
    if device.number is not None:
        return device.number
    return next(
        number
        for number, candidate in _numbered(machine, device.vendor).items()
        if candidate == device
    )


def with_devices(machine: Machine, indices: Collection[int]) -> Machine:
    """The machine with only these accelerators; they keep their numbers."""
    devices = [device for device in machine.accelerators if device.index in indices]
    if len(devices) < len(machine.accelerators):
        devices = [
            device.model_copy(update={"number": runtime_number(machine, device)})
            for device in devices
        ]
    return machine.model_copy(update={"accelerators": tuple(devices)})


def mask_of(machine: Machine, vendor: Vendor) -> str:
    """The variable that selects devices of a vendor; empty if none is set."""
    masks = VENDORS[vendor].masks
    return next((name for name in masks if name in machine.software.environment), "")


def hidden(machine: Machine) -> str:
    """The variable that hides every accelerator of this machine; empty if none does."""
    if not machine.accelerators or visible_devices(machine):
        return ""
    return next((name for name in MASKS if name in machine.software.environment), "")


def _numbered(machine: Machine, vendor: str) -> dict[int, Accelerator]:
    devices = [device for device in machine.accelerators if device.vendor == vendor]
    return {
        position if device.number is None else device.number: device
        for position, device in enumerate(devices)
    }


def _masked(devices: Mapping[int, Accelerator], mask: str | None) -> list[Accelerator]:
    """The devices of a list of numbers or unique IDs, up to the first that does not exist; None: all of them."""
    if mask is None:
        return list(devices.values())
    selected: list[Accelerator] = []
    for word in (word.strip() for word in mask.split(",")):
        if word.isdigit():
            device = devices.get(int(word))
        else:
            unique_id = word.lower().removeprefix("gpu-")
            by_id = {
                candidate.unique_id.lower().removeprefix("0x"): candidate
                for candidate in reversed(list(devices.values()))
            }
            device = by_id.get(unique_id) if unique_id else None
        if device is None:
            break
        if device in selected:  # listed twice: the runtime shows no device
            return []
        selected.append(device)
    return selected
