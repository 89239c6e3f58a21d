"""What a machine wants: the only place where knowledge of vendors turns into choices."""

from dataclasses import dataclass

from bloomery.choice import Choice
from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.specs import ArchSpec, CpuSpec, GpuSpec, arch_spec, cpu_spec, gpu_spec

MEMORY_SHARE = 0.92  # of a card: above it a ROCm driver can hang before PyTorch raises
HIP_ALLOCATOR = "garbage_collection_threshold:0.8,max_split_size_mb:512"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Choices for the device that training will use, with the table's rows behind them (None: not in the table)."""

    device: Choice[str]  # cpu, cuda (also ROCm's name in PyTorch)
    accelerator: Accelerator | None
    arch: ArchSpec | None
    gpu: GpuSpec | None
    cpu: CpuSpec | None
    dtype: Choice[str]  # float32, bfloat16, float16
    attention: Choice[str]  # fused, plain: whether the device has fused attention kernels
    compile: Choice[bool]
    fused_optimizer: Choice[bool]
    workers: Choice[int]
    pin_memory: Choice[bool]
    prefetch: Choice[int]  # batches read ahead
    environment: Choice[dict[str, str]]  # set before torch is imported, never over the user's own


def build_profile(machine: Machine) -> Profile:
    """Choices for the accelerator that training would use here, or for the processor when there is none to use."""
    accelerator, device = choose_device(machine)
    arch = arch_spec(accelerator.arch) if accelerator else None
    cpu = cpu_spec(machine.host)
    return Profile(
        device=device,
        accelerator=accelerator,
        arch=arch,
        gpu=gpu_spec(accelerator) if accelerator else None,
        cpu=cpu,
        dtype=_gpu_dtype(accelerator, arch) if accelerator else _cpu_dtype(cpu),
        attention=_attention(accelerator, arch),
        compile=_gpu_compile(accelerator, arch) if accelerator else _cpu_compile(machine),
        fused_optimizer=Choice(True, "one kernel over all parameters; the same mathematics"),
        workers=Choice(1, "shards are memory-mapped: one thread reads far faster than any device trains"),
        pin_memory=_pinned(accelerator),
        prefetch=Choice(4 if accelerator else 2, "batches kept ready, a few kilobytes each"),
        environment=_environment(machine, accelerator, arch),
    )


def choose_device(machine: Machine) -> tuple[Accelerator | None, Choice[str]]:
    """The accelerator with the most memory that is no processor graphics and that the installed torch was built for."""
    build = machine.software.build
    if not machine.accelerators:
        return None, Choice("cpu", "no GPU was found")
    best = max(machine.accelerators, key=lambda device: (not device.integrated, device.memory_bytes, -device.index))
    wanted = "rocm" if best.vendor == "amd" else "cuda"
    if build is not None and build != wanted:
        because = f"{best.name} is here, but the installed PyTorch is a {build} build: it needs a {wanted} one"
        return None, Choice("cpu", because)
    if hidden(machine):
        return None, Choice("cpu", f"{hidden(machine)} hides every GPU")
    return best, Choice("cuda", f"{best.name} ({best.arch})")


def hidden(machine: Machine) -> str:
    """The variable that masks every accelerator of this machine; empty when none does."""
    names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return next((name for name in names if machine.software.environment.get(name) in ("", "-1")), "")


def _gpu_dtype(device: Accelerator, arch: ArchSpec | None) -> Choice[str]:
    if arch is None:
        return Choice("float32", f"{device.arch} is not in the table: what it multiplies in hardware is unknown")
    if arch.bf16 == "full":
        return Choice("bfloat16", f"{device.arch} multiplies bf16 in hardware")
    if arch.bf16 == "half":
        return Choice("bfloat16", f"{device.arch} multiplies bf16 at half the rate of fp16, without loss scaling")
    return Choice("float16", f"{device.arch} has no bf16 matrix instructions")


def _cpu_dtype(cpu: CpuSpec | None) -> Choice[str]:
    if cpu is not None and cpu.bf16:
        return Choice("bfloat16", f"this CPU multiplies it in hardware ({cpu.name})")
    return Choice("float32", "this CPU has no bf16 instructions, and fp16 is five to nine times slower on any CPU")


def _attention(device: Accelerator | None, arch: ArchSpec | None) -> Choice[str]:
    if device is None:
        return Choice("fused", "PyTorch's CPU kernel needs no quadratic memory")
    if arch is None:
        return Choice("plain", f"nothing is known of fused kernels for {device.arch}")
    if arch.fused_attention == "none":
        return Choice("plain", f"no fused kernel for {family_name(device.arch)}")
    because = f"PyTorch has fused kernels for {device.arch}"
    if arch.fused_attention == "experimental":
        because += ", switched on by TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    return Choice("fused", because)


def _pinned(device: Accelerator | None) -> Choice[bool]:
    if device is None:
        return Choice(False, "nothing is copied to a device")
    return Choice(True, "copies to the device overlap with work")


def family_name(arch: str) -> str:
    """gfx1031 -> gfx103x: how people name chips that share an instruction set; others as they are."""
    return arch[:-1] + "x" if arch.startswith(("gfx10", "gfx11")) else arch


def _gpu_compile(device: Accelerator, arch: ArchSpec | None) -> Choice[bool]:
    if arch is None:
        return Choice(False, f"{device.arch} is not in the table: Triton is untried on it")
    return Choice(arch.compile, arch.compile_because)


def _cpu_compile(machine: Machine) -> Choice[bool]:
    compiler = machine.host.compiler
    if compiler is None:
        return Choice(False, "torch.compile needs a C++ compiler, and there is none on PATH")
    return Choice(True, f"{compiler} builds fused loops: 10 to 35% faster once compiled")


def _environment(machine: Machine, device: Accelerator | None, arch: ArchSpec | None) -> Choice[dict[str, str]]:
    """Variables that are unset and should be set in the parent, before torch is imported."""
    wanted, reasons = {}, []
    if device is None and machine.host.compiler and not machine.host.compiler.endswith("/g++"):
        wanted["CXX"] = machine.host.compiler
        reasons.append("torch.compile looks for g++ unless CXX names another")
    if device is not None and device.vendor == "amd" and not _own_allocator(machine):
        wanted["PYTORCH_ALLOC_CONF"] = HIP_ALLOCATOR
        reasons.append("less fragmentation; expandable segments stay off on HIP")
    if arch is not None and arch.fused_attention == "experimental":
        wanted["TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"] = "1"
        reasons.append("fused attention is switched off by default on this chip")
    if device is not None and device.vendor == "amd" and _first_is_integrated(machine, device):
        wanted["HIP_VISIBLE_DEVICES"] = str(device.index)
        reasons.append("processor graphics would be device 0")
    unset = {key: value for key, value in wanted.items() if key not in machine.software.environment}
    return Choice(unset, "; ".join(reasons) or "nothing needs to be set")


def _own_allocator(machine: Machine) -> bool:
    return any(name.endswith("ALLOC_CONF") for name in machine.software.environment)


def _first_is_integrated(machine: Machine, device: Accelerator) -> bool:
    amd = [other for other in machine.accelerators if other.vendor == "amd"]
    return len(amd) > 1 and any(other.integrated for other in amd if other.index < device.index)
