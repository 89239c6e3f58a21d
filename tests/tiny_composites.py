"""Tiny multimodal models of transformers with random weights, by kind: a tower, a projector and a language model."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

PICTURE = 100  # the token that stands where a picture's features do
TEXT = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TOWER |= {"num_attention_heads": 2}
QWEN_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
QWEN_TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TOKENS = {"image_token_id": PICTURE, "video_token_id": 101}
QWEN_TOKENS |= {"vision_start_token_id": 102, "vision_end_token_id": 103}
DEALT_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
DEALT_AXES |= {"mrope_interleaved": True}
BLOCKS_OF_AXES = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}

CONFIGS = {
    "qwen2_5_vl": {
        "text_config": TEXT
        | {"model_type": "qwen2_5_vl_text", "rope_scaling": BLOCKS_OF_AXES}
        | {"layer_types": ["full_attention"] * 2},
        "vision_config": QWEN_TOWER
        | {"depth": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": TEXT | {"model_type": "qwen3_vl_text", "rope_parameters": DEALT_AXES},
        "vision_config": QWEN_TOWER
        | {"depth": 3, "patch_size": 16, "deepstack_visual_indexes": [0, 1]}
        | {"num_position_embeddings": 64},
        **QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": TEXT
        | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, **DELTA}
        | {"rope_parameters": DEALT_AXES | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN_TOWER | {"depth": 2, "patch_size": 16, "num_position_embeddings": 64},
        **QWEN_TOKENS,
    },
    "gemma3": {
        "text_config": TEXT
        | {"model_type": "gemma3_text", "sliding_window": 32, "query_pre_attn_scalar": 8},
        "vision_config": TOWER
        | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        "mm_tokens_per_image": 4,
        "image_token_index": PICTURE,
        "boi_token_index": 102,
        "eoi_token_index": 103,
    },
    "gemma4": {
        "text_config": TEXT
        | {"model_type": "gemma4_text", "num_hidden_layers": 3, "global_head_dim": 16}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 120}
        | {"num_kv_shared_layers": 0, "sliding_window": 32},
        "vision_config": TOWER
        | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 16}
        | {"position_embedding_size": 64, "pooling_kernel_size": 2},
        "image_token_id": PICTURE,
        "audio_config": None,
    },
    "gemma4_unified": {
        "text_config": TEXT
        | {"model_type": "gemma4_unified_text", "num_hidden_layers": 3, "global_head_dim": 16}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {"sliding_window": 32},
        "vision_config": {"patch_size": 8, "pooling_kernel_size": 2, "mm_embed_dim": 32}
        | {"mm_posemb_size": 70, "output_proj_dims": 32},
        "image_token_id": PICTURE,
        "audio_config": None,
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {"image_size": 64, "patch_size": 16},
        "scale_factor": 2,
        "image_token_id": PICTURE,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": TOWER
        | {"model_type": "pixtral", "head_dim": 16, "image_size": 112, "patch_size": 14},
        "image_token_index": PICTURE,
        "spatial_merge_size": 2,
    },
    "lfm2_vl": {
        "text_config": TEXT
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
        "vision_config": TOWER
        | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 16},
        "image_token_id": PICTURE,
        "downsample_factor": 2,
        "projector_hidden_size": 48,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2", "layer_types": ["full_attention"] * 2},
        "vision_config": TOWER
        | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
        "image_token_id": PICTURE,
        "image_seq_length": 4,
    },
}


def composite(kind: str) -> torch.nn.Module:
    """In evaluation; norms and biases are not those of a new model, which would hide that one is left out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():  # Gemma 3's projector begins at 0
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def picture_inputs(kind: str) -> dict[str, torch.Tensor]:
    """What an image processor makes of two pictures, of random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind.startswith("qwen"):
            side = CONFIGS[kind]["vision_config"]["patch_size"]
            return {
                "pixel_values": torch.randn(8 + 16, 3 * 2 * side * side),
                "image_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 4]]),
            }
        if kind == "smolvlm":
            return {
                "pixel_values": torch.randn(1, 2, 3, 64, 64),
                "pixel_attention_mask": torch.ones(1, 2, 64, 64, dtype=torch.bool),
            }
        if kind == "mistral3":
            sizes = torch.tensor([[56, 84], [84, 56]])
            return {"pixel_values": torch.randn(2, 3, 84, 84), "image_sizes": sizes}
        if kind == "lfm2_vl":
            return {
                "pixel_values": torch.randn(2, 16, 3 * 16 * 16),
                "spatial_shapes": torch.tensor([[4, 4], [2, 4]]),
                "pixel_attention_mask": (torch.arange(16) < torch.tensor([[16], [8]])).long(),
            }
        if kind == "gemma4":
            rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
            places = torch.stack([columns.flatten(), rows.flatten()], -1)
            return {
                "pixel_values": torch.rand(2, 16, 3 * 16 * 16),
                "image_position_ids": places.expand(2, 16, 2),
            }
        if kind == "gemma4_unified":
            # Four patches of 16 pixels and three, then padding.
            places = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).repeat(2, 1, 1)
            places[1, 3] = -1
            return {"pixel_values": torch.rand(2, 4, 3 * 16 * 16), "image_position_ids": places}
        return {"pixel_values": torch.randn(2, 3, 56, 56)}
