"""Adapters that PEFT writes besides LoRA of linear layers: the logits of PeftModel, and the merged model's."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CASES, saved_reference, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.export.layouts import open_merged
from bloomery.hub import local_model
from bloomery.model.adapters import patterns
from bloomery.model.adapters.many import Adapters
from bloomery.model.configs import read_config, untied_note
from bloomery.model.io.weights import load_decoder, quantize_model, write_model_piecewise
from bloomery.recipe.schema import Quantize

UNTIED = "llama2"
TIED = "llama3-gqa-tied"
BIASED = "qwen2"
Q = ["q_proj"]
VOCABULARY = CASES[UNTIED][1]["vocab_size"]


def saved_by_peft(case, folder, *, new_tokens=0, tokens_alone=(), **settings):
    """An adapter with random numbers, saved to folder/adapter, and its base, to folder/base; as PEFT reads it again."""
    saved_reference(case, folder / "base")

    def base():
        model = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
        if new_tokens:
            model.resize_token_embeddings(model.config.vocab_size + new_tokens)
        return model

    config = peft.LoraConfig(
        **({"r": 4, "lora_alpha": 6, "target_modules": Q, "task_type": "CAUSAL_LM"} | settings)
    )
    if tokens_alone:
        config = peft.TrainableTokensConfig(token_indices=list(tokens_alone))
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(base(), config)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=numbers)
    wrapped.save_pretrained(folder / "adapter")
    return peft.PeftModel.from_pretrained(base(), folder / "adapter").eval()


def merged_by_us(folder):
    """The merged model that `export --to merged` writes, opened by transformers."""
    merged_folder = folder / "merged"
    merged_folder.mkdir()
    with open_merged(folder / "adapter", folder / "base", torch.float32, "cpu") as (
        read_tensor,
        config,
    ):
        write_model_piecewise(read_tensor, config, torch.float32, merged_folder)
    return AutoModelForCausalLM.from_pretrained(merged_folder, attn_implementation="eager").eval()


# Tokens of the sequences below.
FIRST, SECOND = (int(token) for token in (tokens() % VOCABULARY)[0].unique()[:2])
HEADS = {
    "new tokens": {"new_tokens": 8},
    "new tokens, modules to save": {
        "new_tokens": 8,
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "head to save": {"modules_to_save": ["lm_head"]},
    "embedding to save": {"modules_to_save": ["embed_tokens"]},
    "tied to save": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora of head": {"target_modules": [*Q, "lm_head"]},
    "lora of head, new tokens": {"target_modules": [*Q, "lm_head"], "new_tokens": 8},
    "lora of embedding": {"target_modules": [*Q, "embed_tokens"]},
    "lora of embedding, new tokens": {"target_modules": [*Q, "embed_tokens"], "new_tokens": 8},
    "lora of embedding alone": {"target_modules": ["embed_tokens"]},
    "lora of both": {"target_modules": [*Q, "embed_tokens", "lm_head"]},
    "lora of both, tied": {
        "target_modules": [*Q, "embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "dora of both": {
        "target_modules": [*Q, "embed_tokens", "lm_head"],
        "use_dora": True,
        "use_rslora": True,
    },
    "lora of both by a pattern": {
        "target_modules": r".*(q_proj|embed_tokens)|lm_head",
        "rank_pattern": {"lm_head": 2},
        "alpha_pattern": {".*embed.*": 3},
    },
    "token rows": {"trainable_token_indices": [FIRST, SECOND]},
    "token rows of both": {
        "trainable_token_indices": {"embed_tokens": [FIRST, SECOND], "lm_head": [FIRST]}
    },
    "equal token rows of both": {
        "trainable_token_indices": {"embed_tokens": [FIRST, SECOND], "lm_head": [FIRST, SECOND]}
    },
    "token rows of the head": {"trainable_token_indices": {"lm_head": [9]}},
    "token rows without lora": {"tokens_alone": [FIRST, SECOND]},
    "rows of new tokens": {
        "trainable_token_indices": [VOCABULARY, VOCABULARY + 1],
        "new_tokens": 8,
    },
}
OTHER_ADAPTERS = {
    "bias all": (BIASED, {"bias": "all"}),
    "bias lora_only": (BIASED, {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    "bias of a base without": (UNTIED, {"bias": "all"}),
    "bias of a fused layer": ("gpt2", {"bias": "all", "target_modules": ["c_attn"]}),
    "lora_bias": (BIASED, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "lora_bias of a fused layer": ("gpt2", {"lora_bias": True, "target_modules": ["c_attn"]}),
    "lora of gemma's embedding": ("gemma2", {"target_modules": ["q_proj", "embed_tokens"]}),
    "dora of gemma's embedding": ("gemma", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "lora of gpt2's embedding": ("gpt2", {"target_modules": ["c_attn", "wte"]}),
    "token rows of gpt2": (
        "gpt2",
        {"target_modules": ["c_attn"], "trainable_token_indices": [FIRST]},
    ),
    "pissa": (UNTIED, {"init_lora_weights": "pissa", "target_modules": ["q_proj", "down_proj"]}),
    "olora": (UNTIED, {"init_lora_weights": "olora", "target_modules": ["v_proj", "up_proj"]}),
    "pissa and dora": (UNTIED, {"init_lora_weights": "pissa", "use_dora": True}),
    "pissa and rslora": (
        UNTIED,
        {"init_lora_weights": "pissa", "use_rslora": True, "rank_pattern": {"layers.1.*": 3}},
    ),
    "a group in a pattern": (
        UNTIED,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "alpha_pattern": {r".*layers\.1\..*(q_proj|v_proj)": 32, "q_proj": 2},
        },
    ),
    "quantifiers in patterns": (
        UNTIED,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {r"layers\.[0-9]{1,2}\.(?:self_attn|mlp)\.(v|down)_proj$": 2},
            "alpha_pattern": {r"^model\.layers\.(?!0)\d+\..*": 9, r".*\.(q|v)_proj": 4},
        },
    ),
}
ALL = [
    *((f"{name}, {kind}", case, settings) for kind, case in (("untied", UNTIED), ("tied", TIED))
      for name, settings in HEADS.items()),
    *((name, case, settings) for name, (case, settings) in OTHER_ADAPTERS.items()),
]  # fmt: skip


def known_tokens():
    return tokens() % VOCABULARY


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "settings"), [entry[1:] for entry in ALL], ids=[entry[0] for entry in ALL]
)
def test_logits_and_the_merged_model_are_those_of_peft(case, settings, tmp_path):
    their_model = saved_by_peft(case, tmp_path, **settings)
    with torch.no_grad():
        expected = their_model(known_tokens()).logits[..., :VOCABULARY]
        logits = load_decoder(tmp_path / "adapter")(known_tokens()).head[..., :VOCABULARY]
        assert_close(logits, expected, atol=1e-4, rtol=0)
        base_logits = load_decoder(tmp_path / "base")(known_tokens()).head
        assert (logits - base_logits).abs().max() > 0.01
        merged_logits = merged_by_us(tmp_path)(known_tokens()).logits[..., :VOCABULARY]
        assert_close(merged_logits, expected, atol=1e-4, rtol=0)


def test_the_bias_of_a_lora_matrix_is_added_where_the_base_has_none(tmp_path):
    their_model = saved_by_peft(
        BIASED, tmp_path, lora_bias=True, target_modules=["q_proj", "o_proj"]
    )
    with torch.no_grad():
        expected = their_model(known_tokens()).logits
        logits = load_decoder(tmp_path / "adapter")(known_tokens()).head
        assert_close(logits, expected, atol=1e-4, rtol=0)
    # A model of this family cannot store it: PEFT refuses this merge, too.
    with pytest.raises(RuntimeError, match="no bias"):
        their_model.merge_and_unload()
    with pytest.raises(UserError, match=r"o_proj a bias") as refused:
        merged_by_us(tmp_path)
    assert "--to adapter" in refused.value.fix


def rewrite(folder, change):
    """Change the names of an adapter's tensors."""
    file = folder / "adapter_model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def set_key(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


