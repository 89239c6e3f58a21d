"""Tiny random models of architectures that our decoder lacks, as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

_COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _COMMON | {
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": _COMMON | {"intermediate_size": 48, "max_position_embeddings": 64},
    # its head has a bias
    "phi": _COMMON | {"intermediate_size": 48, "max_position_embeddings": 64},
    # scales its logits, ties its head, and norms each head by weights of its own
    "cohere": _LLAMA | _TOKENS | {"use_qk_norm": True},
    "opt": _COMMON
    | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32, **_TOKENS},
    "falcon": _COMMON | {"new_decoder_architecture": False, **_TOKENS},
    # positions in the scores alone (ALiBi), and no mask of documents
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    # state spaces and attention
    "bamba": _LLAMA
    | _TOKENS
    | {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    # the same with experts beside one that every token meets, as Granite 4 Tiny
    "granitemoehybrid": _LLAMA
    | _TOKENS
    | {
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "nope",
        "intermediate_size": 16,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    # attention of its own
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "llama": _LLAMA | _TOKENS,
    # experts, each by itself in files and one tensor in memory; training draws which ones a token meets
    "phimoe": _LLAMA
    | _TOKENS
    | {"num_local_experts": 4, "lm_head_bias": True, "attention_bias": True},
    # its layers differ in their heads, and so in the sizes of their matrices
    "laguna": _LLAMA
    | _TOKENS
    | {
        "num_attention_heads_per_layer": [4, 2],
        "mlp_layer_types": ["dense", "dense"],
        "num_experts": 0,
        "head_dim": 8,
    },
}


def saved_model(kind: str, folder: Path, **changed: Any) -> Any:
    """Transformers' model, in evaluation mode, its files in `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES[kind] | changed)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def saved_gemma3(folder: Path, vocab_size: int = 128) -> Any:
    """A random Gemma 3 with a vision tower, and its files in `folder` as google/gemma-3-4b-it has them."""
    torch.manual_seed(0)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "pad_token_id": 0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    }
    last = {
        "image_token_index": vocab_size - 1,
        "boi_token_index": vocab_size - 3,
        "eoi_token_index": vocab_size - 2,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **last)
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model
