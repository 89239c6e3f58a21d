"""Shapes that a plan knows without a download, against the numbers that the models' own files and cards state."""

import tomllib
from importlib import resources

import pytest

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import active_parameter_count, flops_per_token, layers, parameter_count
from bloomery.facts.published import (
    Published,
    entry_config,
    published_config,
    published_models,
    similar_names,
)
from bloomery.model.configs import known_config

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
# What llama.cpp reports for GGUF files of language models: also frequencies of rotation, and keys that no layer uses.
OF_GGUF_FILES = {
    "google/gemma-4-E2B-it": 4_647_450_147,
    "google/gemma-4-E4B-it": 7_518_069_290,
    "google/gemma-4-12B-it": 11_907_350_576,
    "google/gemma-4-31B-it": 30_697_345_596,
}
UNITS = {"B": 1e9, "M": 1e6}


def is_near(count: float, stated_count: str) -> bool:
    """Cards round or cut off: within one unit of the last digit that is written."""
    digits = stated_count[:-1]
    unit = UNITS[stated_count[-1]]
    return abs(count / unit - float(digits)) <= 10.0 ** -len(digits.partition(".")[2])


def first_name(entry: Published) -> str:
    return entry.names[0]


@pytest.mark.parametrize("name", COUNTS)
def test_the_parameter_count_is_that_of_the_files(name):
    assert parameter_count(published_config(name)) == COUNTS[name]


@pytest.mark.parametrize("name", OF_GGUF_FILES)
def test_the_parameter_count_is_that_of_llama_cpp(name):
    config = published_config(name)
    unused = sum(
        2 * layer.key_width * layer.hidden_size + layer.head_dim
        for layer in layers(config)
        if layer.keys_of is not None
    )
    frequencies = max(layer.head_dim for layer in layers(config)) // 2
    assert parameter_count(config) + unused + frequencies == OF_GGUF_FILES[name]


@pytest.mark.parametrize("entry", published_models(), ids=first_name)
def test_the_parameter_count_is_that_of_the_model_card(entry):
    config = entry_config(entry, where=entry.names[0])
    count = parameter_count(config)
    assert (
        count == entry.parameters
        if isinstance(entry.parameters, int)
        else is_near(count, entry.parameters)
    )
    active_count = active_parameter_count(config)
    if entry.active is None:
        assert active_count == count and config.experts is None
    else:  # GPT-OSS leaves its input embeddings out of this count
        assert is_near(active_count, entry.active) or is_near(
            active_count - config.vocab_size * config.hidden_size, entry.active
        )


def test_the_table_has_sources_and_sixty_models():
    text = (resources.files("bloomery.facts") / "published.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    assert len(table["model"]) >= 60
    for entry in table["model"]:
        assert {entry["source"], entry["counted"]} <= set(table["sources"]), entry["names"]
        assert set(entry) <= {
            "names",
            "kind",
            "parameters",
            "active",
            "source",
            "counted",
            "config",
        }
    names = [name.lower() for entry in table["model"] for name in entry["names"]]
    assert len(names) == len(set(names))


def test_mirrors_and_other_spellings_are_the_same_model():
    config = published_config("meta-llama/Llama-3.1-8B-Instruct")
    for name in (
        "NousResearch/Meta-Llama-3.1-8B-Instruct",
        "unsloth/Meta-Llama-3.1-8B-Instruct",
        "unsloth/Llama-3.1-8B-Instruct@main",
        "meta-llama/llama-3.1-8b-instruct",
    ):
        assert published_config(name) == config, name
    assert parameter_count(published_config("gpt2")) == 124_439_808
    assert published_config("someone/Llama-3.1-8B-Instruct") is None
    assert "Qwen/Qwen3-8B" in similar_names("org/Qwen-3-8B")


def test_a_mixture_of_experts_is_counted_by_hand():
    """Qwen3 30B-A3B: 48 layers of 128 experts with three matrices of 2,048 x 768, of which a token meets 8."""
    config = published_config("Qwen/Qwen3-30B-A3B")
    attention = 2048 * (2 * 32 * 128 + 2 * 4 * 128)
    expert = 3 * 2048 * 768
    router = 128 * 2048
    norms = 2 * 2048 + 2 * 128
    embeddings = 2 * 151_936 * 2048 + 2048
    assert parameter_count(config) == embeddings + 48 * (attention + norms + router + 128 * expert)
    assert active_parameter_count(config) == embeddings + 48 * (
        attention + norms + router + 8 * expert
    )
    assert layers(config)[0].active_products == attention + router + 8 * expert
    scores = 4 * 1024 * 32 * 128
    products = 2 * (48 * (attention + router + 8 * expert) + 151_936 * 2048) + 48 * scores
    assert flops_per_token(config, 1024, backward=False) == products
    assert known_config("Qwen/Qwen3-30B-A3B") == config


def test_llama_3_has_scaled_positions_and_grouped_queries():
    config = published_config("meta-llama/Llama-3.1-8B-Instruct@main")
    assert isinstance(config, ModelConfig)
    assert (config.max_positions, config.num_kv_heads, config.rope_scaling.kind) == (
        131_072,
        8,
        "llama3",
    )
    assert published_config("meta-llama/Llama-2-7b-chat-hf").num_kv_heads == 32


def test_only_the_first_mistral_has_a_window():
    assert set(published_config("mistralai/Mistral-7B-v0.1").sliding_window) == {4096}
    for name in (
        "Mistral-7B-v0.3",
        "Mistral-Nemo-Base-2407",
        "Mistral-Small-24B-Instruct-2501",
        "Mixtral-8x7B-v0.1",
    ):
        assert published_config(f"mistralai/{name}").sliding_window == (), name
    assert published_config("google/gemma-2-9b").sliding_window[:2] == (4096, None)


def test_a_model_that_is_not_in_the_table_is_unknown():
    assert published_config("org/model") is None