NAMES = {
    "name of the adapter": lambda name: (
        name.replace("lora_A.", "lora_A.default.")
        .replace("lora_B.", "lora_B.default.")
        .replace("lora_embedding_A", "lora_embedding_A.default")
        .replace("lora_embedding_B", "lora_embedding_B.default")
    ),
    "torch.compile": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "ddp": lambda name: f"module.{name}",
    "fsdp": lambda name: name.replace("layers.1.", "layers.1._fsdp_wrapped_module."),
    "injected into the model": lambda name: name.removeprefix("base_model.model."),
    "inside a multimodal model": lambda name: name.replace(
        "base_model.model.model.", "base_model.model.model.language_model."
    ),
    "inside an older multimodal model": lambda name: name.replace(
        "base_model.model.", "base_model.model.language_model."
    ),
    "of a model without its head": lambda name: name.replace(
        "base_model.model.model.", "base_model.model."
    ),
}


@pytest.mark.parametrize("names", NAMES)
def test_an_adapter_is_found_under_the_names_of_other_programs(names, tmp_path):
    their_model = saved_by_peft(
        UNTIED, tmp_path, target_modules=["q_proj", "embed_tokens", "lm_head"]
    )
    rewrite(tmp_path / "adapter", NAMES[names])
    with torch.no_grad():
        logits = load_decoder(tmp_path / "adapter")(known_tokens()).head
        assert_close(logits, their_model(known_tokens()).logits, atol=1e-4, rtol=0)


def two_adapters(folder):
    rewrite(
        folder,
        lambda name: name.replace("lora_A.", "lora_A.one.").replace("lora_B.", "lora_B.two."),
    )


