"""Which model fits a card: of the usual ones the first method that fits each, by the plan's own numbers. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from bloomery.facts.counting import parameter_count
from bloomery.facts.published import published_config
from bloomery.hardware.machine import Machine
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

CHATS = 1000
CHAT_TOKENS = 600
SEQUENCE_LENGTH = 2048
# What people choose between, by size: one model of each kind and size that they fine-tune.
MODELS = (
    "google/gemma-3-270m-it",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3.5-0.8B",
    "google/gemma-3-1b-it",
    "meta-llama/Llama-3.2-1B-Instruct",
    "LiquidAI/LFM2.5-1.2B-Instruct",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3.5-2B",
    "google/gemma-4-E2B-it",
    "HuggingFaceTB/SmolLM3-3B",
    "mistralai/Ministral-3-3B-Instruct-2512",
    "ibm-granite/granite-4.0-micro",
    "microsoft/Phi-4-mini-instruct",
    "Qwen/Qwen3.5-4B",
    "google/gemma-4-E4B-it",
    "allenai/Olmo-3-7B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Ministral-3-8B-Instruct-2512",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-9B",
    "google/gemma-4-12B-it",
    "microsoft/phi-4",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen/Qwen3.8-27B",
    "Qwen/Qwen3-32B",
)
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"adapter": {"kind": "lora", "target_modules": ["all-linear"]}},
    "QLoRA": {
        "adapter": {"kind": "lora", "target_modules": ["all-linear"]},
        "quantize": {"kind": "nf4"},
    },
    "full": {"adapter": {"kind": "none"}},
}


@dataclass(frozen=True)
class ModelFit:
    """A model of MODELS on a machine. `method`: the first one that fits, LoRA or QLoRA, and its `plan` for one epoch of
    1,000 chats; "" and None where none fits. `fits_in_full`: full fine-tuning fits, too.
    """

    name: str
    parameters: int
    method: str = ""
    plan: RunPlan | None = None
    fits_in_full: bool = False


def known_models() -> list[str]:
    """Models of the table whose architecture is trained here, by their number of parameters."""
    sizes = {
        name: parameter_count(config)
        for name in MODELS
        if (config := published_config(name)) is not None and config.experts is None
    }
    return sorted(sizes, key=lambda name: sizes[name])


def model_fits(machine: Machine, *, count: int = 1) -> Iterator[ModelFit]:
    """Each known model, the smallest first. `count`: devices of the machine's kind that train together."""
    for name in known_models():
        yield model_fit(name, machine, count=count)


def model_fit(name: str, machine: Machine, *, count: int = 1) -> ModelFit:
    config = published_config(name)
    assert config is not None, name
    parameters = parameter_count(config)
    for method in ("LoRA", "QLoRA"):
        plan = _planned(name, method, machine, count)
        if plan is None:
            continue
        # Full fine-tuning takes 16 bytes per weight at first sight: only then it is planned.
        is_small = 12 * parameters < plan.memory.limit * count
        fits_in_full = (
            method == "LoRA" and is_small and _planned(name, "full", machine, count) is not None
        )
        return ModelFit(name, parameters, method, plan, fits_in_full)
    return ModelFit(name, parameters)


def _planned(name: str, method: str, machine: Machine, count: int) -> RunPlan | None:
    """One epoch of the chats; None where the model does not fit."""
    config = published_config(name)
    assert config is not None, name
    recipe = Recipe.model_validate(
        {
            "model": {"from": name},
            "data": {"path": "chats.jsonl", "sequence_length": SEQUENCE_LENGTH},
            "objective": {"kind": "sft"},
            "train": {"epochs": 1, "batch_size": 16},
            "parallel": {"stream": "off"},  # a GPU of any size holds one layer after the other
            **METHODS[method],
        }
    )
    loaded = LoadedRecipe(recipe, "which-model", {})
    facts = facts_of(loaded, machine, dataset=_chats(config.vocab_size))
    plan = resolve(loaded, facts, gpus=count)
    return plan if plan.fits else None


@cache
def _chats(vocab_size: int) -> DatasetFacts:
    """In packed sequences."""
    tokens = CHATS * CHAT_TOKENS
    return DatasetFacts(
        sequences_per_epoch=-(-tokens // SEQUENCE_LENGTH),
        tokens=tokens,
        vocab_size=vocab_size,
        loss_share=0.6,
        template="the tokenizer's own template",
    )
