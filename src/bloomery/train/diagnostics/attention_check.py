"""A check of the run's attention kernel before the first step.

A build for another GPU, or an override of the GPU's architecture, may compute wrong numbers instead of crashing.
"""

import torch
from torch import Tensor

from bloomery.model.attention.attend import attend, layout_of
from bloomery.model.decoder import Attention, Decoder
from bloomery.model.transformers_backend.backbone import check_head, check_rows
from bloomery.plan.types import RunPlan
from bloomery.train.forward import eval_mode, precision_context
from bloomery.train.run import Unsound

TOKENS = 128
# The largest rounding error relative to the largest value; float32 may be TF32 on a GPU.
TOLERANCE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 4e-2, "bfloat16-pure": 4e-2}


def check_attention(model: Decoder, plan: RunPlan) -> None:
    """Compare output and gradients with the math backend in float32, on two packed documents; RNG states are kept.
    Layers of transformers with the native head are compared to transformers' forward.

    Raises Unsound when they differ by more than rounding or are non-finite; UserError for transformers' layers.
    """
    limit, packed = TOLERANCE[plan.train.precision], plan.data.layout == "packed"
    if plan.model.config.transformers_backend is not None:
        with eval_mode(model), precision_context(plan.train.precision, plan.train.device):
            check_head(model, limit)
            check_rows(model, limit, packed=packed)
        return
    if plan.model.attention == "math":
        return
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    kinds = {(part.window, part.scale) for part in parts}
    for window, scale in sorted(kinds, key=str):
        error = difference(plan, window=window, scale=scale)
        if not error <= limit:
            what = f"error {error:.2g}, at most {limit:.2g} is rounding" if error == error else "non-finite output"
            raise Unsound(
                f"wrong results of {plan.model.attention} attention in {plan.train.precision} on this device: {what}",
                where=f"the check before the first step, PyTorch {torch.__version__}",
                fix="run `bloomery doctor --probe`; or set train.attention=blockwise, which needs no such kernel",
            )


def difference(plan: RunPlan, *, window: int | None, scale: float) -> float:
    """The largest error of output and gradients, relative to the largest value of each; NaN if any is non-finite."""
    config, device = plan.model.config, torch.device(plan.train.device)
    length = min(TOKENS, plan.data.sequence_length)
    draw = torch.Generator().manual_seed(0)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_heads
    q, k, v, upstream = (torch.randn(2, length, n, config.head_dim, generator=draw).transpose(1, 2) for n in heads)
    documents = torch.arange(length).ge(length // 3).long().expand(2, length)
    alone = plan.model.attention == "sdpa"  # one document per sequence

    def results(backend: str, where: torch.device, precision: str) -> list[Tensor]:
        kind = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
        inputs = [x.to(where, kind).requires_grad_() for x in (q, k, v)]
        to_q, to_k, to_v = inputs
        layout = layout_of(None if alone else documents.to(where), backend=backend)
        with precision_context(precision, where.type):
            out = attend(
                to_q, to_k, to_v, layout, backend=backend, window=window, softcap=config.attention_softcap, scale=scale,
                dropout=0.0,
            )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(where, out.dtype))]

    actual = results(plan.model.attention, device, plan.train.precision)
    exact = results("math", torch.device("cpu"), "float32")
    shares = [(a.float().cpu() - b).abs().max() / b.abs().max() for a, b in zip(actual, exact, strict=True)]
    return float(torch.stack(shares).max())  # NaN wins
