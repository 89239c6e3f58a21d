"""The three figures of one step: from shapes, on fake tensors, and measured in live bytes on this CPU."""

import pytest
import torch
from plan_help import gpu_machine, machine, planned
from steps_for_tests import counted, load_of, measured, simulated, small_plan, some

from bloomery.hardware.detect import detect
from bloomery.hardware.profile import build_profile
from bloomery.model.native import find_compiler
from bloomery.plan.estimate.memory import tensor_bytes
from bloomery.recipe.load import load_recipe
from bloomery.simulate.run import MeshSplit
from bloomery.simulate.step import simulated_step

WIDE = {"hidden_size": 512}
RECIPES = ["demo", "go-coder-tiny", "go-coder-125m", "go-coder-medium", "everything"]
DEVICES = [
    "cpu",
    "RX 6700 XT",  # triton, float16
    "MI300X",  # compiled; the demo with varlen, the others with dropout and triton
    "MI50 16GB",  # as seed 000 would run it
]
QUICK = {
    ("demo", "cpu"),
    ("demo", "MI300X"),
}


def agree_on(recipe, device, *overrides):
    here = machine() if device == "cpu" else gpu_machine(device)
    plan = planned(load_recipe(recipe, overrides), here)
    figure = simulated(plan, fused=build_profile(here).attention.value == "fused")
    assert plan.memory.allocated == pytest.approx(figure, rel=0.08)


@pytest.mark.parametrize(
    ("recipe", "device"), some([(r, d) for r in RECIPES for d in DEVICES], QUICK)
)
def test_shapes_and_fake_tensors_agree_on_the_packaged_recipes(recipe, device):
    agree_on(recipe, device)


@pytest.mark.parametrize("recipe", some(["demo", "go-coder-tiny", "go-coder-125m"], set()))
def test_both_agree_with_what_a_packaged_recipe_holds_here(recipe):
    plan = planned(load_recipe(recipe), machine())
    real = measured(plan)
    assert plan.memory.allocated == pytest.approx(real, rel=0.10)
    assert simulated(plan) == pytest.approx(real, rel=0.10)


WAYS = [
    (device, how)
    for device in ("RX 6700 XT", "MI300X")
    for how in ("model.dropout=0", "train.activation_checkpointing=full")
]


@pytest.mark.parametrize(("device", "how"), some(WAYS, set()))
def test_they_agree_on_flash_attention_and_on_checkpointing(device, how):
    agree_on("go-coder-tiny", device, how)


@pytest.mark.parametrize(
    ("device", "is_compiled"),
    some([("MI300X", True), ("RX 6700 XT", False)], set()),
)
def test_they_agree_on_triton_kernels(device, is_compiled):
    """Without Triton: fake tensors see shapes. An MI300X takes the kernels for dropout, in compiled blocks."""
    plan = planned(load_recipe("go-coder-tiny", ["model.dropout=0.1"]), gpu_machine(device))
    assert (plan.model.attention, plan.train.compile) == ("triton", is_compiled)
    agree_on("go-coder-tiny", device, "model.dropout=0.1")


GRID = [
    (family, precision, dropout, checkpointing)
    for family in ("gpt2", "llama")
    for precision in ("float32", "bfloat16")
    for dropout in (0.0, 0.1)
    for checkpointing in ("none", "full")
]
QUICK_OF_GRID = {
    ("llama", "bfloat16", 0.0, "full"),
}


@pytest.mark.parametrize(
    ("family", "precision", "dropout", "checkpointing"), some(GRID, QUICK_OF_GRID)
)
def test_both_agree_with_what_a_step_holds_here(family, precision, dropout, checkpointing):
    all_agree(
        small_plan(
            family, dropout=dropout, precision=precision, activation_checkpointing=checkpointing
        ),
        apart=0.03,
    )


def all_agree(plan, *, apart):
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=apart)
    assert counted(plan) == pytest.approx(real, rel=0.10)


SHARDED = {
    "bfloat16": (MeshSplit(shard=8), {"precision": "bfloat16"}),
    "compiled, small batches": (
        MeshSplit(shard=8),
        {"precision": "bfloat16", "compile": True, "rows": 1, "sizes": WIDE},
    ),
    "accumulated": (
        MeshSplit(shard=4),
        {"precision": "float16", "rows": 1, "micro_batches": 2, "sizes": WIDE},
    ),
    "a large vocabulary": (
        MeshSplit(shard=64),
        {
            "precision": "bfloat16",
            "activation_checkpointing": "full",
            "rows": 1,
            "chunk": 64,
            "sizes": {"vocab_size": 50_000, "num_layers": 2},
        },
    ),
    "float32": (MeshSplit(shard=2), {"rows": 2, "sizes": WIDE}),
    "nf4": (
        MeshSplit(shard=4),
        {
            "precision": "bfloat16",
            "base": "nf4",
            "adapter": {"kind": "lora", "rank": 8},
            "sizes": {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 4},
            "activation_checkpointing": "full",
            "rows": 1,
        },
    ),
    "copies of shards": (
        MeshSplit(replicate=2, shard=8),
        {"precision": "bfloat16-pure", "family": "gpt2"},
    ),
}


