"""FSDP2: the ranks of a replica hold the rows of its weights, gradients and optimizer states in turn."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bloomery.facts.counting import is_never_trained
from bloomery.model.adapters.settings import shares_head
from bloomery.model.decoder import Decoder
from bloomery.model.experts import Router
from bloomery.model.io.weights import quantized_weights
from bloomery.model.norms import LayerNorm, RMSNorm
from bloomery.model.xielu import XIELU
from bloomery.parallel.clock import CommunicationClock
from bloomery.parallel.experts import is_divided
from bloomery.plan.types import TrainPlan

# What a CPU gathers or reduces at once, up to this size, goes through one buffer of all layers.
SHARED_BUFFER_BYTES = 2**24


def apply_fsdp(
    model: Decoder,
    plan: TrainPlan,
    device_mesh: DeviceMesh,
    clock: CommunicationClock | None = None,
) -> None:
    """Shard the model in place: each block, the embeddings where the head does not share them, and the rest.

    Must run after checkpointing and compilation, before weights are read. Weights compute as on one device: matrices of
    blocks are gathered in the dtype of matmuls; embeddings, head and last norm in their own, so that the residual
    stream keeps its dtype. Gradients are summed in float32. Frozen weights are in the dtype of matmuls already, or
    quantized, and like adapters gathered as they are. `clock` counts the collectives.
    """
    trains_all_weights = all(
        parameter.requires_grad or is_never_trained(name)
        for name, parameter in model.named_parameters()
    )
    matmul_dtype = None
    # Transformers' layers mix dtypes as it happens: theirs are gathered as they are, and autocast rounds them.
    if trains_all_weights and model.config.transformers_backend is None:
        matmul_dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(plan.precision)
    block_policy = MixedPrecisionPolicy(
        param_dtype=matmul_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    own_dtype_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    for _, weight in quantized_weights(model):
        weight.become_parameters()

    # 1. Blocks. Their norms and routers are small: every rank has them in full, and their gradients are summed like a
    # replica's. A router computes with the float32 that it is kept in, on shards as without.
    *_, last_block = model.model.layers  # by order: a stage keeps the numbers of its layers
    for block in model.model.layers:
        small_weights = {
            weight
            for module in block.modules()
            if isinstance(module, RMSNorm | LayerNorm | XIELU | Router)
            for weight in module.parameters()
        }
        small_weights |= {w for name, w in block.named_parameters() if is_never_trained(name)}
        divided_weights = {weight for weight in block.parameters() if is_divided(weight)}
        fully_shard(
            block,
            mesh=device_mesh,
            mp_policy=block_policy,
            ignored_params=small_weights | divided_weights,
            # Backward begins with the last block, right after its forward: it stays gathered.
            reshard_after_forward=block is not last_block,
        )

    # 2. The embedding of all layers' inputs, which no head shares.
    if model.config.per_layer_input_size:
        table: Any = model.model.embed_tokens_per_layer
        fully_shard(table, mesh=device_mesh, mp_policy=own_dtype_policy)
        table.set_unshard_in_backward(False)

    # 3. Embeddings and the rest. A head that shares the matrix of the embeddings must be in one unit with them. A value
    # head is one row, which every rank has in full.
    embedding: Any = model.model.embed_tokens
    if model.stage.has_embedding and not shares_head(model.config):
        fully_shard(embedding, mesh=device_mesh, mp_policy=own_dtype_policy)
        embedding.set_unshard_in_backward(False)  # its gradient does not depend on its weight
    value_weights = set() if model.value_head is None else set(model.value_head.parameters())
    fully_shard(
        model,
        mesh=device_mesh,
        mp_policy=own_dtype_policy,
        reshard_after_forward=False,
        ignored_params=value_weights,
    )
    # The output of a head is a view, and nothing writes into it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

    # 4. Sums instead of means: the loss is divided by the count of all ranks before backward. Pre-multiplied sums,
    # which FSDP2 would use for a factor, do not exist in gloo.
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if clock is not None:
        _replace_collectives(units, clock, device=plan.device, has_replicas=device_mesh.ndim > 1)


def reduce_between_replicas(model: nn.Module, *, in_next_backward: bool) -> None:
    """Whether the next backward sums gradients over the replicas of shards, or only adds its own to those of earlier
    ones, on each rank. No effect without shards.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(in_next_backward)


