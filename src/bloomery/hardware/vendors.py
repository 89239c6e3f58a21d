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
    # Contexts measured on MI250X.
    "amd": VendorFacts("AMD", "cuda", "rocm", "hip", "HIP", AMD_MASKS, 0.95 * GIB, 0.65 * GIB),
    # Contexts by ml-engineering, of two ranks.
    "nvidia": VendorFacts(
        "NVIDIA", "cuda", "cuda", "cuda", "CUDA", AMD_MASKS[-1:], 1.5 * GIB, 0.3 * GIB
    ),
    # Contexts not measured: as NVIDIA's. The mask by Intel's guide to Level Zero.
    "intel": VendorFacts(
        *("Intel", "xpu", "xpu", "xpu", "SYCL", ("ZE_AFFINITY_MASK",), 1.5 * GIB, 0.3 * GIB),
        is_detected=False,
    ),
    # One GPU: no mask, and nothing to exchange.
    "apple": VendorFacts("Apple", "mps", "cpu", "", "Metal", (), 0.0, 0.0, is_detected=False),
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
