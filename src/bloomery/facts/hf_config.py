"""A Hugging Face config.json becomes a ModelConfig by the entry of its family, and a ModelConfig becomes one again."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, cast

from bloomery.core.errors import UserError
from bloomery.facts.config import Experts, ModelConfig, checked_config
from bloomery.facts.config_fields import (
    LARGEST,
    Fields,
    HfKeys,
    ModelFacts,
    NotNative,
    rope_facts,
    rope_keys,
    stated_theta,
)
from bloomery.facts.families import (
    FAMILIES,
    MULTIMODAL,
    TEXT_DEFAULTS,
    TEXT_FIXED,
    known_family,
)
from bloomery.facts.family import Family
from bloomery.facts.family_rules_experts import COUNTS


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
    own_kind = text.get("model_type")
    family = own_kind if own_kind in FAMILIES else MULTIMODAL[kind]
    part = {**TEXT_DEFAULTS.get(kind, {}), **outer, **text, **TEXT_FIXED.get(kind, {})}
    part["model_type"] = family
    if "tie_word_embeddings" in outer:  # transformers ties what the whole says
        part["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return part


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
    values: HfKeys = {}
    if not family.reads_rotary_share:
        values["partial_rotary_factor"] = inner_share or hf.get("partial_rotary_factor")
    values |= {key: hf.get(key) for key in family.ignored}
    return [f"{key} ({str(value)[:20]})" for key, value in values.items() if value not in (None, 1)]


def config_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """The facts in a config.json. Raises UserError naming the field that is missing or makes no sense."""
    hf = text_part(hf)
    name = family_of(hf, where=where)
    family = FAMILIES[name]
    if hf.get("rope_parameters") is None and "rope_parameters" in family.defaults:
        hf = {key: value for key, value in hf.items() if key != "rope_parameters"}  # null: those
    fields = Fields(hf, family.defaults, where=where)
    for key in family.refused:
        if fields.flag(key):
            raise NotNative(f"{key} is not supported", where=where, fix="choose another model")
    for key in family.by_transformers:
        if fields.get(key):
            fix = "set model.implementation=transformers"
            raise NotNative(f"{key} is not supported natively", where=where, fix=fix)
    if fields.get("is_causal") is False:
        problem = "is_causal: false is not supported: tokens would see those after them"
        raise UserError(problem, where=where, fix="choose another model")
    facts: ModelFacts = {"family": name, **family.facts, **_sizes(fields, family)}
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
    if family.rotates_by_theta and stated_theta(fields) is None:
        facts["rotary_layers"] = (False,) * facts["num_layers"]
    elif facts.get("positions") != "learned":
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


def config_to_hf(config: ModelConfig) -> HfKeys:
    """A config.json for the config's family. Raises UserError when that family cannot hold these facts."""
    if config.transformers_backend is not None:
        return cast(HfKeys, json.loads(config.transformers_backend.raw_config))
    family = FAMILIES[config.family]
    raw_config: HfKeys = {"architectures": [family.architecture], "model_type": config.family}
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
        default_share = family.defaults.get("partial_rotary_factor", 1.0)
        raw_config |= rope_keys(config, default_share=default_share)
    if config.head == "values":  # transformers' names for a model with one value per text
        stem = family.classifier or family.architecture.removesuffix("ForCausalLM").removesuffix(
            "LMHeadModel"
        )
        raw_config |= {"architectures": [f"{stem}ForSequenceClassification"]}
        raw_config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    raw_config |= family.write(config)
    raw_config = {key: value for key, value in raw_config.items() if key not in family.unwritten}
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


def has_delta_net(family: Family) -> bool:
    """Whether layers of the family's models are gated delta nets, with sizes of their own."""
    return "linear_num_key_heads" in family.defaults


def has_experts(family: Family) -> bool:
    """Whether layers of the family's models have experts in place of an MLP."""
    return any(key in family.defaults for key in COUNTS)


def fresh_config(
    name: str,
    sizes: Mapping[str, Any],
    *,
    window: int | None = None,
    delta_net: Mapping[str, int] = MappingProxyType({}),
    experts: Mapping[str, int] = MappingProxyType({}),
) -> ModelConfig:
    """A new model of a family, without dropout: `sizes` are facts that the family stores under a key of its own.

    `delta_net`: fields of a `DeltaNet`, `experts`: of an `Experts`, of a family that has them.
    """
    family = known_family(name)
    keys = family.keys
    hf_sizes: HfKeys = {
        keys[native_name]: size for native_name, size in sizes.items() if native_name in keys
    }
    if window is not None:
        hf_sizes |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    hf_sizes |= {f"linear_{field}": size for field, size in delta_net.items()}
    fresh_keys = {"model_type": name, **family.fresh(sizes)}
    config = config_from_hf(fresh_keys | hf_sizes, where="model")
    if window is not None and not config.sliding_window:
        fix = "leave it out, or choose mistral"
        raise UserError(
            f"a {name} model has no sliding window", where="model.sliding_window", fix=fix
        )
    if experts and config.experts is None:
        fix = "leave it out, or set model.family=qwen3_moe"
        raise UserError(f"a new {name} model has no experts", where="model.experts", fix=fix)
    if experts and config.experts is not None:
        config = _with_experts(config, config.experts, experts)
    return replace(config, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0)


def _with_experts(config: ModelConfig, default: Experts, asked: Mapping[str, int]) -> ModelConfig:
    """The config with other sizes of its experts. A shared expert keeps its ratio to the others."""
    sizes: dict[str, Any] = dict(asked)
    width = sizes.get("width", default.width)
    shared_width = default.shared_width * width // default.width
    experts = replace(default, shared_width=shared_width, **sizes)
    # Where no layer has an MLP, some families state the width of experts alone.
    mlp_width = config.intermediate_size if experts.layers else width
    resized = replace(config, experts=experts, intermediate_size=mlp_width)
    return checked_config(resized, where="model.experts")
