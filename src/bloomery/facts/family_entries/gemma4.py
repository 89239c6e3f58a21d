"""Gemma 4's families: the language models of its small and large ones, and of the unified one."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts
from bloomery.facts.family import BIASES, LLAMA_KEYS, Family, StoredExperts, StoredNames
from bloomery.facts.family_rules_gemma4 import (
    GEMMA4_ROPE,
    fresh_gemma4,
    gemma4_facts,
    windows_of_gemma4,
    write_gemma4,
)
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

_FACTS: ModelFacts = {
    "norm": "rms",
    "norm_placement": "both",
    "qk_norm": "head",
    "value_norm": True,
    "scale_embeddings": True,
    "layer_scalar": True,
}

_DEFAULTS: HfKeys = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_parameters": GEMMA4_ROPE,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

_GRAPH = GgufGraph(
    "gemma4",
    {
        "norm_placement": "both",
        "qk_norm": "head",
        "value_norm": True,
        "activation": "gelu_tanh",
        "scale_embeddings": True,
        "attention_scale": 1.0,
    },
    free=(
        "final_softcap",
        "keys_are_values",
        "layer_scalar",
        "local_rope_theta",
        "num_kv_shared_layers",
        "per_layer_input_size",
    ),
    states_windows=True,
    states_merges=True,
    # What every token meets is the MLP there.
    renamed={
        "mlp.shared_expert.gate_proj": "ffn_gate",
        "mlp.shared_expert.up_proj": "ffn_up",
        "mlp.shared_expert.down_proj": "ffn_down",
    },
    experts=GgufExperts(
        ("softmax_of_chosen",),
        normed_router=True,
        shared=("plain",),
        shared_is_mlp=True,
        fused=True,
        optional=True,
    ),
)

# Both classes take the old key for the new one, and know no third.
_OLD_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq")


def _write_unified(config: ModelConfig) -> HfKeys:
    """The unified model's layers are given nothing beside the stream, and its class knows no key of it."""
    small_only = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
    return {key: value for key, value in write_gemma4(config).items() if key not in small_only}


def _unified_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    return gemma4_facts(fields, facts) | {"per_layer_input_size": 0, "experts": None}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma4_text": Family(
            "Gemma4ForCausalLM",
            "Gemma 4",
            _FACTS,
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=windows_of_gemma4,
            extra=gemma4_facts,
            fresh=fresh_gemma4,
            write=write_gemma4,
            refused=(),
            unwritten=_OLD_ROPE,
            has_local_rope=True,
            defaults={
                **_DEFAULTS,
                "max_position_embeddings": 131072,
                "sliding_window": 512,
                "hidden_size_per_layer_input": 256,
            },
            # The MLP that every token meets is a shared expert here.
            stored=StoredNames(
                renamed={
                    "mlp.shared_expert": "mlp",
                    "mlp.gate.scale": "router.scale",
                    "mlp.gate.per_expert_scale": "router.per_expert_scale",
                    "mlp.gate": "router.proj",
                },
                experts=StoredExperts(
                    prefix="experts",
                    module="experts",
                    stacks={
                        "gate_up_proj": "experts.gate_up_proj",
                        "down_proj": "experts.down_proj",
                    },
                ),
            ),
            gguf=_GRAPH,
        ),
        "gemma4_unified_text": Family(
            "Gemma4UnifiedForCausalLM",
            "Gemma 4 unified",
            _FACTS,
            flags=BIASES,
            keys=LLAMA_KEYS | {"activation": "hidden_activation"},
            windows=windows_of_gemma4,
            extra=_unified_facts,
            fresh=lambda sizes: {"global_head_dim": 2 * sizes["head_dim"]},
            write=_write_unified,
            refused=(),
            unwritten=_OLD_ROPE,
            has_local_rope=True,
            defaults={**_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024},
            gguf=_GRAPH,
        ),
    }
)
