"""OLMo-Hybrid: gated delta nets, with OLMo 2's attention in some layers."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config import DeltaNet, ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts
from bloomery.facts.family import BIASES, Family, StoredNames
from bloomery.facts.family_rules import mixers_by_type, refuse_other_activation, write_qwen3_5

# What is read of a delta net is normed with this epsilon, whatever the config says.
_READ_EPS = 1e-5


def _layers(fields: Fields, facts: ModelFacts) -> ModelFacts:
    num_layers = facts["num_layers"]
    kinds = ["full_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)]
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    if set(fields.entries("layer_types", num_layers) or ()) & {"sliding_attention", "conv"}:
        raise fields.lacks("layer_types", "made of full_attention and linear_attention")

    def size(key: str, default: int) -> int:
        return fields.size(f"linear_{key}", 2**16, default=default)

    refuse_other_activation(fields)
    num_key_heads = size("num_key_heads", facts["num_heads"])
    key_head_dim = size("key_head_dim", int(0.75 * facts["hidden_size"] / num_key_heads))
    return {
        "mixers": mixers_by_type(fields, num_layers, lambda n: kinds[n]),
        "delta_net": DeltaNet(
            num_key_heads=num_key_heads,
            num_value_heads=size("num_value_heads", facts["num_heads"]),
            key_head_dim=key_head_dim,
            value_head_dim=size("value_head_dim", 2 * key_head_dim),
            kernel=size("conv_kernel_dim", 4),
            projections="separate",
            negative_eigenvalues=fields.flag("linear_allow_neg_eigval"),
            norm_eps=_READ_EPS,
        ),
    }


def _write(config: ModelConfig) -> HfKeys:
    sizes = config.delta_net
    assert sizes is not None
    keys = write_qwen3_5(config) | {"linear_allow_neg_eigval": sizes.negative_eigenvalues}
    if config.rotary_layers:
        unrotated = {"rope_type": "default", "rope_theta": None}
        keys |= {"rope_theta": None, "rope_scaling": None, "rope_parameters": unrotated}
    return keys


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "olmo_hybrid": Family(
            "OlmoHybridForCausalLM",
            "OLMo-Hybrid",
            {"norm_placement": "by_mixer", "qk_norm": "full"},
            flags=BIASES,
            # What is convolved goes through the same function, and through no other here.
            activations={"silu": "silu", "swish": "silu"},
            extra=_layers,
            write=_write,
            rotates_by_theta=True,
            defaults={
                "max_position_embeddings": 65536,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "linear_num_key_heads": None,
                "linear_allow_neg_eigval": True,
            },
            stored=StoredNames(
                renamed={
                    "input_layernorm": "attention_layer_norm",
                    "post_attention_layernorm": "feedforward_layer_norm",
                    "linear_attn.in_proj_z": "linear_attn.g_proj",
                    "linear_attn.in_proj_b": "linear_attn.b_proj",
                    "linear_attn.in_proj_a": "linear_attn.a_proj",
                    "linear_attn.out_proj": "linear_attn.o_proj",
                    "linear_attn.norm": "linear_attn.o_norm",
                },
                # Files have either name in layers of attention.
                in_memory={
                    "attention_layer_norm": "input_layernorm",
                    "feedforward_layer_norm": "post_attention_layernorm",
                },
            ),
        ),
    }
)
