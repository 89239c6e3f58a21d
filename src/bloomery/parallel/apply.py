"""Puts what a plan asks for onto a plain model, from outside: activation checkpointing, compilation, offload."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bloomery.facts.attention import BACKENDS
from bloomery.model.decoder import Block, Decoder
from bloomery.model.mixers.recomputed import is_inside_recomputed
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.offload import offload_activations
from bloomery.parallel.streamed import StreamedWeights
from bloomery.parallel.streamed_experts import StreamedExperts
from bloomery.plan.types import TrainPlan

_Forward = Callable[..., Tensor]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


def apply(model: Decoder, plan: TrainPlan, mesh: Mesh = SINGLE_RANK) -> None:
    """Change the model in place; parameters keep their names.

    Must run before the optimizer is built and the first forward. Each block is compiled on its own: whole-model graphs
    are not bitwise repeatable, and one block's graph serves all of them.
    """
    # Inside of checkpointing: a block that is recomputed loads its weights again.
    device = torch.device(plan.device)
    if plan.stream == "layers":
        model.weight_stream = StreamedWeights(model, device, mesh=mesh, placement=plan.stream_host)
    elif plan.stream == "experts":
        is_recomputed = partial(recomputes, plan.activation_checkpointing)
        model.weight_stream = StreamedExperts(
            model,
            device,
            is_recomputed=is_recomputed,
            mesh=mesh,
            placement=plan.stream_host,
        )
    for layer, block in zip(model.stage.layers, model.model.layers, strict=True):
        checkpoint_block(block, plan.activation_checkpointing, index=layer)
        if plan.compile:
            block.compile(dynamic=False)
    # On a CPU activations are in the host's memory already.
    if plan.offload_activations and plan.device != "cpu":
        offload_activations(model.model)


def recomputes(mode: str, index: int) -> bool:
    """Whether the forward of a block runs again in backward: in `selective` without its products."""
    if mode.startswith("every-"):
        return index % int(mode.removeprefix("every-")) == 0
    return mode != "none"


def checkpoint_block(block: nn.Module, mode: str, *, index: int) -> None:
    """Make the block recompute its activations in backward: all (`full`), all but matmuls (`selective`), or none.

    `every-N` is `full` for each N-th block.
    """
    if not recomputes(mode, index):
        return
    settings = {"context_fn": selective_contexts} if mode == "selective" else {}
    if mode != "selective" and isinstance(block, Block) and block.kind.experts is not None:
        settings = {"context_fn": choice_contexts}
    block.forward = partial(_checkpointed, block.forward, settings)


def _checkpointed(forward: _Forward, settings: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    output: Tensor = checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)
    return output


def selective_contexts() -> Any:
    """The `context_fn` of torch.utils.checkpoint for `selective`."""
    return create_selective_checkpoint_contexts(_selective_policy)


def choice_contexts() -> Any:
    """The `context_fn` of `full` for a layer with experts: all is recomputed, but each token keeps its experts."""
    return create_selective_checkpoint_contexts(_choice_policy)


def _choice_policy(
    _context: object, operation: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    is_choice = operation is torch.ops.bloomery.kept_choice.default
    return CheckpointPolicy.MUST_SAVE if is_choice else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_policy(
    _context: object, operation: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    # Selective checkpointing saves the results of matmuls and of attention, which cost more to compute again than to
    # hold; everything between them (norms, activations, dropout) is cheap. Our namespace has attention, too, and
    # products with quantized weights. Plug-ins add backends: the table is read each time. A part that is recomputed
    # keeps none of its products.
    if is_inside_recomputed():
        return CheckpointPolicy.PREFER_RECOMPUTE
    is_ours = getattr(operation, "namespace", "") == "bloomery"
    name = ""
    if isinstance(operation, OpOverload | HigherOrderOperator):
        name = operation.name()  # type: ignore[no-untyped-call]  # torch's
    is_attention = any(name in facts.operators for facts in BACKENDS.values())
    if name in PRODUCTS or is_attention or is_ours:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
