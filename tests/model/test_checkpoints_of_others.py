"""Checkpoints as other programs save them: what transformers makes of each, or a refusal that names the reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import saved_reference, tokens
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.export.layouts import export
from bloomery.model.configs import headers_of, read_config
from bloomery.model.io.stored import INDEX, SINGLE, find_tensors
from bloomery.model.io.weights import load_decoder
from models_for_tests import make_tokenizer

LLAMA = "llama2"
TIED = "llama3-gqa-tied"


def logits_of(folder):
    with torch.no_grad():
        return load_decoder(folder, dtype=torch.float32)(tokens()).head


def logits_of_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(tokens()).logits


def rewrite(folder, change):
    """`change`: of the tensors of model.safetensors, in place or as a new dict."""
    tensors = load_file(folder / SINGLE)
    tensors = change(tensors) or tensors
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, folder / SINGLE, {"format": "pt"}
    )


def prefixed(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


WRAPPERS = {
    "torch.compile": ("_orig_mod.", prefixed("_orig_mod.")),
    "ddp": ("module", prefixed("module.")),
    "ddp of compile": ("module", prefixed("module._orig_mod.")),
    "compile of ddp": ("module", prefixed("_orig_mod.module.")),
    "peft": ("base_model.model", prefixed("base_model.model.")),
    "trl": ("pretrained_model", prefixed("pretrained_model.")),
    "lightning": ("model", prefixed("model.")),
    "fsdp": (
        "_fsdp_wrapped_module",
        lambda tensors: {
            "_fsdp_wrapped_module."
            + name.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace(
                "layers.1.", "layers.1._checkpoint_wrapped_module."
            ): tensor
            for name, tensor in tensors.items()
        },
    ),
    "blocks compiled alone": (
        "_orig_mod",
        lambda tensors: {
            name.replace("layers.1.", "layers.1._orig_mod."): tensor
            for name, tensor in tensors.items()
        },
    ),
    "composite": (
        "model.language_model",
        lambda tensors: {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in tensors.items()
        },
    ),
}


# Three of the changes are of Llama's names.
LLAMA_WRAPPERS = ("fsdp", "blocks compiled alone", "composite")


@pytest.mark.parametrize(
    ("case", "wrapper"),
    [
        (case, wrapper)
        for case in (LLAMA, TIED, "gpt2")
        for wrapper in WRAPPERS
        if case != "gpt2" or wrapper not in LLAMA_WRAPPERS
    ],
)
def test_a_wrapper_in_the_names_is_left_out_and_named(wrapper, case, tmp_path):
    saved_reference(case, tmp_path)
    expected = logits_of_transformers(tmp_path)
    segment, change = WRAPPERS[wrapper]
    rewrite(tmp_path, change)
    assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=0)
    notes = headers_of(tmp_path).notes
    # A composite's names are those of published multimodal models, which need no line.
    assert wrapper == "composite" or any(segment.rstrip(".") in note for note in notes)


@pytest.mark.parametrize("case", [LLAMA, TIED, "gpt2", "phi3"])
def test_names_without_the_outermost_module_are_read_as_transformers_reads_them(case, tmp_path):
    saved_reference(case, tmp_path / "whole")
    model = AutoModel.from_pretrained(tmp_path / "whole")
    if read_config(tmp_path / "whole").tie_embeddings:
        model.save_pretrained(tmp_path / "bare")  # what AutoModel leaves: no head, no prefix
    else:
        saved_reference(case, tmp_path / "bare")
        rewrite(
            tmp_path / "bare",
            lambda tensors: {
                name.removeprefix("model."): tensor for name, tensor in tensors.items()
            },
        )
    assert "model.embed_tokens.weight" not in find_tensors(tmp_path / "bare")
    expected = logits_of_transformers(tmp_path / "bare")
    assert_close(logits_of(tmp_path / "bare"), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [TIED, "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", ["same", "head in bfloat16"])
def test_a_stored_head_that_is_not_the_embedding_is_used_though_the_config_ties_them(
    case, dtype, tmp_path
):
    saved_reference(case, tmp_path)
    embedding_name = "transformer.wte.weight" if case == "gpt2" else "model.embed_tokens.weight"

    def add_head(tensors):
        head = tensors[embedding_name] * 0.5 + 0.1
        tensors["lm_head.weight"] = head if dtype == "same" else head.bfloat16()

    rewrite(tmp_path, add_head)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert_close(logits_of(tmp_path), logits_of_transformers(tmp_path), atol=1e-4, rtol=0)
    assert not read_config(tmp_path).tie_embeddings
    assert any("lm_head.weight" in note for note in headers_of(tmp_path).notes)

    make_tokenizer(tmp_path)
    export(tmp_path, tmp_path / "out", dtype="float32")
    assert "lm_head.weight" in find_tensors(tmp_path / "out")
    assert_close(logits_of_transformers(tmp_path / "out"), logits_of(tmp_path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_head_that_equals_the_embedding_stays_tied(dtype, tmp_path):
    saved_reference(TIED, tmp_path)

    def add_head(tensors):
        tensors["model.embed_tokens.weight"] = (
            tensors["model.embed_tokens.weight"].bfloat16().float()
        )
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].to(dtype, copy=True)

    rewrite(tmp_path, add_head)
    assert read_config(tmp_path).tie_embeddings
    assert headers_of(tmp_path).notes == ()
    assert_close(logits_of(tmp_path), logits_of_transformers(tmp_path), atol=1e-4, rtol=0)


def test_tied_weights_that_are_stored_as_the_head_alone(tmp_path):
    saved_reference(TIED, tmp_path)

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(tmp_path, rename)
    assert_close(logits_of(tmp_path), logits_of_transformers(tmp_path), atol=1e-4, rtol=0)
    assert any("tied" in note for note in headers_of(tmp_path).notes)


def add_index(folder, factor):
    tensors = {name: tensor * factor for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_single_file_is_read_before_an_index_as_transformers_does(tmp_path):
    saved_reference(LLAMA, tmp_path)
    add_index(tmp_path, 0)
    assert_close(logits_of(tmp_path), logits_of_transformers(tmp_path), atol=1e-4, rtol=0)
    assert any(INDEX in note for note in headers_of(tmp_path).notes)

    make_tokenizer(tmp_path)
    export_result = export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX).exists()
    assert any(INDEX in proof for proof in export_result.proofs)
    assert_close(logits_of_transformers(tmp_path / "out"), logits_of(tmp_path), atol=1e-4, rtol=0)


def test_an_index_of_the_single_file_is_no_second_model(tmp_path):
    saved_reference(LLAMA, tmp_path)
    weight_map = dict.fromkeys(load_file(tmp_path / SINGLE), SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert headers_of(tmp_path).notes == ()


@pytest.mark.parametrize("wrapper", ["torch.compile", "peft"])
def test_an_export_of_wrapped_names_has_those_that_transformers_expects(wrapper, tmp_path):
    saved_reference(LLAMA, tmp_path)
    expected = logits_of_transformers(tmp_path)
    rewrite(tmp_path, WRAPPERS[wrapper][1])
    make_tokenizer(tmp_path)
    export(tmp_path, tmp_path / "out")
    assert_close(logits_of_transformers(tmp_path / "out"), expected, atol=1e-4, rtol=0)


def without_head(folder):
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})


def with_value_head(folder):
    rewrite(folder, lambda tensors: tensors | {"v_head.summary.weight": torch.zeros(1, 48)})


def with_peft_layers(folder):
    def change(tensors):
        name = "model.layers.0.self_attn.q_proj"
        weight = tensors.pop(f"{name}.weight")
        tensors[f"{name}.base_layer.weight"] = weight
        tensors[f"{name}.lora_A.default.weight"] = torch.zeros(4, 48)
        return {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}

    rewrite(folder, change)


def with_two_models(folder):
    def change(tensors):
        return prefixed("actor.")(tensors) | prefixed("critic.")(
            {name: tensor.clone() for name, tensor in tensors.items()}
        )

    rewrite(folder, change)


def as_a_variant(folder):
    (folder / SINGLE).rename(folder / "model.fp16.safetensors")


def as_shards_without_index(folder):
    add_index(folder, 1)
    (folder / SINGLE).unlink()
    (folder / INDEX).unlink()


def with_a_missing_shard(folder):
    add_index(folder, 1)
    (folder / SINGLE).unlink()
    (folder / "model-00001-of-00001.safetensors").unlink()


REFUSED = {
    without_head: ("lm_head.weight is missing", "tie_word_embeddings"),
    with_value_head: ("v_head.summary.weight", "language model alone"),
    with_peft_layers: ("q_proj.base_layer.weight", "merge_and_unload"),
    with_two_models: ("'actor' and 'critic'", "alone"),
    as_a_variant: ("model.fp16.safetensors", "rename model.fp16.safetensors"),
    as_shards_without_index: ("model-00001-of-00001.safetensors", "rename"),
    with_a_missing_shard: ("model-00001-of-00001.safetensors is missing", "download"),
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_checkpoint_that_cannot_be_read_is_refused_with_a_fix(change, tmp_path):
    saved_reference(LLAMA, tmp_path)
    change(tmp_path)
    problem, fix = REFUSED[change]
    with pytest.raises(UserError, match=problem) as refused:
        load_decoder(tmp_path)
    assert fix in refused.value.fix
