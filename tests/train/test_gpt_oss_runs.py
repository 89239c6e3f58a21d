"""Runs of gpt-oss: from MXFP4 files, resumed bitwise, opened by transformers; LoRA on nf4 of its experts."""

import json

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import resumed_bitwise
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bloomery.model.configs import read_config
from bloomery.model.io.weights import load_decoder
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Quantize

TOKENS = torch.arange(60).view(2, 30)
SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny gpt-oss whose experts are blocks of MXFP4."""
    folder = tmp_path_factory.mktemp("oss")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES))
    for name, parameter in model.named_parameters():
        parameter.data.normal_(float("norm" in name), 0.1)
    model.save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim < 3:
            tensors[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape, 123, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(prepared, base, *, base_in="none", adapter=None, **sections):
    plan = tiny_plan(
        prepared,
        config=read_config(base),
        model={"source": base, "attention": "blockwise"},
        **sections,
    )
    changed = {"quantize": Quantize(kind=base_in)}
    if adapter is not None:
        changed["adapter"] = Lora(**{"kind": "lora", "rank": 4, "alpha": 8.0} | adapter)
    plan = plan.model_copy(update=changed)
    return RunPlan.model_validate_json(plan.model_dump_json())  # as a run reads it


def test_a_resumed_run_equals_the_undisturbed_one_and_opens_in_transformers(
    prepared, base, tmp_path
):
    run = resumed_bitwise(plan_of(prepared, base, train={"steps": 4}), tmp_path)
    assert run.losses()[4] < run.losses()[1]
    theirs = AutoModelForCausalLM.from_pretrained(run.checkpoint(4)).eval().float()
    ours = load_decoder(run.checkpoint(4), dtype=torch.float32)
    assert_close(ours(TOKENS).head, theirs(TOKENS).logits, atol=1e-5, rtol=1e-4)
    assert "quantization_config" not in (run.checkpoint(4) / "config.json").read_text()


@pytest.mark.parametrize("base_in", ["none", "nf4"])
def test_lora_of_experts_trains_on_mxfp4_and_is_resumed(prepared, base, tmp_path, base_in):
    plan = plan_of(
        prepared,
        base,
        base_in=base_in,
        adapter={"target_modules": "all-linear"},
        train={"steps": 4},
    )
    run = resumed_bitwise(plan, tmp_path)
    assert run.losses()[4] < run.losses()[1]
    trained = load_file(run.checkpoint(4) / "adapter_model.safetensors")
    of_experts = {name: value for name, value in trained.items() if ".experts." in name}
    assert of_experts
    for name, value in of_experts.items():
        assert "lora_B" not in name or float(value.abs().max()) > 0, name


def test_logits_are_those_of_transformers_on_the_same_numbers(prepared, base, tmp_path):
    """The blocks as transformers reads them, in float32, one after another."""
    stored = load_file(base / "model.safetensors")
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES)).eval()
    state = {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            state[stem] = convert_moe_packed_tensors(tensor, stored[f"{stem}_scales"]).float()
        elif not name.endswith("_scales"):
            state[name] = tensor.float()
    model.load_state_dict(state)
    ours = load_decoder(base, dtype=torch.float32)
    assert_close(ours(TOKENS).head, model(TOKENS).logits, atol=1e-5, rtol=1e-4)
