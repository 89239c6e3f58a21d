"""Tiny configs of transformers' architectures: every size shrinks, and one layer of each kind stays.

A model of such a config shows in milliseconds how transformers computes the large one: what its head does to logits,
how documents of a row are kept apart, whether its cache continues a text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

VOCABULARY = 96
WIDTH = 64
HEADS = 4
HEAD_WIDTH = 16
POSITIONS = 64
WINDOW = 8  # shorter than the trial's texts, so that it counts
FEWEST_LAYERS = 2
ATTENTION_LAYERS = ("attn_layer_indices", "full_attn_idxs")  # numbers of layers
BY_LAYER = (
    "per_layer_config"  # the key of settings that some layers have of their own, by their number
)

LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "decoder_layers",
    "num_decoder_layers",
)
HEAD_COUNTS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
)
# (pattern of a key, its size): the first pattern that matches the whole key holds.
_SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*", VOCABULARY),
    (r"hidden_size_per_layer_input", HEAD_WIDTH),
    (r"hidden_size|n_embd|d_model|emb_dim|embedding_dim|word_embed_proj_dim|lru_width", WIDTH),
    (r"embedding_size|input_embedding_size|output_embedding_size", WIDTH),
    (r"moe_intermediate_size|.*shared.*intermediate_size|.*expert.*_intermediate_size", 16),
    (r".*intermediate_size|.*ffn_dim|n_inner|dff|dim_ff|d_inner|.*ffn_hidden_size", 48),
    (r"qk_head_dim", 2 * HEAD_WIDTH),
    (r".*head_dim|dim_head|d_head|kv_channels|attention_head_size|mamba_headdim", HEAD_WIDTH),
    (r"rotary_dim", HEAD_WIDTH // 2),
    (r".*num_local_experts|.*num_experts|n_routed_experts", 4),
    (r".*experts_per_tok.*|moe_topk|moe_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|num_dense_layers|n_dense_layers", 1),  # the others have experts
    (r".*_rank", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|context_length", POSITIONS),
    (r"model_max_length|max_target_positions", POSITIONS),
    (r"sliding_window|window_size|attention_window_size|local_attention|.*chunk_size", WINDOW),
    (r"state_size|ssm_state_size|mamba_d_state", 8),
    (r"mamba_d_head", HEAD_WIDTH),
    (r"encoder_layers|num_encoder_layers", 1),
    (r"encoder_attention_heads|num_encoder_attention_heads", HEADS),
)
_UNTOUCHED = ("chunk_size_feed_forward", "chunk_size_lm_head")


def tiny_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config (`config.to_dict()`) with every size shrunk; all else as it is."""
    tiny = {
        key: value
        for key, value in settings.items()
        if key not in ("quantization_config", "dtype", "torch_dtype", "transformers_version")
    }
    chosen = _chosen_layers(settings)
    num_layers = _num_layers(settings)
    for key, value in tiny.items():
        if isinstance(value, list | tuple) and chosen and len(value) == num_layers:
            value = [value[index] for index in chosen]
        if key == BY_LAYER and isinstance(value, dict):
            numbers = {index: number for number, index in enumerate(chosen)}
            value = {
                type(index)(numbers[int(index)]): tiny_settings(entry)
                for index, entry in value.items()
                if int(index) in numbers and isinstance(entry, dict)
            }
        tiny[key] = _tiny_value(key, value, settings, len(chosen))
    _fit_state_space(tiny)
    return tiny


def _tiny_value(key: str, value: Any, settings: Mapping[str, Any], num_layers: int) -> Any:
    if isinstance(value, bool) or key in _UNTOUCHED or key == BY_LAYER:
        return value
    if key == "rope_parameters" and isinstance(value, dict):
        return _tiny_rotation(value)
    if isinstance(value, dict) and "model_type" in value:
        return tiny_settings(value)
    if key in ATTENTION_LAYERS and value:
        return [1]
    if isinstance(value, list) and value and all(type(entry) is int for entry in value):
        return [_tiny_value(key, entry, settings, num_layers) for entry in value]
    if type(value) is not int:
        return value
    if key.endswith("token_id"):
        return value % VOCABULARY
    if value <= 0:
        return value
    if key in LAYER_COUNTS:
        return num_layers or min(value, FEWEST_LAYERS)
    if key == "attention_hidden_size":
        return _tiny_attention_width(settings)
    if key == "attention_head_dim" and "attention_hidden_size" in settings:
        return _tiny_attention_width(settings) // HEADS
    if key in HEAD_COUNTS or re.fullmatch(r".*num_(key_value|kv|key)_heads|num_query_groups", key):
        return _tiny_heads(key, value, settings)
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), value)
    return min(value, size)


