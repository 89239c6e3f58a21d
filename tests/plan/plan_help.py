"""Machines and recipes that the tests of planning share."""

from typing import Any

from bloomery.core.units import GIB
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.advise import advise
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import DatasetFacts, PlanReport, RunPlan
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe

SMALL = {
    "family": "llama",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 128,
    "vocab_size": 256,
}


def machine(
    *,
    flags: tuple[str, ...] = ("avx2", "avx512f", "avx512_bf16"),
    cores: int = 2,
    free_gib: float = 20,
) -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=cores,
        cpu_flags=flags,
        memory_bytes=32 * GIB,
        memory_free_bytes=int(free_gib * GIB),
        disk_free_bytes=100 * GIB,
        compiler="/usr/bin/g++",
    )
    return Machine(
        accelerators=(),
        host=host,
        software=Software(python="3.12.4", torch="2.13.0+cpu", build="cpu"),
    )


def gpu_machine(name: str) -> Machine:
    return with_gpu(machine(), find_gpu(name))


def loaded(**sections: Any) -> LoadedRecipe:
    """A small pretraining recipe with the given sections on top."""
    defaults: dict[str, Any] = {
        "model": SMALL,
        "data": {"builtin": "stdlib-code", "sequence_length": 128},
        "train": {"max_steps": 100, "tokens_per_step": 1024},
    }
    if {"epochs", "max_steps", "max_tokens", "max_time"} & set(sections.get("train", {})):
        defaults["train"].pop("max_steps")
    merged = {
        key: {**defaults.get(key, {}), **sections.get(key, {})}
        if key in defaults
        else sections[key]
        for key in {**defaults, **sections}
    }
    return LoadedRecipe(Recipe.model_validate(merged), "small", {})


def planned(
    loaded: LoadedRecipe,
    machine: Machine,
    *,
    dataset: DatasetFacts | None = None,
    gpus: int = 1,
    nodes: int = 1,
) -> RunPlan:
    """Without the text that may lie here."""
    return resolve(loaded, facts_of(loaded, machine, dataset=dataset), gpus=gpus, nodes=nodes)


def reported(
    loaded: LoadedRecipe,
    machine: Machine,
    *,
    dataset: DatasetFacts | None = None,
    gpus: int = 1,
    nodes: int = 1,
) -> PlanReport:
    facts = facts_of(loaded, machine, dataset=dataset)
    return advise(loaded, resolve(loaded, facts, gpus=gpus, nodes=nodes), facts)
