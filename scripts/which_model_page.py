"""Writes the tables of docs/how-to/which-model.md: which model fits which card, by the plan's own numbers.

    python scripts/which_model_page.py

For each card and model the first method that fits: LoRA over bfloat16 weights, else QLoRA; full fine-tuning where it
fits, too. Shapes come from facts/published.toml; a model that it lacks is named below the tables.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bloomery.core.units import GIB, format_count, two_digits
from bloomery.facts.counting import parameter_count
from bloomery.facts.published import published_config, published_entry
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/how-to/which-model.md"
TABLE = re.compile(r"<!-- (cards|missing) -->\n.*?<!-- end -->", re.DOTALL)

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


@dataclass(frozen=True)
class Card:
    """A row of the page's tables. `gpu` is a name of the table of GPUs; None: the CPU alone."""

    title: str
    gpu: str | None
    count: int = 1


CARDS = (
    Card("12 GB: Radeon RX 6700 XT", "RX 6700 XT"),
    Card("16 GB: GeForce RTX 4060 Ti 16GB", "RTX 4060 Ti 16GB"),
    Card("24 GB: Radeon RX 7900 XTX", "RX 7900 XTX"),
    Card("2 x 24 GB: two GeForce RTX 3090", "RTX 3090", 2),
    Card("192 GB: Instinct MI300X", "MI300X"),
    Card("No GPU: a CPU with AVX-512 and bfloat16, 8 cores, 32 GB of memory", None),
)
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"adapter": {"kind": "lora", "target_modules": ["all-linear"]}},
    "QLoRA": {
        "adapter": {"kind": "lora", "target_modules": ["all-linear"]},
        "quantize": {"kind": "nf4"},
    },
    "full": {"adapter": {"kind": "none"}},
}


def machine(card: Card) -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=8,
        cpu_flags=("avx2", "avx512f", "avx512_bf16"),
        memory_bytes=64 * GIB if card.gpu else 32 * GIB,
        memory_free_bytes=60 * GIB if card.gpu else 30 * GIB,
        disk_free_bytes=500 * GIB,
        compiler="/usr/bin/g++",
    )
    software = Software(python="3.12.4", torch="2.13.0+cpu", build="cpu")
    bare = Machine(accelerators=(), host=host, software=software)
    return bare if card.gpu is None else with_gpu(bare, find_gpu(card.gpu))


@cache
def dataset(vocab_size: int) -> DatasetFacts:
    """The chats in packed sequences."""
    tokens = CHATS * CHAT_TOKENS
    return DatasetFacts(
        sequences_per_epoch=-(-tokens // SEQUENCE_LENGTH),
        tokens=tokens,
        vocab_size=vocab_size,
        loss_share=0.6,
        template="the tokenizer's own template",
    )


def planned(name: str, method: str, card: Card) -> RunPlan | None:
    """One epoch of the chats; None where the model does not fit."""
    config = published_config(name)
    assert config is not None
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
    facts = facts_of(loaded, machine(card), dataset=dataset(config.vocab_size))
    plan = resolve(loaded, facts, gpus=card.count)
    return plan if plan.fits else None


def row(name: str, card: Card) -> list[str] | None:
    """The cells of a model that fits."""
    config = published_config(name)
    assert config is not None
    for method in ("LoRA", "QLoRA"):
        if (plan := planned(name, method, card)) is None:
            continue
        # Full fine-tuning takes 16 bytes per weight at first sight: only then it is planned.
        is_small = 12 * parameter_count(config) < plan.memory.limit * card.count
        fits_in_full = method == "LoRA" and is_small and planned(name, "full", card) is not None
        return [
            f"`{name}`",
            format_count(parameter_count(config)),
            f"{method}, or full" if fits_in_full else method,
            str(plan.train.micro_batch_size),
            f"{plan.memory.total / GIB:.1f}",
            time(plan),
        ]
    return None


def time(plan: RunPlan) -> str:
    """Of one epoch, with the range of the plan, in minutes or hours."""
    if plan.seconds is None:
        return "unknown"
    size, unit = (3600, "h") if plan.seconds.value >= 5400 else (60, "min")
    ends = (plan.seconds.value, plan.seconds.low, plan.seconds.high)
    value, low, high = (seconds / size for seconds in ends)
    return f"{rounded(value)} {unit} ({rounded(low)} to {rounded(high)})"


def rounded(value: float) -> str:
    return two_digits(value) if value >= 10 else f"{value:.1f}"


def known_models() -> list[str]:
    """Models of the table whose architecture is trained here, by their number of parameters."""
    known = [
        name for name in MODELS if (config := published_config(name)) and config.experts is None
    ]
    return sorted(known, key=lambda name: parameter_count(published_config(name)))  # type: ignore[arg-type]  # known


def card_tables() -> Iterator[str]:
    for card in CARDS:
        yield from section(card)


def section(card: Card) -> Iterator[str]:
    """The heading, the table and the models that are too large."""
    yield f"## {card.title}"
    yield ""
    rows = {name: row(name, card) for name in known_models()}
    yield "| model | parameters | method | micro-batch | GiB | 1,000 chats |"
    yield "|---|--:|---|--:|--:|--:|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows.values() if cells is not None)
    yield ""
    too_large = [f"`{name}`" for name, cells in rows.items() if cells is None]
    if too_large:
        yield f"Too large: {', '.join(too_large)}."
        yield ""


def missing() -> Iterator[str]:
    """The models that the table of shapes lacks."""
    names = [f"`{name}`" for name in MODELS if published_entry(name) is None]
    if names:
        yield f"Not in the table of shapes: {', '.join(names)}. `bloomery plan --model NAME` downloads a config.json."
    else:
        yield "Every model that this page means to compare is in its tables."


def refreshed(text: str) -> str:
    """The page with today's tables."""
    tables = {"cards": card_tables, "missing": missing}

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(tables[match[1]]()).strip("\n")
        return f"<!-- {match[1]} -->\n{lines}\n<!-- end -->"

    return TABLE.sub(table, text)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    new_text = refreshed(text)
    if new_text != text:
        PAGE.write_text(new_text, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)} is rewritten")


if __name__ == "__main__":
    main()
