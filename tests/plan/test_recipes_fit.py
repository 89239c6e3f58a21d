"""The GPU in the first line of a packaged recipe is the smallest one, as the planner computes it."""

import re

import pytest
from plan_help import gpu_machine, planned

from bloomery.core.errors import UserError
from bloomery.recipe.load import load_recipe, packaged

# usual GPUs of these sizes
OF_SIZE = {8: "RTX 4060", 12: "RTX 4070", 16: "RTX 4060 Ti 16GB", 24: "RTX 4090", 32: "RTX 5090"}
SMALLEST = (
    "train.micro_batch_size=1",
    "train.activation_checkpointing=full",
    "parallel.stream=off",  # any GPU holds one layer after the other
)
FIRST_LINE = re.compile(r"# (SFT) \+ (LoRA|QLoRA): [^,]+, [^,]+, one (\d+) GB GPU\.")
NEW = (
    "qwen3-0.6b-lora",
    "qwen3-1.7b-lora",
    "qwen3-4b-lora",
    "qwen3-8b-qlora",
    "gemma3-1b-lora",
    "gemma3-4b-qlora",
    "gemma4-e2b-lora",
    "gemma4-e4b-qlora",
    "gemma4-12b-qlora",
    "phi4-mini-qlora",
    "smollm3-3b-qlora",
    "llama3.2-1b-lora",
    "llama3.2-3b-qlora",
    "qwen3.5-0.8b-lora",
    "qwen3.5-2b-lora",
    "qwen3.5-4b-qlora",
    "qwen3.5-9b-qlora",
    "qwen3.8-27b-qlora",
    "lfm2.5-1.2b-lora",
    "olmo3-7b-qlora",
    "ministral3-3b-lora",
    "ministral3-8b-qlora",
    "granite4-micro-lora",
    "granite3.1-1b-a400m-lora",
    "olmoe-1b-7b-lora",
    "qwen3-30b-a3b-qlora",
    "qwen3.5-35b-a3b-qlora",
    "gpt-oss-20b-lora",
)


def holds(name: str, size: int) -> bool:
    """Whether also the upper end of the memory range fits, at a micro-batch of one sequence with recomputation."""
    memory = planned(load_recipe(name, SMALLEST), gpu_machine(OF_SIZE[size])).memory
    return memory.high <= memory.limit


@pytest.mark.parametrize("name", NEW)
def test_the_first_line_names_method_and_smallest_gpu(name, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    match = FIRST_LINE.match(packaged()[name].read_text(encoding="utf-8"))
    method, size = match[2], int(match[3])
    recipe = load_recipe(name).recipe
    assert (recipe.quantize.kind == "nf4") == (method == "QLoRA") and recipe.adapter.kind == "lora"
    # a name that ends with "lora" may be of either
    assert (
        method.lower().endswith(name.rpartition("-")[2])
        and recipe.objective.kind == match[1].lower()
    )
    assert [smaller for smaller in OF_SIZE if smaller <= size and holds(name, smaller)] == [size]
    assert planned(load_recipe(name), gpu_machine(OF_SIZE[size])).fits


def test_flash_attention_is_refused_for_wider_heads_than_its_own(monkeypatch):
    """Gemma 4's full attention has heads of 512 numbers; at its window's length flash attention would be chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    short = (*SMALLEST, "data.sequence_length=1024")
    card = gpu_machine(OF_SIZE[24])
    assert planned(load_recipe("gemma4-12b-qlora", short), card).model.attention == "flex"
    assert planned(load_recipe("gemma3-4b-qlora", short), card).model.attention == "varlen"
    with pytest.raises(UserError, match="heads of at most 256"):
        planned(load_recipe("gemma4-12b-qlora", (*short, "train.attention=varlen")), card)
