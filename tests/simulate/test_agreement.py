"""The three figures of one step: from shapes, on fake tensors, and measured in live bytes on this CPU."""

import pytest
from plan_help import gpu_machine, machine
from steps_for_tests import counted, measured, simulated, small_plan

from bloomery.hardware.profile import build_profile
from bloomery.plan.resolve import resolve
from bloomery.recipe.load import load_recipe

RECIPES = ["demo", "go-coder-tiny", "go-coder-125m", "go-coder-medium", "everything"]
DEVICES = [
    "cpu",
    "RX 6700 XT",  # blockwise, float16
    "MI300X",  # compiled; the demo with varlen, the others with dropout and blockwise
    "MI50 16GB",  # as seed 000 would run it
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_and_fake_tensors_agree_on_the_packaged_recipes(recipe, device):
    here = machine() if device == "cpu" else gpu_machine(device)
    plan = resolve(load_recipe(recipe), here)
    figure = simulated(plan, fused=build_profile(here).attention.value == "fused")
    assert plan.memory.allocated == pytest.approx(figure, rel=0.08)


@pytest.mark.parametrize("device", ["RX 6700 XT", "MI300X"])
@pytest.mark.parametrize("more", ["model.dropout=0", "train.activation_checkpointing=full"])
def test_they_agree_on_flash_attention_and_on_checkpointing(device, more):
    here = gpu_machine(device)
    plan = resolve(load_recipe("go-coder-tiny", [more]), here)
    figure = simulated(plan, fused=build_profile(here).attention.value == "fused")
    assert plan.memory.allocated == pytest.approx(figure, rel=0.08)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_both_agree_with_what_a_step_holds_here(family, precision, dropout, checkpointing):
    plan = small_plan(family, dropout=dropout, precision=precision, activation_checkpointing=checkpointing)
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.03)
    assert counted(plan) == pytest.approx(real, rel=0.10)


OTHERS = {
    "sdpa, every score kept": {"attention": "sdpa", "dropout": 0.1},
    "mask": {"attention": "mask", "precision": "bfloat16"},
    "math": {"attention": "math", "precision": "bfloat16-pure"},
    "blockwise, float16": {"attention": "blockwise", "precision": "float16", "dropout": 0.1},
    "selective": {"activation_checkpointing": "selective", "precision": "bfloat16"},
    "every second layer": {"activation_checkpointing": "every-2", "precision": "bfloat16"},
    "three micro-batches": {"micro_batches": 3, "precision": "bfloat16"},
    "chunks of scores": {"chunk": 256, "precision": "bfloat16", "sizes": {"vocab_size": 9000}},
    "Muon": {"optimizer": "muon", "activation_checkpointing": "full"},
    "Adafactor": {"optimizer": "adafactor", "sizes": {"vocab_size": 9000}},
}


@pytest.mark.parametrize("case", OTHERS)
def test_and_so_do_other_ways_to_train(case):
    plan = small_plan(**({"family": "qwen3"} | OTHERS[case]))
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.03)
    assert counted(plan) == pytest.approx(real, rel=0.10)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_compiled_blocks_agree_with_what_the_compiler_makes(family):
    plan = small_plan(family, precision="bfloat16", compile=True)
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.05)
    assert counted(plan) == pytest.approx(real, rel=0.10)
