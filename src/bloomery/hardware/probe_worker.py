"""Probes of torch and a device, by name: `python -m bloomery.hardware.probe_worker`, the child process of probes.py.

Results are compared with float64; times are the best of several runs. Torch is imported inside functions.
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bloomery.core.child import LOOPBACK_INTERFACE, Child, accept, reply
from bloomery.core.device import (
    accelerator_type,
    can,
    copies_directly,
    device_backend,
    is_accelerator,
    num_devices,
    select_device,
    synchronize,
)
from bloomery.hardware.copy_rates import copy_rates

if TYPE_CHECKING:
    from torch import Tensor

Result = dict[str, Any]  # fields of a Probe: outcome, message, seconds, error, facts
Compute = Callable[..., "Tensor"]
Shapes = Sequence[tuple[int, ...]]

# The largest error due to rounding, relative to the largest value. Half precision: MI200 rounds the inputs of fp16
# backward matmuls to bf16, and sums can be accumulated in half precision.
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 4e-2}
REPEATS = 5
TIMING_SECONDS = 1.0
# Of a matrix that fills a device of less than half a TFLOP/s, such as an old integrated GPU.
SMALL_SIZE = 1024
# Rows, inputs and outputs of each product, which takes 5 ms at most.
# Of a step's products: widths of matrices, tokens, rank. A width whose product takes longer is the last.
STEP_WIDTHS = (64, 192, 576, 1536)
STEP_TOKENS = 1024
STEP_RANK = 16
STEP_SECONDS = 0.03
CHECKED_PRODUCTS = ((512, 192, 512), (256, 512, 512), (256, 1024, 1024))


def result_of_error(error: float, dtype: str, **fields: Any) -> Result:
    """ "wrong" if the error is larger than rounding errors, or NaN."""
    limit = TOLERANCE[dtype]
    if error <= limit:
        return {"outcome": "ok", "error": error} | fields
    message = f"relative error {error:.2g} against float64; expected at most {limit:.2g}"
    return {
        "outcome": "wrong",
        "error": error if error == error else None,
        "message": message,
    } | fields


def worst_error(pairs: Iterable[tuple["Tensor", "Tensor"]]) -> float:
    """The largest difference of a result from its reference, relative to the largest value of that; NaN if one is."""
    errors = [
        float(
            (result.cpu().double() - reference).abs().max() / reference.abs().max().clamp(min=1e-30)
        )
        for result, reference in pairs
    ]
    return next((error for error in errors if error != error), max(errors))


def best_seconds(work: Callable[[], object], *devices: str) -> float:
    """The best time of several runs after a warm-up run. `devices`: all that take part in the work."""

    def wait() -> None:
        for device in devices:
            synchronize(device)

    work()
    wait()
    times: list[float] = []
    begun_at = time.perf_counter()
    while len(times) < REPEATS and (not times or time.perf_counter() - begun_at < TIMING_SECONDS):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def compared_with_float64(
    run: Compute, reference: Compute, shapes: Shapes, device: str, dtype: str
) -> Result:
    """`run` of normal values and its gradients, compared with `reference` in float64 on the CPU. The last of the
    `shapes` is that of the result.
    """
    import torch

    torch.manual_seed(0)
    *values, gradient = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
    exact = [tensor.double().requires_grad_() for tensor in values]
    inputs = [tensor.to(device).requires_grad_() for tensor in values]
    reference_result = reference(*exact)
    result = run(*inputs)
    torch.autograd.backward(reference_result, gradient.double())
    torch.autograd.backward(result, gradient.to(device))
    pairs = [(result.detach(), reference_result.detach())]
    pairs += [
        (x.grad, y.grad)
        for x, y in zip(inputs, exact, strict=True)
        if x.grad is not None and y.grad is not None
    ]
    assert len(pairs) == len(shapes)
    return result_of_error(worst_error(pairs), dtype)


def seconds_with_gradients(run: Compute, shapes: Shapes, device: str, dtype: str) -> float:
    """The time of `run` and its gradients. The last of the `shapes` is that of the result."""
    import torch

    *inputs, gradient = (torch.randn(shape).to(device, getattr(torch, dtype)) for shape in shapes)
    for tensor in inputs:
        tensor.requires_grad_()

    def work() -> None:
        for tensor in inputs:
            tensor.grad = None
        torch.autograd.backward(run(*inputs), gradient)

    return best_seconds(work, device)


def checked_matmul(device: str, dtype: str, *, size: int) -> Result:
    """A small matmul and its gradients; then the time and the rate at `size`, or at SMALL_SIZE where it takes long."""
    import torch

    result = compared_with_float64(
        torch.matmul, torch.matmul, ((192, 512), (512, 256), (192, 256)), device, dtype
    )
    if size > SMALL_SIZE:
        small_seconds = seconds_with_gradients(
            torch.matmul, ((SMALL_SIZE,) * 2,) * 3, device, dtype
        )
        if small_seconds * (size / SMALL_SIZE) ** 3 > TIMING_SECONDS:
            size = SMALL_SIZE
    seconds = seconds_with_gradients(torch.matmul, ((size, size),) * 3, device, dtype)
    return result | {"seconds": seconds, "facts": {"tflops": f"{6 * size**3 / seconds / 1e12:.3g}"}}


def compared_attention(run: Compute, device: str, dtype: str) -> Result:
    """Causal attention of 256 tokens."""
    import torch

    def reference(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        scores = (q @ k.mT / 8.0).masked_fill(~causal, float("-inf"))
        return torch.softmax(scores, -1) @ v

    return compared_with_float64(run, reference, ((2, 4, 256, 64),) * 4, device, dtype)


LONGEST_SECONDS = 600.0  # the parent of the probe stops waiting earlier


def all_reduce(name: str, job: Mapping[str, Any]) -> Result:
    """An all-reduce over all devices, one process each; two processes on a machine without GPUs."""
    world = num_devices(job["device"]) if is_accelerator(job["device"]) else 2
    if world < 2:
        return {"outcome": "absent", "message": f"torch sees {world} device"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job_of_rank = {
            "names": ["rank"],
            "world": world,
            "device": job["device"],
            "meeting": f"{folder}/meet",
        }
        environment = os.environ | dict.fromkeys(
            ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK_INTERFACE
        )
        module = "bloomery.hardware.probe_worker"
        ranks = [
            stack.enter_context(
                Child(module, job_of_rank | {"rank": rank}, environment=environment)
            )
            for rank in range(world)
        ]
        answers: list[Result] = []
        for rank in ranks:
            answer = rank.next(LONGEST_SECONDS)
            while isinstance(answer, dict) and answer["outcome"] == "started":
                answer = rank.next(LONGEST_SECONDS)
            if not isinstance(answer, dict):
                return {
                    "outcome": "failed",
                    "message": rank.ending() if answer == "ended" else "a rank did not answer",
                }
            answers.append(answer)
    return next((answer for answer in answers if answer["outcome"] != "ok"), answers[0]) | {
        "name": name
    }


def be_rank(_: str, job: Mapping[str, Any]) -> Result:
    """One rank of `all_reduce`."""
    import torch
    from torch import distributed

    rank = job["rank"]
    world = job["world"]
    device = job["device"]
    backend, size = "gloo", 2**22
    if is_accelerator(device):
        backend, size = device_backend(device), 2**26
        select_device(device, rank)
        device = f"{device}:{rank}"
    distributed.init_process_group(
        backend, init_method=f"file://{job['meeting']}", rank=rank, world_size=world
    )
    numbers = torch.full((size // 4,), float(rank + 1), device=device)
    distributed.all_reduce(numbers)
    correct = bool((numbers == world * (world + 1) / 2).all())
    seconds = best_seconds(lambda: distributed.all_reduce(numbers), device)
    distributed.destroy_process_group()
    rate = 2 * (world - 1) / world * size / seconds / 1e9
    facts = {"ranks": str(world), "backend": backend, "gb_per_second": f"{rate:.2f}"}
    message = "" if correct else f"the sum over {world} ranks is not {world * (world + 1) // 2}"
    outcome = "ok" if correct else "wrong"
    return {"outcome": outcome, "seconds": seconds, "facts": facts, "message": message}


# Architectures of its composable-kernel build that have forward and backward.
FLASH_ATTN_ARCHS = ("gfx90a", "gfx942", "gfx950")

Run = Callable[[str, Mapping[str, Any]], Result]


def main(probes: Mapping[str, Run]) -> int:
    """Runs the probes of the job in order and reports each. The process ends after a probe that fails, as its state is
    unreliable; the parent starts another for the rest.
    """
    job = accept()
    for name in job["names"]:
        reply(job, {"name": name, "outcome": "started"})
        try:
            result = (probes.get(name) or probes[name.partition("-")[0]])(name, job)
        except Exception as error:  # any error of a driver or library is the result
            result = {"outcome": "failed", "message": error_line(error)}
        reply(job, {"name": name} | result)
        if result["outcome"] not in ("ok", "absent"):
            break
    return 0


def exit_at_once(code: int) -> NoReturn:
    """Exits without shutting down the driver, which takes seconds and crashes some drivers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def error_line(error: BaseException) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}".replace(str(Path.home()), "~")[:300]


