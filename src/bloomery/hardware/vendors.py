"""What follows from the maker of a GPU: its kind of device, its PyTorch, its variables, and the words of its driver."""

from dataclasses import dataclass
from typing import Literal, final

from bloomery.core.units import GIB

Vendor = Literal["amd", "nvidia", "intel", "apple"]
# Of PyTorch. That for macOS computes on Apple's GPUs, and has no name of its own.
Build = Literal["cpu", "cuda", "rocm", "xpu"]
BUILD_NAMES: dict[Build, str] = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU"}


@final
@dataclass(frozen=True)
class VendorFacts:
    name: str
    device_type: str  # of `core.device.KINDS`
    build: Build
    version: str  # the field of torch.version that only its builds have
    runtime: str
    masks: tuple[str, ...]  # variables that hide devices, in the order in which they apply
    mask: str  # the one of them that Bloomery sets
    allocators: tuple[str, ...]  # variables that PyTorch's allocator for its GPUs reads
    # Bytes that the contexts of its collective library take: the first process group's, and each further one's.
    first_context: float
    next_context: float
    # Of a GPU that shares the machine's memory: the share of it that the driver lets the GPU use by default (AMD's:
    # unless amdgpu.gttsize or ttm.pages_limit are set).
    shared_part: float = 0.5
    pci_vendor: int | None = None  # on the PCI bus
    # Modules of the kernel; each process opens the render node of a GPU by itself, so that it needs the right to.
    drivers: tuple[str, ...] = ()
    opens_render_node: bool = False
    # The variable for the order in which the runtime counts GPUs, which is otherwise the fastest first, and its value
    # for the order of the PCI bus, in which they are found.
    order: tuple[str, str] | None = None
    # What is missing, so that its GPUs are planned for and neither found nor trained on; empty: they are trained on.
    missing: str = ""


# Not GPU_DEVICE_ORDINAL, which Slurm also sets: AMD's runtime uses it for OpenCL only (CLR, rocdevice.cpp).
AMD_MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VENDORS: dict[Vendor, VendorFacts] = {
    "amd": VendorFacts(
        name="AMD",
        device_type="cuda",
        build="rocm",
        version="hip",
        runtime="HIP",
        masks=AMD_MASKS,
        mask="HIP_VISIBLE_DEVICES",  # ROCR_VISIBLE_DEVICES would renumber them
        allocators=ALLOCATORS,
        first_context=0.95 * GIB,  # measured on MI250X
        next_context=0.65 * GIB,
        pci_vendor=0x1002,
        drivers=("amdgpu",),
        opens_render_node=True,
    ),
    "nvidia": VendorFacts(
        name="NVIDIA",
        device_type="cuda",
        build="cuda",
        version="cuda",
        runtime="CUDA",
        masks=("CUDA_VISIBLE_DEVICES",),
        mask="CUDA_VISIBLE_DEVICES",
        allocators=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        first_context=1.5 * GIB,  # ml-engineering, of two ranks
        next_context=0.3 * GIB,
        pci_vendor=0x10DE,
        drivers=("nvidia",),
        order=("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    ),
    "intel": VendorFacts(
        name="Intel",
        device_type="xpu",
        build="xpu",
        version="xpu",
        runtime="SYCL",
        masks=("ZE_AFFINITY_MASK",),
        mask="ZE_AFFINITY_MASK",
        allocators=("PYTORCH_ALLOC_CONF",),
        first_context=1.5 * GIB,  # not measured: as NVIDIA's
        next_context=0.3 * GIB,
        pci_vendor=0x8086,
        drivers=("xe", "i915"),  # xe also serves GPUs before Battlemage, where it is asked to
        opens_render_node=True,
    ),
    "apple": VendorFacts(
        name="Apple",
        device_type="mps",
        build="cpu",
        version="",
        runtime="Metal",
        masks=(),
        mask="",
        allocators=(),
        first_context=0.0,  # one GPU, and nothing to exchange
        next_context=0.0,
        # Of recommendedMaxWorkingSetSize, as reported: 17.8 of 24 GiB (sgl-project/sglang#29949), 107.5 of 128
        # (antirez/ds4#893). iogpu.wired_limit_mb of sysctl changes it.
        shared_part=0.75,
        missing=(
            "PyTorch has no float64 on MPS, which checks and sampling compute in; no pinned memory, which"
            " offloading copies through; and no kernels for 4-bit weights (nf4)"
        ),
    ),
}
ORDERS = tuple(facts.order[0] for facts in VENDORS.values() if facts.order)
ASSUMED_VENDOR: Vendor = "amd"  # of a GPU that the tables do not list

TRITONS = (
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "triton-xpu",
    "pytorch-triton-xpu",
)  # its packages

# Variables that choose other kernels, or another architecture: results may differ with them.
KERNEL_VARIABLES = (
    "HSA_OVERRIDE_GFX_VERSION",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "ROCBLAS_USE_HIPBLASLT",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "CUBLAS_WORKSPACE_CONFIG",
)

# Regular expressions: a GPU's driver or runtime, its libraries, its collectives in an error message.
DRIVER_ERROR = (
    r"(HIP|CUDA) error|\b(hip|cuda)Error\w+|HSA_STATUS_ERROR|UR_RESULT_ERROR_\w+"
    r"|Memory access fault|AcceleratorError"
)
LIBRARY_ERROR = r"\b(CUBLAS|HIPBLAS|ROCBLAS|CUDNN|MIOPEN)_STATUS_(?!ALLOC)|miopenStatus"
COLLECTIVE_ERROR = r"(NCCL|RCCL) error|oneCCL: .*error"
