"""The features of each attention backend, and the choice of one. No torch: the plan uses it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bloomery.core import Choice
from bloomery.core.device import Capability, can, is_accelerator
from bloomery.facts.table import OpenTable

# tokens up to which a block mask on the CPU is quicker than a call per document (benchmarks/attention.py)
SHORT_SEQUENCE = 512
# what a GPU's fused kernels compute
FLASH_LIKE = frozenset({"sdpa", "varlen", "flex"})


# Those that scaled_dot_product_attention chooses from, for a CPU, for CUDA and ROCm, for XPU and others, and for MPS.
SDPA_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_attention_math_for_mps",
)


NO_SINKS = "scaled_dot_product_attention has no sinks"


@dataclass(frozen=True, kw_only=True)
class BackendSupport:
    """The features of a backend; text is the reason that one is missing.

    `operators`: the kernels that compute attention as a whole, by the names that PyTorch's dispatcher has for them.
    Selective checkpointing keeps their results. Empty: it is made of products, which are kept, too, every score.
    """

    operators: tuple[str, ...]

    # What its kernels need of the kind of device, and the reason without it: both or neither.
    needs: Capability | None = None
    needs_reason: str = ""

    since: tuple[int, int] = (2, 9)  # torch
    float32: str | None = None
    packed: str | None = None
    window: str | None = None
    softcap: str | None = None
    dropout: str | None = None
    sinks: str | None = None

    def __post_init__(self) -> None:
        assert (self.needs is None) == (not self.needs_reason), (
            f"a backend that needs {self.needs} of a device says why in `needs_reason`, and no other does"
        )

    def runs_on(self, device: str) -> bool:
        """Whether this kind of device has the kernels."""
        return self.needs is None or can(device, self.needs)


BACKENDS = OpenTable(
    {
        "sdpa": BackendSupport(
            operators=SDPA_OPERATORS,
            packed="a causal flag cannot mask documents",
            softcap="scaled_dot_product_attention has no soft-cap",
            sinks=NO_SINKS,
        ),
        "mask": BackendSupport(
            operators=SDPA_OPERATORS,
            softcap="scaled_dot_product_attention has no soft-cap",
            sinks=NO_SINKS,
        ),
        "per_document": BackendSupport(
            operators=("bloomery::per_document",),
            needs="cpu",
            needs_reason="one call per document uses a kernel that only the CPU has",
        ),
        "compiled": BackendSupport(
            operators=("bloomery::compiled",),
            needs="cpu",
            needs_reason="its code is compiled for the CPU",
        ),
        "varlen": BackendSupport(
            operators=("torch_attn::_varlen_attn",),
            needs="varlen",
            needs_reason="varlen_attn has no kernel for the CPU",
            # A scale, windows and shared heads came one by one in 2.10, 2.11 and 2.12.
            since=(2, 12),
            float32="varlen_attn takes 16-bit floats only",
            window="not every build of varlen_attn has windows",
            softcap="varlen_attn has no soft-cap",
            dropout="varlen_attn has no dropout",
            sinks="varlen_attn has no sinks",
        ),
        "flex": BackendSupport(
            # As it is written, and as one piece of code that torch has compiled (`model.attention.attend`).
            operators=("flex_attention", "inductor_compiled_code"),
            needs="flex",
            needs_reason="FlexAttention has no backward on the CPU",
            dropout="FlexAttention has no dropout",
            sinks="sinks have not been tried with FlexAttention",
        ),
        "triton": BackendSupport(
            operators=("bloomery::triton",),
            needs="triton",
            needs_reason="Triton compiles for GPUs",
            sinks="sinks have not been tried with Triton",
        ),
        "blockwise": BackendSupport(operators=("bloomery::blockwise",)),
        "math": BackendSupport(operators=()),
    }
)


def missing_feature(
    backend: str,
    *,
    device_type: str,
    packed: bool,
    window: bool,
    softcap: bool,
    dropout: bool,
    sinks: bool = False,
    float32: bool = False,
    torch: str | None = None,
) -> str | None:
    """None when the backend computes exactly what is asked, in training, on this kind of device; else the reason.

    `packed`: rows hold several documents that must not see each other. `torch`: its version, where known.
    Raises KeyError for an unknown backend.
    """
    facts = BACKENDS[backend]
    if not facts.runs_on(device_type):
        is_untried = facts.needs != "cpu" and is_accelerator(device_type)
        return f"it has not been tried on {device_type}" if is_untried else facts.needs_reason
    if torch is not None and _version(torch) < facts.since:
        return f"it needs torch {facts.since[0]}.{facts.since[1]}, and this is {torch}"
    needs = (
        (float32, facts.float32),
        (packed, facts.packed),
        (window, facts.window),
        (softcap, facts.softcap),
        (dropout, facts.dropout),
        (sinks, facts.sinks),
    )
    return next((reason for is_needed, reason in needs if is_needed and reason), None)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def choose_backend(
    device_type: str,
    *,
    arch_has_fused: bool,
    sequence_length: int,
    packed: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
    sinks: bool = False,
    float32: bool = False,
    torch: str | None = None,
    absent: Mapping[str, str] = MappingProxyType({}),
    compiled: str | None = None,
) -> Choice[str]:
    """The backend of a training run.

    `arch_has_fused`: torch brings fused attention kernels for this GPU. `absent`: backends without a kernel for it,
    with the reason. `compiled`: why `compiled` is the quickest on this CPU; None: it is not.
    """
    bites = window is not None and window < sequence_length
    # what sdpa does without a [T, T] tensor
    simple = not bites and (device_type != "cpu" or dropout == 0)
    if compiled is not None and not bites and softcap is None and dropout == 0:
        return Choice("compiled", compiled)
    for backend, reason in _candidates(device_type, arch_has_fused, sequence_length, simple):
        unfit = missing_feature(
            backend,
            device_type=device_type,
            packed=packed,
            window=bites,
            softcap=softcap is not None,
            dropout=dropout > 0,
            sinks=sinks,
            float32=float32,
            torch=torch,
        )
        if unfit is None and backend not in absent:
            return Choice(backend, reason)
    raise AssertionError("blockwise supports everything and ends every list")


def _candidates(
    device_type: str, arch_has_fused: bool, sequence_length: int, simple: bool
) -> Iterator[tuple[str, str]]:
    if device_type != "cpu" and not arch_has_fused:
        yield "triton", "Bloomery's own Triton kernels"
        yield (
            "blockwise",
            "torch has no fused attention for this GPU and would take memory quadratic in the length",
        )
        return
    if simple or (device_type == "cpu" and sequence_length <= SHORT_SEQUENCE):
        yield "sdpa", "PyTorch's SDPA: one document per sequence"
    if device_type != "cpu":
        yield "varlen", "flash attention takes packed documents of any length"
        yield "flex", "FlexAttention makes one kernel of documents, windows and soft-caps"
        yield "triton", "Bloomery's own Triton kernels"
    elif sequence_length <= SHORT_SEQUENCE:
        yield (
            "mask",
            f"up to {SHORT_SEQUENCE} tokens a block mask is the quickest way to keep documents apart on a CPU",
        )
    else:
        yield (
            "per_document",
            f"above {SHORT_SEQUENCE} tokens a call per document skips masked keys and needs no mask",
        )
    yield "blockwise", "no flash attention supports this; blockwise memory is linear in the length"