def of_the_vision_part(folder):
    rewrite(
        folder,
        lambda name: name.replace("model.layers.0.", "vision_tower.encoder.layers.0."),
    )


def of_more_layers(folder):
    rewrite(folder, lambda name: name.replace("layers.1.", "layers.91."))


def with_random_residual(folder):
    set_key(folder, init_lora_weights="pissa_niter_4")


def with_an_endless_pattern(folder):
    set_key(folder, alpha_pattern={r"(\w*\.*)*!": 2})


def with_a_broken_pattern(folder):
    set_key(folder, alpha_pattern={"q_proj(": 2})


def with_target_parameters(folder):
    set_key(folder, target_parameters=["mlp.experts.gate_up_proj"])


REFUSED = {
    two_adapters: ("2 adapters are in one file: one, two", "save_pretrained"),
    of_the_vision_part: ("vision part", "merge_and_unload"),
    of_more_layers: ("layers.91", "merge_and_unload"),  # its own base was given
    with_random_residual: ("pissa_niter_4", "path_initial_model_for_weight_conversion"),
    with_an_endless_pattern: ("take longer", "in full"),
    with_a_broken_pattern: ("no regular expression", "in full"),
    with_target_parameters: ("target_parameters", "merge_and_unload"),
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_an_adapter_that_cannot_be_applied_is_refused_with_another_way(
    change, tmp_path, monkeypatch
):
    monkeypatch.setattr(patterns, "PATTERN_SECONDS", 1.0)
    saved_by_peft(UNTIED, tmp_path)
    change(tmp_path / "adapter")
    problem, fix = REFUSED[change]
    with pytest.raises(UserError, match=problem) as refused:
        load_decoder(tmp_path / "adapter")
    assert fix in refused.value.fix
    assert str(tmp_path) not in refused.value.fix  # never the same command again


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lora_bias": True, "target_modules": ["q_proj", "lm_head"]}, "lora_bias gives lm_head"),
        ({"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [5]}, "and trained"),
    ],
)
def test_combinations_that_no_weight_can_hold_are_refused(settings, problem, tmp_path):
    saved_by_peft(UNTIED, tmp_path, **settings)
    with pytest.raises(UserError, match=problem) as refused:
        load_decoder(tmp_path / "adapter")
    assert "merge_and_unload" in refused.value.fix


def test_tokens_that_the_base_lacks_are_refused(tmp_path):
    saved_by_peft(UNTIED, tmp_path, trainable_token_indices=[5, 7])
    set_key(tmp_path / "adapter", trainable_token_indices=[5, VOCABULARY])
    with pytest.raises(UserError, match=f"{VOCABULARY}, and this base has"):
        load_decoder(tmp_path / "adapter")
    set_key(tmp_path / "adapter", trainable_token_indices=[5])
    with pytest.raises(UserError, match="names 1 tokens"):
        load_decoder(tmp_path / "adapter")


def test_an_adapter_of_another_base_names_the_one_that_it_was_trained_on(tmp_path):
    saved_by_peft(UNTIED, tmp_path)
    of_more_layers(tmp_path / "adapter")
    saved_reference(UNTIED, tmp_path / "other")
    with pytest.raises(UserError, match="does not have") as refused:
        load_decoder(tmp_path / "adapter", base=tmp_path / "other")
    assert f"{tmp_path / 'base'}+" in refused.value.fix


def test_a_quantized_base_has_no_residual(tmp_path):
    saved_by_peft(UNTIED, tmp_path, init_lora_weights="pissa")

    def quantize(decoder):
        quantize_model(decoder, Quantize(kind="int8"))

    with pytest.raises(UserError, match="pissa changes the base"):
        load_decoder(tmp_path / "adapter", arrange=quantize)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"trainable_token_indices": [5]},
        {"init_lora_weights": "olora"},
    ],
)
def test_adapters_that_change_their_base_do_not_share_it(settings, tmp_path):
    saved_by_peft(UNTIED, tmp_path, **settings)
    with pytest.raises(UserError, match="does not share its base") as refused:
        Adapters(load_decoder(tmp_path / "base"), {"one": tmp_path / "adapter"})
    assert "BASE+ADAPTER" in refused.value.fix


def test_a_base_that_an_adapter_unties_is_named(tmp_path):
    saved_by_peft(TIED, tmp_path, modules_to_save=["lm_head"])
    assert "two weights" in untied_note(
        tmp_path / "base", load_decoder(tmp_path / "adapter").config
    )
    assert untied_note(tmp_path / "base", read_config(tmp_path / "base")) is None
    assert untied_note(None, read_config(tmp_path / "base")) is None


def test_training_from_a_base_and_its_adapter_names_the_merge(tmp_path):
    saved_by_peft(UNTIED, tmp_path)
    name = f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"
    with pytest.raises(UserError, match="a base and its adapter") as refused:
        local_model(name)
    assert f"bloomery export {name} --to merged" in refused.value.fix