def _replace_collectives(
    units: Sequence[FSDPModule], clock: CommunicationClock, *, device: str, has_replicas: bool
) -> None:
    """Give FSDP2 collectives that the clock counts, and on a CPU those that spare memory."""
    # Renamed in torch 2.13.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    # Any: torch describes its interface by classes to inherit from.
    timed_gather: Any = _TimedCollective(clock, all_gather)
    timed_scatter: Any = _TimedCollective(clock, reduce_scatter)
    if device == "cpu":
        host = _HostCollectives()
        timed_gather = _TimedCollective(clock, all_gather, host.allocate_gathered)
        timed_scatter = _TimedCollective(clock, host.reduce_scatter, host.allocate_reduced)

    for unit in units:
        if device == "cpu":
            # Nothing overlaps on a CPU: gathering a layer ahead would only cost memory.
            unit.set_modules_to_backward_prefetch([unit])
        unit.set_custom_all_gather(timed_gather)
        unit.set_custom_reduce_scatter(timed_scatter)
        if has_replicas:
            unit.set_all_reduce_hook(
                lambda gradients: clock.measure_since_last("replicate", gradients.device.type)
            )


@final
@dataclass(frozen=True)
class _TimedCollective:
    """A collective with the interface that FSDP2 wants (its `Comm`): it allocates the tensors, then calls."""

    clock: CommunicationClock
    collective: Callable[..., dist.Work | None]
    allocator: Callable[..., Tensor] = torch.empty

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.allocator(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, **settings: Any
    ) -> dist.Work | None:
        name = self.collective.__name__
        with self.clock.measure("shard", input_tensor.device.type, name=name):
            return self.collective(output_tensor, input_tensor, **settings)


@final
class _HostCollectives:
    """Collectives for a CPU, where they are over when the call returns.

    Layers are gathered and reduced in turn, so that small ones can share one buffer: fresh memory costs a page fault
    every 4 KiB. Large inputs are freed at once; FSDP2 keeps them a layer longer, for devices that still read them.
    """

    def __init__(self) -> None:
        self._shared_buffer = torch.empty(0, dtype=torch.uint8)
        self._allocates_sums = False

    def allocate_gathered(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized [size] for gathered weights, which FSDP2 copies out before it gathers anything else.

        Up to SHARED_BUFFER_BYTES in the memory that all layers share, above in memory of its own.
        """
        num_bytes = size * dtype.itemsize
        if num_bytes > SHARED_BUFFER_BYTES:
            return torch.empty(size, dtype=dtype, device=device)
        if num_bytes > len(self._shared_buffer):
            self._shared_buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._shared_buffer[:num_bytes].view(dtype)

    def allocate_reduced(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks twice for each layer: for its gradients, then for the rows of their sums that this rank keeps."""
        is_for_sums = self._allocates_sums
        self._allocates_sums = not is_for_sums
        if is_for_sums:
            return torch.empty(size, dtype=dtype, device=device)
        return self.allocate_gathered(size, dtype=dtype, device=device)

    def reduce_scatter(
        self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        """Sum `gradients` where they are, and free them: gloo's own reduce-scatter would sum a copy.

        Memory that layers share is not freed.
        """
        assert not self._allocates_sums, "the rows of the sums have memory of their own"
        dist.all_reduce(gradients, op=op, group=group)
        output.copy_(gradients.chunk(group.size())[group.rank()])
        if gradients.untyped_storage().nbytes() > SHARED_BUFFER_BYTES:
            gradients.untyped_storage().resize_(0)
