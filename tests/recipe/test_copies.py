"""Names of quantized copies in examples of other trainers, and the model that a recipe trains for each."""

import pytest

from bloomery.facts.copies import quantized_copy
from bloomery.facts.published import original_of, published_config
from bloomery.recipe.importing import import_recipe
from bloomery.recipe.load import load_recipe

NAMES = {
    "unsloth/Qwen3-8B-unsloth-bnb-4bit": ("unsloth/Qwen3-8B", "nf4"),
    "unsloth/llama-3-8b-bnb-4bit": ("unsloth/llama-3-8b", "nf4"),
    "unsloth/Qwen3.5-9B-GGUF": ("unsloth/Qwen3.5-9B", "none"),
    "mlx-community/Llama-3.2-3B-Instruct-4bit": ("meta-llama/Llama-3.2-3B-Instruct", "nf4"),
    "mlx-community/gemma-3-4b-it-4bit-DWQ": ("google/gemma-3-4b-it", "nf4"),
    "mlx-community/Qwen3-4B-8bit": ("Qwen/Qwen3-4B", "int8"),
    "mlx-community/Qwen3-4B-bf16": ("Qwen/Qwen3-4B", "none"),
    "Qwen/Qwen3-8B-AWQ": ("Qwen/Qwen3-8B", "nf4"),
    "Qwen/Qwen3-1.7B-GPTQ-Int8": ("Qwen/Qwen3-1.7B", "int8"),
    "Qwen/Qwen3.5-27B-FP8": ("Qwen/Qwen3.5-27B", "none"),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ("Qwen/Qwen2.5-7B-Instruct", "nf4"),
    "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ": ("mistralai/Mistral-7B-Instruct-v0.2", "nf4"),
    "RedHatAI/Llama-3.2-1B-Instruct-FP8-dynamic": ("meta-llama/Llama-3.2-1B-Instruct", "none"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "nf4",
    ),
    "nvidia/Qwen3-8B-NVFP4": ("Qwen/Qwen3-8B", "nf4"),
    "bartowski/google_gemma-3-4b-it-GGUF": ("google/gemma-3-4b-it", "none"),
    "lmstudio-community/Qwen3-8B-MLX-4bit": ("Qwen/Qwen3-8B", "nf4"),
    "ggml-org/SmolLM3-3B-GGUF": ("HuggingFaceTB/SmolLM3-3B", "none"),
    "me/Something-else-Q4_K_M-GGUF": (None, "none"),
    "me/Something-AWQ": (None, "nf4"),
}
PLAIN = (
    "Qwen/Qwen3-8B",
    "google/gemma-3-4b-it",
    "./models/x-GGUF/y/z",
    "openai/gpt-oss-20b",
    "me/4bit",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_behind_a_copy(name: str) -> None:
    copy = quantized_copy(name)
    assert copy is not None and (original_of(copy), copy.quantize) == NAMES[name]


def test_models_in_full_precision_are_no_copies() -> None:
    assert [name for name in PLAIN if quantized_copy(name) is not None] == []


def test_a_copy_has_the_shape_of_its_original() -> None:
    config = published_config("Qwen/Qwen3-8B")
    for name in ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B-FP8", "me/Qwen3-8B-AWQ@main"):
        assert published_config(name) == config, name
    assert published_config("me/Something-else-AWQ") is None


AXOLOTL = """\
base_model: {name}
datasets: [{{path: chats.jsonl, type: chat_template}}]
adapter: {adapter}
sequence_len: 512
micro_batch_size: 2
num_epochs: 1
"""


@pytest.mark.parametrize(
    ("name", "adapter", "model", "quantize", "said"),
    [
        ("Qwen/Qwen3-8B-AWQ", "lora", "Qwen/Qwen3-8B", "nf4", "AWQ, 4 bits"),
        ("unsloth/Qwen3-8B-GGUF", "lora", "unsloth/Qwen3-8B", "none", "a copy (GGUF)"),
        ("Qwen/Qwen3-8B-FP8", "lora", "Qwen/Qwen3-8B", "none", "trained on the copy"),
        ("me/Mine-AWQ", "lora", "me/Mine-AWQ", "none", "a frozen base"),
        ("me/Mine-GGUF", "lora", "MODEL", "none", "name the model that it was made from"),
    ],
)
def test_an_imported_recipe_names_the_model(name, adapter, model, quantize, said, tmp_path) -> None:
    (tmp_path / "config.yml").write_text(AXOLOTL.format(name=name, adapter=adapter))
    text, tool = import_recipe(tmp_path / "config.yml")
    assert tool == "Axolotl" and said in " ".join(text.split())
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    assert (recipe.model.from_, recipe.quantize.kind) == (model, quantize)
