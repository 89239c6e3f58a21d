"""Owners of a checkpoint's tensors at sizes that no test trains: 512 ranks, 8 billion parameters."""

import math
from collections import Counter

import pytest

from bloomery.core.units import MIB
from bloomery.facts.counting import parameter_shapes
from bloomery.model.configs import build_config
from bloomery.model.io.stored import tensor_locations
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.ownership import HeldTensor, OwnedTensor, assign_owners
from bloomery.plan.pipeline import even_groups
from bloomery.recipe.schema import Model

LARGE = Model(
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    tie_embeddings=False,
)


def owners(*, replicate: int = 1, shard: int = 1, stages: int = 1, model: Model = LARGE):
    """The owners of the weights and AdamW's states of a model, as ranks of this mesh would find them."""
    config = build_config(model, vocab_size=128256)
    mesh = Mesh(replicate=replicate, shard=shard, stages=stages)
    stage_of_layer = [
        stage
        for stage, count in enumerate(even_groups(config.num_layers, stages))
        for _ in range(count)
    ]
    held_by_stage: list[list[HeldTensor]] = [[] for _ in range(stages)]
    full_rows_by_stage: list[list[int]] = [[] for _ in range(stages)]
    for part, slots in {"model": [""], "optimizer": [".exp_avg", ".exp_avg_sq"]}.items():
        for name, shape in parameter_shapes(config).items():
            stage = 0 if "embed" in name else stages - 1
            if ".layers." in name:
                stage = stage_of_layer[int(name.split(".")[2])]
            for slot in slots:
                rows = -(-shape[0] // shard) if len(shape) > 1 else shape[0]
                held = HeldTensor(
                    part, name + slot, "float32", (rows, *shape[1:]), is_rows=len(shape) > 1
                )
                held_by_stage[stage].append(held)
                full_rows_by_stage[stage].append(shape[0])
    rows_by_rank = [
        [
            min(held.rows, max(0, full_rows - rank % shard * held.rows))
            if held.is_rows
            else held.rows
            for held, full_rows in zip(
                held_by_stage[rank // mesh.data_world],
                full_rows_by_stage[rank // mesh.data_world],
                strict=True,
            )
        ]
        for rank in range(mesh.world)
    ]
    owned_tensors = assign_owners(
        held_by_stage,
        rows_by_rank,
        mesh,
        locations_by_part={"model": tensor_locations(config)},
        divided_parts=("model", "optimizer"),
    )
    return owned_tensors, mesh, config


MESHES = {
    "8 shards": {"shard": 8},
    "8 x 8": {"replicate": 8, "shard": 8},
    "4 stages of 16 x 8": {"replicate": 16, "shard": 8, "stages": 4},
    "7 copies": {"replicate": 7},
}


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_owners_have_equal_bytes_and_every_byte_has_one_sender(axes) -> None:
    owned_tensors, mesh, config = owners(**axes)
    bytes_by_owner: Counter[tuple[str, int]] = Counter()
    for owned in owned_tensors:
        # The pieces are the tensor from its first byte to its last, of ranks in the replica of the owner.
        end = 0
        for piece in owned.pieces:
            assert piece.start == end
            end += piece.size
            assert piece.rank // mesh.shard == owned.owner // mesh.shard
        assert end == owned.bytes
        bytes_by_owner[owned.part, owned.owner] += owned.bytes
    num_weights = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    for part, bytes_per_weight in {"model": 4, "optimizer": 8}.items():
        sizes = {owner: size for (p, owner), size in bytes_by_owner.items() if p == part}
        assert sum(sizes.values()) == bytes_per_weight * num_weights
        # Tensors are whole: a rank has at most the largest one more than its share of its stage.
        largest = max(owned.bytes for owned in owned_tensors if owned.part == part)
        share = bytes_per_weight * num_weights / mesh.world
        assert max(sizes.values()) <= 1.5 * share + largest
        assert {owner // mesh.data_world for owner in sizes} == set(range(mesh.stages))


def test_files_are_numbered_and_contiguous_in_the_order_of_the_model() -> None:
    owned_tensors, _, config = owners(shard=8)
    of_model = [owned for owned in owned_tensors if owned.part == "model"]
    assert list(dict.fromkeys(owned.file for owned in of_model)) == [
        f"model-{number:05d}-of-00008.safetensors" for number in range(1, 9)
    ]
    owner_of = {owned.name: owned.owner for owned in of_model}
    in_order = [owner_of[name] for name in parameter_shapes(config)]
    assert in_order == sorted(in_order)


def test_a_small_part_is_one_file_of_the_first_rank() -> None:
    small = Model(family="llama", hidden_size=64, num_layers=2, num_heads=2)
    owned_tensors, _, _ = owners(shard=8, model=small)
    assert {owned.owner for owned in owned_tensors} == {0}
    assert {owned.file for owned in owned_tensors} == {
        "model.safetensors",
        "optimizer.safetensors",
    }
    assert sum(owned.bytes for owned in owned_tensors if owned.part == "model") < 2 * 64 * MIB


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_tensors_that_are_stored_fused_have_one_owner(family) -> None:
    config = build_config(
        Model(family=family, hidden_size=64, num_layers=2, num_heads=2), vocab_size=512
    )
    owned_tensors, _, config = owners(
        shard=2, model=Model(family=family, hidden_size=64, num_layers=2, num_heads=2)
    )
    by_name: dict[str, OwnedTensor] = {o.name: o for o in owned_tensors if o.part == "model"}
    locations = tensor_locations(config)
    shapes = parameter_shapes(config)
    assert by_name.keys() == {location.name for location in locations.values()}
    for name, location in locations.items():
        owned = by_name[location.name]
        assert owned.stored_shape == location.stored_shape(shapes[name])
        assert sum(piece.size for piece in owned.pieces if piece.name == name) == 4 * math.prod(
            shapes[name]
        )
