"""What llama.cpp reads of a vision tower and its projector, by kind of multimodal model: the names in an mmproj file.

Keys and names are those of llama.cpp's conversion (`conversion/*.py`, `gguf-py/gguf/constants.py`), and what its graphs
compute is from `tools/mtmd/clip.cpp` and `tools/mtmd/models/*.cpp`, as of build b11549.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from bloomery.facts.config_fields import HfKeys

# A value of the metadata: its type there is that of Python's, integers are uint32, floats float32.
Stated = bool | int | float | str | list[float] | list[bool]
Describe = Callable[[HfKeys], Mapping[str, Stated]]
Differences = Callable[[HfKeys], Iterator[str]]

# What a file has in place of a tensor of the model. `frames`: the two slices of a convolution over time;
# `thirds`: queries, keys and values, each alone; `pairs`: of each head the two numbers that are rotated together are
# neighbors; `channels_first`: a matrix over the pixels of a patch as a convolution; `colors`: of the numbers of a patch
# first all reds, then all greens; `axes_first`: positions as one table for columns and one for rows; `plus_one`: a norm
# that is multiplied without adding 1.
Change = Literal["frames", "thirds", "pairs", "channels_first", "colors", "axes_first", "plus_one"]


def _no_differences(tower: HfKeys) -> Iterator[str]:
    del tower
    yield from ()


@dataclass(frozen=True)
class GgufProjector:
    """A projector of llama.cpp (`clip.projector_type`), and the tower before it.

    `tensors`: what a module or a parameter of transformers' model is called in the file; {} stands for a number.
    `changes`: by the same names. `left_out`: how modules begin that the graph does not compute with. `types`: tensors
    of another type than `mmproj.type_of` gives them. `vision`: keys of vision_config by what they are in most towers,
    and `defaults` what they are where config.json says nothing (transformers' config classes); `processor`: the same of
    the image processor. `describe`: more of the metadata, by key without "clip.", from `tower_settings` with the image
    processor's settings as "processor". `fixed`: what the graph computes whatever the file says, by key of
    `tower_settings`: other values are refused.
    `text_graph`: the graph of the language model that sees three axes of positions, by the name of the one that sees
    one. `deepstack`: the file of the language model states how many layers get features of inner layers of the tower.
    `break_token`: whose embedding ends each row of features. `differences`: what llama.cpp does otherwise than the
    model and its processor, from the same settings as `describe`.
    """

    name: str
    tensors: Mapping[str, str]
    describe: Describe
    changes: Mapping[str, Change] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    vision: Mapping[str, str] = field(default_factory=dict)
    defaults: HfKeys = field(default_factory=dict)
    processor: HfKeys = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    key: str = "clip.projector_type"
    text_graph: Mapping[str, str] = field(default_factory=dict)
    deepstack: bool = False
    break_token: str | None = None
    differences: Differences = _no_differences


def _under(prefix: str, names: Mapping[str, str], target: str = "") -> dict[str, str]:
    return {f"{prefix}{name}": f"{target}{tensor}" for name, tensor in names.items()}


# SigLIP (models/siglip.cpp), with a projector of any kind behind it.
_SIGLIP_LAYER = _under(
    "encoder.layers.{}.",
    {
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
    "v.blk.{}.",
)
_SIGLIP = _SIGLIP_LAYER | {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}
# Qwen3-VL and Qwen3.5 (models/qwen3vl.cpp).
_QWEN3 = _under(
    "visual.",
    {
        "blocks.{}.norm1": "v.blk.{}.ln1",
        "blocks.{}.norm2": "v.blk.{}.ln2",
        "blocks.{}.attn.qkv": "v.blk.{}.attn_qkv",
        "blocks.{}.attn.proj": "v.blk.{}.attn_out",
        "blocks.{}.mlp.linear_fc1": "v.blk.{}.ffn_up",
        "blocks.{}.mlp.linear_fc2": "v.blk.{}.ffn_down",
        "merger.norm": "v.post_ln",
        "merger.linear_fc1": "mm.0",
        "merger.linear_fc2": "mm.2",
        "patch_embed.proj": "v.patch_embd",
        "pos_embed": "v.position_embd",
        "deepstack_merger_list.{}.norm": "v.deepstack.{}.norm",
        "deepstack_merger_list.{}.linear_fc1": "v.deepstack.{}.fc1",
        "deepstack_merger_list.{}.linear_fc2": "v.deepstack.{}.fc2",
    },
)
_TANH = ("gelu_pytorch_tanh",)
_LAST_LAYER = {"vision_feature_layer": (-1,)}
_QWEN_SIZES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
_QWEN3_SIZES: HfKeys = {  # of Qwen3-VL and Qwen3.5 where their config says nothing
    "patch_size": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "projector_hidden_act": "gelu",
}
_QWEN_FIXED = {"temporal_patch_size": (2,), "spatial_merge_size": (2,), "rope_theta": (1e4,)}
_NORM = "vision.attention.layer_norm_epsilon"


# What a config.json says beside its vision_config of what follows the tower.
_BESIDE = (
    "scale_factor spatial_merge_size downsample_factor downsample_ratio projector_hidden_act"
    " mm_tokens_per_image vision_feature_layer vision_feature_select_strategy"
).split()


def tower_settings(hf: HfKeys, projector: GgufProjector) -> HfKeys:
    """What a multimodal config.json says of a tower and what follows it, with transformers' defaults of absent keys,
    by the names that most towers have for them. A size of two equal sides is one number.
    """
    inner: HfKeys = hf["vision_config"]
    settings = {
        **projector.defaults,
        **{key: hf[key] for key in _BESIDE if key in hf},
        **{key: value for key, value in inner.items() if value is not None},
    }
    settings |= {name: settings[key] for name, key in projector.vision.items()}
    rope = settings.get("rope_parameters") or {}
    if isinstance(rope, dict) and "rope_theta" in rope:
        settings["rope_theta"] = rope["rope_theta"]
    for key in ("image_size", "patch_size"):
        sides = settings.get(key)
        if isinstance(sides, list | tuple) and len(set(sides)) == 1:
            settings[key] = sides[0]
    return settings


def _activation(tower: HfKeys) -> dict[str, Stated]:
    """llama.cpp takes a quick GELU where neither is stated."""
    return {"use_silu": True} if tower["hidden_act"] == "silu" else {"use_gelu": True}


def _full_attention_period(tower: HfKeys) -> int:
    """n, where each n-th layer has no windows; 0 where that is not so."""
    layers: list[int] = list(tower["fullatt_block_indexes"])
    period = layers[0] + 1 if layers else 0
    regular = [number * period - 1 for number in range(1, len(layers) + 1)]
    return period if layers == regular else 0


def _pixels(tower: HfKeys) -> dict[str, Stated]:
    """How large a picture the processor gives the tower, which llama.cpp else takes from one model."""
    processor = tower["processor"]
    size = processor.get("size") or {}
    limits = {
        "min": processor.get("min_pixels") or size.get("shortest_edge"),
        "max": processor.get("max_pixels") or size.get("longest_edge"),
    }
    return {f"vision.image_{end}_pixels": limit for end, limit in limits.items() if limit}


def _qwen2_5(tower: HfKeys) -> dict[str, Stated]:
    return {
        "use_silu": True,
        "vision.n_wa_pattern": _full_attention_period(tower),
        _NORM: 1e-6,  # a constant: transformers' models/qwen2_5_vl, Qwen2_5_VLVisionBlock
        **_pixels(tower),
    }


def _qwen3(tower: HfKeys) -> dict[str, Stated]:
    deep_layers = tower["deepstack_visual_indexes"]
    return {
        # as many positions as the square of image_size has patches
        "vision.image_size": int(tower["num_position_embeddings"] ** 0.5 * tower["patch_size"]),
        "use_gelu": True,
        "vision.spatial_merge_size": tower["spatial_merge_size"],
        _NORM: 1e-6,  # a constant: transformers' models/qwen3_vl, Qwen3VLVisionBlock
        "vision.is_deepstack_layers": [
            number in deep_layers for number in range(tower["num_hidden_layers"])
        ],
        **_pixels(tower),
    }


def _gemma3(tower: HfKeys) -> dict[str, Stated]:
    """llama.cpp makes 256 tokens of 64 x 64 patches, four to a side, where nothing else is stated."""
    tokens_per_side = math.isqrt(tower["mm_tokens_per_image"])
    per_token = tower["image_size"] // tower["patch_size"] // tokens_per_side
    scale: dict[str, Stated] = {"vision.projector.scale_factor": per_token}
    return {
        _NORM: tower["layer_norm_eps"],
        "use_gelu": True,
        **(scale if per_token not in (0, 4) else {}),
    }


def _differences_gemma3(tower: HfKeys) -> Iterator[str]:
    del tower
    yield "llama.cpp writes no empty line before and after a picture, and this model's processor does"


def _gemma4(tower: HfKeys) -> dict[str, Stated]:
    pooled = tower["pooling_kernel_size"]
    scale: dict[str, Stated] = {"vision.projector.scale_factor": pooled}
    # llama.cpp's own conversion states no activation, of which its graph makes a quick GELU.
    return {_NORM: tower["rms_norm_eps"], "use_gelu": True, **(scale if pooled != 3 else {})}


def _differences_gemma4(tower: HfKeys) -> Iterator[str]:
    most = tower["processor"].get("max_soft_tokens", 280)
    yield (
        "llama.cpp leaves a picture of 70 to 1,120 tokens as large as it is, and this model's processor "
        f"scales all to about {most:,} tokens"
    )


def _gemma4_unified(tower: HfKeys) -> dict[str, Stated]:
    return {key: value for key, value in _gemma4(tower).items() if key != "use_gelu"}


def _idefics3(tower: HfKeys) -> dict[str, Stated]:
    longest = (tower["processor"].get("size") or {}).get("longest_edge", tower["image_size"])
    return {
        _NORM: tower["layer_norm_eps"],
        "vision.projector.scale_factor": tower["scale_factor"],
        "use_gelu": True,
        "vision.preproc_image_size": longest,
    }


def _differences_idefics3(tower: HfKeys) -> Iterator[str]:
    if tower["processor"].get("do_image_splitting") is False:
        yield "llama.cpp cuts pictures into squares, and this model's processor does not"


def _pixtral(tower: HfKeys) -> dict[str, Stated]:
    return {
        _NORM: 1e-5,  # a constant: transformers' models/pixtral, PixtralAttentionLayer
        **_activation(tower),
        "vision.spatial_merge_size": tower["spatial_merge_size"],
    }


def _differences_pixtral(tower: HfKeys) -> Iterator[str]:
    longest = (tower["processor"].get("size") or {}).get("longest_edge", 0)
    most = (longest // (tower["patch_size"] * tower["spatial_merge_size"])) ** 2
    if most > 1024:
        yield (
            f"llama.cpp makes at most 1,024 tokens of a picture, and this model's processor up to {most:,}: "
            f"run it with --image-max-tokens {most}"
        )


# PIL's numbers of what llama.cpp can resize with.
_RESAMPLING = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _lfm2(tower: HfKeys) -> dict[str, Stated]:
    resample = _RESAMPLING.get(tower["processor"].get("resample", 0))
    return {
        _NORM: tower["layer_norm_eps"],
        "vision.projector.scale_factor": tower["downsample_factor"],
        "use_gelu": True,
        **({} if resample is None else {"vision.image_resize_algo": resample}),
    }


# Of a picture, in tools/mtmd/mtmd-image.h, and of its tokens in clip.cpp.
_LFM2_PROCESSOR = {
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "tile_size": 512,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
}


def _differences_lfm2(tower: HfKeys) -> Iterator[str]:
    for key, value in _LFM2_PROCESSOR.items():
        stated = tower["processor"].get(key, value)
        if stated != value:
            yield f"llama.cpp cuts pictures by {key} {value}, and this model's processor by {stated}"


def _internvl(tower: HfKeys) -> dict[str, Stated]:
    """Where nothing is stated, llama.cpp cuts a picture into up to 12 squares."""
    processor = tower["processor"]
    crops = processor.get("crop_to_patches", False)
    tiles = {
        "vision.preproc_min_tiles": processor.get("min_patches", 1) if crops else 1,
        "vision.preproc_max_tiles": processor.get("max_patches", 12) if crops else 1,
    }
    return {
        _NORM: tower["layer_norm_eps"],
        **_activation(tower),
        "vision.projector.scale_factor": int(1 / tower["downsample_ratio"]),
        **tiles,
    }


def _differences_internvl(tower: HfKeys) -> Iterator[str]:
    """models/internvl.cpp puts the class token last, and the table of positions stays as it was."""
    if not tower["processor"].get("crop_to_patches", False):
        side = tower["image_size"]
        yield (
            f"llama.cpp sees a picture that is wider or higher than {side} pixels twice, and this model's "
            "processor once"
        )
    yield (
        "llama.cpp gives each patch of a picture the position of the one before it, with files of its own "
        "conversion too: features differ"
    )


GGUF_PROJECTORS: Mapping[str, GgufProjector] = MappingProxyType(
    {
        "qwen2_5_vl": GgufProjector(
            "qwen2.5vl_merger",
            _under(
                "visual.",
                {
                    "blocks.{}.norm1": "v.blk.{}.ln1",
                    "blocks.{}.norm2": "v.blk.{}.ln2",
                    "blocks.{}.attn.qkv": "v.blk.{}.attn_",
                    "blocks.{}.attn.proj": "v.blk.{}.attn_out",
                    "blocks.{}.mlp.gate_proj": "v.blk.{}.ffn_gate",
                    "blocks.{}.mlp.up_proj": "v.blk.{}.ffn_up",
                    "blocks.{}.mlp.down_proj": "v.blk.{}.ffn_down",
                    "merger.ln_q": "v.post_ln",
                    "merger.mlp.{}": "mm.{}",
                    "patch_embed.proj": "v.patch_embd",
                },
            ),
            changes={"visual.blocks.{}.attn.qkv": "thirds", "visual.patch_embed.proj": "frames"},
            vision=_QWEN_SIZES,
            # image_size: none is in config.json; the conversion of llama.cpp writes this one
            defaults={
                "image_size": 560,
                "patch_size": 14,
                "hidden_size": 3584,
                "num_heads": 16,
                "intermediate_size": 3420,
                "depth": 32,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "hidden_act": "silu",
                "projector_hidden_act": "gelu",
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "window_size": 112,
            },
            describe=_qwen2_5,
            fixed={
                **_QWEN_FIXED,
                "hidden_act": ("silu",),
                "window_size": (112,),
            },
            text_graph={"qwen2": "qwen2vl"},
        ),
        "qwen3_vl": GgufProjector(
            "qwen3vl_merger",
            _QWEN3,
            changes={"visual.patch_embed.proj": "frames"},
            vision=_QWEN_SIZES,
            defaults=_QWEN3_SIZES | {"deepstack_visual_indexes": [8, 16, 24]},
            describe=_qwen3,
            fixed={**_QWEN_FIXED, "hidden_act": _TANH},
            text_graph={"qwen3": "qwen3vl", "qwen3moe": "qwen3vlmoe"},
            deepstack=True,
        ),
        "qwen3_5": GgufProjector(
            "qwen3vl_merger",
            _QWEN3,
            changes={"visual.patch_embed.proj": "frames"},
            vision=_QWEN_SIZES,
            defaults=_QWEN3_SIZES | {"deepstack_visual_indexes": []},
            describe=_qwen3,
            fixed={**_QWEN_FIXED, "hidden_act": _TANH},
        ),
        "gemma3": GgufProjector(
            "gemma3",
            _under("vision_tower.", _SIGLIP)
            | {
                "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
                "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
            },
            changes={"multi_modal_projector.mm_soft_emb_norm": "plus_one"},
            left_out=("vision_tower.head.",),
            types={"v.patch_embd.weight": "f32", "mm.input_projection.weight": "f16"},
            defaults={
                "image_size": 224,
                "patch_size": 16,
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "layer_norm_eps": 1e-6,
                "hidden_act": "gelu_pytorch_tanh",
                "mm_tokens_per_image": 256,
            },
            describe=_gemma3,
            differences=_differences_gemma3,
            fixed={"hidden_act": _TANH},
        ),
        "gemma4": GgufProjector(
            "gemma4v",
            _under(
                "vision_tower.encoder.layers.{}.",
                {
                    "input_layernorm": "ln1",
                    "post_attention_layernorm": "attn_post_norm",
                    "pre_feedforward_layernorm": "ln2",
                    "post_feedforward_layernorm": "ffn_post_norm",
                    "self_attn.q_proj": "attn_q",
                    "self_attn.k_proj": "attn_k",
                    "self_attn.v_proj": "attn_v",
                    "self_attn.o_proj": "attn_out",
                    "self_attn.q_norm": "attn_q_norm",
                    "self_attn.k_norm": "attn_k_norm",
                    "mlp.gate_proj": "ffn_gate",
                    "mlp.up_proj": "ffn_up",
                    "mlp.down_proj": "ffn_down",
                },
                "v.blk.{}.",
            )
            | {
                "vision_tower.patch_embedder.input_proj": "v.patch_embd",
                "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
                "vision_tower.std_bias": "v.std_bias",
                "vision_tower.std_scale": "v.std_scale",
                "embed_vision.embedding_projection": "mm.input_projection",
            },
            changes={"vision_tower.patch_embedder.input_proj": "channels_first"},
            left_out=("audio_tower.", "embed_audio."),
            # image_size: none is in config.json; the conversion of llama.cpp writes this one, which nothing reads
            defaults={
                "image_size": 224,
                "patch_size": 16,
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 16,
                "num_attention_heads": 12,
                "num_key_value_heads": 12,
                "head_dim": 64,
                "rms_norm_eps": 1e-6,
                "pooling_kernel_size": 3,
                "hidden_activation": "gelu_pytorch_tanh",
            },
            describe=_gemma4,
            differences=_differences_gemma4,
            fixed={"hidden_activation": _TANH, "rope_theta": (100.0,)},
            key="clip.vision.projector_type",
        ),
        "gemma4_unified": GgufProjector(
            "gemma4uv",
            {
                "vision_embedder.patch_dense.weight": "v.patch_embd.weight",
                "vision_embedder.patch_dense.bias": "v.patch_embd.bias",
                "vision_embedder.patch_ln1": "v.patch_norm.1",
                "vision_embedder.patch_ln2": "v.patch_norm.2",
                "vision_embedder.pos_norm": "v.patch_norm.3",
                "vision_embedder.pos_embedding": "v.position_embd.weight",
                "embed_vision.embedding_projection": "mm.input_projection",
            },
            changes={
                "vision_embedder.patch_dense.weight": "colors",
                "vision_embedder.patch_ln1": "colors",
                "vision_embedder.pos_embedding": "axes_first",
            },
            left_out=("audio_tower.", "embed_audio.", "audio_embedder."),
            vision={"hidden_size": "mm_embed_dim"},
            # No tower: patches are embedded. image_size: nothing reads it.
            defaults={
                "image_size": 224,
                "patch_size": 16,
                "mm_embed_dim": 3840,
                "intermediate_size": 0,
                "num_hidden_layers": 0,
                "num_attention_heads": 0,
                "rms_norm_eps": 1e-6,
                "pooling_kernel_size": 3,
            },
            processor={"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]},
            describe=_gemma4_unified,
            differences=_differences_gemma4,
            key="clip.vision.projector_type",
        ),
        "smolvlm": GgufProjector(
            "idefics3",
            _under("vision_model.", _SIGLIP)
            | {"connector.modality_projection.proj": "mm.model.fc"},
            types={"v.patch_embd.weight": "f32"},
            defaults={
                "image_size": 224,
                "patch_size": 32,
                "hidden_size": 1152,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 16,
                "layer_norm_eps": 1e-6,
                "hidden_act": "gelu_pytorch_tanh",
                "scale_factor": 2,
            },
            describe=_idefics3,
            differences=_differences_idefics3,
            fixed={"hidden_act": _TANH},
        ),
        "mistral3": GgufProjector(
            "pixtral",
            _under(
                "vision_tower.transformer.layers.{}.",
                {
                    "attention_norm": "ln1",
                    "ffn_norm": "ln2",
                    "attention.q_proj": "attn_q",
                    "attention.k_proj": "attn_k",
                    "attention.v_proj": "attn_v",
                    "attention.o_proj": "attn_out",
                    "feed_forward.gate_proj": "ffn_gate",
                    "feed_forward.up_proj": "ffn_up",
                    "feed_forward.down_proj": "ffn_down",
                },
                "v.blk.{}.",
            )
            | {
                "vision_tower.patch_conv": "v.patch_embd",
                "vision_tower.ln_pre": "v.pre_ln",
                "multi_modal_projector.linear_{}": "mm.{}",
                "multi_modal_projector.norm": "mm.input_norm",
                "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
            },
            changes={
                f"vision_tower.transformer.layers.{{}}.attention.{name}": "pairs"
                for name in ("q_proj", "k_proj")
            },
            defaults={
                "image_size": 1024,
                "patch_size": 16,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "hidden_act": "gelu",
                "spatial_merge_size": 2,
                "projector_hidden_act": "gelu",
            },
            describe=_pixtral,
            differences=_differences_pixtral,
            fixed={
                **_LAST_LAYER,
                "hidden_act": ("gelu", "silu"),
                "projector_hidden_act": ("gelu",),
                "rope_theta": (1e4,),
            },
            break_token="[IMG_BREAK]",
        ),
        "lfm2_vl": GgufProjector(
            "lfm2",
            _under("vision_tower.", _SIGLIP)
            | {
                "multi_modal_projector.layer_norm": "mm.input_norm",
                "multi_modal_projector.linear_{}": "mm.{}",
            },
            changes={"vision_tower.embeddings.patch_embedding": "channels_first"},
            left_out=("vision_tower.head.",),
            # image_size: the tower takes any; the conversion of llama.cpp writes this one
            defaults={
                "image_size": 256,
                "patch_size": 16,
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "layer_norm_eps": 1e-6,
                "hidden_act": "gelu_pytorch_tanh",
                "downsample_factor": 2,
                "projector_hidden_act": "gelu",
            },
            processor={"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
            describe=_lfm2,
            differences=_differences_lfm2,
            fixed={
                **_LAST_LAYER,
                "hidden_act": _TANH,
                "projector_hidden_act": ("gelu",),
            },
        ),
        "internvl": GgufProjector(
            "internvl",
            _under(
                "vision_tower.encoder.layer.{}.",
                {
                    "layernorm_before": "ln1",
                    "layernorm_after": "ln2",
                    "lambda_1": "ls1.weight",
                    "lambda_2": "ls2.weight",
                    "attention.q_proj": "attn_q",
                    "attention.k_proj": "attn_k",
                    "attention.v_proj": "attn_v",
                    "attention.projection_layer": "attn_out",
                    "mlp.fc1": "ffn_up",
                    "mlp.fc2": "ffn_down",
                },
                "v.blk.{}.",
            )
            | {
                "vision_tower.embeddings.cls_token": "v.class_embd",
                "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
                "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
                "multi_modal_projector.layer_norm": "mm.model.mlp.0",
                "multi_modal_projector.linear_1": "mm.model.mlp.1",
                "multi_modal_projector.linear_2": "mm.model.mlp.3",
            },
            defaults={
                "image_size": 448,
                "patch_size": 14,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "layer_norm_eps": 1e-6,
                "hidden_act": "gelu",
                "downsample_ratio": 0.5,
                "norm_type": "layer_norm",
                "use_qk_norm": False,
                "projector_hidden_act": "gelu",
                "vision_feature_select_strategy": "default",
            },
            describe=_internvl,
            differences=_differences_internvl,
            fixed={
                **_LAST_LAYER,
                "hidden_act": ("gelu", "silu"),
                "norm_type": ("layer_norm",),
                "use_qk_norm": (False,),
                "vision_feature_select_strategy": ("default",),
                "projector_hidden_act": ("gelu",),
            },
        ),
    }
)
