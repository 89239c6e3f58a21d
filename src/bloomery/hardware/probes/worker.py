"""Probes of torch and a device, each by its name: `python -m bloomery.hardware.probes.worker`, the child of run.py.

Every value is checked against float64, every time is the best of several. Torch is imported inside functions.
"""

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bloomery.core.child import Child, accept, tell

if TYPE_CHECKING:
    from torch import Tensor

Found = dict[str, Any]  # fields of a Probe: outcome, said, seconds, error, facts
Attend = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]

# Greatest difference that rounding explains, as a share of the largest value. Half precision: MI200 rounds the factors
# of fp16's backward to bf16, and sums may be kept in the type itself.
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 4e-2}
REPEATS, TIMING_SECONDS = 5, 1.0


def backward(result: "Tensor", gradient: "Tensor") -> None:
    result.backward(gradient)


def judged(error: float, dtype: str, **fields: Any) -> Found:
    """Wrong when the values differ by more than rounding, or are no numbers."""
    limit = TOLERANCE[dtype]
    if error <= limit:
        return {"outcome": "ok", "error": error} | fields
    said = f"differs from float64 by {error:.2g} of the largest value; rounding explains {limit:.2g}"
    return {"outcome": "wrong", "error": error if error == error else None, "said": said} | fields


def difference(found: "Tensor", reference: "Tensor") -> float:
    """The greatest difference as a share of the reference's largest value; NaN when a value is none."""
    return float((found.double().cpu() - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def worst(errors: list[float]) -> float:
    """The largest; NaN, which compares with nothing, counts as larger than any."""
    return next((error for error in errors if error != error), max(errors))


def best_seconds(work: Callable[[], object], device: str) -> float:
    """Of several runs after a first one that warms up."""
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    work()
    wait()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < REPEATS and (not times or time.perf_counter() - begun < TIMING_SECONDS):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def product(where: str, dtype: str, *, sizes: tuple[int, int, int]) -> Found:
    """a b and both gradients against float64 on the CPU, from normal values."""
    import torch

    rows, inner, columns = sizes
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    a, b, g = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(rows, columns)
    a, b, g = (tensor.to(kind) for tensor in (a, b, g))
    left, right = (tensor.to(where).requires_grad_() for tensor in (a, b))
    result = left @ right
    backward(result, g.to(where))
    assert left.grad is not None and right.grad is not None
    exact = a.double() @ b.double(), g.double() @ b.double().T, a.double().T @ g.double()
    errors = [difference(x.detach(), y) for x, y in zip((result, left.grad, right.grad), exact, strict=True)]
    return judged(worst(errors), dtype)


def product_seconds(where: str, dtype: str, size: int) -> float:
    """Of a square product with both gradients."""
    import torch

    a, b = (torch.randn(size, size).to(where, getattr(torch, dtype)).requires_grad_() for _ in range(2))
    gradient = torch.randn(size, size).to(where, getattr(torch, dtype))

    def work() -> None:
        a.grad = b.grad = None
        backward((a @ b), gradient)

    return best_seconds(work, where)


def attention_checked(run: Attend, where: str, dtype: str, *, tokens: int) -> Found:
    """Causal attention of 2 rows, 4 heads, width 64 and its three gradients against float64 on the CPU."""
    import torch

    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, tokens, 64).to(getattr(torch, dtype)) for _ in range(4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = (exact[0] @ exact[1].mT / 8.0).masked_fill(~seen, float("-inf"))
    reference = torch.softmax(scores, -1) @ exact[2]
    backward(reference, g.double())
    inputs = [tensor.to(where).requires_grad_() for tensor in (q, k, v)]
    result = run(*inputs)
    backward(result, g.to(where))
    pairs = [(result.detach(), reference.detach())]
    pairs += [(x.grad, y.grad) for x, y in zip(inputs, exact, strict=True) if x.grad is not None and y.grad is not None]
    assert len(pairs) == 4
    return judged(worst([difference(found, truth) for found, truth in pairs]), dtype)


def attention_seconds(run: Attend, where: str, dtype: str, *, tokens: int) -> float:
    """Forward and backward of one row, 8 heads, width 64."""
    import torch

    q, k, v = (torch.randn(1, 8, tokens, 64).to(where, getattr(torch, dtype)).requires_grad_() for _ in range(3))
    gradient = torch.randn(1, 8, tokens, 64).to(where, getattr(torch, dtype))

    def work() -> None:
        q.grad = k.grad = v.grad = None
        backward(run(q, k, v), gradient)

    return best_seconds(work, where)


LONGEST_SECONDS = 600.0  # whoever asked for the probe gives it up earlier


def all_reduce(name: str, job: Mapping[str, Any]) -> Found:
    """Every device adds up its numbers: one process each, joined by a file. Two processes on a machine without GPUs."""
    import torch

    world = 2 if job["device"] == "cpu" else torch.cuda.device_count()
    if world < 2:
        return {"outcome": "absent", "said": f"{world} device is visible to torch"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        told = {"names": ["rank"], "world": world, "device": job["device"], "meeting": f"{folder}/meet"}
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # nothing leaves the host
        module = "bloomery.hardware.probes.worker"
        ranks = [
            stack.enter_context(Child(module, told | {"rank": rank}, environment=environment)) for rank in range(world)
        ]
        answers: list[Found] = []
        for rank in ranks:
            answer = rank.next(LONGEST_SECONDS)
            while isinstance(answer, dict) and answer["outcome"] == "started":
                answer = rank.next(LONGEST_SECONDS)
            if not isinstance(answer, dict):
                return {"outcome": "failed", "said": rank.ending() if answer == "ended" else "a rank never answered"}
            answers.append(answer)
    return next((answer for answer in answers if answer["outcome"] != "ok"), answers[0]) | {"name": name}


def be_rank(name: str, job: Mapping[str, Any]) -> Found:
    """What one rank of `all_reduce` finds; it is the same for all."""
    del name
    import torch
    from torch import distributed

    rank, world = job["rank"], job["world"]
    device = "cpu" if job["device"] == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    backend, size = ("gloo", 2**22) if device == "cpu" else ("nccl", 2**26)
    distributed.init_process_group(backend, init_method=f"file://{job['meeting']}", rank=rank, world_size=world)
    numbers = torch.full((size // 4,), float(rank + 1), device=device)
    distributed.all_reduce(numbers)
    right = bool((numbers == world * (world + 1) / 2).all())
    seconds = best_seconds(lambda: distributed.all_reduce(numbers), device)
    distributed.destroy_process_group()
    carried = 2 * (world - 1) / world * size / seconds / 1e9
    facts = {"ranks": str(world), "backend": backend, "gb_per_second": f"{carried:.2f}"}
    said = {} if right else {"said": f"the sum over {world} ranks is not {world * (world + 1) // 2}"}
    return {"outcome": "ok" if right else "wrong", "seconds": seconds, "facts": facts} | said


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
