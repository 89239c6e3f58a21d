"""Prints the tables of docs/explanation/memory.md.

Usage: `python tests/simulate/figures.py recipes`, or `steps`, `shards`, `stages`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "plan"), str(ROOT / "benchmarks")]

from plan_help import gpu_machine, loaded, machine, planned  # noqa: E402
from steps_for_tests import both_of_stage, counted, laid, measured, simulated, small_plan  # noqa: E402

from bloomery.core.units import MIB  # noqa: E402
from bloomery.hardware.profile import build_profile  # noqa: E402
from bloomery.recipe.load import LoadedRecipe, load_recipe  # noqa: E402
from bloomery.simulate.run import MeshSplit, passes_in_flight, stages_of_kinds  # noqa: E402

STEPS = {
    "Llama's shape, float32": {},
    "Llama's shape, bfloat16": {"precision": "bfloat16"},
    "the same, checkpointing full": {"precision": "bfloat16", "activation_checkpointing": "full"},
    "the same, checkpointing selective": {
        "precision": "bfloat16",
        "activation_checkpointing": "selective",
    },
    "the same, three micro-batches": {"precision": "bfloat16", "micro_batches": 3},
    "the same, compiled": {"precision": "bfloat16", "compile": True},
    "GPT-2's shape, float32, dropout": {"family": "gpt2", "dropout": 0.1},
    "GPT-2's shape, bfloat16, dropout": {"family": "gpt2", "dropout": 0.1, "precision": "bfloat16"},
    "the same with `sdpa`: every score kept": {
        "family": "gpt2",
        "dropout": 0.1,
        "precision": "bfloat16",
        "attention": "sdpa",
    },
    "Qwen 3's shape, bfloat16-pure": {"family": "qwen3", "precision": "bfloat16-pure"},
}


def recipes() -> None:
    print(
        "| recipe | device | counted MiB | simulated MiB | difference | measured MiB |\n|---|---|--:|--:|--:|--:|"
    )
    for recipe in ("demo", "go-coder-tiny", "go-coder-125m", "go-coder-medium"):
        for device in ("a CPU", "RX 6700 XT", "MI300X", "MI50 16GB"):
            here = machine() if device == "a CPU" else gpu_machine(device)
            plan = planned(load_recipe(recipe), here)
            fake = simulated(plan, fused=build_profile(here).attention.value == "fused")
            told = plan.memory.allocated
            row = f"| {recipe} | {device} | {told / MIB:,.0f} | {fake / MIB:,.0f} | {told / fake - 1:+.1%} |"
            print(row, f"{measured(plan) / MIB:,.0f} |" if device == "a CPU" else "|", flush=True)


def steps() -> None:
    print("| step | counted MiB | simulated MiB | measured MiB |\n|---|--:|--:|--:|")
    for name, settings in STEPS.items():
        plan = small_plan(**settings)
        figures = counted(plan), simulated(plan), measured(plan)
        print(
            f"| {name} | " + " | ".join(f"{figure / MIB:.1f}" for figure in figures) + " |",
            flush=True,
        )


LLAMA = {
    "family": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "max_positions": 8192,
    "vocab_size": 128256,
}


def large(tokens: int) -> LoadedRecipe:
    return loaded(
        model=LLAMA,
        data={"sequence_length": 8192},
        train={"tokens_per_step": tokens, "precision": "bfloat16"},
    )


def shards() -> None:
    jobs = [
        ("go-coder-125m", load_recipe("go-coder-125m"), "MI250X", 8, 1),
        ("go-coder-medium", load_recipe("go-coder-medium"), "MI300X", 8, 2),
        ("Llama 3.1 8B's shape", large(2**24), "MI300X", 8, 64),
    ]
    print("| recipe | devices | counted MiB | simulated MiB | difference |\n|---|---|--:|--:|--:|")
    for name, recipe, gpu, gpus, nodes in jobs:
        plan = planned(recipe, gpu_machine(gpu), gpus=gpus, nodes=nodes)
        for layout in plan.parallel.layouts:
            if layout.shard > 1 and layout.pipeline == 1:
                told = layout.memory.allocated
                fake = simulated(laid(plan, layout), split=MeshSplit.of(layout))
                devices = f"{nodes * gpus} x {gpu}: {layout.replicate} x {layout.shard} shards"
                row = f"| {name} | {devices} | {told / MIB:,.0f} | {fake / MIB:,.0f} | {told / fake - 1:+.1%} |"
                print(row, flush=True)


def stages() -> None:
    jobs = [
        ("go-coder-125m", load_recipe("go-coder-125m"), "RX 6700 XT"),
        ("go-coder-125m", load_recipe("go-coder-125m"), "MI250X"),
        ("go-coder-medium", load_recipe("go-coder-medium"), "MI300X"),
        ("Llama 3.1 8B's shape", large(2**20), "MI300X"),
    ]
    print("| recipe | devices | stage | micro-batches | counted MiB | simulated MiB | difference |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name, recipe, gpu in jobs:
        here = gpu_machine(gpu)
        plan = planned(recipe, here, gpus=8)
        for layout in plan.parallel.layouts:
            split = MeshSplit.of(layout)
            own = laid(plan, layout)
            for index in stages_of_kinds(own, split) if layout.pipeline == 8 else []:
                told, fake = both_of_stage(
                    own, split, index, fused=build_profile(here).attention.value == "fused"
                )
                in_flight = passes_in_flight(own, split, index)
                row = f"| {name} | 8 x {gpu} | {index + 1} of {split.pipeline} | {in_flight} |"
                print(
                    row,
                    f"{told / MIB:,.0f} | {fake / MIB:,.0f} | {told / fake - 1:+.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    {"recipes": recipes, "steps": steps, "shards": shards, "stages": stages}[sys.argv[1]]()
