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
    # Bytes that the contexts of its collective library take: the first process group's, and each further one's.
    first_context: float
    next_context: float
    is_detected: bool = True  # `hardware.detect` finds its GPUs


# Not GPU_DEVICE_ORDINAL, which Slurm also sets: AMD's runtime uses it for OpenCL only (CLR, rocdevice.cpp).
AMD_MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
VENDORS: dict[Vendor, VendorFacts] = {
    "amd": VendorFacts(
        name="AMD",
        device_type="cuda",
        build="rocm",
        version="hip",
        runtime="HIP",
        masks=AMD_MASKS,
        first_context=0.95 * GIB,  # measured on MI250X
        next_context=0.65 * GIB,
    ),
    "nvidia": VendorFacts(
        name="NVIDIA",
        device_type="cuda",
        build="cuda",
        version="cuda",
        runtime="CUDA",
        masks=("CUDA_VISIBLE_DEVICES",),
        first_context=1.5 * GIB,  # ml-engineering, of two ranks
        next_context=0.3 * GIB,
    ),
    "intel": VendorFacts(
        name="Intel",
        device_type="xpu",
        build="xpu",
        version="xpu",
        runtime="SYCL",
        masks=("ZE_AFFINITY_MASK",),
        first_context=1.5 * GIB,  # not measured: as NVIDIA's
        next_context=0.3 * GIB,
        is_detected=False,
    ),
    "apple": VendorFacts(
        name="Apple",
        device_type="mps",
        build="cpu",
        version="",
        runtime="Metal",
        masks=(),
        first_context=0.0,  # one GPU, and nothing to exchange
        next_context=0.0,
        is_detected=False,
    ),
}
ASSUMED_VENDOR: Vendor = "amd"  # of a GPU that the tables do not list

TRITONS = ("triton", "triton-rocm", "pytorch-triton-rocm")  # its packages

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
    r"(HIP|CUDA) error|\b(hip|cuda)Error\w+|HSA_STATUS_ERROR|Memory access fault|AcceleratorError"
)
LIBRARY_ERROR = r"\b(CUBLAS|HIPBLAS|ROCBLAS|CUDNN|MIOPEN)_STATUS_(?!ALLOC)|miopenStatus"
COLLECTIVE_ERROR = r"(NCCL|RCCL) error"
