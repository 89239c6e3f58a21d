"""A model cut over devices that are not there: FSDP2, block by block, on torch's fake process group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bloomery.model.decoder import Decoder
from bloomery.train import step

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Cut:
    """Over how many devices: copies, and shards or stages of each."""

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1


ONE = Cut()


def fake_mesh(cut: Cut) -> DeviceMesh:
    """So many devices, this one the first; made outside fake tensors, for it asks its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cut.replicate * cut.shard)
    if cut.replicate == 1:
        return init_device_mesh("cpu", (cut.shard,))
    return init_device_mesh("cpu", (cut.replicate, cut.shard), mesh_dim_names=("replicate", "shard"))


def shard(model: Decoder, precision: str, mesh: DeviceMesh) -> None:
    """In place: layers are gathered in half precision where products run in it, gradients summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=HALVES.get(precision), reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def norms_over_shards() -> Iterator[None]:
    """While it is entered a step's gradient norm is a plain number again, summed over the shards."""

    of_one = step.global_norm

    def whole(gradients: Sequence[Tensor]) -> Tensor:
        norm = of_one(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    with mock.patch("bloomery.train.step.global_norm", whole):
        yield
