"""Files of hybrid and shared-expert mixtures: both forms, older keys, composites, and numbers that stay float32."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CASES, saved_reference, tokens
from torch.testing import assert_close

from bloomery.export.layouts import merged_state, open_model
from bloomery.facts.families import FAMILIES
from bloomery.facts.hf_config import config_from_hf, config_to_hf, fresh_config, has_experts
from bloomery.model.io.stored import dtype_of
from bloomery.model.io.weights import (
    load_decoder,
    model_state,
    write_model,
    write_model_piecewise,
)

TOKENS = tokens()
# What each keeps in float32 in files of bfloat16.
KEPT = {
    "lfm2-moe": ("feed_forward.expert_bias",),
    "ernie4.5-moe": ("mlp.gate.weight", "moe_statics.e_score_correction_bias"),
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def saved_in_bfloat16(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """As transformers opens the model in bfloat16 and writes it again; its tensors."""
    saved_reference(case, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return stored(folder)


def assert_same_files(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("case", KEPT)
def test_files_of_bfloat16_keep_what_chooses_in_float32(case: str, tmp_path: Path) -> None:
    theirs = saved_in_bfloat16(case, tmp_path)
    kept = {name for name, tensor in theirs.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in theirs if name.endswith(KEPT[case])} != set()
    assert dtype_of(tmp_path) == torch.bfloat16

    decoder = load_decoder(tmp_path)
    assert decoder.model.embed_tokens.weight.dtype == torch.bfloat16
    (tmp_path / "ours").mkdir()
    write_model(model_state(decoder), decoder.config, tmp_path / "ours")
    assert_same_files(stored(tmp_path / "ours"), theirs)
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("case", KEPT)
def test_an_export_rounds_all_but_what_chooses(case: str, tmp_path: Path) -> None:
    exact = tmp_path / "exact"
    exact.mkdir()
    saved_reference(case, exact)
    expected = {
        name: tensor if name.endswith(KEPT[case]) else tensor.bfloat16()
        for name, tensor in stored(exact).items()
    }
    for folder in ("piecewise", "whole"):
        (tmp_path / folder).mkdir()
    with open_model(exact, torch.bfloat16) as (read_parameter, config):
        write_model_piecewise(read_parameter, config, torch.bfloat16, tmp_path / "piecewise")
    assert_same_files(stored(tmp_path / "piecewise"), expected)
    state = merged_state(load_decoder(exact), torch.bfloat16)
    write_model(state, config, tmp_path / "whole")
    assert_same_files(stored(tmp_path / "whole"), expected)


@torch.no_grad()
def test_a_composite_with_fused_experts_opens_as_its_language_model(tmp_path: Path) -> None:
    """Qwen3.5 MoE as published, whose files may have the experts of a layer in two tensors."""
    vision = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=4)
    vision |= dict(out_hidden_size=48, num_position_embeddings=16)
    config = transformers.Qwen3_5MoeConfig(
        text_config=CASES["qwen3.5-moe"][1], vision_config=vision
    )
    torch.manual_seed(0)
    their_model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    for parameter in their_model.parameters():
        parameter.normal_(0.0, 0.1)
    expected = their_model(TOKENS % 120).logits
    their_model.save_pretrained(tmp_path)
    per_expert = stored(tmp_path)
    assert any(".language_model.layers.0.mlp.experts.0.gate_proj." in name for name in per_expert)
    assert_close(load_decoder(tmp_path)(TOKENS % 120).head, expected, atol=1e-4, rtol=0)

    fused = {name: t for name, t in per_expert.items() if ".mlp.experts." not in name}
    fused |= {
        name: parameter.clone()
        for name, parameter in their_model.named_parameters()
        if ".mlp.experts." in name
    }
    save_file(fused, tmp_path / "model.safetensors", {"format": "pt"})
    decoder = load_decoder(tmp_path)
    assert_close(decoder(TOKENS % 120).head, expected, atol=1e-4, rtol=0)

    (tmp_path / "ours").mkdir()
    write_model(model_state(decoder), decoder.config, tmp_path / "ours")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(reloaded).__name__ == "Qwen3_5MoeForCausalLM"
    assert_close(reloaded(TOKENS % 120).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("case", "older"),
    [
        ("qwen3-next", {"layer_types": None, "full_attention_interval": 4}),
        ("lfm2-moe", {"tie_word_embeddings": False, "tie_embedding": True}),
        ("ernie4.5-moe", {"moe_k": None, "num_experts_per_tok": 2}),
        ("ernie4.5-moe", {"moe_num_experts": None, "num_experts": 8}),
    ],
)
def test_older_spellings_mean_the_same(case: str, older: dict, tmp_path: Path) -> None:
    """Both read the changed file alike: transformers' class of it writes what ours does."""
    saved_reference(case, tmp_path)
    keys = json.loads((tmp_path / "config.json").read_text()) | older
    keys = {key: value for key, value in keys.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config_from_hf(theirs.to_dict()) == config_from_hf(keys)


# Granite 4 is dense unless a file says otherwise.
MIXTURES = [name for name in FAMILIES if has_experts(FAMILIES[name]) and name != "granitemoehybrid"]


@pytest.mark.parametrize("family", MIXTURES)
def test_new_models_take_the_sizes_of_experts_from_the_recipe(family: str) -> None:
    sizes = dict(vocab_size=64, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)
    sizes |= dict(head_dim=8, intermediate_size=48)
    config = fresh_config(family, sizes, experts={"count": 8, "per_token": 2, "width": 16})
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.width) == (8, 2, 16)
    assert config.experts.shared_width <= 4 * 16
    assert config_from_hf(config_to_hf(config)) == config
