"""Attention kernels, compared with plain attention on the CPU: a part of a step, and the start of every run.

A build for another GPU, or an override of the GPU's architecture, may compute wrong numbers instead of crashing. It
takes milliseconds, so that every run looks at the kernels of its layers on every device.

B batch, T time, H query heads, K key/value heads, E head width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from bloomery.check.comparison import Numbers, backward_numbers, drawn, wrong_quantities
from bloomery.check.rounding import TF32, bound_in, device_roundoff
from bloomery.facts.counting import layers_by_attention
from bloomery.infer.forward import matmul_dtype
from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.attention.triton_attention import arch_of
from bloomery.plan.types import ModelPlan, TrainPlan
from bloomery.train.failures import Unsound

TOKENS = 128
# To the dtype of matmuls: scores, shares and the values' sum; each again in backward, and the sum over a row.
ROUNDINGS_OF_ATTENTION = 8


@final
@dataclass(frozen=True)
class AttentionKernel:
    """What one layer calls, for heads of any number."""

    backend: str
    window: int | None
    scale: float
    softcap: float | None


def attention_numbers(
    inputs: Mapping[str, Tensor],
    documents_BT: Tensor | None,
    kernel: AttentionKernel,
    *,
    device: torch.device,
    precision: str,
) -> Numbers:
    """The output and the gradients of q [B, T, H, E], k and v [B, T, K, E]. Without documents a row is one."""
    documents = None if documents_BT is None else documents_BT.to(device)
    layout = layout_of(documents, backend=kernel.backend)

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_BHTE, k_BKTE, v_BKTE = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return attend(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            layout,
            backend=kernel.backend,
            window=kernel.window,
            softcap=kernel.softcap,
            scale=kernel.scale,
            dropout=0.0,
        )

    dtype = matmul_dtype(precision)
    typed_inputs = {name: (tensor, dtype) for name, tensor in inputs.items()}
    return backward_numbers(
        "attention", attended, typed_inputs, {}, device=device, precision=precision
    )


def check_attention(model: ModelPlan, train: TrainPlan, *, sequence_length: int) -> None:
    """Compare output and gradients with the math backend in float32, on two packed documents; RNG states are kept.

    Raises Unsound when they differ by more than rounding or are non-finite.
    """
    config = model.config
    if model.attention == "math" or config.transformers_backend is not None:
        return

    # Two documents; `sdpa` has one per sequence.
    length = min(TOKENS, sequence_length)
    dtype = matmul_dtype(train.precision)
    documents = None
    if model.attention != "sdpa":
        documents = torch.arange(length).ge(length // 3).long().expand(2, length)

    # Every run on every device takes it, so that it allows for TF32, whatever the device does.
    device = torch.device(train.device)
    roundoff = device_roundoff(dtype, device, arch=arch_of(device), in_attention=True)

    def bound(numbers: Tensor) -> float:
        least_roundoff = max(roundoff, TF32)
        return bound_in(
            numbers.dtype, least_roundoff, roundings=ROUNDINGS_OF_ATTENTION, terms=length
        )

    # Layers of the same heads, window and scale call the same kernel.
    for layer in sorted(layers_by_attention(config), key=lambda layer: str(layer.window)):
        heads = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
        inputs = {
            name: drawn(
                f"attention before the first step, {name}",
                (2, length, count, layer.head_dim),
                dtype,
            )
            for name, count in heads.items()
        }
        kernel = AttentionKernel(
            model.attention, layer.window, layer.attention_scale, config.attention_softcap
        )
        plain = replace(kernel, backend="math")
        tested = attention_numbers(
            inputs, documents, kernel, device=device, precision=train.precision
        )
        exact = attention_numbers(
            inputs, documents, plain, device=torch.device("cpu"), precision="float32"
        )
        for difference in wrong_quantities([tested], exact, bound)[:1]:
            problem = "non-finite output"
            if math.isfinite(difference.error):
                problem = (
                    f"error {difference.error:.2g}, at most {difference.bound:.2g} is rounding"
                )
            raise Unsound(
                f"wrong results of {model.attention} attention in {train.precision}"
                f" on this device: {problem}",
                where=f"the check before the first step, PyTorch {torch.__version__}",
                fix="run `bloomery doctor --probe`; or set train.attention=blockwise, which needs no such kernel",
            )
