"""The model families: what a Hugging Face config.json of each means as architectural facts, both ways.

A family is one entry of `FAMILIES` here, one line of `names.FUSED` if its weights are stored differently, and one
parameter of the parity test. Defaults of absent keys are those of transformers' config classes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, cast

from bloomery.errors import UserError
from bloomery.model.config import Activation, ModelConfig, checked
from bloomery.model.fields import LARGEST, Fields
from bloomery.model.rope_fields import rope_facts, rope_keys

Facts = dict[str, Any]
LLAMA_KEYS = MappingProxyType({
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "activation": "hidden_act", "attention_dropout": "attention_dropout",
})  # fmt: skip
GPT2_KEYS = MappingProxyType({
    "vocab_size": "vocab_size", "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_layers": "n_layer",
    "num_heads": "n_head", "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function", "attention_dropout": "attn_pdrop",
})  # fmt: skip
GEMMA_FACTS: Facts = {"norm": "rms_unit_offset", "scale_embeddings": True}
BIASES = {"attention_bias": "attention_bias", "output_bias": "attention_bias"}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_pytorch": "gelu", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """`facts` hold for each of its models; `keys` (ours -> theirs) and `flags` differ between models.

    `windows` reads the window of each layer, `extra` the facts that take more than copying; `write` undoes both.
    `refused` are keys that change the mathematics in a way that the decoder does not follow.
    """

    architecture: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    flags: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    windows: Callable[[Fields, int], tuple[int | None, ...]] = lambda _fields, _layers: ()
    extra: Callable[[Fields, Facts], Facts] = lambda _fields, _facts: {}
    write: Callable[[ModelConfig], Facts] = lambda _config: {}
    refused: tuple[str, ...] = ("use_bidirectional_attention",)


def _layer_types(config: ModelConfig) -> Facts:
    kinds = ["full_attention" if config.window(n) is None else "sliding_attention" for n in range(config.num_layers)]
    return {"sliding_window": _window(config), "layer_types": kinds}


def _window(config: ModelConfig) -> int | None:
    return next((window for window in config.sliding_window if window is not None), None)


def _windows_by_type(fields: Fields, layers: int, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """From `layer_types`, or by the family's own rule in files that are older than that key."""
    if fields.get("sliding_window") is None:
        return ()
    window = fields.size("sliding_window", 2**31)
    types = fields.entries("layer_types", layers)
    unknown = set(types or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise fields.refuse("layer_types", "made of full_attention and sliding_attention")
    slides = [sliding(n) if types is None else types[n] == "sliding_attention" for n in range(layers)]
    return tuple(window if slide else None for slide in slides) if any(slides) else ()


def _windows_everywhere(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.get("sliding_window") is None:
        return ()
    return (fields.size("sliding_window", 2**31),) * layers


def _windows_qwen(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window"):
        return ()
    full = int(fields.number("max_window_layers", default=layers))
    return _windows_by_type(fields, layers, lambda n: n >= full)


def _windows_gemma2(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return _windows_by_type(fields, layers, lambda n: n % 2 == 0)


def _windows_gemma3(fields: Fields, layers: int) -> tuple[int | None, ...]:
    pattern = fields.size("sliding_window_pattern", 2**12, default=6)
    return _windows_by_type(fields, layers, lambda n: (n + 1) % pattern != 0)


def _windows_smollm3(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window"):
        return ()
    rotating = _rotating(fields, layers)
    return _windows_by_type(fields, layers, lambda n: not rotating[n])


def _rotating(fields: Fields, layers: int) -> tuple[bool, ...]:
    interval = fields.size("no_rope_layer_interval", 2**12, default=4)
    stated = fields.entries("no_rope_layers", layers)  # the name misleads: 1 means that the layer rotates
    return tuple(bool(stated[n]) if stated is not None else (n + 1) % interval != 0 for n in range(layers))


def _gemma_scale(fields: Fields, facts: Facts) -> Facts:
    scalar = fields.number("query_pre_attn_scalar", low=1e-6)
    caps = {
        "attention_softcap": fields.optional_number("attn_logit_softcapping"),
        "final_softcap": fields.optional_number("final_logit_softcapping"),
    }
    return caps | {"attention_scale": None if scalar == facts["head_dim"] else scalar**-0.5}


def _write_gemma(config: ModelConfig) -> Facts:
    scalar = config.head_dim if config.attention_scale is None else config.attention_scale**-2
    caps = {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.final_softcap}
    return _layer_types(config) | caps | {"query_pre_attn_scalar": round(scalar)}


def _write_qwen(config: ModelConfig) -> Facts:
    kinds = _layer_types(config)
    slides = config.sliding_window != ()
    return kinds | {"use_sliding_window": slides, "max_window_layers": kinds["layer_types"].count("full_attention")}


def _write_smollm3(config: ModelConfig) -> Facts:
    rotating = config.rotary_layers or (True,) * config.num_layers
    slides = {"use_sliding_window": config.sliding_window != (), "no_rope_layers": [int(turns) for turns in rotating]}
    return _layer_types(config) | slides


def _write_phi3(config: ModelConfig) -> Facts:
    scaling = config.rope_scaling
    original = None if scaling is None else scaling.original_max_positions
    return {"sliding_window": _window(config), "original_max_position_embeddings": original or config.max_positions}


def _gpt2_scale(fields: Fields, _facts: Facts) -> Facts:
    return {"attention_scale": 1.0 if fields.get("scale_attn_weights") is False else None}


def _write_gpt2(config: ModelConfig) -> Facts:
    return {"scale_attn_weights": config.attention_scale is None}


FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family(
        "LlamaForCausalLM", flags=BIASES | {"mlp_bias": "mlp_bias"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4},
    ),
    "mistral": Family(
        "MistralForCausalLM", windows=_windows_everywhere, write=lambda config: {"sliding_window": _window(config)},
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
                  "hidden_act": "silu", "rope_theta": 1e4, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", {"attention_bias": True}, windows=_windows_qwen, write=_write_qwen,
        defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4,
                  "max_window_layers": 28},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"qk_norm": "head"}, flags=BIASES, windows=_windows_qwen, write=_write_qwen,
        defaults={"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                  "rope_theta": 1e4, "max_window_layers": 28},
    ),
    "gemma": Family(
        "GemmaForCausalLM", GEMMA_FACTS, flags=BIASES, activations=ACTIVATIONS | {"gelu": "gelu_tanh"},
        defaults={"head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
                  "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "num_key_value_heads": 16},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**GEMMA_FACTS, "norm_placement": "both"}, flags=BIASES,
        keys=LLAMA_KEYS | {"activation": "hidden_activation"},
        windows=_windows_gemma2, extra=_gemma_scale, write=_write_gemma,
        defaults={"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
                  "rope_theta": 1e4, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                  "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                  "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", {**GEMMA_FACTS, "norm_placement": "both", "qk_norm": "head"}, flags=BIASES,
        keys=LLAMA_KEYS | {"activation": "hidden_activation"},
        windows=_windows_gemma3, extra=_gemma_scale, write=_write_gemma,
        defaults={"vocab_size": 262208, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                  "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
                  "query_pre_attn_scalar": 256, "sliding_window": 4096},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", flags=BIASES | {"mlp_bias": "mlp_bias"}, windows=_windows_smollm3, write=_write_smollm3,
        extra=lambda fields, facts: {"rotary_layers": _rotating(fields, facts["num_layers"])},
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
                  "hidden_act": "silu", "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", {"norm_placement": "after", "qk_norm": "full"}, flags=BIASES,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4},
    ),
    "phi3": Family(
        "Phi3ForCausalLM", windows=_windows_everywhere, write=_write_phi3,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"norm": "layer", "gated_mlp": False, "attention_bias": True, "output_bias": True, "mlp_bias": True,
         "positions": "learned"},
        keys=GPT2_KEYS, extra=_gpt2_scale, write=_write_gpt2,
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
                  "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True},
        refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    ),
})  # fmt: skip


def family_of(hf: Mapping[str, Any], *, where: str = "config.json") -> str:
    """The key of FAMILIES, from `model_type` or `architectures`. Raises UserError for an unknown architecture."""
    kind, architectures = hf.get("model_type"), hf.get("architectures")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    stated = architectures[0] if isinstance(architectures, list) and architectures else kind
    for name, family in FAMILIES.items():
        if stated == family.architecture:
            return name
    raise UserError(
        f"{str(stated)[:60]!r} is no architecture that Bloomery knows", where=where,
        remedy=f"these are known: {', '.join(FAMILIES)}",
    )  # fmt: skip


def config_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """The facts in a config.json. Raises UserError naming the field that is missing or makes no sense."""
    name = family_of(hf, where=where)
    family = FAMILIES[name]
    fields = Fields(hf, family.defaults, where=where)
    for key in family.refused:
        if fields.flag(key):
            raise UserError(f"{key} is not supported", where=where, remedy="choose another model")
    facts: Facts = {"family": name, **family.facts, **_sizes(fields, family), **_training(fields)}
    facts |= {ours: fields.flag(theirs) for ours, theirs in family.flags.items()}
    facts["norm_eps"] = fields.number(family.keys["norm_eps"], high=1.0)
    facts["activation"] = fields.choice(family.keys["activation"], family.activations)
    facts["attention_dropout"] = fields.number(family.keys["attention_dropout"], high=0.999, default=0.0)
    facts["tie_embeddings"] = fields.flag("tie_word_embeddings")
    facts["sliding_window"] = family.windows(fields, facts["num_layers"])
    if facts.get("positions") != "learned":
        facts |= rope_facts(fields, max_positions=facts["max_positions"], head_dim=facts["head_dim"])
    facts |= family.extra(fields, facts)
    if _gives_values(hf, where):
        facts["head"] = "values"
    facts |= {key: fields.token(key, facts["vocab_size"]) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return checked(ModelConfig(**facts), where=where)


def _gives_values(hf: Mapping[str, Any], where: str) -> bool:
    """Whether it is a reward model: transformers' classifier of a text with a single label. UserError for several."""
    architectures, labels = hf.get("architectures"), hf.get("id2label")
    stated = architectures[0] if isinstance(architectures, list) and architectures else ""
    if not str(stated).endswith("ForSequenceClassification"):
        return False
    count = len(labels) if isinstance(labels, dict) else hf.get("num_labels", 2)  # transformers' default is 2
    if count != 1:
        problem = f"a classifier of {str(count)[:20]} labels gives no single value"
        raise UserError(problem, where=where, remedy="choose a reward model, or the model that it was made from")
    return True


def _classifier(family: str) -> Facts:
    """What transformers says of a model with one value a text."""
    stem = FAMILIES[family].architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    name = f"{'Gemma3Text' if family == 'gemma3_text' else stem}ForSequenceClassification"
    return {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _sizes(fields: Fields, family: Family) -> dict[str, int]:
    def size(ours: str, default: int | None = None) -> int:
        theirs = family.keys.get(ours)
        return default if theirs is None and default else fields.size(theirs or ours, LARGEST[ours], default=default)

    width, heads = size("hidden_size"), size("num_heads")
    per_head = width // heads
    whole = width % heads == 0 or fields.get(family.keys.get("head_dim", "")) is not None
    if not whole:
        raise fields.refuse(family.keys["hidden_size"], f"a multiple of the {heads} heads")
    return {
        "vocab_size": size("vocab_size"), "hidden_size": width, "num_layers": size("num_layers"), "num_heads": heads,
        "intermediate_size": size("intermediate_size", 4 * width if family.keys is GPT2_KEYS else None),
        "num_kv_heads": size("num_kv_heads", heads), "head_dim": size("head_dim", per_head or None),
        "max_positions": size("max_positions"),
    }  # fmt: skip


def _training(fields: Fields) -> dict[str, float]:
    return {
        "embedding_dropout": fields.number("embd_pdrop", high=0.999, default=0.0),
        "residual_dropout": fields.number("resid_pdrop", high=0.999, default=0.0),
        "initializer_range": fields.number("initializer_range", high=1e3, default=0.02),
    }


def config_to_hf(config: ModelConfig) -> Facts:
    """A config.json for the config's family. Raises UserError when that family cannot hold these facts."""
    if config.foreign is not None:
        return cast(Facts, json.loads(config.foreign.stated))
    stated = _stated(config)
    again = config_from_hf(stated, where="model")
    lost = [f.name for f in fields(config) if getattr(again, f.name) != getattr(config, f.name)]
    if lost:
        raise UserError(
            f"a {config.family} model cannot have {_listed(lost, config)}",
            where="model.family", remedy=f"choose another family ({', '.join(FAMILIES)}) or leave these settings out",
        )  # fmt: skip
    return stated


def _listed(names: list[str], config: ModelConfig) -> str:
    return ", ".join(f"{name} {getattr(config, name)!r}" for name in names)


def _stated(config: ModelConfig) -> Facts:
    family = FAMILIES[config.family]
    stated: Facts = {"architectures": [family.architecture], "model_type": config.family}
    stated |= {theirs: getattr(config, ours) for ours, theirs in family.keys.items() if ours != "activation"}
    stated |= {theirs: getattr(config, ours) for ours, theirs in family.flags.items()}
    written = "gelu_new" if config.family == "gpt2" else "gelu_pytorch_tanh"
    stated[family.keys["activation"]] = written if config.activation == "gelu_tanh" else config.activation
    stated |= {"tie_word_embeddings": config.tie_embeddings, "initializer_range": config.initializer_range}
    stated |= {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    stated |= {"pad_token_id": config.pad_token_id, "use_cache": True}
    if config.family in ("gpt2", "phi3") or config.residual_dropout or config.embedding_dropout:
        stated |= {"resid_pdrop": config.residual_dropout, "embd_pdrop": config.embedding_dropout}
    if config.positions == "rotary":
        stated |= rope_keys(config)
    if config.head == "values":
        stated |= _classifier(config.family)
    return stated | family.write(config)


def architecture_of(config: ModelConfig) -> str:
    """The name of its class in transformers."""
    if config.foreign is not None:
        return config.foreign.architecture or config.family
    return FAMILIES[config.family].architecture


def known_family(name: str) -> Family:
    """Raises UserError for a name that is none."""
    if name not in FAMILIES:
        raise UserError(
            f"{name!r} is no family that Bloomery knows", where="model.family", remedy=f"known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def fresh_config(name: str, sizes: Mapping[str, Any], *, window: int | None = None) -> ModelConfig:
    """A new model of a family, without dropout: `sizes` are facts that the family stores under a key of its own."""
    keys = known_family(name).keys
    stated: Facts = {keys[ours]: size for ours, size in sizes.items() if ours in keys}
    if window is not None:
        stated |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    config = config_from_hf({"model_type": name, **stated}, where="model")
    if window is not None and not config.sliding_window:
        remedy = "leave it out, or choose mistral"
        raise UserError(f"a {name} model has no sliding window", where="model.sliding_window", remedy=remedy)
    return replace(config, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0)