# The probes


def device(name: str, job: Mapping[str, Any]) -> Result:
    """Versions of torch and properties of a device, and a matmul on it. `device-1`: of another device."""
    import torch

    facts = {
        "torch": torch.__version__,
        "hip": torch.version.hip or "",
        "cuda": torch.version.cuda or "",
        "xpu": getattr(torch.version, "xpu", None) or "",
    }
    index = int(name.partition("-")[2] or 0)
    if job["device"] == "cpu":
        facts |= {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
        }
        return {"outcome": "ok", "facts": facts}
    if accelerator_type() != job["device"]:
        return {
            "outcome": "failed",
            "message": f"torch.{job['device']}.is_available() is False",
            "facts": facts,
        }
    module = torch.get_device_module(job["device"])
    properties = module.get_device_properties(index)
    facts |= {
        "gcnArchName": getattr(properties, "gcnArchName", ""),
        "arch_list": " ".join(module.get_arch_list()),
        "devices": str(num_devices(job["device"])),
        "name": properties.name,
        "memory_bytes": str(properties.total_memory),
        # torch.xpu's are vector engines.
        "units": str(
            getattr(properties, "multi_processor_count", "")
            or getattr(properties, "max_compute_units", "")
        ),
        "warp_size": str(getattr(properties, "warp_size", "")),
    }
    torch_device = f"{job['device']}:{index}"
    return compared_with_float64(
        torch.matmul, torch.matmul, ((64, 64),) * 3, torch_device, job["dtype"]
    ) | {"facts": facts}


