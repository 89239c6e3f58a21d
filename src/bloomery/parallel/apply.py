"""Puts what a plan asks for onto a plain model, from outside, block by block: checkpointing, then compilation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bloomery.model.decoder import Decoder
from bloomery.parallel.offload import offload_activations
from bloomery.plan.types import TrainPlan

_Forward = Callable[..., Tensor]
_aten = torch.ops.aten
# Products cost more to repeat than to keep; everything between them (norms, activations, dropout) is cheap.
_KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


def apply(model: Decoder, plan: TrainPlan) -> None:
    """In place, parameter names unchanged; before the optimizer is built and the first forward.

    Compilation is per block: whole-model graphs are not bitwise repeatable, and one block's graph serves all of them.
    """
    for index, block in enumerate(model.model.layers):
        checkpoint_block(block, plan.activation_checkpointing, index=index)
        if plan.compile:
            block.compile(dynamic=False)
    if plan.offload_activations and plan.device != "cpu":  # no effect on a CPU
        offload_activations(model.model)


def checkpoint_block(block: nn.Module, mode: str, *, index: int) -> None:
    """`full` recomputes the block in backward, `selective` all but its products, `every-N` each N-th block."""
    if mode == "none" or (mode.startswith("every-") and index % int(mode.removeprefix("every-")) != 0):
        return
    contexts = {"context_fn": _selective_contexts} if mode == "selective" else {}
    block.forward = partial(_recomputed, block.forward, contexts)


def _recomputed(forward: _Forward, contexts: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    output: Tensor = checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
    return output


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    kept = operation in _KEPT or getattr(operation, "namespace", "") == "bloomery"  # our own attention kernels
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
