"""The language model of a multimodal one: Gemma 3 as it is published, with its vision weights left out."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CASES, tokens
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.facts.counting import layers
from bloomery.facts.hf_config import config_from_hf
from bloomery.facts.published import published_config
from bloomery.model.configs import read_config
from bloomery.model.io.stored import find_tensors, read_headers, stored_parameters
from bloomery.model.io.weights import load_decoder, model_state, write_model
from foreign_models import saved_gemma3

TOKENS = tokens()
# Of google/gemma-3-4b-it: what its config.json says; all else are defaults of transformers' Gemma3TextConfig.
PUBLISHED_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A random Gemma 3 with a vision tower, saved by transformers, and its logits of text."""
    folder = tmp_path_factory.mktemp("gemma3")
    model = saved_gemma3(folder)
    with torch.no_grad():
        return folder, model(TOKENS % 120).logits


def as_in_memory(folder, target):
    """With the names of tensors that transformers 5 uses inside: model.language_model.layers, model.vision_tower."""
    tensors = load_file(folder / "model.safetensors")
    renamed_tensors = {}
    for name, tensor in tensors.items():
        inner_name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
        renamed_tensors[
            re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", inner_name)
        ] = tensor
    save_file(renamed_tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return renamed_tensors


@torch.no_grad()
def test_text_logits_are_those_of_the_whole_model(gemma, tmp_path):
    folder, expected = gemma
    assert float(expected.std()) > 0.1
    assert_close(load_decoder(folder)(TOKENS % 120).head, expected, atol=1e-4, rtol=0)
    published_tensors = load_file(folder / "model.safetensors")  # the names of google/gemma-3-4b-it
    assert any(name.startswith("language_model.model.layers.0.") for name in published_tensors)
    assert any(name.startswith("vision_tower.") for name in published_tensors)
    tensors_in_memory = as_in_memory(folder, tmp_path)
    assert any(name.startswith("model.language_model.layers.0.") for name in tensors_in_memory)
    our_model = load_decoder(tmp_path)
    assert_close(our_model(TOKENS % 120).head, expected, atol=1e-4, rtol=0)
    assert not any("vision" in name or "projector" in name for name in find_tensors(tmp_path))
    (tmp_path / "saved").mkdir()
    write_model(model_state(our_model), our_model.config, tmp_path / "saved")
    reloaded_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager"
    ).eval()
    assert type(reloaded_model).__name__ == "Gemma3ForCausalLM"
    assert_close(reloaded_model(TOKENS % 120).logits, expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "architecture", "text_case"),
    [("Mistral3", "Ministral3ForCausalLM", "ministral3"), ("Lfm2Vl", "Lfm2ForCausalLM", "lfm2")],
)
def test_the_text_part_says_which_family_it_is(kind, architecture, text_case, tmp_path):
    """Ministral 3 and LFM2-VL: one class around language models of several families."""
    text_config = CASES[text_case][1] | {"model_type": text_case}
    vision_config = {
        "model_type": "pixtral" if kind == "Mistral3" else "siglip2_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 14,
    }
    config = getattr(transformers, f"{kind}Config")(
        text_config=text_config, vision_config=vision_config, image_token_id=130
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    assert_close(decoder(TOKENS % 120).head, model(TOKENS % 120).logits, atol=1e-4, rtol=0)
    (tmp_path / "saved").mkdir()
    write_model(model_state(decoder), decoder.config, tmp_path / "saved")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")).__name__ == (
        architecture
    )


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_qwen3_5_opens_as_its_language_model_and_names_the_rest(tied, tmp_path):
    """As Qwen publishes it: model.language_model, model.visual, and mtp, which transformers does not read either."""
    text_config = CASES["qwen3.5"][1] | {"tie_word_embeddings": tied}
    vision_config = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text_config["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3_5Config(
        text_config=text_config, vision_config=vision_config, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    their_model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    for parameter in their_model.parameters():
        parameter.normal_(0.0, 0.2)
    their_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.language_model.layers.0.linear_attn.") for name in tensors)
    tensors["mtp.norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    num_unread = sum(name.startswith(("model.visual.", "mtp.")) for name in tensors)
    assert read_headers(tmp_path, read_config(tmp_path)).notes == (
        f"{num_unread} tensors of model.visual, mtp are not read: it is opened as its language model",
    )
    decoder = load_decoder(tmp_path)
    expected = their_model(TOKENS % 120).logits
    assert_close(decoder(TOKENS % 120).head, expected, atol=2e-4, rtol=0)
    (tmp_path / "saved").mkdir()
    write_model(model_state(decoder), decoder.config, tmp_path / "saved")
    reloaded_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(reloaded_model).__name__ == "Qwen3_5ForCausalLM"
    assert_close(reloaded_model.eval()(TOKENS % 120).logits, expected, atol=2e-4, rtol=0)


@torch.no_grad()
def test_mistral_small_with_vision_loads_as_its_language_model(tmp_path):
    """mistralai/Mistral-Small-3.1-24B-Instruct-2503: Mistral3ForConditionalGeneration, an untied head."""
    torch.manual_seed(0)
    text_config = {
        "model_type": "mistral",
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 1e9,
        "sliding_window": None,
    }
    vision_config = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Mistral3Config(
        text_config=text_config,
        vision_config=vision_config,
        image_token_index=127,
        tie_word_embeddings=False,
    )
    their_model = transformers.Mistral3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    for parameter in their_model.parameters():
        parameter.data.normal_(0, 0.2)
    their_model.save_pretrained(tmp_path)
    assert any(
        name.startswith("language_model.") for name in load_file(tmp_path / "model.safetensors")
    )
    expected = their_model(TOKENS % 120).logits
    assert float(expected.std()) > 0.1
    our_model = load_decoder(tmp_path)
    assert (
        our_model.config.family == "mistral"
        and our_model.config.sliding_window == ()
        and not our_model.config.tie_embeddings
    )
    assert_close(our_model(TOKENS % 120).head, expected, atol=1e-4, rtol=0)


def test_a_missing_tensor_of_the_language_model_is_named(gemma, tmp_path):
    tensors = as_in_memory(gemma[0], tmp_path)
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight is missing"):
        stored_parameters(tmp_path, read_config(tmp_path))


def test_the_published_config_is_the_shape_of_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_4B))
    config, table = read_config(tmp_path), published_config("google/gemma-3-4b-it")
    ids = {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert {key: value for key, value in vars(config).items() if key not in ids} == {
        key: value for key, value in vars(table).items() if key not in ids
    }
    assert config.eos_token_id == 1 and config.tie_embeddings
    their_config = transformers.Gemma3Config(**PUBLISHED_4B).text_config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        their_config.num_attention_heads,
        their_config.num_key_value_heads,
        their_config.head_dim,
        their_config.vocab_size,
    )
    kinds = [
        "full_attention" if layer.window is None else "sliding_attention"
        for layer in layers(config)
    ]
    assert kinds == their_config.layer_types


def test_another_multimodal_model_is_refused():
    with pytest.raises(UserError):
        config_from_hf(
            {
                "model_type": "llava",
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {},
            }
        )