def _tiny_attention_width(settings: Mapping[str, Any]) -> int:
    """Where attention is wider than the stream, as of Zamba, which gives it the embedded tokens, too."""
    share = int(settings["attention_hidden_size"] // settings["hidden_size"])
    return WIDTH * max(1, share)


def _tiny_heads(key: str, value: int, settings: Mapping[str, Any]) -> int:
    """Heads, or in the same proportion those of keys and values."""
    if key in HEAD_COUNTS:
        return min(value, HEADS)
    own = "linear_num_value_heads" if key.startswith("linear") else "num_attention_heads"
    heads = settings.get(own) or value
    if value >= heads:
        return min(value, HEADS)
    return 1 if value == 1 else min(value, HEADS // 2)


def _tiny_rotation(rotation: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of heads of the tiny width, whose long texts begin at a length that fits."""
    tiny: dict[str, Any] = {}
    for key, value in rotation.items():
        if isinstance(value, dict):
            tiny[key] = _tiny_rotation(value)
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            share = rotation.get("partial_rotary_factor") or 1.0
            tiny[key] = value[: int(HEAD_WIDTH * share) // 2]
        elif key == "original_max_position_embeddings" and isinstance(value, int):
            tiny[key] = min(value, POSITIONS)
        else:
            tiny[key] = value
    return tiny


def _num_layers(settings: Mapping[str, Any]) -> int:
    counts = (settings.get(key) for key in LAYER_COUNTS)
    return next((count for count in counts if isinstance(count, int)), 0)


def _chosen_layers(settings: Mapping[str, Any]) -> list[int]:
    """The first layer of each kind, at least two; layers are alike in what every list of that length says of them."""
    num_layers = _num_layers(settings)
    lists = [
        value
        for value in settings.values()
        if isinstance(value, list | tuple) and len(value) == num_layers
    ]
    if not lists:
        return []
    by_layer = settings.get(BY_LAYER) or {}
    first_of_kind: dict[str, int] = {}
    for index in range(num_layers):
        own = by_layer.get(index, by_layer.get(str(index)))
        first_of_kind.setdefault(repr([own, *(value[index] for value in lists)]), index)
    chosen = sorted(first_of_kind.values())[:8]
    spare = [index for index in range(num_layers) if index not in chosen]
    return sorted(chosen + spare[: max(0, FEWEST_LAYERS - len(chosen))])


def _fit_state_space(tiny: dict[str, Any]) -> None:
    """State-space layers: their heads and their inner width follow from the width and how much it expands."""
    expand = tiny.get("mamba_expand") or tiny.get("expand")
    if not isinstance(expand, int | float):
        return
    widths = (tiny.get(key) for key in ("hidden_size", "d_model"))
    inner = int(expand * next((width for width in widths if isinstance(width, int)), WIDTH))
    head_widths = (tiny.get(key) for key in ("mamba_d_head", "mamba_headdim", "mamba_head_dim"))
    head_width = next((width for width in head_widths if isinstance(width, int)), HEAD_WIDTH)
    heads = inner // head_width
    changes: Mapping[str, int] = {
        "mamba_n_heads": heads,
        "n_mamba_heads": heads if "mamba_headdim" in tiny else tiny.get("n_mamba_heads", 1),
        "mamba_num_heads": heads,
        "mamba_d_ssm": inner,
        "mamba_intermediate": inner,
    }
    for key, size in changes.items():
        if isinstance(tiny.get(key), int):
            tiny[key] = size
    # Pure state-space models have no attention: these keys are their own.
    if "num_attention_heads" not in tiny:
        if "head_dim" in tiny and "num_heads" in tiny:
            tiny["num_heads"] = heads
        elif "intermediate_size" in tiny:
            tiny["intermediate_size"] = inner


def tiny_config(config: Any, change: Callable[[dict[str, Any]], None] | None = None) -> Any:
    """A config of the same class with shrunk sizes. Raises what the class raises where the sizes do not fit."""
    settings = tiny_settings(config.to_dict())
    if change is not None:
        change(settings)
    return type(config).from_dict(settings)
