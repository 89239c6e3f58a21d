"""Probes of the backends of model.attention on packed sequences, for `hardware.probes`, and their child process.

Each runs forward and backward on sequences of several documents, compared with float64 on the CPU, and timed.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bloomery.core.device import is_accelerator
from bloomery.facts.attention import BACKENDS
from bloomery.hardware.machine import Machine
from bloomery.hardware.probe_worker import (
    Compute,
    Result,
    compared_with_float64,
    exit_at_once,
    main,
    seconds_with_gradients,
)
from bloomery.hardware.probes import ProbeSpec
from bloomery.hardware.profile import build_profile

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 256
TIMED_ON_CPU = 1024  # tokens
TIMED_ON_GPU = 4096


def attention_probe_specs(machine: Machine) -> tuple[ProbeSpec, ...]:
    """A probe of every backend that the device of the machine has."""
    device = build_profile(machine).device.value
    names = (name for name, facts in BACKENDS.items() if facts.runs_on(device))
    return tuple(ProbeSpec(name=f"backend-{name}", module=__name__, seconds=90) for name in names)


def backend(name: str, job: Mapping[str, Any]) -> Result:
    """`backend-blockwise`: three documents per sequence, or one without document masking; the kernel.

    The result and the three gradients are compared with those of `math`.
    """
    kind = name.partition("-")[2]
    device = job["device"]
    # varlen has kernels for half precision alone.
    dtype = "bfloat16" if kind == "varlen" and job["dtype"] == "float32" else job["dtype"]

    def attention(backend_kind: str, sequences: int, tokens: int, device: str) -> Compute:
        documents = _documents(sequences, tokens, device, packed=name != "backend-sdpa")
        return partial(_attend, kind=backend_kind, documents=documents)

    # Half as many heads of keys and values as of queries; the fourth shape is the gradient's.
    queries = (2, 4, TOKENS, 64)
    keys = (2, 2, TOKENS, 64)
    run = attention(kind, 2, TOKENS, device)
    reference = attention("math", 2, TOKENS, "cpu")
    result = compared_with_float64(run, reference, (queries, keys, keys, queries), device, dtype)

    # One longer sequence, timed.
    tokens = TIMED_ON_GPU if is_accelerator(device) else TIMED_ON_CPU
    timed = attention(kind, 1, tokens, device)
    seconds = seconds_with_gradients(timed, ((1, 8, tokens, 64),) * 4, device, dtype)
    return result | {
        "seconds": seconds,
        "facts": {"kernel": kernel(kind, device, dtype), "tokens": str(tokens)},
    }


def kernel(kind: str, device: str, dtype: str) -> str:
    """Which kernel of scaled_dot_product_attention torch took, by the operators that it called; else ours."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    called_operators: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            called_operators.append(str(func))
            return func(*args, **(kwargs or {}))

    if kind not in ("sdpa", "mask"):
        return kind
    tensors = [torch.randn(1, 8, TOKENS, 64).to(device, getattr(torch, dtype)) for _ in range(3)]
    with Listening():  # type: ignore[no-untyped-call]  # torch's own
        _attend(*tensors, kind=kind, documents=_documents(1, TOKENS, device, packed=kind != "sdpa"))
    for kernel_name in ("flash", "efficient", "cudnn"):
        if any(f"{kernel_name}_attention" in operator for operator in called_operators):
            return kernel_name
    return "math"


def _attend(
    q: "Tensor", k: "Tensor", v: "Tensor", *, kind: str, documents: "Tensor | None"
) -> "Tensor":
    from bloomery.model.attention.attend import attend, layout_of

    layout = layout_of(documents, backend=kind)
    return attend(
        q, k, v, layout, backend=kind, window=None, softcap=None, scale=64**-0.5, dropout=0.0
    )


def _documents(sequences: int, tokens: int, device: str, *, packed: bool) -> "Tensor | None":
    """A half, a quarter and a quarter of each sequence; None: one document per sequence."""
    import torch

    if not packed:
        return None
    lengths = torch.tensor([tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4])
    return torch.repeat_interleave(torch.arange(3), lengths).expand(sequences, -1).to(device)


if __name__ == "__main__":
    exit_at_once(main({"backend": backend}))
