"""Models that a recipe can name, and the config that a recipe's `model` section stands for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.core.errors import UserError
from bloomery.hub import cached_model, local_model
from bloomery.model.config import ModelConfig, RopeScaling, checked
from bloomery.model.families.registry import config_from_hf, config_to_hf, fresh_config, known_family
from bloomery.model.io.stored import AGAIN, read_object
from bloomery.model.transformers_backend.config import chosen, transformers_config
from bloomery.recipe import schema

_LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"}  # fmt: skip


def _qwen(width: int, inner: int, layers: int, heads: int, groups: int, *, vocab: int = 151936) -> dict[str, Any]:
    """Of Qwen2.5; the embeddings are tied up to 3B parameters."""
    return {
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": width <= 2048,
    }  # fmt: skip


def _llama(inner: int, groups: int, **more: Any) -> dict[str, Any]:
    """Of 32 layers, 4,096 wide, where `more` has no others."""
    return {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": inner, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": groups, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


_LLAMA_2 = _llama(11008, 32, vocab_size=32000, max_position_embeddings=4096)
_LLAMA_2_70B = _LLAMA_2 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                            "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
_LLAMA_31 = _llama(14336, 8, vocab_size=128256, max_position_embeddings=131072, rope_theta=5e5, rope_scaling=_LLAMA_3)
_QWEN = {
    "0.5B": _qwen(896, 4864, 24, 14, 2),
    "1.5B": _qwen(1536, 8960, 28, 12, 2),
    "3B": _qwen(2048, 11008, 36, 16, 2),
    "7B": _qwen(3584, 18944, 28, 28, 4, vocab=152064),
}
_CONFIG_SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    **{f"Qwen/Qwen2.5-{size}": raw_config for size, raw_config in _QWEN.items()},
    **{f"Qwen/Qwen2.5-{size}-Instruct": raw_config for size, raw_config in _QWEN.items()},
    "meta-llama/Llama-2-7b-hf": _LLAMA_2,
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA_2,
    "meta-llama/Llama-2-70b-hf": _LLAMA_2_70B,
    "meta-llama/Llama-3.1-8B": _LLAMA_31,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31,
})  # fmt: skip


def published_config(name: str) -> ModelConfig | None:
    """The config of a Hub id, with or without a revision; None where the table does not have it."""
    raw_config = _CONFIG_SIZES.get(name.partition("@")[0])
    return None if raw_config is None else config_from_hf(dict(raw_config), where=name)


SAFE = "model.load_with=transformers asks for it"


@dataclass(frozen=True)
class Preset:
    config: ModelConfig
    description: str


def _go_coder(width: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        family="gpt2", vocab_size=50_000, hidden_size=width, intermediate_size=4 * width, num_layers=layers,
        num_heads=heads, num_kv_heads=heads, head_dim=width // heads, max_positions=1024, norm="layer", norm_eps=1e-5,
        activation="gelu", gated_mlp=False, attention_bias=True, output_bias=True, mlp_bias=True, positions="learned",
        tie_embeddings=True, embedding_dropout=0.1, residual_dropout=0.1, attention_dropout=0.1,
        bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip


PRESETS: Mapping[str, Preset] = MappingProxyType({
    "go-coder-tiny": Preset(_go_coder(512, 8, 8), "GPT-2 shape, 51M parameters"),
    "go-coder-small": Preset(_go_coder(768, 12, 12), "GPT-2 shape, 124M parameters"),
    "go-coder-medium": Preset(
        _go_coder(1024, 16, 16), "GPT-2 shape, 254M parameters (the Go coder guide calls it 350M)"
    ),
})  # fmt: skip


def preset(name: str) -> ModelConfig:
    """Raises UserError for an unknown name."""
    if name not in PRESETS:
        fix = f"these are: {', '.join(PRESETS)}"
        raise UserError(f"{name!r} is no preset", where="model.preset", fix=fix, code=2)
    return PRESETS[name].config


def read_config(folder: Path, implementation: str = "auto") -> ModelConfig:
    """The config of a folder in Hugging Face format. Raises UserError without a valid one.

    `implementation`: auto: native where supported, else transformers.
    """
    said, where = stated_config(folder), str(folder / "config.json")
    if chosen(said, implementation) == "transformers":
        return transformers_config(said, where=where)
    return config_from_hf(said, where=where)


def stated_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json, unjudged. Raises UserError."""
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        fix = "`bloomery export MODEL --to merged --out DIR` makes a whole model of it and its base"
        raise UserError("this is an adapter, not a whole model", where=str(folder), fix=fix)
    if not path.is_file():
        raise UserError("no config.json is here", where=str(folder), fix="give the folder of a saved model")
    return read_object(path, fix=AGAIN)


