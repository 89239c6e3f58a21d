"""Shapes of models that many start from, so that a plan needs no download: the facts of their config.json on the Hub.

A run never takes them from here: it reads the folder that was fetched.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bloomery.model.config import ModelConfig
from bloomery.model.families import config_from_hf

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
    """Of 32 layers, 4,096 wide."""
    return {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": inner, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": groups, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


_LLAMA_2 = _llama(11008, 32, vocab_size=32000, max_position_embeddings=4096)
_LLAMA_31 = _llama(
    14336, 8, vocab_size=128256, max_position_embeddings=131072, rope_theta=5e5, rope_scaling=_LLAMA_3
)
_QWEN = {
    "0.5B": _qwen(896, 4864, 24, 14, 2),
    "1.5B": _qwen(1536, 8960, 28, 12, 2),
    "3B": _qwen(2048, 11008, 36, 16, 2),
    "7B": _qwen(3584, 18944, 28, 28, 4, vocab=152064),
}
_STATED: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    **{f"Qwen/Qwen2.5-{size}": stated for size, stated in _QWEN.items()},
    **{f"Qwen/Qwen2.5-{size}-Instruct": stated for size, stated in _QWEN.items()},
    "meta-llama/Llama-2-7b-hf": _LLAMA_2,
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA_2,
    "meta-llama/Llama-3.1-8B": _LLAMA_31,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31,
})  # fmt: skip


def published_config(name: str) -> ModelConfig | None:
    """The config of a Hub id, with or without a revision; None where the table does not have it."""
    stated = _STATED.get(name.partition("@")[0])
    return None if stated is None else config_from_hf(dict(stated), where=name)
