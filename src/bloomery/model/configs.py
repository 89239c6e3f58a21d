"""The config that a folder, a model of the Hub or the `model` section of a recipe stands for. No torch.

For an architecture that our decoder lacks, transformers is asked what its config.json means.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.facts.config import ModelConfig, RopeScaling, TransformersBackend, checked_config
from bloomery.facts.config_fields import LARGEST, Fields, NotNative
from bloomery.facts.families import FAMILIES, known_family
from bloomery.facts.family import ACTIVATIONS
from bloomery.facts.hf_config import (
    config_from_hf,
    config_to_hf,
    fresh_config,
    has_delta_net,
    has_experts,
    text_part,
    unread_keys,
)
from bloomery.facts.presets import preset
from bloomery.facts.published import published_config
from bloomery.hub import cached_model, local_model
from bloomery.model.io.packed import QUANTIZATION_KEYS, is_read, quantization_of
from bloomery.model.io.stored import (
    AGAIN,
    StoredParameters,
    find_tensors,
    has_own_head,
    is_bare,
    read_buffer,
    read_headers,
    read_object,
)
from bloomery.recipe import schema

OTHER_MODEL = "choose a language model that decodes text, from left to right"
# Names that configs use for one size, where transformers has no common one.
SIZES = {
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_positions": ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions"),
}


def choose_implementation(config_json: Mapping[str, Any], implementation: str) -> str:
    """ "native" or "transformers", for a config.json and the recipe's `implementation`."""
    if implementation != "auto":
        return implementation
    architectures = config_json.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    is_native_architecture = any(
        architecture == family.architecture for family in FAMILIES.values()
    )
    family = FAMILIES.get(str(text_part(config_json).get("model_type")))
    foreign_keys = () if family is None else family.by_transformers
    if any(text_part(config_json).get(key) for key in foreign_keys):
        return "transformers"
    if is_native_architecture or family is not None:
        return "native"
    # Without transformers or a model_type, the native implementation reports what is missing.
    if find_spec("transformers") is None or "model_type" not in config_json:
        return "native"
    return "transformers"


