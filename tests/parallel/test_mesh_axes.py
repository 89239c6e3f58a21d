"""The axes of a mesh. Oracle: how torch's init_device_mesh numbers ranks."""

import torch

from bloomery.parallel.mesh import Mesh


def test_ranks_are_numbered_by_stage_then_replica_then_shard() -> None:
    numbers = torch.arange(12).view(
        3, 2, 2
    )  # as init_device_mesh numbers ("stage", "replicate", "shard")
    for stage, replica, shard in torch.cartesian_prod(*map(torch.arange, numbers.shape)).tolist():
        rank = int(numbers[stage, replica, shard])
        mesh = Mesh(rank, replicate=2, shard=2, stages=3)
        assert (mesh.world, mesh.data_world) == (12, 4)
        assert (mesh.stage, mesh.rank % mesh.shard) == (stage, shard)
        assert mesh.data_rank == 2 * replica + shard
        assert mesh.last_stage == (stage == 2)


def test_without_stages_every_rank_is_a_data_rank_of_the_last_one() -> None:
    for rank in range(4):
        mesh = Mesh(rank, replicate=2, shard=2)
        assert (mesh.data_rank, mesh.data_world) == (rank, mesh.world)
        assert (mesh.stage, mesh.stages, mesh.last_stage) == (0, 1, True)
