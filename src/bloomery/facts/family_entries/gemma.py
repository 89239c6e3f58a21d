"""Gemma's families."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config_fields import ModelFacts
from bloomery.facts.family import ACTIVATIONS, BIASES, LLAMA_KEYS, Family, StoredNames
from bloomery.facts.family_rules import (
    gemma3_scale,
    gemma_scale,
    windows_by_type,
    windows_of_gemma3,
    write_gemma,
)
from bloomery.facts.gguf_graphs import GgufGraph

GEMMA_FACTS: ModelFacts = {"norm": "rms_unit_offset", "scale_embeddings": True}

_GEMMA_GRAPH = {"norm": "rms_unit_offset", "activation": "gelu_tanh", "scale_embeddings": True}

_TIED = {"tie_embeddings": True}

_GEMMA2_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma": Family(
            "GemmaForCausalLM",
            "Gemma",
            GEMMA_FACTS,
            flags=BIASES,
            activations=ACTIVATIONS | {"gelu": "gelu_tanh"},
            defaults={
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "hidden_act": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "num_key_value_heads": 16,
            },
            gguf=GgufGraph("gemma", _GEMMA_GRAPH | _TIED),
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            "Gemma 2",
            {**GEMMA_FACTS, "norm_placement": "both"},
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=lambda fields, layers: windows_by_type(fields, layers, lambda n: n % 2 == 0),
            extra=gemma_scale,
            write=write_gemma,
            defaults=_GEMMA2_DEFAULTS,
            gguf=GgufGraph(
                "gemma2",
                _GEMMA_GRAPH | _TIED | {"norm_placement": "both"},
                free=("attention_bias", "attention_scale", "attention_softcap", "final_softcap"),
                window_period=2,
                default_window=4096,
                full_scale_layers=46,
                default_softcaps=(50.0, 30.0),
            ),
        ),
        "vaultgemma": Family(
            "VaultGemmaForCausalLM",
            "VaultGemma",
            GEMMA_FACTS,
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=lambda fields, layers: windows_by_type(fields, layers, lambda n: n % 2 == 0),
            extra=gemma_scale,
            write=write_gemma,
            defaults=_GEMMA2_DEFAULTS,
            stored=StoredNames(
                renamed={"post_attention_layernorm": "pre_feedforward_layernorm"},
            ),
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            "Gemma 3",
            {**GEMMA_FACTS, "norm_placement": "both", "qk_norm": "head"},
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=windows_of_gemma3,
            extra=gemma3_scale,
            write=write_gemma,
            has_local_rope=True,
            classifier="Gemma3Text",
            defaults={
                "vocab_size": 262208,
                "head_dim": 256,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "hidden_activation": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
            },
            ignored=("attn_logit_softcapping",),
            gguf=GgufGraph(
                "gemma3",
                _GEMMA_GRAPH | {"norm_placement": "both", "qk_norm": "head"},
                free=("attention_bias", "attention_scale", "final_softcap", "local_rope_theta"),
                window_period=6,
                full_scale_layers=62,
            ),
        ),
    }
)