def known_config(name: str, implementation: str = "auto") -> ModelConfig:
    """Of a folder or of a model that was fetched; of one that was not, from our table. Raises UserError."""
    folder = cached_model(name)
    table = published_config(name) if folder is None and implementation != "transformers" else None
    return table or read_config(folder or local_model(name), implementation)


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
    named = [key for key in ("from_", "preset", "family") if getattr(model, key) is not None]
    if len(named) != 1 and named != ["preset", "family"]:
        fix = "set one of model.from, model.preset and model.family"
        raise UserError("the recipe names no single model", where="model", fix=fix, code=2)
    if model.from_ is not None:
        return _pretrained(model, vocab_size)
    if model.implementation == "transformers":
        fix = "set model.from to the folder of a model, or model.implementation=auto"
        problem = "transformers' layers are trained from a model's weights, not from fresh ones"
        raise UserError(problem, where="model.implementation", fix=fix, code=2)
    sizes = {key: getattr(model, key) for key in _SIZES if getattr(model, key) is not None}
    if "vocab_size" not in sizes and vocab_size is not None:
        sizes["vocab_size"] = vocab_size
    config = _resized(preset(model.preset), sizes) if model.preset is not None else _new(model, sizes)
    facts = {key: getattr(model, key) for key in _COPIED if getattr(model, key) is not None}
    if model.rope_scaling is not None:
        facts["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    ids: dict[str, Any] = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    config = replace(config, **facts, **_dropout(model), **ids)
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, the model {config.vocab_size:,}",
            where="model.vocab_size", fix=f"set model.vocab_size to at least {vocab_size}, or leave it out",
        )  # fmt: skip
    config_to_hf(checked(config, where="model"))
    return config


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
          "max_positions")  # fmt: skip
_COPIED = ("norm", "norm_eps", "activation", "qk_norm", "rope_theta", "tie_embeddings", "initializer_range")


CONTEXT_KEYS = ("rope_scaling", "rope_theta", "max_positions")  # the context extension of a pretrained model


def _pretrained(model: schema.Model, vocab_size: int | None) -> ModelConfig:
    assert model.from_ is not None
    longer = {key: getattr(model, key) for key in CONTEXT_KEYS if getattr(model, key) is not None}
    free = {"from_", "implementation", "load_with", "dropout", *longer}
    config = grown(known_config(model.from_, model.implementation), vocab_size or 0)
    rotary = config.positions == "rotary" and config.transformers_backend is None
    fixed = [key for key in type(model).model_fields if key not in free and getattr(model, key) is not None]
    if fixed or (longer and not rotary):
        raise UserError(
            f"{', '.join(fixed or longer)} cannot be changed with model.from: {model.from_} defines them",
            where="model",
            fix="remove them, or set model.family instead of model.from",
            code=2,
        )
    if model.rope_scaling is not None:
        longer["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if longer:
        config = replace(config, **longer)
        config_to_hf(checked(config, where="model"))
    if config.transformers_backend is not None and model.load_with == "transformers":
        config = replace(config, transformers_backend=replace(config.transformers_backend, safe_reason=SAFE))
    return replace(config, **_dropout(model))


def grown(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """The same with at least `vocab_size` tokens; `weights.read_model` gives those that are new rows of their own."""
    if vocab_size <= config.vocab_size:
        return config
    if config.transformers_backend is None:
        return replace(config, vocab_size=vocab_size)
    said = json.loads(config.transformers_backend.raw_config) | {"vocab_size": vocab_size}
    larger = transformers_config(said, where="model.from")
    assert larger.transformers_backend is not None
    return replace(
        larger,
        transformers_backend=replace(larger.transformers_backend, safe_reason=config.transformers_backend.safe_reason),
    )


def _new(model: schema.Model, sizes: Mapping[str, int]) -> ModelConfig:
    assert model.family is not None
    missing = [key for key in ("vocab_size", "hidden_size", "num_layers", "num_heads") if key not in sizes]
    if missing:
        fix = f"set {', '.join(f'model.{key}' for key in missing)}"
        raise UserError(f"a {model.family} model needs {', '.join(missing)}", where="model", fix=fix, code=2)
    width, heads = sizes["hidden_size"], sizes["num_heads"]
    if "head_dim" not in sizes and width % heads:
        problem = f"hidden_size {width} is not a multiple of num_heads {heads}"
        raise UserError(problem, where="model.num_heads", fix="change one of them, or set model.head_dim", code=2)
    # 4 times the width; two thirds of that where a gate adds a third matrix (Shazeer 2020), in steps of 64.
    gated = known_family(model.family).facts.get("gated_mlp", True)
    inner = -(-8 * width // 3 // 64) * 64 if gated else 4 * width
    shared = {"head_dim": width // heads, "num_kv_heads": heads, "intermediate_size": inner}
    return fresh_config(model.family, {**shared, **sizes}, window=model.sliding_window)


def _resized(config: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    derived: dict[str, int] = {}
    if "hidden_size" in sizes and "intermediate_size" not in sizes:
        derived["intermediate_size"] = round(config.intermediate_size / config.hidden_size * sizes["hidden_size"])
    if "num_heads" in sizes and config.num_kv_heads == config.num_heads:
        derived["num_kv_heads"] = sizes["num_heads"]
    if {"hidden_size", "num_heads"} & sizes.keys():
        derived["head_dim"] = sizes.get("hidden_size", config.hidden_size) // sizes.get("num_heads", config.num_heads)
    return replace(config, **{**derived, **sizes})  # type: ignore[arg-type]  # the fields of that name are ints


def _dropout(model: schema.Model) -> dict[str, Any]:
    kinds = ("embedding_dropout", "residual_dropout", "attention_dropout")
    return {} if model.dropout is None else dict.fromkeys(kinds, model.dropout)
