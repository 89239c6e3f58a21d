"""Memory of layers that mix tokens by something else than attention: from shapes, on fake tensors, measured."""

import pytest
from steps_for_tests import counted, measured, simulated, small_plan, some

from bloomery.model.native import find_compiler

EVERY = {"kind": "lora", "rank": 8, "target_modules": ["all-linear"]}
# Three layers of another mixer and one of attention.
SIZES = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "head_dim": 64}
CASES = {
    "full training": {},
    "bfloat16": {"precision": "bfloat16"},
    "recomputed": {"precision": "bfloat16", "activation_checkpointing": "full"},
    "selective": {"precision": "bfloat16", "activation_checkpointing": "selective"},
    "compiled": {"precision": "bfloat16", "attention": "compiled"},
    "LoRA": {"precision": "bfloat16", "adapter": EVERY},
    "LoRA, recomputed": {
        "precision": "bfloat16",
        "adapter": EVERY,
        "activation_checkpointing": "full",
    },
    "DoRA": {"precision": "bfloat16", "adapter": EVERY | {"kind": "dora"}},
    "nf4": {"precision": "bfloat16", "adapter": EVERY, "base": "nf4"},
}
FAMILIES = ("qwen3_5_text", "lfm2", "olmo_hybrid")
QUICK = {("qwen3_5_text", "LoRA"), ("lfm2", "LoRA")}


@pytest.mark.parametrize(("family", "case"), some([(f, c) for f in FAMILIES for c in CASES], QUICK))
def test_shapes_fake_tensors_and_measured_bytes_agree(family: str, case: str) -> None:
    plan = small_plan(family, **({"sizes": SIZES, "rows": 2} | CASES[case]))
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("case", ["full training", "LoRA"])
def test_a_convolution_in_c_plus_plus_keeps_less(case: str) -> None:
    settings = CASES[case] | {"sizes": SIZES, "rows": 2, "attention": "compiled"}
    assert counted(small_plan("lfm2", **settings)) == pytest.approx(
        measured(small_plan("lfm2", **settings)), rel=0.03
    )


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", some(["bfloat16", "LoRA, recomputed"], {"LoRA, recomputed"}))
def test_delta_nets_in_compiled_code_agree(case: str) -> None:
    plan = small_plan("qwen3_5_text", sizes=SIZES, rows=2, attention="compiled", **CASES[case])
    real = measured(plan)
    assert simulated(plan) == pytest.approx(real, rel=0.01)
    assert counted(plan) == pytest.approx(real, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heads_computed_in_groups_agree(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.facts.limits.CPU_DELTA_VALUES", 2**18)
    monkeypatch.setattr("bloomery.facts.limits.GPU_DELTA_VALUES", 2**19)
    plan = small_plan(
        "qwen3_5_text",
        sizes=SIZES,
        precision="bfloat16",
        activation_checkpointing="full",
        device=device,
        attention="sdpa",
    )
    assert counted(plan) == pytest.approx(simulated(plan), rel=0.05)
