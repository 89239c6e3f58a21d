"""Shapes that a plan knows without a download, against the numbers that the models' own files and cards state."""

import pytest

from bloomery.model.counting import parameter_count
from bloomery.model.presets import published_config

# Half of `total_size` in model.safetensors.index.json, where weights are bfloat16, or the count on the model's page.
COUNTS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_the_files_hold(name):
    assert parameter_count(published_config(name)) == COUNTS[name]


def test_llama_3_stretches_its_positions_and_groups_its_queries():
    config = published_config("meta-llama/Llama-3.1-8B-Instruct@main")
    assert (config.max_positions, config.num_kv_heads, config.rope_scaling.kind) == (131_072, 8, "llama3")
    assert published_config("meta-llama/Llama-2-7b-chat-hf").num_kv_heads == 32


def test_a_model_that_is_not_in_the_table_is_unknown():
    assert published_config("org/model") is None