def matmul(name: str, job: Mapping[str, Any]) -> Result:
    """`matmul-bfloat16`: a matmul and its gradients, and the rate at a size that fills the device."""
    dtype = name.partition("-")[2]
    size = 4096 if job["device"] != "cpu" else 512 if dtype == "float16" else 1024
    return checked_matmul(job["device"], dtype, size=size)


def attention(name: str, job: Mapping[str, Any]) -> Result:
    """`attention-flash`: one kernel of scaled_dot_product_attention and its gradients; "absent" if it cannot run."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    backend = kinds[name.partition("-")[2]]

    def run(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    try:
        result = compared_attention(run, job["device"], job["dtype"])
    except RuntimeError as error:
        if "No available kernel" in str(error) or "not compiled" in str(error):
            return {"outcome": "absent", "message": error_line(error)}
        raise
    tokens = 1024 if job["device"] == "cpu" else 4096
    seconds = seconds_with_gradients(run, ((1, 8, tokens, 64),) * 4, job["device"], job["dtype"])
    return result | {"seconds": seconds, "facts": {"tokens": str(tokens)}}


def compile_(_: str, job: Mapping[str, Any]) -> Result:
    """A small compiled block, forward and backward, compared with float64. `seconds`: the compilation time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    dtype = getattr(torch, job["dtype"])
    x = torch.randn(32, 64)
    exact = block.double()(x.to(dtype).double())
    exact.square().sum().backward()
    truth = [p.grad for p in block.parameters() if p.grad is not None]
    block.zero_grad(set_to_none=True)
    device_block = block.float().to(job["device"])
    compiled = torch.compile(device_block, dynamic=False)
    begun_at = time.perf_counter()
    result = compiled(x.to(job["device"], dtype).float())
    result.square().sum().backward()
    grads = [p.grad for p in device_block.parameters() if p.grad is not None]
    seconds = time.perf_counter() - begun_at
    error = worst_error(zip((result.detach(), *grads), (exact.detach(), *truth), strict=True))
    return result_of_error(error, "float32", seconds=seconds)


def blas(_: str, job: Mapping[str, Any]) -> Result:
    """`blas-hipblaslt`, `blas-rocblas`: the rate of a matmul; the environment selects the library."""
    result = checked_matmul(job["device"], job["dtype"], size=4096)
    preference = os.environ.get("TORCH_BLAS_PREFER_HIPBLASLT", "")
    return result | {"facts": {"TORCH_BLAS_PREFER_HIPBLASLT": preference} | result["facts"]}


