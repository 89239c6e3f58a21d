"""Gradients of parameters that every rank holds in full: their sum over the ranks, in float32."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bloomery.core.device import is_accelerator, sent
from bloomery.model.io.parameters import is_split, local
from bloomery.parallel.experts import is_divided
from bloomery.parallel.mesh import Mesh

# Small gradients are summed together, in a float32 copy of 25 MiB: DistributedDataParallel's bucket.
BUCKET_NUMBERS = 25 * 2**20 // 4
# A float32 gradient of so many numbers is summed where it is: on a CPU, two copies soon cost more than a call.
IN_PLACE_ON_CPU = 2**18


def all_reduce_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sum gradients over the data-parallel ranks, in place. FSDP2 has summed those of shards during backward.

    A gradient that some ranks have counts as zero on the others; one that no rank has stays None.
    """
    if mesh.data_world == 1:
        return
    parameters = list(parameters)
    full_parameters = [parameter for parameter in parameters if not is_split(parameter)]
    if full_parameters:
        axis = "shard" if mesh.shard > 1 else "replicate"
        with mesh.clock.measure(axis, mesh.device, name="sum of gradients"):
            _all_reduce(full_parameters, mesh, mesh.data_group)
    # The gradient of an expert has the tokens of all ranks that divide the experts: it is summed over its copies alone.
    experts = [parameter for parameter in parameters if is_divided(parameter)]
    if experts and mesh.expert_copies is not None:
        with mesh.clock.measure("replicate", mesh.device, name="sum of experts' gradients"):
            _all_reduce(experts, mesh, mesh.expert_copies)


def _all_reduce(
    parameters: list[nn.Parameter], mesh: Mesh, group: dist.ProcessGroup | None
) -> None:
    """Of parameters that each rank of the group holds alike. `group`: None is all ranks."""
    # Ranks must call the same collectives: each has a gradient of every parameter, of zeros where it had none. How many
    # ranks had one travels along, so that no collective before these has to tell.
    is_missing = [parameter.grad is None for parameter in parameters]
    ranks_with_gradient = sent(
        torch.tensor([0.0 if missing else 1.0 for missing in is_missing]),
        local(parameters[0]).device,
    )

    bucket = [ranks_with_gradient]
    bucket_numbers = 0
    under_way = list[dist.Work]()
    in_place_numbers = BUCKET_NUMBERS if is_accelerator(mesh.device) else IN_PLACE_ON_CPU
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

        # Size and dtype of the parameter decide, which are equal on every rank; the layout of a gradient may differ,
        # where one rank had none. A large one travels while the next is copied.
        numbers = local(parameter).numel()
        if numbers >= in_place_numbers and parameter.dtype == torch.float32:
            parameter.grad = parameter.grad.contiguous()
            work = dist.all_reduce(local(parameter.grad), group=group, async_op=True)
            under_way.append(work)
            continue

        bucket.append(local(parameter.grad))
        bucket_numbers += numbers
        if bucket_numbers >= BUCKET_NUMBERS:
            _all_reduce_bucket(bucket, group)
            bucket = []
            bucket_numbers = 0

    if bucket:
        _all_reduce_bucket(bucket, group)
    for work in under_way:
        work.wait()

    # The host waits for the device only where a gradient was missing.
    if any(is_missing):
        for parameter, count in zip(parameters, ranks_with_gradient.tolist(), strict=True):
            if not count:
                parameter.grad = None


def _all_reduce_bucket(gradients: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum gradients of any dtype and layout in float32 at least, in place."""
    is_double = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if is_double else torch.float32
    flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, summed in zip(gradients, sums, strict=True):
        gradient.copy_(summed.view_as(gradient))