@pytest.mark.parametrize("case", some(SHARDED, {"copies of shards"}))
def test_shapes_and_fake_tensors_agree_on_shards(case):
    split, settings = SHARDED[case]
    if settings.get("precision") == "bfloat16-pure" and torch.__version__ >= "2.15":
        pytest.skip("PyTorch 2.15 cannot place the float32 norms of sharded bfloat16 gradients")
    plan = small_plan(**({"attention": "varlen", "device": "cuda"} | settings))
    assert counted(plan, split=split) == pytest.approx(simulated(plan, split=split), rel=0.08)


@pytest.mark.soak
def test_they_agree_where_selective_checkpointing_keeps_every_score():
    settings = ["attention=math", "activation_checkpointing=selective", "compile=false"]
    changes = [f"train.{setting}" for setting in (*settings, "micro_batch_size=4")]
    agree_on("go-coder-125m", "MI300X", *changes)


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
QUICK_OF_OTHERS = {"Muon"}


@pytest.mark.parametrize("case", some(OTHERS, QUICK_OF_OTHERS))
def test_and_so_do_other_ways_to_train(case):
    all_agree(small_plan(**({"family": "qwen3"} | OTHERS[case])), apart=0.03)


BF16 = {"avx512_bf16", "amx_bf16"} & set(detect().host.cpu_flags)
EVERY = {"kind": "lora", "rank": 8, "target_modules": ["all-linear"]}
FINE = {
    "LoRA on two matrices": {"adapter": {"kind": "lora", "rank": 8}, "precision": "bfloat16"},
    "LoRA on all, recomputed": {
        "adapter": EVERY,
        "precision": "bfloat16",
        "activation_checkpointing": "full",
    },
    "LoRA in float32": {"adapter": EVERY},
    "LoRA with dropout": {"adapter": EVERY | {"dropout": 0.1}, "precision": "bfloat16"},
    "DoRA": {"adapter": EVERY | {"kind": "dora"}, "precision": "bfloat16"},
    "PiSSA": {"adapter": EVERY | {"init": "pissa"}, "precision": "bfloat16"},
    "LoRA beside modules in full": {
        "adapter": {"kind": "lora", "modules_to_save": ["embed_tokens", "lm_head", "norms"]},
        "precision": "bfloat16",
    },
    "nf4": {"adapter": EVERY, "base": "nf4", "precision": "bfloat16"},
    "nf4, recomputed": {
        "adapter": EVERY,
        "base": "nf4",
        "precision": "bfloat16",
        "activation_checkpointing": "full",
        "sizes": {"hidden_size": 256},
    },
    "int8": {
        "adapter": EVERY,
        "base": "int8",
        "precision": "bfloat16",
        "sizes": {"hidden_size": 256},
    },
    "8-bit states": {"lean": {"state_dtype": "int8"}, "rows": 1, "sizes": {"hidden_size": 256}},
    "bfloat16 states": {
        "lean": {"state_dtype": "bfloat16"},
        "rows": 1,
        "sizes": {"hidden_size": 256},
    },
    "Adafactor in backward": {
        "lean": {"fused_backward": True, "stochastic_rounding": True},
        "optimizer": "adafactor",
        "precision": "bfloat16-pure",
        "activation_checkpointing": "full",
        "rows": 1,
        "sizes": {"hidden_size": 256},
    },
    "AdamW in backward": {
        "lean": {"fused_backward": True},
        "precision": "bfloat16-pure",
        "rows": 1,
    },
}
QUICK_OF_FINE = {"LoRA on two matrices"}


@pytest.mark.parametrize("case", some(FINE, QUICK_OF_FINE))
def test_adapters_quantised_bases_and_lean_optimizers_agree(case):
    """Within 5% of what the step holds here, and the simulation within 1%."""
    plan = small_plan(**({"family": "qwen2"} | FINE[case]))
    if FINE[case].get("base") and not BF16:
        pytest.skip(
            "without bf16 instructions oneDNN takes scratch of its own for products of half precision"
        )
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("case", some(["float16", "compiled"], {"float16"}))
def test_adapters_on_a_gpu_agree_with_fake_tensors(case):
    settings = {
        "float16": {"precision": "float16"},
        "compiled": {"precision": "bfloat16", "compile": True},
    }[case]
    plan = small_plan("qwen2", adapter=EVERY, device="cuda", attention="varlen", **settings)
    assert counted(plan) == pytest.approx(simulated(plan), rel=0.05)


def test_states_in_the_processors_memory_are_not_the_cards():
    settings = {"device": "cuda", "attention": "varlen", "activation_checkpointing": "full"}
    assert (
        simulated_step(small_plan("qwen2", lean={"offload": True}, **settings), fused=True).parts[
            "optimizer"
        ]
        == 0
    )
    assert (
        tensor_bytes(load_of(small_plan("qwen2", lean={"paged": True}, **settings)))["optimizer"]
        == 0
    )


@pytest.mark.parametrize("family", some(["gpt2", "llama"], set()))
def test_compiled_blocks_agree_with_what_the_compiler_makes(family):
    all_agree(small_plan(family, precision="bfloat16", compile=True), apart=0.05)


def test_compiled_blocks_can_be_checkpointed():
    settings = {"device": "cuda", "attention": "varlen", "compile": True, "rows": 1}
    plan = small_plan(activation_checkpointing="full", sizes={"num_layers": 1}, **settings)
    assert counted(plan) == pytest.approx(simulated(plan), rel=0.08)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_both_agree_with_what_a_step_of_compiled_code_holds_here():
    all_agree(small_plan(precision="bfloat16", attention="compiled"), apart=0.03)
