"""The reference model of rollouts whose training changes the base: a frozen copy of the model before the first step."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bloomery.core.device import can
from bloomery.core.errors import UserError
from bloomery.infer.forward import matmul_dtype
from bloomery.model.decoder import Decoder
from bloomery.model.experts import ExpertMLPs
from bloomery.model.io.weights import quantize_model
from bloomery.model.vision import VisionTower, load_tower
from bloomery.parallel.apply import apply
from bloomery.parallel.context import HeadExchange
from bloomery.parallel.experts import RowExchange, divide_experts
from bloomery.parallel.fsdp import apply_fsdp
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.stage import keep_stage
from bloomery.parallel.transfers import pinned_all
from bloomery.plan.choices import reference_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import RewardedRollouts
from bloomery.recipe.schema import Quantize
from bloomery.train.checkpoint.checkpointed_model import InitialWeights


def build_reference_model(
    plan: RunPlan, policy: Decoder, *, run_dir: Path | None, mesh: Mesh
) -> Decoder | None:
    """The copy, in evaluation mode and cut into shards as `policy`; None where the plan needs none.

    It is read from where the run started, never from a checkpoint, so that a resumed run has the same one. Its values
    have the dtypes with which the first step of `policy` computes, so that they agree before the first update.
    Raises UserError when the folder of the start is missing, damaged or changed.
    """
    if reference_of(plan.objective, plan.adapter, plan.vision.train).value != "copy":
        return None
    objective = plan.objective
    assert isinstance(objective, RewardedRollouts), (
        "others score their dataset before the first step"
    )
    source = plan.model.source
    if source is not None and not source.is_dir():
        raise UserError(
            "the reference model, which this run started from, is missing",
            where=str(source),
            fix="put the folder back in its place; without it the KL divergence is of another model",
        )

    # 1. The model on the meta device. A policy with quantized matrices started from what they are as stored.
    with torch.device("meta"):
        reference = Decoder(plan.model.config, attention=plan.model.attention)
    reference.requires_grad_(False)
    is_nf4 = objective.reference == "nf4"
    quantize = Quantize(kind="nf4") if is_nf4 else plan.quantize
    if quantize.kind != "none":
        quantize_model(reference, quantize, reader=plan.quantized_by)
    _take_dtypes(reference, policy, plan.train.precision)
    reference.tie()

    if mesh.context > 1:
        reference.share_sequences(HeadExchange(mesh))
    if mesh.stages > 1:
        # The same stage as the policy's, and over its link: the two compute one after the other.
        keep_stage(reference, policy.stage)
        reference.model.link = policy.model.link

    # 2. Shards as those of the policy, and streamed as it is. Nothing is kept for a backward, so that nothing is
    # recomputed or offloaded.
    on_host = objective.reference == "host" and plan.train.device != "cpu"
    on_host &= plan.train.stream == "off"
    forward_only = {"activation_checkpointing": "none", "offload_activations": False}
    if on_host:  # the hooks that move a block are no part of compiled code
        forward_only["compile"] = False
    train = plan.train.model_copy(update=forward_only)
    apply(reference, train)
    if mesh.expert_mesh is not None:
        divide_experts(reference, mesh.expert_mesh, RowExchange(mesh))
    if mesh.device_mesh is not None:
        apply_fsdp(reference, train, mesh.device_mesh, mesh.clock)

    # 3. The weights, read a piece at a time.
    device = torch.device(plan.train.device)
    if reference.weight_stream is not None:
        reference.weight_stream.allocate()
    else:
        reference.to_empty(device=device)
        if on_host:
            reference.model.layers.to_empty(device="cpu")
    reference.tie()
    note = run_dir if mesh.first_rank else None
    InitialWeights(source, plan.train.seed, plan.model.new_ids, note, mesh).fill(reference)
    if on_host:
        stream_blocks(reference, device)
    if policy.vision is not None:
        reference.see(_tower(plan, policy.vision, device))
    return reference.eval()


def _tower(plan: RunPlan, tower: VisionTower, device: torch.device) -> VisionTower:
    """The policy's, where no update changes it; else another one, as the run started from."""
    if not any(parameter.requires_grad for parameter in tower.parameters()):
        return tower
    assert plan.model.source is not None, "a tower is a folder's"
    precision = plan.train.precision
    dtype = torch.float32 if precision == "float16" else matmul_dtype(precision)
    return load_tower(tower.vision, plan.model.source, dtype=dtype, device=device)


def _take_dtypes(reference: Decoder, policy: Decoder, precision: str) -> None:
    """Matrices of blocks in the dtype of matmuls, everything else in that of the policy.

    Autocast multiplies in the dtype of matmuls in any case; a residual stream in another one would give a divergence
    to two equal models.
    """
    dtypes = {name: parameter.dtype for name, parameter in policy.named_parameters()}
    others = matmul_dtype(precision)
    matrices = {
        name
        for path, module in reference.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, nn.Linear | ExpertMLPs)
        for name, parameter in module.named_parameters(prefix=path, recurse=False)
        if parameter.ndim == (3 if isinstance(module, ExpertMLPs) else 2)
    }
    for name, parameter in reference.named_parameters():
        dtype = matmul_dtype(precision) if name in matrices else dtypes.get(name, others)
        parameter.data = parameter.data.to(dtype)


def stream_blocks(model: Decoder, device: torch.device) -> None:
    """Keep the blocks of the model in host memory: each is on `device` while it computes, and only then."""

    def fetch(block: nn.Module, _inputs: Any, *, host: dict[str, torch.Tensor]) -> None:
        for name, tensor in _tensors(block).items():
            host[name] = tensor.data
            tensor.data = tensor.data.to(device, copy=True, non_blocking=True)

    def free(
        block: nn.Module, _inputs: Any, _output: Any, *, host: dict[str, torch.Tensor]
    ) -> None:
        for name, tensor in _tensors(block).items():
            if name in host:  # an error, such as out of memory, may come before it was fetched
                tensor.data = host.pop(name)

    for block in model.model.layers:
        if can(device, "streams"):
            # Block by block: the host never holds more than one of them twice.
            tensors = list(_tensors(block).values())
            for tensor, pinned in zip(tensors, pinned_all(tensors, device), strict=True):
                tensor.data = pinned.copy_(tensor.data)
        held: dict[str, torch.Tensor] = {}
        block.register_forward_pre_hook(partial(fetch, host=held))
        block.register_forward_hook(partial(free, host=held), always_call=True)


def _tensors(block: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}
