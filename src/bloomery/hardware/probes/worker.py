"""Probes of torch and a device, each by its name: `python -m bloomery.hardware.probes.worker`, the child of probes.py.

Every value is checked against float64, every time is the best of several. Torch is imported inside functions.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bloomery.core.child import accept, tell
from bloomery.hardware.probes.all_reduce import all_reduce, be_rank
from bloomery.hardware.probes.checks import (
    Found,
    attention_checked,
    attention_seconds,
    best_seconds,
    difference,
    judged,
    product,
    product_seconds,
    worst,
)

if TYPE_CHECKING:
    from torch import Tensor

FLASH_ATTN_ARCHS = ("gfx90a", "gfx942", "gfx950")  # of its composable-kernel build, forward and backward

Run = Callable[[str, Mapping[str, Any]], Found]


def main(probes: Mapping[str, Run]) -> int:
    """Runs the job's probes in order and tells each. After one that is not well the process is not to be trusted:
    it ends, and the parent starts another for the rest.
    """
    job = accept()
    for name in job["names"]:
        tell(job, {"name": name, "outcome": "started"})
        found = _guarded(probes.get(name) or probes[name.partition("-")[0]], name, job)
        tell(job, {"name": name} | found)
        if found["outcome"] not in ("ok", "absent"):
            break
    return 0


def leave(code: int) -> NoReturn:
    """Taking a driver down costs seconds, and some crash in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guarded(run: Run, name: str, job: Mapping[str, Any]) -> Found:
    try:
        return run(name, job)
    except Exception as error:  # whatever a driver or a library raises is the finding
        return {"outcome": "failed", "said": one_line(error)}


def one_line(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}".replace(str(Path.home()), "~")[:300]


# The probes


