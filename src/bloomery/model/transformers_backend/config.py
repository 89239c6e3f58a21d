"""What config.json of an architecture that our decoder lacks means for it, asked of transformers. No torch."""

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from bloomery.core.errors import UserError
from bloomery.model.config import ModelConfig, TransformersBackend, checked
from bloomery.model.families.registry import ACTIVATIONS, FAMILIES, LARGEST, Fields

INSTALL = 'pip install "bloomery[hf]"'
OTHER = "choose a language model that decodes text, from left to right"
# Names that configs use for one size, where transformers has no common one.
SIZES = {
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_positions": ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
}


def chosen(config_json: Mapping[str, Any], implementation: str) -> str:
    """ "native" or "transformers", for a config.json and the recipe's `implementation`."""
    if implementation != "auto":
        return implementation
    named = config_json.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    native = any(architecture == family.architecture for family in FAMILIES.values())
    known = native or config_json.get("model_type") in FAMILIES
    return "native" if known or find_spec("transformers") is None or "model_type" not in config_json else "transformers"


def transformers_config(config_json: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Raises UserError where transformers has no decoder of text for it, or one that does not fit under our head."""
    if find_spec("transformers") is None:
        problem = "transformers, which has the layers of this architecture, is not installed"
        raise UserError(problem, where=where, fix=INSTALL)
    if "quantization_config" in config_json:
        problem = "not supported: training transformers' layers from quantized weights"
        raise UserError(problem, where=where, fix="use the unquantized model")
    if any(key in config_json for key in ("vision_config", "audio_config", "text_config")):
        raise UserError("it is a multimodal model, and only text is trained here", where=where, fix=OTHER)
    kept = {key: value for key, value in config_json.items() if key != "auto_map"}  # no code comes with a model
    return _asked(json.dumps(kept, sort_keys=True), where)


@lru_cache(maxsize=4)
def _asked(raw_config: str, where: str) -> ModelConfig:
    from transformers.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.CRITICAL)  # it prints a whole config before the error
    try:
        return _probed(raw_config, where)
    finally:
        set_verbosity(level)


def _probed(raw_config: str, where: str) -> ModelConfig:
    from bloomery.model.transformers_backend.backbone import Unlike, blank_model, computed_buffers, transformers_facts

    fields = _fields(json.loads(raw_config), where)
    sizes = _sizes(fields)
    try:
        whole, attention = blank_model(raw_config)
        facts = transformers_facts(whole, sizes["num_layers"])
    except Unlike as error:
        raise UserError(f"transformers' layers do not fit here: {error}", where=where, fix=OTHER) from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        problem = f"transformers cannot build this model: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(problem[:300], where=where, fix="fix config.json, or download the model again") from error
    try:
        computed_buffers(raw_config, attention)
        reason = ""
    except Unlike as error:
        reason = str(error)
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    rate = fields.number("attention_dropout", high=0.999, default=0.0)
    factor = fields.number("logit_scale", default=1.0) / fields.number("logits_scaling", low=1e-6, default=1.0)
    activation = fields.get("hidden_act") or fields.get("activation_function") or "gelu"
    ids = {key: fields.token(key, sizes["vocab_size"]) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    facts_of_all: dict[str, Any] = {**sizes, **ids}
    config = ModelConfig(
        family=fields.get("model_type"), **facts_of_all, norm="layer",
        gated_mlp=any("gate" in name for name, *_ in facts["matrices"]),
        activation=ACTIVATIONS.get(str(activation), "gelu"),
        tie_embeddings=tied, final_softcap=fields.optional_number("final_logit_softcapping"), attention_dropout=rate,
        sliding_window=_windows(fields, sizes["num_layers"]),
        transformers_backend=TransformersBackend(
            raw_config=raw_config, architecture=type(whole).__name__, attention=attention, factor=factor,
            safe_reason=reason, **facts,
        ),
    )  # fmt: skip
    return checked(config, where=where)


def _fields(config_json: dict[str, Any], where: str) -> Fields:
    """The config as transformers completes it. Raises UserError for what is no decoder of text."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(config_json.get("model_type"))
    if kind not in CONFIG_MAPPING:
        problem = f"{kind[:60]!r} is an architecture that neither Bloomery nor transformers supports"
        raise UserError(problem, where=where, fix="choose another model; remote code is never run")
    try:
        config = CONFIG_MAPPING[kind].from_dict(config_json)
        whole = config.to_dict()
    except Exception as error:  # transformers' validators raise errors of their own kinds
        problem = f"transformers refuses it: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(problem[:300], where=where, fix="fix config.json, or download the model again") from error
    if getattr(config, "is_encoder_decoder", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "has an encoder" if getattr(config, "is_encoder_decoder", False) else "writes no text"
        raise UserError(f"a model of the kind {kind} {what}, and is not trained here", where=where, fix=OTHER)
    common = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return Fields(whole | {key: getattr(config, key, None) for key in common}, {}, where=where)


def _sizes(fields: Fields) -> dict[str, int]:
    def first(native_name: str, default: int) -> int:
        key = next((key for key in SIZES[native_name] if isinstance(fields.get(key), int)), SIZES[native_name][0])
        return fields.size(key, LARGEST[native_name], default=default)

    width, heads = fields.size("hidden_size", LARGEST["hidden_size"]), fields.size("num_attention_heads", 2**16)
    return {
        "vocab_size": fields.size("vocab_size", LARGEST["vocab_size"]), "hidden_size": width, "num_heads": heads,
        "num_layers": fields.size("num_hidden_layers", LARGEST["num_layers"]),
        "intermediate_size": first("intermediate_size", 4 * width), "num_kv_heads": first("num_kv_heads", heads),
        "head_dim": fields.size("head_dim", LARGEST["head_dim"], default=max(2, width // heads)),
        "max_positions": first("max_positions", 2048),
    }  # fmt: skip


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The layers with sliding-window attention, from transformers' common keys."""
    window, kinds = fields.get("sliding_window"), fields.get("layer_types")
    if not isinstance(window, int) or fields.get("use_sliding_window") is False:
        return ()
    if not isinstance(kinds, list):
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])
