"""What chooses among experts keeps its float32, whatever the precision of the weights around it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.facts.config import Experts, ModelConfig
from bloomery.infer.forward import prepare_weights
from bloomery.model.io.stored import dtype_of
from bloomery.model.io.weights import fresh_decoder
from bloomery.train.objectives.reference_model import _take_dtypes

BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
ROUTER = "model.layers.0.mlp.gate.weight"


def config(*, float32_router: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        experts=Experts(
            count=4,
            per_token=2,
            width=8,
            scores="sigmoid",
            choice_bias=True,
            float32_router=float32_router,
        ),
    )


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-pure", "float16", "float32"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("float32_router", [True, False])
def test_no_precision_rounds_a_choice(precision: str, trains: bool, float32_router: bool) -> None:
    decoder = fresh_decoder(config(float32_router=float32_router), seed=0, dtype=torch.bfloat16)
    kept = [BIAS, ROUTER] if float32_router else [BIAS]
    numbers = torch.tensor([1e-5, 1.0 + 2e-5, 2.0, -3e-7])
    parameters = dict(decoder.named_parameters())
    for name in kept:
        parameters[name].data.copy_(numbers if name == BIAS else numbers[:, None].expand(4, 16))
    before = {name: parameters[name].data.clone() for name in kept}

    if not trains:
        decoder.requires_grad_(False)
    prepare_weights(decoder, precision)

    for name in kept:
        assert parameters[name].dtype == torch.float32
        assert torch.equal(parameters[name].data, before[name])
    assert not parameters[BIAS].requires_grad
    query = parameters["model.layers.0.self_attn.q_proj.weight"]
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    if half is not None and not trains:
        assert query.dtype == half


def test_frozen_stacks_have_the_dtype_of_matmuls() -> None:
    """As matrices of other layers: float32 would double the memory of a LoRA run in float16, and of its reference."""
    decoder = fresh_decoder(config(float32_router=False), seed=0).requires_grad_(False)
    prepare_weights(decoder, "float16")
    experts = decoder.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.float16
    assert decoder.model.norm.weight.dtype == torch.float32

    # A policy in full training, and a reference that is only read.
    policy = fresh_decoder(config(float32_router=False), seed=0)
    reference = fresh_decoder(config(float32_router=False), seed=0)
    _take_dtypes(reference, policy, "bfloat16")
    experts = reference.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.bfloat16
    gate = reference.model.layers[0].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32


def test_a_copy_has_the_dtype_of_most_numbers(tmp_path: Path) -> None:
    """safetensors writes wide numbers first."""
    tensors = {"a.bias": torch.zeros(3), "b.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert dtype_of(tmp_path) == torch.bfloat16
