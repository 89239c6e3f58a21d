"""The bytes that training a pretrained model holds before any activation, computed by hand beside the plan's."""

import pytest
from plan_help import machine, planned

from bloomery.recipe.load import load_recipe

LLAMA_2_7B = 6_738_415_616  # parameters, as its paper's weights have them
Q_AND_V = 64 * 2 * 8 * 4096  # numbers of rank 8 beside q_proj and v_proj of 32 layers


def said(*words: str) -> str:
    plan = planned(load_recipe("llama2-7b-lora", ("tokenizer={}", *words)), machine())
    return next(f"{told.value}: {told.reason}" for told in plan.choices if told.key == "model.from")


def test_seven_billion_parameters_in_full_hold_16_bytes_each():
    text = said("adapter={kind: none}")
    assert text.startswith(
        f"training state {16 * LLAMA_2_7B / 1e9:.1f} GB: full training: 16 bytes"
    )
    assert text.endswith(
        "16 bytes (weights 4, gradients 4, states 8) for each of 6.74 B parameters"
    )


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_lora_leaves_the_weights_and_little_beside(base):
    text = said(
        "adapter={kind: lora, rank: 8, target_modules: [q_proj, v_proj]}",
        f"quantize.kind={base}",
        "train.precision=bfloat16",
    )
    inside = LLAMA_2_7B - 2 * 32_000 * 4096 - 65 * 4096  # matrices of the layers
    frozen = (
        2 * LLAMA_2_7B
        if base == "none"
        else 2 * (LLAMA_2_7B - inside) + inside * (0.5 + 1 / 64 + 4 / (64 * 256))
    )
    total = frozen + (4 + 4 + 8) * Q_AND_V
    assert text.startswith(f"training state {total / 1e9:.1f} GB: instead of 107.8 GB: ")
    assert f"weights {(frozen + 4 * Q_AND_V) / 1e9:.1f} GB" in text
    assert f"gradients {4 * Q_AND_V / 1e6:.1f} MB, states {8 * Q_AND_V / 1e6:.1f} MB" in text


def test_a_model_of_random_weights_is_not_compared():
    plan = planned(load_recipe("go-coder-tiny"), machine())
    assert "model.from" not in {told.key for told in plan.choices}
