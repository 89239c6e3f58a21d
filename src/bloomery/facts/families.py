"""The model families: what a Hugging Face config.json of each means as architectural facts, both ways.

A family is one entry of `FAMILIES` here and one parameter of the parity test. The entry holds all that is known of
it: its label, its keys, the names of its stored tensors, its graph of llama.cpp. Defaults of absent keys are those of
transformers' config classes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, cast

from bloomery.core.errors import UserError
from bloomery.facts.config import Activation, ModelConfig, checked_config
from bloomery.facts.config_fields import LARGEST, ConfigFields, Fields, rope_facts, rope_keys
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

LLAMA_KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attention_dropout": "attention_dropout",
    }
)
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
GEMMA_FACTS: ConfigFields = {"norm": "rms_unit_offset", "scale_embeddings": True}
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_bias"}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_pytorch": "gelu",
    "relu": "relu",
}


@dataclass(frozen=True)
class StoredNames:
    """How a family's files name and arrange its parameters, where they do not have our names.

    `renamed`: prefixes of a name; `fused`: stored modules by the native modules that they contain, in order.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    transposed: bool = False  # the matrices of its layers


@dataclass(frozen=True)
class Family:
    """`facts` hold for each of its models; `keys` (native_name -> theirs) and `flags` differ between models.

    `windows` reads the window of each layer, `extra` the facts that take more than copying; `write` undoes both.
    `refused` are keys that change the mathematics in a way that the decoder does not follow, `ignored` keys that
    transformers' layers of the family do not read, though other programs may. `reads_rotary_share`: a part of each
    head may rotate. `has_local_rope`: layers with a window rotate by a base of their own. `classifier`: the stem of
    transformers' reward model, where it is not the architecture's; `gelu_tanh`: how the family calls that activation;
    `states_dropout`: its config class has a dropout that is not 0 by default. `gguf`: None where llama.cpp's graph is
    not known here.
    """

    architecture: str
    label: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    flags: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    windows: Callable[[Fields, int], tuple[int | None, ...]] = lambda _fields, _layers: ()
    extra: Callable[[Fields, ConfigFields], ConfigFields] = lambda _fields, _facts: {}
    write: Callable[[ModelConfig], ConfigFields] = lambda _config: {}
    refused: tuple[str, ...] = ("use_bidirectional_attention",)
    ignored: tuple[str, ...] = ()
    reads_rotary_share: bool = False
    has_local_rope: bool = False
    classifier: str = ""
    gelu_tanh: str = "gelu_pytorch_tanh"
    states_dropout: bool = False
    stored: StoredNames = field(default_factory=StoredNames)
    gguf: GgufGraph | None = None


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


def family_label(config: ModelConfig) -> str:
    """How people write the name of the config's architecture."""
    if config.transformers_backend is not None:
        return architecture_of(config).removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    if config.family in EXPERT_FAMILIES:
        return EXPERT_FAMILIES[config.family].label
    return FAMILIES[config.family].label


# The model_type of a multimodal model, and of its language model.
MULTIMODAL: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text", "mistral3": "mistral"})


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of a multimodal model's language model, with what only the whole states of it; any other as it
    is.
    """
    kind = hf.get("model_type")
    text = hf.get("text_config")
    if not isinstance(kind, str) or kind not in MULTIMODAL or not isinstance(text, dict):
        return hf
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    outer = {key: hf[key] for key in shared if key in hf}
    return {**outer, **text, "model_type": MULTIMODAL[kind]}


def family_of(hf: Mapping[str, Any], *, where: str = "config.json") -> str:
    """The key of FAMILIES, from `model_type` or `architectures`. Raises UserError for an unknown architecture."""
    kind = hf.get("model_type")
    architectures = hf.get("architectures")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    architecture = architectures[0] if isinstance(architectures, list) and architectures else kind
    for name, family in FAMILIES.items():
        if architecture == family.architecture:
            return name
    raise UserError(
        f"{str(architecture)[:60]!r} is not a supported architecture",
        where=where,
        fix=f"supported: {', '.join(FAMILIES)}",
    )


def unread_keys(hf: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that transformers' layers of its family ignore, though other programs may read them."""
    hf = text_part(hf)
    family = FAMILIES.get(str(hf.get("model_type")))
    if family is None:
        return []
    rope = hf.get("rope_parameters")
    inner_share = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    values: ConfigFields = {}
    if not family.reads_rotary_share:
        values["partial_rotary_factor"] = inner_share or hf.get("partial_rotary_factor")
    values |= {key: hf.get(key) for key in family.ignored}
    return [f"{key} ({str(value)[:20]})" for key, value in values.items() if value not in (None, 1)]


