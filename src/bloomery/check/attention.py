"""The attention kernels of a run, compared with plain attention on the CPU before its first step.

A build for another GPU, or an override of the GPU's architecture, may compute wrong numbers instead of crashing. It
takes milliseconds, so that every run does it on every device.
"""

import math

import torch
from torch import Tensor

from bloomery.infer.forward import precision_context
from bloomery.model.attention.attend import attend, layout_of
from bloomery.plan.types import ModelPlan, TrainPlan
from bloomery.train.failures import Unsound

TOKENS = 128
# The largest rounding error relative to the largest value; float32 may be TF32 on a GPU.
TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 4e-2, "bfloat16-pure": 4e-2}


def check_attention(model: ModelPlan, train: TrainPlan, *, sequence_length: int) -> None:
    """Compare output and gradients with the math backend in float32, on two packed documents; RNG states are kept.

    Raises Unsound when they differ by more than rounding or are non-finite.
    """
    config = model.config
    if model.attention == "math" or config.transformers_backend is not None:
        return

    # Layers of one window and scale call the same kernel.
    limit = TOLERANCE[train.precision]
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    windows = {config.window(layer) for layer in range(config.num_layers)}
    for window in sorted(windows, key=str):
        error = attention_error(
            model, train, window=window, scale=scale, length=min(TOKENS, sequence_length)
        )
        if not error <= limit:
            problem = "non-finite output"
            if not math.isnan(error):
                problem = f"error {error:.2g}, at most {limit:.2g} is rounding"
            raise Unsound(
                f"wrong results of {model.attention} attention in {train.precision}"
                f" on this device: {problem}",
                where=f"the check before the first step, PyTorch {torch.__version__}",
                fix="run `bloomery doctor --probe`; or set train.attention=blockwise, which needs no such kernel",
            )


def attention_error(
    model: ModelPlan, train: TrainPlan, *, window: int | None, scale: float, length: int
) -> float:
    """The largest error of output and gradients, relative to the largest value of each; NaN if any is non-finite."""
    config = model.config
    device = torch.device(train.device)

    # Queries, keys, values and the gradient of the output, of two documents; `sdpa` has one document per sequence.
    generator = torch.Generator().manual_seed(0)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads
    q, k, v, output_gradient = (
        torch.randn(2, length, n, config.head_dim, generator=generator).transpose(1, 2)
        for n in heads
    )
    documents = torch.arange(length).ge(length // 3).long().expand(2, length)
    one_document = model.attention == "sdpa"

    def output_and_gradients(backend: str, device: torch.device, precision: str) -> list[Tensor]:
        dtype = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (q, k, v)]
        queries, keys, values = inputs
        layout = layout_of(None if one_document else documents.to(device), backend=backend)
        with precision_context(precision, device.type):
            output = attend(
                queries,
                keys,
                values,
                layout,
                backend=backend,
                window=window,
                softcap=config.attention_softcap,
                scale=scale,
                dropout=0.0,
            )
        gradients = torch.autograd.grad(output, inputs, output_gradient.to(device, output.dtype))
        return [output.detach(), *gradients]

    actual = output_and_gradients(model.attention, device, train.precision)
    exact = output_and_gradients("math", torch.device("cpu"), "float32")
    errors = [
        (actual_tensor.float().cpu() - exact_tensor).abs().max() / exact_tensor.abs().max()
        for actual_tensor, exact_tensor in zip(actual, exact, strict=True)
    ]
    # The maximum is NaN where any error is.
    return float(torch.stack(errors).max())
