"""Probes of the backends of model.attention on packed sequences, for `hardware.probes`, and their child process.

Each runs forward and backward on sequences of several documents, compared with float64 on the CPU, and timed.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bloomery.hardware.machine import Machine
from bloomery.hardware.probe_worker import Compute, Result, check, leave, main, seconds_of
from bloomery.hardware.probes import ProbeSpec
from bloomery.hardware.profile import build_profile
from bloomery.model.attention.support import BACKENDS

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 256
TIMED_TOKENS = {"cpu": 1024, "cuda": 4096}


def specs(machine: Machine) -> tuple[ProbeSpec, ...]:
    """A probe of every backend that the device of the machine has."""
    where = build_profile(machine).device.value
    names = (name for name, facts in BACKENDS.items() if where in facts.devices)
    return tuple(ProbeSpec(name=f"backend-{name}", module=__name__, seconds=90) for name in names)


def backend(name: str, job: Mapping[str, Any]) -> Result:
    """`backend-blockwise`: three documents per sequence, or one without document masking; the kernel.

    The result and the three gradients are compared with those of `math`.
    """
    kind = name.partition("-")[2]
    where = job["device"]
    dtype = "bfloat16" if kind == "varlen" and job["dtype"] == "float32" else job["dtype"]
    queries = (2, 4, TOKENS, 64)
    shared = (2, 2, TOKENS, 64)
    tokens = TIMED_TOKENS[where]

    def attention(kind: str, sequences: int, tokens: int, where: str) -> Compute:
        documents = _documents(sequences, tokens, where, packed=name != "backend-sdpa")
        return partial(_attend, kind=kind, documents=documents)

    run = attention(kind, 2, TOKENS, where)
    reference = attention("math", 2, TOKENS, "cpu")
    result = check(run, reference, (queries, shared, shared, queries), where, dtype)
    seconds = seconds_of(attention(kind, 1, tokens, where), ((1, 8, tokens, 64),) * 4, where, dtype)
    return result | {
        "seconds": seconds,
        "facts": {"kernel": kernel(kind, where, dtype), "tokens": str(tokens)},
    }


def kernel(kind: str, where: str, dtype: str) -> str:
    """Which kernel of scaled_dot_product_attention torch took, by the operators that it called; else ours."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    if kind not in ("sdpa", "mask"):
        return kind
    tensors = [torch.randn(1, 8, TOKENS, 64).to(where, getattr(torch, dtype)) for _ in range(3)]
    with Listening():  # type: ignore[no-untyped-call]  # torch's own
        _attend(*tensors, kind=kind, documents=_documents(1, TOKENS, where, packed=kind != "sdpa"))
    words = {"flash": "flash", "efficient": "efficient", "cudnn": "cudnn"}
    return next(
        (words[word] for word in words if any(f"{word}_attention" in name for name in called)),
        "math",
    )


def _attend(
    q: "Tensor", k: "Tensor", v: "Tensor", *, kind: str, documents: "Tensor | None"
) -> "Tensor":
    from bloomery.model.attention.attend import attend, layout_of

    layout = layout_of(documents, backend=kind)
    return attend(
        q, k, v, layout, backend=kind, window=None, softcap=None, scale=64**-0.5, dropout=0.0
    )


def _documents(sequences: int, tokens: int, where: str, *, packed: bool) -> "Tensor | None":
    """A half, a quarter and a quarter of each sequence; None: one document per sequence."""
    import torch

    if not packed:
        return None
    lengths = torch.tensor([tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4])
    return torch.repeat_interleave(torch.arange(3), lengths).expand(sequences, -1).to(where)


if __name__ == "__main__":
    leave(main({"backend": backend}))