def nf4_round_trip(_: str, job: Mapping[str, Any]) -> Result:
    """Quantize to nf4 and back: the error of nf4 is known, and a faulty kernel exceeds it by far."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"outcome": "absent", "message": "not installed"}
    import torch
    from bitsandbytes import functional, __version__  # type: ignore[import-not-found,unused-ignore]  # isort: skip

    torch.manual_seed(0)
    weights = torch.randn(256, 256).to(job["device"], getattr(torch, job["dtype"]))
    packed, state = functional.quantize_4bit(weights, quant_type="nf4", blocksize=64)
    restored = functional.dequantize_4bit(packed, state)
    # On the host: not every device computes in float64.
    exact = weights.cpu().double()
    error = float(
        (restored.cpu().double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    )
    facts = {"version": __version__, "relative_rms": f"{error:.4f}"}
    # nf4 with blocks of 64 has a relative error of about 9% for normal values.
    if 0.02 < error < 0.15:
        return {"outcome": "ok", "facts": facts}
    return {
        "outcome": "wrong",
        "message": f"relative error of nf4 is {error:.0%} for normal values; expected about 9%",
        "facts": facts,
    }


def flash_attn(_: str, job: Mapping[str, Any]) -> Result:
    """The package flash-attn: useful only if torch has no fused kernel. Bloomery does not require it."""
    if importlib.util.find_spec("flash_attn") is None:
        build_command = (
            f"GPU_ARCHS={job['arch']} pip install --no-build-isolation --no-deps flash-attn"
        )
        facts = {"build": build_command} if job["arch"] in FLASH_ATTN_ARCHS else {}
        return {
            "outcome": "absent",
            "message": "not installed; not required by PyTorch's own kernels",
            "facts": facts,
        }
    from flash_attn import __version__, flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    dtype = "float16" if job["dtype"] == "float32" else job["dtype"]

    def run(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        result: Tensor = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return result.transpose(1, 2)

    result = compared_attention(run, job["device"], dtype)
    seconds = seconds_with_gradients(run, ((1, 8, 4096, 64),) * 4, job["device"], dtype)
    return result | {"seconds": seconds, "facts": {"version": __version__, "tokens": "4096"}}


def bandwidth(_: str, job: Mapping[str, Any]) -> Result:
    """Bytes read and written per second by a copy."""
    import torch

    size = 2**26 if job["device"] == "cpu" else 2**28
    source = torch.ones(size // 4, device=job["device"])
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), job["device"])
    return {
        "outcome": "ok",
        "seconds": seconds,
        "facts": {"gb_per_second": f"{2 * size / seconds / 1e9:.1f}"},
    }


def step_products(
    dtype: str, best: Callable[[Callable[[], object], float], float]
) -> list[dict[str, float]]:
    """GFLOP/s of the products of a step, as `hardware.machine.ProductRates`, width by width."""
    import torch

    def of(*shape: int) -> "Tensor":
        return torch.randn(shape).to(getattr(torch, dtype))

    linear = torch.matmul
    found: list[dict[str, float]] = []
    for width in STEP_WIDTHS:
        x_TI, grad_TO, weight_OI = (
            of(STEP_TOKENS, width),
            of(STEP_TOKENS, 2 * width),
            of(2 * width, width),
        )
        narrow_TR, a_RI, b_OR = (
            of(STEP_TOKENS, STEP_RANK),
            of(STEP_RANK, width),
            of(2 * width, STEP_RANK),
        )

        def narrow(
            x_TI: "Tensor" = x_TI,
            grad_TO: "Tensor" = grad_TO,
            narrow_TR: "Tensor" = narrow_TR,
            a_RI: "Tensor" = a_RI,
            b_OR: "Tensor" = b_OR,
        ) -> None:
            linear(x_TI, a_RI.T), linear(narrow_TR, b_OR.T)
            linear(grad_TO, b_OR), linear(narrow_TR, a_RI)
            linear(grad_TO.T, narrow_TR), linear(narrow_TR.T, x_TI)

        work: dict[str, Callable[[], object]] = {
            "forward": partial(linear, x_TI, weight_OI.T),
            "inputs": partial(linear, grad_TO, weight_OI),
            "weights": partial(linear, grad_TO.T, x_TI),
            "narrow": narrow,
        }
        flops = dict.fromkeys(work, 4 * STEP_TOKENS * width**2)
        flops["narrow"] = 3 * 2 * STEP_TOKENS * STEP_RANK * 3 * width
        seconds = {name: best(each, 0.04) for name, each in work.items()}
        rates = {name: float(f"{flops[name] / seconds[name] / 1e9:.4g}") for name in work}
        found.append(rates | {"width": width})
        if seconds["forward"] > STEP_SECONDS:
            break
    return found


def host_copies(_: str, job: Mapping[str, Any]) -> Result:
    """Copies between the device and its host: correct, and how fast."""
    if not can(job["device"], "streams"):
        return {"outcome": "absent", "message": "the device uses the memory of its host"}
    try:
        rates = copy_rates(job["device"])
    except RuntimeError as error:
        outcome = "wrong" if "changed the data" in str(error) else "failed"
        return {"outcome": outcome, "message": str(error)}
    return {"outcome": "ok", "facts": {name: f"{rate:.1f}" for name, rate in rates.items()}}


def cpu_check(_: str, job: Mapping[str, Any]) -> Result:
    """Rates of one core: products of matrices by dtype, a copy, and a loop of Python.

    Every piece of work takes a few milliseconds at most, and the best of many counts by the time of this thread, so
    that other programs on the cores change little: two threads are rarely undisturbed at once, one often is.
    """
    import torch

    def best(work: Callable[[], object], seconds: float = 0.15) -> float:
        work()
        times: list[float] = []
        begun_at = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begun_at < seconds:
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        return min(times)

    torch.set_num_threads(1)
    facts = {}
    for dtype in ("float32", "bfloat16"):
        rates = []
        for rows, inputs, outputs in CHECKED_PRODUCTS:
            values = torch.randn(rows, inputs).to(getattr(torch, dtype))
            matrix = torch.randn(outputs, inputs).to(getattr(torch, dtype))
            seconds = best(partial(torch.nn.functional.linear, values, matrix))
            rates.append(2 * rows * inputs * outputs / seconds / 1e9)
        facts[dtype] = f"{sum(rates) / len(rates):.4g}"
    dtype = job["dtype"] if job["dtype"] in facts else "float32"
    facts["products"] = json.dumps({dtype: step_products(dtype, best)})
    source = torch.ones(2**20)
    target = torch.empty_like(source)
    seconds = best(lambda: target.copy_(source))
    facts["copy_gbs"] = f"{2 * 4 * source.numel() / seconds / 1e9:.3g}"
    facts["python_seconds"] = (
        f"{best(lambda: sum(number * number for number in range(20_000))):.3g}"
    )
    return {"outcome": "ok", "facts": facts}


def p2p(_: str, job: Mapping[str, Any]) -> Result:
    """Copies between every two devices: correct, and how fast."""
    import torch

    kind = job["device"]
    count = num_devices(kind)
    size = 2**26
    if count < 2:
        return {"outcome": "absent", "message": f"torch sees {count} device"}
    facts: dict[str, str] = {}
    for a, b in ((a, b) for a in range(count) for b in range(count) if a != b):
        source = torch.arange(size // 4, dtype=torch.int32, device=f"{kind}:{a}")
        target = torch.zeros(size // 4, dtype=torch.int32, device=f"{kind}:{b}")
        # The copy is work of its source's stream: whoever waits for the target alone trusts that it waits, too.
        seconds = best_seconds(partial(target.copy_, source), f"{kind}:{a}", f"{kind}:{b}")
        direct = "direct" if copies_directly(kind, a, b) else "through CPU memory"
        facts[f"{a}-{b}"] = f"{size / seconds / 1e9:.1f} GB/s, {direct}"
        if not torch.equal(source.cpu(), target.cpu()):
            return {
                "outcome": "wrong",
                "message": f"a copy from GPU {a} to GPU {b} changed the data",
                "facts": facts,
            }
    return {"outcome": "ok", "facts": facts}


PROBES: dict[str, Run] = {
    "device": device,
    "matmul": matmul,
    "attention": attention,
    "compile": compile_,
    "blas": blas,
    "bitsandbytes": nf4_round_trip,
    "flash-attn": flash_attn,
    "bandwidth": bandwidth,
    "host": host_copies,
    "cpu-check": cpu_check,
    "p2p": p2p,
    "all-reduce": all_reduce,
    "rank": be_rank,
}

if __name__ == "__main__":
    exit_at_once(main(PROBES))
