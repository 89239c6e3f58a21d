"""IBM's Granite models: Llama with four multipliers, dense or with experts, which Granite 4 stores alike."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts
from bloomery.facts.family import (
    BIASES,
    GATE_UP,
    LLAMA_KEYS,
    Family,
    StoredExperts,
    StoredNames,
)
from bloomery.facts.family_rules_experts import expert_keys, experts_of
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e4,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }
)
_GRAPH = GgufGraph(
    "granite",
    free=(
        "attention_bias",
        "output_bias",
        "mlp_bias",
        "attention_scale",
        "embedding_multiplier",
        "residual_multiplier",
        "logit_scale",
    ),
    interleaved=True,
    keys={
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    },
)
_MIXTURE_GRAPH = replace(
    _GRAPH,
    name="granitemoe",
    free=tuple(fact for fact in _GRAPH.free if fact != "mlp_bias"),
    experts=GgufExperts(("softmax_of_chosen",), shared=("none", "plain"), width_is_mlp=True),
)
_EXPERTS = MappingProxyType(
    {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
)
_STORED_EXPERTS = StoredExperts(
    prefix="block_sparse_moe.experts",
    module="block_sparse_moe.experts",
    stacks={
        "gate_up_proj": "block_sparse_moe.input_linear.weight",
        "down_proj": "block_sparse_moe.output_linear.weight",
    },
)
_SHARED_GATE_UP = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
_STORED_ROUTER = {"mlp.gate": "block_sparse_moe.router.layer"}
_ROUTER_IN_MEMORY = {"block_sparse_moe.router.layer": "block_sparse_moe.router"}
# What `layer_types` calls attention, in transformers and in the published files.
_ATTENTION = ("full_attention", "attention")


def _multipliers(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """A scale of head_dim ** -0.5 is the default, and so None."""
    scale = fields.number("attention_multiplier", low=1e-9)
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", low=1e-9),
        "residual_multiplier": fields.number("residual_multiplier", low=1e-9),
        "logit_scale": 1.0 / fields.number("logits_scaling", low=1e-9),
        "attention_scale": None if scale == facts["head_dim"] ** -0.5 else scale,
    }


def _write_granite(config: ModelConfig) -> HfKeys:
    scale = config.attention_scale
    return {
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": 1.0 / config.logit_scale,
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
    }


def _mixture(fields: Fields, facts: ModelFacts) -> ModelFacts:
    experts = experts_of(fields, width_key="intermediate_size", softmax_of_chosen=True)
    return _multipliers(fields, facts) | {"experts": experts}


def _write_mixture(config: ModelConfig) -> HfKeys:
    keys = expert_keys(config, count_key="num_local_experts", width_key="intermediate_size")
    return _write_granite(config) | keys


def _granite4(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """The MLP of dense models is what those with experts call the shared one. Layers rotate if the file says so."""
    layers = facts["num_layers"]
    types = fields.entries("layer_types", layers) or fields.entries("layers_block_type", layers)
    if types is None or set(types) - set(_ATTENTION):
        raise fields.lacks("layer_types", "full_attention in each layer: Mamba is not native")
    embedding = fields.get("position_embedding_type")
    if embedding not in (None, "rope", "nope"):
        raise fields.lacks("position_embedding_type", "rope or null")
    rotation = {"rotary_layers": () if embedding == "rope" else (False,) * layers}
    if not fields.number("num_local_experts"):
        return _multipliers(fields, facts) | rotation
    experts = experts_of(
        fields,
        width_key="intermediate_size",
        softmax_of_chosen=True,
        shared_width=facts["intermediate_size"],
    )
    return _multipliers(fields, facts) | rotation | {"experts": experts}


def _write_granite4(config: ModelConfig) -> HfKeys:
    """Of Mamba, which no layer has, transformers checks the sizes: one head as wide as the model."""
    expert_sizes: HfKeys = {
        "intermediate_size": config.intermediate_size,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    if config.experts is not None:
        expert_sizes = expert_keys(
            config, count_key="num_local_experts", width_key="intermediate_size"
        )
    return _write_granite(config) | {
        **expert_sizes,
        "layer_types": ["full_attention"] * config.num_layers,
        "position_embedding_type": None if config.rotary_layers else "rope",
        "mamba_n_heads": 1,
        "mamba_expand": 1,
        "mamba_d_head": config.hidden_size,
    }


def _fresh_granite(sizes: Mapping[str, Any]) -> HfKeys:
    """The multipliers of Granite 3.3 2B, whose attention is scaled by the width of a head."""
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"]
    return {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_multiplier": 1.0 / head_dim,
    }


def _fresh_granite4(sizes: Mapping[str, Any]) -> HfKeys:
    return _fresh_granite(sizes) | {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * sizes["num_layers"],
        "position_embedding_type": "rope",
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "granite": Family(
            "GraniteForCausalLM",
            "Granite 3",
            flags={**BIASES, "mlp_bias": "mlp_bias"},
            extra=_multipliers,
            write=_write_granite,
            fresh=_fresh_granite,
            defaults=_DEFAULTS,
            gguf=_GRAPH,
        ),
        "granitemoe": Family(
            "GraniteMoeForCausalLM",
            "Granite 3 MoE",
            flags=BIASES,
            extra=_mixture,
            write=_write_mixture,
            fresh=_fresh_granite,
            defaults={**_DEFAULTS, **_EXPERTS},
            stored=StoredNames(
                renamed=_STORED_ROUTER, experts=_STORED_EXPERTS, in_memory=_ROUTER_IN_MEMORY
            ),
            gguf=_MIXTURE_GRAPH,
        ),
        "granitemoehybrid": Family(
            "GraniteMoeHybridForCausalLM",
            "Granite 4",
            flags=BIASES,
            keys=LLAMA_KEYS | {"intermediate_size": "shared_intermediate_size"},
            extra=_granite4,
            write=_write_granite4,
            fresh=_fresh_granite4,
            defaults={
                **_DEFAULTS,
                **_EXPERTS,
                "intermediate_size": 11008,
                "shared_intermediate_size": 1024,
            },
            stored=StoredNames(
                renamed={
                    "mlp.down_proj": "shared_mlp.output_linear",
                    "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
                    **_STORED_ROUTER,
                },
                fused={
                    GATE_UP: "shared_mlp.input_linear",
                    _SHARED_GATE_UP: "shared_mlp.input_linear",
                },
                experts=_STORED_EXPERTS,
                in_memory=_ROUTER_IN_MEMORY,
            ),
            gguf=_GRAPH,
            gguf_mixture=_MIXTURE_GRAPH,
        ),
    }
)
