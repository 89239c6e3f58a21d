"""Tiny random models of architectures that our decoder lacks, as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": _COMMON | {"intermediate_size": 48, "max_position_embeddings": 64},
    "phi": _COMMON | {"intermediate_size": 48, "max_position_embeddings": 64},  # its head has a bias
    "cohere": _LLAMA | _TOKENS,  # scales its logits, and ties its head
    "opt": _COMMON | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32, **_TOKENS},
    "falcon": _COMMON | {"new_decoder_architecture": False, **_TOKENS},
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},  # attention of its own
    "llama": _LLAMA | _TOKENS,
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