def device(name: str, job: Mapping[str, Any]) -> Found:
    """What torch says of itself and of a device. `device-1` and on: that a product on that one is right, too."""
    import torch

    facts = {"torch": torch.__version__, "hip": torch.version.hip or "", "cuda": torch.version.cuda or ""}
    index = int(name.partition("-")[2] or 0)
    if job["device"] == "cpu":
        facts |= {"capability": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
        return {"outcome": "ok", "facts": facts}
    if not torch.cuda.is_available():
        return {"outcome": "failed", "said": "torch.cuda.is_available() is False", "facts": facts}
    known = torch.cuda.get_device_properties(index)
    facts |= {
        "gcnArchName": getattr(known, "gcnArchName", ""),
        "arch_list": " ".join(torch.cuda.get_arch_list()),
        "devices": str(torch.cuda.device_count()),
        "name": known.name,
        "memory_bytes": str(known.total_memory),
        "units": str(known.multi_processor_count),
        "warp_size": str(getattr(known, "warp_size", "")),
    }
    where = f"cuda:{index}"
    return product(where, job["dtype"], sizes=(64, 64, 64)) | {"facts": facts}


def matmul(name: str, job: Mapping[str, Any]) -> Found:
    """`matmul-bfloat16`: a product and its gradients, and its rate at a size that fills the device."""
    dtype = name.partition("-")[2]
    found = product(job["device"], dtype, sizes=(192, 512, 256))
    size = 4096 if job["device"] != "cpu" else 512 if dtype == "float16" else 1024
    seconds = product_seconds(job["device"], dtype, size)
    return found | {"seconds": seconds, "facts": {"tflops": f"{6 * size**3 / seconds / 1e12:.3g}"}}


def attention(name: str, job: Mapping[str, Any]) -> Found:
    """`attention-flash`: one kernel of scaled_dot_product_attention, both ways. Absent where it cannot run."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    wanted = name.partition("-")[2]

    def run(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        with sdpa_kernel(kinds[wanted]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    try:
        found = attention_checked(run, job["device"], job["dtype"], tokens=256)
    except RuntimeError as error:
        if "No available kernel" in str(error) or "not compiled" in str(error):
            return {"outcome": "absent", "said": one_line(error)}
        raise
    tokens = 1024 if job["device"] == "cpu" else 4096
    seconds = attention_seconds(run, job["device"], job["dtype"], tokens=tokens)
    return found | {"seconds": seconds, "facts": {"tokens": str(tokens)}}


def compile_(name: str, job: Mapping[str, Any]) -> Found:
    """A small block compiled, forward and backward, against float64. `seconds`: how long compiling took."""
    del name
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    kind = getattr(torch, job["dtype"])
    x = torch.randn(32, 64)
    exact = block.double()(x.to(kind).double())
    exact.square().sum().backward()
    truth = [p.grad for p in block.parameters() if p.grad is not None]
    block.zero_grad(set_to_none=True)
    moved = block.float().to(job["device"])
    compiled = torch.compile(moved, dynamic=False)
    begun = time.perf_counter()
    result = compiled(x.to(job["device"], kind).float())
    result.square().sum().backward()
    grads = [p.grad for p in moved.parameters() if p.grad is not None]
    seconds = time.perf_counter() - begun
    errors = [difference(a, b) for a, b in zip((result.detach(), *grads), (exact.detach(), *truth), strict=True)]
    return judged(worst(errors), "float32", seconds=seconds)


def blas(name: str, job: Mapping[str, Any]) -> Found:
    """`blas-hipblaslt`, `blas-rocblas`: the rate of a product with either library, which the environment has chosen."""
    del name
    seconds = product_seconds(job["device"], job["dtype"], 4096)
    found = product(job["device"], job["dtype"], sizes=(192, 512, 256))
    chosen = os.environ.get("TORCH_BLAS_PREFER_HIPBLASLT", "")
    facts = {"TORCH_BLAS_PREFER_HIPBLASLT": chosen, "tflops": f"{6 * 4096**3 / seconds / 1e12:.3g}"}
    return found | {"seconds": seconds, "facts": facts}


def bitsandbytes(name: str, job: Mapping[str, Any]) -> Found:
    """Four bits there and back: the error of nf4 is known, and a wrong kernel is far outside it."""
    del name
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"outcome": "absent", "said": "not installed"}
    import torch
    from bitsandbytes import functional, __version__  # type: ignore[import-not-found,unused-ignore]  # isort: skip

    torch.manual_seed(0)
    weights = torch.randn(256, 256).to(job["device"], getattr(torch, job["dtype"]))
    packed, state = functional.quantize_4bit(weights, quant_type="nf4", blocksize=64)
    back = functional.dequantize_4bit(packed, state)
    error = float((back.double() - weights.double()).pow(2).mean().sqrt() / weights.double().pow(2).mean().sqrt())
    facts = {"version": __version__, "relative_rms": f"{error:.4f}"}
    if 0.02 < error < 0.15:  # nf4 at blocks of 64 loses about 9% of normal values
        return {"outcome": "ok", "facts": facts}
    return {"outcome": "wrong", "said": f"nf4 loses {error:.0%} of normal values; about 9% is right", "facts": facts}


def flash_attn(name: str, job: Mapping[str, Any]) -> Found:
    """The flash-attn package, which Bloomery does not need: it matters where torch has no fused kernel of its own."""
    del name
    if importlib.util.find_spec("flash_attn") is None:
        built = f"GPU_ARCHS={job['arch']} pip install --no-build-isolation --no-deps flash-attn"
        facts = {"build": built} if job["arch"] in FLASH_ATTN_ARCHS else {}
        return {"outcome": "absent", "said": "not installed; torch's own kernels do without it", "facts": facts}
    from flash_attn import __version__, flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    dtype = "float16" if job["dtype"] == "float32" else job["dtype"]

    def run(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        out: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return out.transpose(1, 2)

    found = attention_checked(run, job["device"], dtype, tokens=256)
    seconds = attention_seconds(run, job["device"], dtype, tokens=4096)
    return found | {"seconds": seconds, "facts": {"version": __version__, "tokens": "4096"}}


def bandwidth(name: str, job: Mapping[str, Any]) -> Found:
    """Bytes read and written by a copy, a second."""
    del name
    import torch

    size = 2**26 if job["device"] == "cpu" else 2**28
    source = torch.ones(size // 4, device=job["device"])
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), job["device"])
    return {"outcome": "ok", "seconds": seconds, "facts": {"gb_per_second": f"{2 * size / seconds / 1e9:.1f}"}}


def p2p(name: str, job: Mapping[str, Any]) -> Found:
    """Copies between each two devices: whether they arrive whole, and how fast."""
    del name, job
    import torch

    count, size = torch.cuda.device_count(), 2**26
    if count < 2:
        return {"outcome": "absent", "said": f"{count} device is visible to torch"}
    facts: dict[str, str] = {}
    for a, b in ((a, b) for a in range(count) for b in range(count) if a != b):
        source = torch.arange(size // 4, dtype=torch.int32, device=f"cuda:{a}")
        target = torch.zeros(size // 4, dtype=torch.int32, device=f"cuda:{b}")
        seconds = best_seconds(lambda target=target, source=source: target.copy_(source), f"cuda:{b}")  # type: ignore[misc]  # mypy infers no lambda with defaults
        torch.cuda.synchronize(a)
        direct = "direct" if torch.cuda.can_device_access_peer(a, b) else "through the host"
        facts[f"{a}-{b}"] = f"{size / seconds / 1e9:.1f} GB/s, {direct}"
        if not torch.equal(source.cpu(), target.cpu()):
            return {"outcome": "wrong", "said": f"a copy from GPU {a} to GPU {b} arrived changed", "facts": facts}
    return {"outcome": "ok", "facts": facts}


PROBES: dict[str, Run] = {
    "device": device,
    "matmul": matmul,
    "attention": attention,
    "compile": compile_,
    "blas": blas,
    "bitsandbytes": bitsandbytes,
    "flash-attn": flash_attn,
    "bandwidth": bandwidth,
    "p2p": p2p,
    "all-reduce": all_reduce,
    "rank": be_rank,
}

if __name__ == "__main__":
    leave(main(PROBES))