def transformers_config(config_json: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The config of a model with transformers' layers.

    Raises UserError where transformers has no decoder of text for it, or one that does not fit under our head.
    """
    if find_spec("transformers") is None:
        problem = "transformers, which has the layers of this architecture, is not installed"
        raise UserError(problem, where=where, fix=install_extra("hf"))
    if not is_read(config_json):
        problem = "not supported: training transformers' layers from weights that are quantized so"
        raise UserError(problem, where=where, fix="use the unquantized model")
    if any(key in config_json for key in ("vision_config", "audio_config", "text_config")):
        raise UserError(
            "it is a multimodal model, and only text is trained here",
            where=where,
            fix=OTHER_MODEL,
        )
    # "auto_map" names Python code of the model's author, which is never run; quantized weights are read as numbers.
    unused = ("auto_map", *QUANTIZATION_KEYS)
    settings = {key: value for key, value in config_json.items() if key not in unused}
    return _quietly_probed(json.dumps(settings, sort_keys=True), where)


# Several parts of a plan ask for the same model, and an answer builds it.
@lru_cache(maxsize=4)
def _quietly_probed(raw_config: str, where: str) -> ModelConfig:
    from transformers.utils.logging import get_verbosity, set_verbosity

    level = get_verbosity()
    set_verbosity(logging.CRITICAL)  # it prints a whole config before the error
    try:
        return _probed(raw_config, where)
    finally:
        set_verbosity(level)


def _probed(raw_config: str, where: str) -> ModelConfig:
    """The config, with facts about transformers' model that only the built model shows."""
    from bloomery.model.transformers_backend import (
        computed_buffers,
        layer_list,
        transformers_facts,
    )
    from bloomery.model.transformers_model import Unlike, blank_model, decoded
    from bloomery.model.transformers_trial import trial

    # The model is built without memory for its matrices: its modules say whether they fit.
    fields = _fields(decoded(json.loads(raw_config)), where)
    sizes = _sizes(fields)
    try:
        model, attention = blank_model(raw_config)
        # A layer is what the model has in its list, whatever its config counts.
        sizes["num_layers"] = len(layer_list(model, sizes["num_layers"]))
        facts = transformers_facts(model, sizes["num_layers"])
    except Unlike as error:
        raise UserError(
            f"transformers' layers do not fit here: {error}", where=where, fix=OTHER_MODEL
        ) from error
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        ZeroDivisionError,
    ) as error:
        problem = f"transformers cannot build this model: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(
            problem[:300], where=where, fix="fix config.json, or download the model again"
        ) from error

    # Where buffers do not follow from the config, transformers itself must load the model.
    try:
        computed_buffers(raw_config, attention)
        safe_reason = ""
    except Unlike as error:
        safe_reason = str(error)

    output_weight = model.get_output_embeddings().weight
    is_tied = output_weight is model.get_input_embeddings().weight
    activation = fields.get("hidden_act") or fields.get("activation_function") or "gelu"
    token_ids = {
        key: fields.token(key, sizes["vocab_size"])
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    common_facts: dict[str, Any] = {**sizes, **token_ids}
    backend = TransformersBackend(
        raw_config=raw_config,
        architecture=type(model).__name__,
        attention=attention,
        safe_reason=safe_reason,
        experts=max(_largest(fields.get(key)) or 0 for key in EXPERTS),
        experts_per_token=max(_largest(fields.get(key)) or 0 for key in EXPERTS_MET),
        **facts,
    )
    config = ModelConfig(
        family=fields.get("model_type"),
        **common_facts,
        norm="layer",
        gated_mlp=any("gate" in name for name, *_ in facts["matrices"]),
        activation=ACTIVATIONS.get(str(activation), "gelu"),
        tie_embeddings=is_tied,
        attention_dropout=fields.number("attention_dropout", high=0.999, default=0.0),
        sliding_window=_windows(fields, sizes["num_layers"]),
        transformers_backend=backend,
    )

    # What its modules do, a tiny model of the same class shows: its head, its documents, its cache.
    try:
        tried = trial(raw_config, attention, config)
    except Unlike as error:
        raise UserError(
            f"transformers' layers do not fit here: {error}", where=where, fix=OTHER_MODEL
        ) from error
    config = replace(
        config,
        final_softcap=tried.softcap,
        transformers_backend=replace(
            backend,
            factor=tried.factor,
            documents=tried.documents,
            documents_reason=tried.documents_reason,
            cache=tried.cache,
        ),
    )
    return checked_config(config, where=where)


def _fields(config_json: dict[str, Any], where: str) -> Fields:
    """The config as transformers completes it. Raises UserError for a model that is no decoder of text."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    # transformers' class of the config, and its own defaults and checks.
    model_type = str(config_json.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        problem = f"{model_type[:60]!r} is an architecture that neither Bloomery nor transformers supports"
        raise UserError(problem, where=where, fix="choose another model; remote code is never run")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(config_json)
        settings = config.to_dict()
    except Exception as error:  # transformers' validators raise errors of their own kinds
        problem = f"transformers refuses it: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            problem[:300], where=where, fix="fix config.json, or download the model again"
        ) from error

    has_encoder = getattr(config, "is_encoder_decoder", False)
    if has_encoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        difference = "has an encoder" if has_encoder else "writes no text"
        raise UserError(
            f"a model of the kind {model_type} {difference}, and is not trained here",
            where=where,
            fix=OTHER_MODEL,
        )

    # Under their common names, whatever a family calls these sizes in its config.json.
    common = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes = {key: getattr(config, key, None) for key in common}
    return Fields(settings | sizes, {}, where=where)


def _sizes(fields: Fields) -> dict[str, int]:
    def size_by_any_name(native_name: str, default: int) -> int:
        names = SIZES[native_name]
        sizes = (_largest(fields.get(name)) for name in names)
        size = next((size for size in sizes if size is not None), default)
        return min(size, LARGEST[native_name])

    width = fields.size("hidden_size", LARGEST["hidden_size"])
    # Layers without attention have no heads, and some architectures a number for each layer.
    heads = _largest(fields.get("num_attention_heads")) or 1
    kv_heads = _largest(fields.get("num_key_value_heads")) or _largest(fields.get("num_kv_heads"))
    if kv_heads is None or kv_heads > heads or heads % kv_heads:
        kv_heads = heads
    return {
        "vocab_size": fields.size("vocab_size", LARGEST["vocab_size"]),
        "hidden_size": width,
        "num_heads": heads,
        "num_layers": fields.size("num_hidden_layers", LARGEST["num_layers"], default=1),
        "intermediate_size": size_by_any_name("intermediate_size", 4 * width),
        "num_kv_heads": kv_heads,
        "head_dim": fields.size("head_dim", LARGEST["head_dim"], default=max(2, width // heads)),
        "max_positions": size_by_any_name("max_positions", 2048),
    }


def _largest(value: Any) -> int | None:
    """A positive whole number, or the largest of a list; None for anything else."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return max((number for number in numbers if type(number) is int and number > 0), default=None)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None without one, from transformers' common keys."""
    window = fields.get("sliding_window")
    layer_types = fields.get("layer_types")
    if type(window) is not int or window < 1 or fields.get("use_sliding_window") is False:
        return ()
    if not isinstance(layer_types, list) or len(layer_types) < num_layers:
        return (window,) * num_layers
    return tuple(
        window if layer_type == "sliding_attention" else None
        for layer_type in layer_types[:num_layers]
    )


SAFE_REASON = "model.load_with=transformers asks for it"
# The keys under which configs state the number of experts.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_MET = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def read_config(folder: Path, implementation: str = "auto") -> ModelConfig:
    """The config of a folder in Hugging Face format. Raises UserError without a valid one.

    `implementation`: "native", "transformers", or "auto" for native where it is supported.
    """
    config_json = stated_config(folder)
    where = str(folder / "config.json")
    is_native = choose_implementation(config_json, implementation) == "native"
    try:
        config = read_as(config_json, is_native=is_native, where=where)
    except NotNative as refusal:
        # A known family with a setting that its native implementation lacks is computed by transformers.
        if implementation != "auto" or not is_native or find_spec("transformers") is None:
            raise
        try:
            config = transformers_config(config_json, where=where)
        except UserError:
            raise refusal from None
        is_native = False
    # transformers ties no weights that differ in the files, whatever config.json says.
    if config.tie_embeddings and config.head == "tokens" and has_own_head(folder):
        untied_json = {**text_part(config_json), "tie_word_embeddings": False}
        config = read_as(untied_json, is_native=is_native, where=where)
    return _with_buffers(config, folder)


def _with_buffers(config: ModelConfig, folder: Path) -> ModelConfig:
    """The config with the numbers that the folder's files keep beside parameters. Raises UserError."""
    backend = config.transformers_backend
    if backend is None or not backend.buffers or is_bare(folder):
        return config
    tensors = find_tensors(folder)
    buffers = [
        read_buffer(buffer, tensors[buffer.name]) if buffer.name in tensors else buffer
        for buffer in backend.buffers
    ]
    return replace(config, transformers_backend=replace(backend, buffers=tuple(buffers)))


def read_as(config_json: Mapping[str, Any], *, is_native: bool, where: str) -> ModelConfig:
    if is_native:
        return config_from_hf(config_json, where=where)
    return transformers_config(config_json, where=where)


def headers_of(folder: Path, *, sees: bool = False) -> StoredParameters:
    """How the folder's files are read, with a note on each thing that is read in another way than they say. `sees`:
    what reads pictures is read, too.

    Raises UserError as `read_headers` does. Of a model that transformers itself loads, nothing is known here.
    """
    config = read_config(folder)
    backend = config.transformers_backend
    if backend is not None and backend.safe_reason:
        return StoredParameters({})
    headers = read_headers(folder, config, headless=True, sees=sees)
    config_json = stated_config(folder)
    notes = list(headers.notes)
    where = str(folder / "config.json")
    stated = read_as(config_json, is_native=backend is None, where=where)
    if stated.tie_embeddings != config.tie_embeddings:
        notes.append(
            "the head is lm_head.weight of the files: it is not the embedding, though config.json ties them"
        )
    if backend is None:
        notes += [
            f"{key} of config.json is not read, as in transformers"
            for key in unread_keys(config_json)
        ]
    return replace(headers, notes=tuple(notes))


def untied_note(base: Path | None, config: ModelConfig) -> str | None:
    """A line where an adapter changes the head apart from the embedding, which its base ties; else None."""
    if base is None or config.tie_embeddings or not read_config(base).tie_embeddings:
        return None
    return "it changes the head apart from the embedding, which its base shares: they are two weights from now on"


def stated_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json, unchecked. Raises UserError."""
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        fix = "`bloomery export MODEL --to merged --out DIR` makes a whole model of it and its base"
        raise UserError("this is an adapter, not a whole model", where=str(folder), fix=fix)
    if not path.is_file():
        fix = "give the folder of a saved model"
        if (folder / "checkpoints").is_dir():
            fix = f"this is a run: give one of {folder / 'checkpoints'}, or `bloomery export` its model"
        raise UserError("no config.json is here", where=str(folder), fix=fix)
    return read_object(path, fix=AGAIN)


def known_config(name: str, implementation: str = "auto") -> ModelConfig:
    """The config of a folder, or of a model of the Hub: downloaded, else from our table. Raises UserError."""
    folder = cached_model(name)
    if folder is None and implementation != "transformers":
        config = published_config(name)
        if config is not None:
            return config
    return read_config(folder or local_model(name), implementation)


def build_config(
    model: schema.Model,
    *,
    vocab_size: int | None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> ModelConfig:
    """The config of a recipe's model: that of a folder (`from`), a preset or a family, with the recipe's sizes.

    `vocab_size` and the token ids are the tokenizer's. Raises UserError for settings that are missing, that contradict
    each other, or that the family cannot store.
    """
    # A pretrained model has its own sizes; all others are given here.
    origins = [key for key in ("from_", "preset", "family") if getattr(model, key) is not None]
    if len(origins) != 1 and origins != ["preset", "family"]:
        fix = "set one of model.from, model.preset and model.family"
        raise UserError("the recipe names no single model", where="model", fix=fix, code=2)
    if model.from_ is not None:
        return _pretrained(model, vocab_size)
    if model.implementation == "transformers":
        fix = "set model.from to the folder of a model, or model.implementation=auto"
        problem = "transformers' layers are trained from a model's weights, not from fresh ones"
        raise UserError(problem, where="model.implementation", fix=fix, code=2)

    # The recipe's sizes win over the preset's, and over the tokenizer's vocabulary.
    _has_delta_net(model)
    sizes = {key: getattr(model, key) for key in _SIZES if getattr(model, key) is not None}
    if "vocab_size" not in sizes and vocab_size is not None:
        sizes["vocab_size"] = vocab_size
    sized_config = (
        _new(model, sizes) if model.preset is None else _resized(preset(model.preset), sizes)
    )

    # Every other key of the recipe replaces one fact.
    facts = {key: getattr(model, key) for key in _FACTS if getattr(model, key) is not None}
    if model.rope_scaling is not None:
        facts["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    token_ids: dict[str, Any] = {
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    config = replace(sized_config, **facts, **_dropout(model), **token_ids)

    # A contradiction is found here, and not when the first checkpoint is written.
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, the model {config.vocab_size:,}",
            where="model.vocab_size",
            fix=f"set model.vocab_size to at least {vocab_size}, or leave it out",
        )
    config_to_hf(checked_config(config, where="model"))
    return config


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)
_FACTS = (
    "norm",
    "norm_eps",
    "activation",
    "qk_norm",
    "rope_theta",
    "tie_embeddings",
    "initializer_range",
)


# The recipe's keys that extend the context of a pretrained model.
CONTEXT_KEYS = ("rope_scaling", "rope_theta", "max_positions")


def _pretrained(model: schema.Model, vocab_size: int | None) -> ModelConfig:
    """The config of the model that `model.from` names, with at least `vocab_size` tokens."""
    assert model.from_ is not None
    extension = {
        key: getattr(model, key) for key in CONTEXT_KEYS if getattr(model, key) is not None
    }
    config = grown(known_config(model.from_, model.implementation), vocab_size or 0)

    # The weights fix every size. Only native models with rotary positions have their context extended.
    changeable_keys = {"from_", "implementation", "load_with", "dropout", *extension}
    fixed_keys = [
        key
        for key in type(model).model_fields
        if key not in changeable_keys and getattr(model, key) is not None
    ]
    is_extensible = (
        config.positions == "rotary"
        and config.transformers_backend is None
        and config.experts is None
    )
    if fixed_keys or (extension and not is_extensible):
        refused_keys = ", ".join(fixed_keys or extension)
        raise UserError(
            f"{refused_keys} cannot be changed with model.from: {model.from_} defines them",
            where="model",
            fix="remove them, or set model.family instead of model.from",
            code=2,
        )
    if model.rope_scaling is not None:
        extension["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if extension:
        config = replace(config, **extension)
        config_to_hf(checked_config(config, where="model"))

    # The recipe can have transformers load what Bloomery could load itself.
    if config.transformers_backend is not None and model.load_with == "transformers":
        _refuse_quantized(model.from_)
        config = replace(
            config,
            transformers_backend=replace(config.transformers_backend, safe_reason=SAFE_REASON),
        )
    return replace(config, **_dropout(model))


def quantized_as(folder: Path) -> str:
    """How matrices of the folder are stored in another program's format; "" where they are plain numbers.

    Of a folder without weights, the method that config.json states. Raises UserError as `find_tensors` does.
    """
    settings = quantization_of(stated_config(folder))
    if settings is None or is_bare(folder):
        return "" if settings is None else str(settings["quant_method"])
    packings = [tensor.packing for tensor in find_tensors(folder).values()]
    return "; ".join(sorted({packing.label for packing in packings if packing is not None}))


def _refuse_quantized(name: str) -> None:
    """Raises UserError for a model that transformers is asked to load although its weights are quantized."""
    folder = cached_model(name)
    if folder is not None and (label := quantized_as(folder)):
        raise UserError(
            f"its weights are quantized ({label}), and transformers would keep them so",
            where="model.load_with",
            fix="leave model.load_with out, or use the unquantized model",
        )


def grown(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """The config with at least `vocab_size` tokens; `weights.read_model` initializes the rows of new ones."""
    if vocab_size <= config.vocab_size:
        return config
    if config.transformers_backend is None:
        return replace(config, vocab_size=vocab_size)
    # The facts of transformers' modules depend on the vocabulary: the larger model is built again.
    config_json = json.loads(config.transformers_backend.raw_config) | {"vocab_size": vocab_size}
    larger_config = transformers_config(config_json, where="model.from")
    assert larger_config.transformers_backend is not None
    return replace(
        larger_config,
        transformers_backend=replace(
            larger_config.transformers_backend,
            safe_reason=config.transformers_backend.safe_reason,
            buffers=config.transformers_backend.buffers,
        ),
    )


def _new(model: schema.Model, sizes: Mapping[str, int]) -> ModelConfig:
    """The config of an untrained model of a family, whose further sizes follow from the width."""
    assert model.family is not None
    required_keys = ("vocab_size", "hidden_size", "num_layers", "num_heads")
    missing_keys = [key for key in required_keys if key not in sizes]
    if missing_keys:
        problem = f"a {model.family} model needs {', '.join(missing_keys)}"
        fix = f"set {', '.join(f'model.{key}' for key in missing_keys)}"
        raise UserError(problem, where="model", fix=fix, code=2)
    width = sizes["hidden_size"]
    heads = sizes["num_heads"]
    if "head_dim" not in sizes and width % heads:
        problem = f"hidden_size {width} is not a multiple of num_heads {heads}"
        raise UserError(
            problem,
            where="model.num_heads",
            fix="change one of them, or set model.head_dim",
            code=2,
        )

    # 4 times the width; two thirds of that where a gate adds a third matrix (Shazeer 2020), in steps of 64.
    is_gated = known_family(model.family).facts.get("gated_mlp", True)
    inner_width = -(-8 * width // 3 // 64) * 64 if is_gated else 4 * width
    defaults = {
        "head_dim": width // heads,
        "num_kv_heads": heads,
        "intermediate_size": inner_width,
    }
    known_sizes = {**defaults, **sizes}
    return fresh_config(
        model.family,
        known_sizes,
        window=model.sliding_window,
        delta_net=_sizes_of_delta_net(model, known_sizes),
        experts=_sizes_of_experts(model),
    )


def _has_delta_net(model: schema.Model) -> bool:
    """Whether layers of a new model are delta nets. Raises UserError where the recipe gives sizes to none."""
    is_hybrid = model.preset is None and has_delta_net(known_family(str(model.family)))
    if model.delta_net is not None and not is_hybrid:
        raise UserError(
            f"a {model.preset or model.family} model has no delta nets",
            where="model.delta_net",
            fix="leave it out, or set model.family=qwen3_5_text",
            code=2,
        )
    return is_hybrid


def _sizes_of_delta_net(model: schema.Model, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those of the recipe, by the fields of `DeltaNet`; by default a delta net has the heads of attention."""
    asked = model.delta_net
    if not _has_delta_net(model):
        return {}
    defaults = {
        "num_key_heads": sizes["num_heads"],
        "num_value_heads": sizes["num_heads"],
        "key_head_dim": sizes["head_dim"],
        "value_head_dim": sizes["head_dim"],
    }
    return defaults | ({} if asked is None else asked.model_dump(exclude_none=True))


def _sizes_of_experts(model: schema.Model) -> dict[str, int]:
    """Those of the recipe, by the fields of `Experts`. Raises UserError where the family has no experts."""
    if model.experts is None:
        return {}
    if model.preset is not None or not has_experts(known_family(str(model.family))):
        raise UserError(
            f"a {model.preset or model.family} model has no experts",
            where="model.experts",
            fix="leave it out, or set model.family=qwen3_moe",
            code=2,
        )
    return model.experts.model_dump(exclude_none=True)


def _resized(config: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    """The config with other sizes; those that are not given keep their ratio to the width and the heads."""
    derived: dict[str, int] = {}
    if "hidden_size" in sizes and "intermediate_size" not in sizes:
        derived["intermediate_size"] = round(
            config.intermediate_size / config.hidden_size * sizes["hidden_size"]
        )
    if "num_heads" in sizes and config.num_kv_heads == config.num_heads:
        derived["num_kv_heads"] = sizes["num_heads"]
    if {"hidden_size", "num_heads"} & sizes.keys():
        width = sizes.get("hidden_size", config.hidden_size)
        derived["head_dim"] = width // sizes.get("num_heads", config.num_heads)
    return replace(config, **{**derived, **sizes})  # type: ignore[arg-type]  # the fields of that name are ints


def _dropout(model: schema.Model) -> dict[str, Any]:
    kinds = ("embedding_dropout", "residual_dropout", "attention_dropout")
    return {} if model.dropout is None else dict.fromkeys(kinds, model.dropout)