def config_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """The facts in a config.json. Raises UserError naming the field that is missing or makes no sense."""
    hf = text_part(hf)
    name = family_of(hf, where=where)
    family = FAMILIES[name]
    fields = Fields(hf, family.defaults, where=where)
    for key in family.refused:
        if fields.flag(key):
            raise UserError(f"{key} is not supported", where=where, fix="choose another model")
    if fields.get("is_causal") is False:
        problem = "is_causal: false is not supported: tokens would see those after them"
        raise UserError(problem, where=where, fix="choose another model")
    facts: ConfigFields = {"family": name, **family.facts, **_sizes(fields, family)}
    facts["embedding_dropout"] = fields.number("embd_pdrop", high=0.999, default=0.0)
    facts["residual_dropout"] = fields.number("resid_pdrop", high=0.999, default=0.0)
    facts["initializer_range"] = fields.number("initializer_range", high=1e3, default=0.02)
    facts |= {native_name: fields.flag(hf_name) for native_name, hf_name in family.flags.items()}
    facts["norm_eps"] = fields.number(family.keys["norm_eps"], high=1.0)
    facts["activation"] = fields.choice(family.keys["activation"], family.activations)
    facts["attention_dropout"] = fields.number(
        family.keys["attention_dropout"], high=0.999, default=0.0
    )
    facts["tie_embeddings"] = fields.flag("tie_word_embeddings")
    facts["sliding_window"] = family.windows(fields, facts["num_layers"])
    if facts.get("positions") != "learned":
        facts |= rope_facts(
            fields,
            max_positions=facts["max_positions"],
            head_dim=facts["head_dim"],
            reads_rotary_share=family.reads_rotary_share,
            has_local_rope=family.has_local_rope,
        )
    facts |= family.extra(fields, facts)
    if _gives_values(hf, where):
        facts["head"] = "values"
    facts |= {
        key: fields.token(key, facts["vocab_size"])
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return checked_config(ModelConfig(**facts), where=where)


def _gives_values(hf: Mapping[str, Any], where: str) -> bool:
    """Whether it is a reward model: transformers' classifier of a text with a single label. UserError for several."""
    architectures = hf.get("architectures")
    labels = hf.get("id2label")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else ""
    if not str(architecture).endswith("ForSequenceClassification"):
        return False
    # transformers' default is 2
    count = len(labels) if isinstance(labels, dict) else hf.get("num_labels", 2)
    if count != 1:
        problem = f"a classifier of {str(count)[:20]} labels gives no single value"
        raise UserError(
            problem, where=where, fix="choose a reward model, or the model that it was made from"
        )
    return True


def _sizes(fields: Fields, family: Family) -> dict[str, int]:
    def size(native_name: str, default: int | None = None) -> int:
        hf_name = family.keys.get(native_name)
        if hf_name is None and default:
            return default
        return fields.size(hf_name or native_name, LARGEST[native_name], default=default)

    width = size("hidden_size")
    heads = size("num_heads")
    per_head = width // heads
    divides = width % heads == 0 or fields.get(family.keys.get("head_dim", "")) is not None
    if not divides:
        raise fields.refuse(family.keys["hidden_size"], f"a multiple of the {heads} heads")
    return {
        "vocab_size": size("vocab_size"),
        "hidden_size": width,
        "num_layers": size("num_layers"),
        "num_heads": heads,
        "intermediate_size": size(
            "intermediate_size", None if family.facts.get("gated_mlp", True) else 4 * width
        ),
        "num_kv_heads": size("num_kv_heads", heads),
        "head_dim": size("head_dim", per_head or None),
        "max_positions": size("max_positions"),
    }


def config_to_hf(config: ModelConfig) -> ConfigFields:
    """A config.json for the config's family. Raises UserError when that family cannot hold these facts."""
    if config.transformers_backend is not None:
        return cast(ConfigFields, json.loads(config.transformers_backend.raw_config))
    family = FAMILIES[config.family]
    raw_config: ConfigFields = {"architectures": [family.architecture], "model_type": config.family}
    raw_config |= {
        hf_name: getattr(config, native_name)
        for native_name, hf_name in family.keys.items()
        if native_name != "activation"
    }
    raw_config |= {
        hf_name: getattr(config, native_name) for native_name, hf_name in family.flags.items()
    }
    raw_config[family.keys["activation"]] = (
        family.gelu_tanh if config.activation == "gelu_tanh" else config.activation
    )
    raw_config |= {
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }
    raw_config |= {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    raw_config |= {"pad_token_id": config.pad_token_id, "use_cache": True}
    if family.states_dropout or config.residual_dropout or config.embedding_dropout:
        raw_config |= {
            "resid_pdrop": config.residual_dropout,
            "embd_pdrop": config.embedding_dropout,
        }
    if config.positions == "rotary":
        raw_config |= rope_keys(config)
    if config.head == "values":  # transformers' names for a model with one value per text
        stem = family.classifier or family.architecture.removesuffix("ForCausalLM").removesuffix(
            "LMHeadModel"
        )
        raw_config |= {"architectures": [f"{stem}ForSequenceClassification"]}
        raw_config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    raw_config |= family.write(config)
    read_back = config_from_hf(raw_config, where="model")
    lost = [f.name for f in fields(config) if getattr(read_back, f.name) != getattr(config, f.name)]
    if lost:
        listed = ", ".join(f"{name} {getattr(config, name)!r}" for name in lost)
        raise UserError(
            f"a {config.family} model cannot have {listed}",
            where="model.family",
            fix=f"choose another family ({', '.join(FAMILIES)}) or leave these settings out",
        )
    return raw_config


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


def fresh_config(name: str, sizes: Mapping[str, Any], *, window: int | None = None) -> ModelConfig:
    """A new model of a family, without dropout: `sizes` are facts that the family stores under a key of its own."""
    keys = known_family(name).keys
    hf_sizes: ConfigFields = {
        keys[native_name]: size for native_name, size in sizes.items() if native_name in keys
    }
    if window is not None:
        hf_sizes |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    config = config_from_hf({"model_type": name, **hf_sizes}, where="model")
    if window is not None and not config.sliding_window:
        fix = "leave it out, or choose mistral"
        raise UserError(
            f"a {name} model has no sliding window", where="model.sliding_window", fix=fix
        )
    return replace(config, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0)
