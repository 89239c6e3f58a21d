"""What ranks pin on a node: it cannot be swapped out, so a node that has less is named before the run."""

import pytest
from plan_help import gpu_machine, reported

from bloomery.core.units import GIB
from bloomery.recipe.load import load_recipe


def test_a_node_with_less_memory_than_its_ranks_pin_is_named() -> None:
    recipe = load_recipe("llama2-7b-full-24gb", ["optimizer.kind=adamw", "optimizer.offload=true"])
    small = gpu_machine("MI300X")
    large = small.model_copy(
        update={"host": small.host.model_copy(update={"memory_bytes": 512 * GIB})}
    )
    [warning] = [text for text in reported(recipe, small).warnings if "host memory" in text]
    assert "a node of 32.0 GiB needs" in warning and "offload less" in warning
    assert not [text for text in reported(recipe, large).warnings if "host memory" in text]


@pytest.mark.parametrize("gpu", ["MI300X", "RTX 4090"])
def test_a_run_that_pins_nothing_is_not_warned_of_a_save(gpu: str) -> None:
    recipe = load_recipe("qwen2.5-0.5b-lora", [])
    assert not [
        text for text in reported(recipe, gpu_machine(gpu)).warnings if "host memory" in text
    ]
