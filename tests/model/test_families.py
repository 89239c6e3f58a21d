"""config.json and recipes to facts: what is read, what is refused, and that nothing is lost on the way back."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from tiny_models import CASES, GPT2, SMALL, tiny_reference
from torch.testing import assert_close
from transformers.activations import ACT2FN

import bloomery
from bloomery.core.errors import UserError
from bloomery.facts import config as facts
from bloomery.facts.config import RopeScaling
from bloomery.facts.families import FAMILIES
from bloomery.facts.family import ACTIVATIONS
from bloomery.facts.hf_config import config_from_hf, config_to_hf
from bloomery.facts.presets import PRESETS, preset
from bloomery.model import decoder
from bloomery.model.configs import build_config, read_config
from bloomery.recipe.schema import Model
from bloomery.recipe.schema import RopeScalingSection as StatedScaling

LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_the_same_after_writing_and_reading(case: str) -> None:
    config = config_from_hf(tiny_reference(case).config.to_dict())
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize("case", ["qwen3.5", "glm4"])
def test_heads_that_rotate_whole_are_stated_where_a_family_rotates_a_part(case: str) -> None:
    config = replace(config_from_hf(tiny_reference(case).config.to_dict()), rotary_share=1.0)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_the_one_that_transformers_has_under_the_name(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    assert_close(decoder.ACTIVATIONS[ACTIVATIONS[name]](x), ACT2FN[name](x))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_stored(name: str) -> None:
    assert config_from_hf(config_to_hf(preset(name))) == preset(name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**12),
        ("hidden_size", -4),
        ("hidden_size", 48.0),
        ("hidden_size", "48"),
        ("hidden_size", True),
        ("num_attention_heads", 0),
        ("num_attention_heads", 5),
        ("num_hidden_layers", 10**9),
        ("vocab_size", None),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", "small"),
        ("hidden_act", "quick_gelu"),
        ("hidden_act", ["silu"]),
        ("tie_word_embeddings", "yes"),
        ("attention_dropout", 1.5),
        ("rope_theta", 0),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "spiral", "factor": 2}),
        ("head_dim", 7),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}),
        ("num_key_value_heads", 3),
        ("eos_token_id", "end"),
        ("max_position_embeddings", 0),
        ("mlp_bias", 1),
        (
            "rope_parameters",
            {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
        ),
        ("partial_rotary_factor", 1.5),
    ],
)
def test_impossible_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError) as refused:
        config_from_hf(LLAMA | {key: value}, where="some/config.json")
    error_text = str(refused.value)
    assert "some/config.json" in error_text
    assert any(name in error_text for name in (key, "factor", "heads", "rope type", "head_dim"))
    assert len(error_text) < 400


def test_unknown_keys_and_remote_code_are_dropped() -> None:
    hostile_keys = {
        "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        "_name_or_path": "/etc",
        "__class__": 1,
        "zzz": [[]],
    }
    assert config_from_hf(LLAMA | hostile_keys) == config_from_hf(LLAMA)
    assert not set(config_to_hf(config_from_hf(LLAMA | hostile_keys))) & set(hostile_keys)


@pytest.mark.parametrize(
    "raw_config", [{"model_type": "mamba"}, {"architectures": ["BertModel"]}, {}, {"model_type": 3}]
)
def test_an_unknown_architecture_lists_the_known_ones(raw_config: dict) -> None:
    with pytest.raises(UserError, match="not a supported architecture") as refused:
        config_from_hf(SMALL | raw_config)
    assert all(name in refused.value.fix for name in FAMILIES)


def test_mathematics_that_the_decoder_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx"):
        config_from_hf(GPT2 | {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True})
    with pytest.raises(UserError, match="use_bidirectional_attention"):
        config_from_hf(SMALL | {"model_type": "gemma", "use_bidirectional_attention": True})


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": "head"},
        {"sliding_window": (8, 8, 8, 8)},
        {"norm": "layer"},
        {"scale_embeddings": True},
    ],
)
def test_facts_that_a_family_cannot_hold_are_refused(change: dict) -> None:
    config = config_from_hf(LLAMA)
    with pytest.raises(UserError, match=next(iter(change))):
        config_to_hf(replace(config, **change))


def test_dropout_is_the_same_after_writing_and_reading() -> None:
    config = replace(
        config_from_hf(LLAMA), embedding_dropout=0.1, residual_dropout=0.2, attention_dropout=0.3
    )
    assert config_from_hf(config_to_hf(config)) == config


def test_gemma_configs_may_leave_out_what_transformers_assumes() -> None:
    raw_config = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 256000,
    }
    config = config_from_hf(raw_config)
    assert (config.head_dim, config.tie_embeddings) == (256, True)
    assert (config.attention_softcap, config.final_softcap) == (50, 30)
    assert config.sliding_window == (4096, None)


class TestRecipes:
    def test_a_family_fills_in_the_rest(self) -> None:
        model = Model(
            family="qwen3",
            hidden_size=192,
            num_layers=3,
            num_heads=3,
            tie_embeddings=True,
            dropout=0.1,
        )
        config = build_config(model, vocab_size=2048, bos_token_id=1, eos_token_id=2)
        assert (config.head_dim, config.intermediate_size, config.qk_norm) == (64, 512, "head")
        assert (config.vocab_size, config.bos_token_id, config.residual_dropout) == (2048, 1, 0.1)

    def test_a_preset_takes_sizes_and_the_tokenizers_vocabulary(self) -> None:
        config = build_config(
            Model(preset="go-coder-tiny", hidden_size=256, num_heads=4), vocab_size=4096
        )
        sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim)
        assert sizes == (4096, 256, 1024, 64)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_can_be_built_from_sizes(self, family: str) -> None:
        config = build_config(
            Model(family=family, hidden_size=64, num_layers=4, num_heads=4), vocab_size=300
        )
        assert config.num_layers == 4
        assert config.embedding_dropout == config.attention_dropout == 0.0

    def test_a_window_and_a_scaling_reach_the_config(self) -> None:
        model = Model(
            family="qwen2",
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            sliding_window=128,
            rope_scaling=StatedScaling(kind="yarn", factor=4, original_max_positions=1024),
        )
        config = build_config(model, vocab_size=300)
        assert config.sliding_window == (128, 128)
        assert config.rope_scaling == RopeScaling(
            kind="yarn", factor=4, original_max_positions=1024
        )

    @pytest.mark.parametrize(
        ("raw_config", "problem"),
        [
            ({}, "model.from"),
            ({"family": "llama"}, "hidden_size"),
            ({"family": "llama", "hidden_size": 65, "num_layers": 1, "num_heads": 4}, "multiple"),
            (
                {
                    "family": "llama",
                    "hidden_size": 64,
                    "num_layers": 1,
                    "num_heads": 4,
                    "sliding_window": 8,
                },
                "window",
            ),
            (
                {
                    "family": "llama",
                    "hidden_size": 64,
                    "num_layers": 1,
                    "num_heads": 4,
                    "qk_norm": "head",
                },
                "qk_norm",
            ),
            (
                {
                    "family": "llama",
                    "hidden_size": 64,
                    "num_layers": 1,
                    "num_heads": 4,
                    "num_kv_heads": 3,
                },
                "divide",
            ),
            ({"preset": "go-coder-tiny", "vocab_size": 100}, "tokenizer"),
        ],
    )
    def test_contradictions_are_named(self, raw_config: dict, problem: str) -> None:
        with pytest.raises(UserError) as refused:
            build_config(Model(**raw_config), vocab_size=300)
        assert problem in str(refused.value)

    def test_a_pretrained_model_keeps_its_sizes(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        config = build_config(
            Model.model_validate({"from": str(tmp_path), "dropout": 0.1}), vocab_size=100
        )
        assert config == replace(
            read_config(tmp_path),
            embedding_dropout=0.1,
            residual_dropout=0.1,
            attention_dropout=0.1,
        )
        with pytest.raises(UserError, match="hidden_size"):
            build_config(
                Model.model_validate({"from": str(tmp_path), "hidden_size": 64}), vocab_size=100
            )
        grown_config = build_config(Model.model_validate({"from": str(tmp_path)}), vocab_size=1000)
        assert grown_config == replace(read_config(tmp_path), vocab_size=1000)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '"x"', "null", "[" * 100_000, '{"model_type": "llama"']
)
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        read_config(tmp_path)


def test_recipes_state_scalings_of_positions_that_configs_have() -> None:
    assert set(get_args(StatedScaling.model_fields["kind"].annotation)) < set(
        get_args(facts.RopeKind)
    )


def test_no_module_compares_a_family_by_its_name() -> None:
    root = Path(bloomery.__file__).parent
    names = re.compile(rf"[\"']({'|'.join(map(re.escape, FAMILIES))})[\"']")
    questions = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Parsing all of the source takes seconds.
        if not names.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Compare) or not ast.unparse(node.left).endswith("family"):
                continue
            constants = [
                part for part in ast.walk(node.comparators[0]) if isinstance(part, ast.Constant)
            ]
            if any(constant.value in FAMILIES for constant in constants):
                questions.append(f"{path.relative_to(root)}: {ast.unparse(node)}")
    assert questions == []
