"""Every packaged recipe on one to eight equal GPUs of recorded machines: what `train` plans is what it can run.

With the functions that `bloomery.runs.lifecycle.start` calls before it starts a rank.
"""

from math import prod

import pytest
from test_every_gpu import RECIPES

from bloomery.hardware.machine import Machine
from bloomery.plan.gather import facts_of
from bloomery.plan.mesh import sizes_of
from bloomery.plan.resolve import resolve
from bloomery.plan.unsupported import refuse_recipe
from bloomery.recipe.load import load_recipe
from bloomery.runs.devices import chosen_devices, device_count
from changed_machines import machine

BOARDS = ("mi300x-node", "rtx-5070-ti-cuda-12.6-wheel", "mi250x-frontier-slurm", "h200")
COUNTS = range(1, 9)
# In `make test` every ninth recipe has one of the machines; in `make soak` each has each.
SOME = [
    pytest.param(name, [BOARDS[number % len(BOARDS)]], id=name)
    for number, name in enumerate(RECIPES)
]
EACH = [
    pytest.param(name, BOARDS, id=f"{name} on each", marks=pytest.mark.soak) for name in RECIPES
]


def with_boards(name: str, count: int) -> Machine:
    """The recorded machine with so many of its first GPU, and no mask that hides some."""
    recorded = machine(name)
    first = recorded.accelerators[0]
    boards = tuple(first.model_copy(update={"index": index}) for index in range(count))
    software = recorded.software.model_copy(update={"environment": {}})
    return recorded.model_copy(update={"accelerators": boards, "software": software})


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("recipe", "boards"), [*SOME, *EACH])
def test_train_runs_the_plan_that_is_chosen(recipe, boards) -> None:
    loaded = load_recipe(recipe)
    for name in boards:
        # A recipe that names stages trains on as many devices; copies of them must divide its batch.
        named = prod(size for size in sizes_of(loaded.recipe.parallel) if size != "auto")
        for count in COUNTS if named == 1 else [named]:
            # As `start` does.
            refuse_recipe(loaded.recipe)
            narrowed, chosen = chosen_devices(with_boards(name, count), None)
            assert chosen == count
            narrowed, chosen = device_count(loaded.recipe, narrowed, chosen, user_named=False)
            plan = resolve(loaded, facts_of(loaded, narrowed), gpus=chosen)
            where = f"{recipe} on {count} of {name}"
            train = plan.train
            assert train.ranks == chosen, where
            # One device where the recipe has a setting that no axis supports.
            assert chosen == (1 if loaded.recipe.optimizer.fused_backward else count), where
            assert train.sequences_per_step * plan.data.sequence_length == train.tokens_per_step, (
                where
            )
            if plan.parallel is None:
                assert train.ranks == 1, where
                continue
            layout = plan.parallel.layout
            assert (layout.pipeline, layout.replicate, layout.shard) == (
                train.pipeline,
                train.replicate,
                train.shard,
            ), where
            if (
                train.pipeline > 1
            ):  # which `plan.pipeline.stage_of` cuts, and a stage's optimizer updates
                assert len(train.pipeline_layers) % train.pipeline == 0, where
                assert sum(train.pipeline_layers) == plan.model.config.num_layers, where
                assert train.accumulation >= train.pipeline, where
            # A run with rewards also samples, and keeps what it sampled during a step.
            if plan.rollout is None:
                assert plan.memory == layout.memory, where
            else:
                phases = (plan.rollout.training_memory, plan.rollout.memory)
                assert plan.memory == max(phases, key=lambda memory: memory.total), where
                # A layout takes what its moment of most memory does: a step, or sampling.
                assert plan.memory.total >= layout.memory.total, where
            assert (train.micro_batch_size, train.accumulation) == (
                layout.micro_batch_size,
                layout.accumulation,
            )
