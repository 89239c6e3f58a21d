"""The table of the model families. One entry, and one case of the parity test, is all that is known of a family.

`family.Family` says what each field means; `hf_config` reads a config.json by it and writes one. Defaults of absent
keys are those of transformers' config classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import ModelFacts
from bloomery.facts.family import ACTIVATIONS, LLAMA_KEYS, Family, StoredNames
from bloomery.facts.family_rules import (
    gemma3_scale,
    gemma_scale,
    rotating_layers,
    windows_by_type,
    windows_everywhere,
    windows_of_gemma3,
    windows_of_mistral,
    windows_of_qwen,
    windows_of_smollm3,
    write_gemma,
    write_mistral,
    write_phi3,
    write_qwen,
    write_smollm3,
)
from bloomery.facts.gguf_graphs import GgufGraph
from bloomery.facts.table import OpenTable

GPT2_KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "attention_dropout": "attn_pdrop",
    }
)
GEMMA_FACTS: ModelFacts = {"norm": "rms_unit_offset", "scale_embeddings": True}
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_bias"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LLAMA_GRAPH = GgufGraph(
    "llama", free=("attention_bias", "output_bias", "mlp_bias"), interleaved=True
)
_GEMMA_GRAPH = {"norm": "rms_unit_offset", "activation": "gelu_tanh", "scale_embeddings": True}
_TIED = {"tie_embeddings": True}

FAMILIES: OpenTable[Family] = OpenTable(
    {
        "llama": Family(
            "LlamaForCausalLM",
            "Llama",
            flags=BIASES | {"mlp_bias": "mlp_bias"},
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            gguf=_LLAMA_GRAPH,
        ),
        "mistral": Family(
            "MistralForCausalLM",
            "Mistral",
            windows=windows_of_mistral,
            write=write_mistral,
            defaults={
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "sliding_window": 4096,
            },
            gguf=_LLAMA_GRAPH,
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            "Qwen2",
            {"attention_bias": True},
            windows=windows_of_qwen,
            write=write_qwen,
            defaults={
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "max_window_layers": 28,
            },
            gguf=GgufGraph("qwen2"),
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            "Qwen3",
            {"qk_norm": "head"},
            flags=BIASES,
            windows=windows_of_qwen,
            write=write_qwen,
            defaults={
                "head_dim": 128,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 1e4,
                "max_window_layers": 28,
            },
            gguf=GgufGraph("qwen3", {"qk_norm": "head"}),
        ),
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
            defaults={
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
            },
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
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            "SmolLM3",
            flags=BIASES | {"mlp_bias": "mlp_bias"},
            windows=windows_of_smollm3,
            write=write_smollm3,
            extra=lambda fields, facts: {
                "rotary_layers": rotating_layers(fields, facts["num_layers"])
            },
            defaults={
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
            gguf=GgufGraph(
                "smollm3",
                free=("attention_bias", "output_bias", "mlp_bias", "rotary_layers"),
                interleaved=True,
                unrotated_period=4,
            ),
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            "OLMo 2",
            {"norm_placement": "after", "qk_norm": "full"},
            flags=BIASES,
            defaults={
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            gguf=GgufGraph(
                "olmo2",
                {"norm_placement": "after", "qk_norm": "full"},
                full_width=True,
                has_own_head=True,
            ),
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            "Phi-3",
            windows=windows_everywhere,
            write=write_phi3,
            reads_rotary_share=True,
            states_dropout=True,
            defaults={
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "rope_theta": 1e4,
            },
            stored=StoredNames(
                fused={_QKV: "self_attn.qkv_proj", _GATE_UP: "mlp.gate_up_proj"},
            ),
            gguf=GgufGraph(
                "phi3",
                free=("rotary_share",),
                full_width=True,
                fused={_QKV: "attn_qkv", _GATE_UP: "ffn_up"},
                states_no_window=True,
            ),
        ),
        "gpt2": Family(
            "GPT2LMHeadModel",
            "GPT-2",
            {
                "norm": "layer",
                "gated_mlp": False,
                "attention_bias": True,
                "output_bias": True,
                "mlp_bias": True,
                "positions": "learned",
            },
            keys=GPT2_KEYS,
            gelu_tanh="gelu_new",
            states_dropout=True,
            extra=lambda fields, _: {
                "attention_scale": 1.0 if fields.get("scale_attn_weights") is False else None
            },
            write=lambda config: {"scale_attn_weights": config.attention_scale is None},
            defaults={
                "n_positions": 1024,
                "layer_norm_epsilon": 1e-5,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "tie_word_embeddings": True,
            },
            refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
            stored=StoredNames(
                renamed={
                    "model.embed_tokens": "transformer.wte",
                    "model.embed_positions": "transformer.wpe",
                    "model.norm": "transformer.ln_f",
                    "model.layers": "transformer.h",
                    "input_layernorm": "ln_1",
                    "post_attention_layernorm": "ln_2",
                    "self_attn.o_proj": "attn.c_proj",
                    "mlp.up_proj": "mlp.c_fc",
                    "mlp.down_proj": "mlp.c_proj",
                },
                fused={_QKV: "attn.c_attn"},
                transposed=True,
            ),
            gguf=GgufGraph(
                "gpt2",
                {
                    "norm": "layer",
                    "activation": "gelu_tanh",
                    "gated_mlp": False,
                    "positions": "learned",
                    "attention_bias": True,
                    "output_bias": True,
                    "mlp_bias": True,
                },
                free=(),
                full_width=True,
                fused={_QKV: "attn_qkv"},
                takes_exact_gelu=True,
            ),
        ),
    }
)


@dataclass(frozen=True)
class ExpertFamily:
    """A mixture of experts that is planned and not trained: its dense kin with experts in place of each MLP.

    `bias` and `sinks` as in `config.Experts`.
    """

    label: str
    dense_kin: str
    bias: bool = False
    sinks: bool = False


EXPERT_FAMILIES: Mapping[str, ExpertFamily] = MappingProxyType(
    {
        "qwen3_moe": ExpertFamily("Qwen3 MoE", "qwen3"),
        "mixtral": ExpertFamily("Mixtral", "mistral"),
        "gpt_oss": ExpertFamily("GPT-OSS", "llama", bias=True, sinks=True),
    }
)

# The model_type of a multimodal model, and of its language model.
MULTIMODAL: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text", "mistral3": "mistral"})


def family_label(config: ModelConfig) -> str:
    """How people write the name of the config's architecture."""
    if config.transformers_backend is not None:
        return architecture_of(config).removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    if config.family in EXPERT_FAMILIES:
        return EXPERT_FAMILIES[config.family].label
    return FAMILIES[config.family].label


def architecture_of(config: ModelConfig) -> str:
    """The name of its class in transformers."""
    if config.transformers_backend is not None:
        return config.transformers_backend.architecture or config.family
    return FAMILIES[config.family].architecture


def known_family(name: str) -> Family:
    """Raises UserError for a name that is none."""
    if name not in FAMILIES:
        raise UserError(
            f"{name!r} is not a supported family",
            where="model.family",
            fix=f"known: {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]
