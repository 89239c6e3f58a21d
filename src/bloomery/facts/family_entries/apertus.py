"""Apertus, whose activation has numbers of its own."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.family import ACTIVATIONS, BIASES, Family, StoredNames

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "apertus": Family(
            "ApertusForCausalLM",
            "Apertus",
            {"qk_norm": "head", "gated_mlp": False},
            flags=BIASES,
            activations=ACTIVATIONS | {"xielu": "xielu"},
            # A new model reads no longer texts than those that it is trained on.
            fresh=lambda _sizes: {"rope_parameters": {"rope_type": "default", "rope_theta": 12e6}},
            defaults={
                "intermediate_size": 14336,
                "max_position_embeddings": 65536,
                "rms_norm_eps": 1e-5,
                "hidden_act": "xielu",
                "rope_theta": 12e6,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 12e6,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            stored=StoredNames(
                renamed={
                    "input_layernorm": "attention_layernorm",
                    "post_attention_layernorm": "feedforward_layernorm",
                }
            ),
        ),
    }
)
