"""Vision towers and their projectors by their sizes: parameters, and what a picture costs. From config.json, no torch.

Names and shapes are those of transformers' modules, without the module of the whole model in front.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from bloomery.facts.picture_sizes import PictureShape, side_of
from bloomery.facts.pictures import is_projector

UNREAD = "vision_tower.head."  # SigLIP's pooled picture, which no language model is given
Json = Mapping[str, Any]
Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of a tower. Of a patch `patch_values` numbers are read; `merged` patches become one feature.

    `width`: of what passes from layer to layer; `inner`: of an MLP; `out`: of the language model. `gated`: an MLP has
    two inputs. `window`: patches that attend to each other, in the layers `windowed`; elsewhere all of a piece do.
    `is_joint`: pieces of a batch are one row, with a mask between them.
    """

    kind: str
    layers: int
    width: int
    inner: int
    heads: int
    head_width: int
    out: int
    patch_values: int
    merged: float
    gated: bool
    shapes: Mapping[str, Shape]
    deep_features: int = 0
    window: int | None = None
    windowed: int = 0
    is_joint: bool = False

    @cached_property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def projector_parameters(self) -> int:
        return sum(
            math.prod(shape) for name, shape in self.shapes.items() if is_projector(self.kind, name)
        )

    @cached_property
    def flops_per_patch(self) -> float:
        """Of the tower's matrices, in forward, without attention's scores, and without a head that nothing reads."""
        return 2.0 * sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if len(shape) > 1
            and not is_projector(self.kind, name)
            and not _is_position(name)
            and not name.startswith(UNREAD)
        )

    @cached_property
    def flops_per_feature(self) -> float:
        """Of the projector's matrices, in forward."""
        return 2.0 * sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if len(shape) > 1 and is_projector(self.kind, name)
        )

    def flops(self, shape: PictureShape) -> float:
        """Of a picture, in forward."""
        pairs = float(sum(piece**2 for piece in shape.pieces))
        if self.is_joint:
            pairs = float(shape.patches**2)
        near = sum(piece * min(piece, self.window or piece) for piece in shape.pieces)
        all_pairs = (self.layers - self.windowed) * pairs + self.windowed * near
        scores = 4.0 * self.heads * self.head_width * all_pairs
        return (
            self.flops_per_patch * shape.patches + self.flops_per_feature * shape.features + scores
        )


def tower_of(config: Json) -> Tower | None:
    """That of a config.json; None of a kind that is not known, and of sizes that are no numbers."""
    build = _TOWERS.get(str(config.get("model_type")))
    vision = config.get("vision_config")
    text = config.get("text_config")
    if build is None or not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        return None
    try:
        return build(config, vision, int(text["hidden_size"]))
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def is_linear_map(name: str, shape: Shape) -> bool:
    """Whether a parameter is the matrix of a linear map, on which LoRA can be: no position, no convolution, no
    parameter that a module multiplies itself.
    """
    return len(shape) == 2 and name.endswith(".weight") and not _is_position(name)


def _is_position(name: str) -> bool:
    return any(part.startswith("pos") for part in name.split("."))


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _qwen(config: Json, vision: Json, _text_width: int) -> Tower:
    """Qwen2.5-VL, Qwen3-VL, Qwen3.5."""
    kind = str(config["model_type"])
    older = kind == "qwen2_5_vl"
    sizes = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14}
    if not older:
        sizes = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    sizes |= {"num_heads": 16, "out_hidden_size": 3584, "num_position_embeddings": 2304}
    sizes |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    size = {name: int(vision.get(name, usual)) for name, usual in sizes.items()}
    width, inner, out = size["hidden_size"], size["intermediate_size"], size["out_hidden_size"]
    patch = (3, size["temporal_patch_size"], size["patch_size"], size["patch_size"])
    merged = size["spatial_merge_size"] ** 2
    deep = vision.get("deepstack_visual_indexes", (8, 16, 24)) if kind == "qwen3_vl" else ()

    def shapes() -> Shapes:
        yield "visual.patch_embed.proj.weight", (width, *patch)
        if not older:
            yield "visual.patch_embed.proj.bias", (width,)
            yield "visual.pos_embed.weight", (size["num_position_embeddings"], width)
        for layer in range(size["depth"]):
            block = f"visual.blocks.{layer}"
            yield from _norm(f"{block}.norm1", width, bias=not older)
            yield from _norm(f"{block}.norm2", width, bias=not older)
            yield from _linear(f"{block}.attn.qkv", 3 * width, width)
            yield from _linear(f"{block}.attn.proj", width, width)
            for name in ("gate_proj", "up_proj") if older else ("linear_fc1",):
                yield from _linear(f"{block}.mlp.{name}", inner, width)
            yield from _linear(
                f"{block}.mlp.{'down_proj' if older else 'linear_fc2'}", width, inner
            )
        for number in range(-1, len(deep)):
            merger = "merger" if number < 0 else f"deepstack_merger_list.{number}"
            norm_width = width if number < 0 else merged * width
            norm, first, second = ("ln_q", "mlp.0", "mlp.2")
            if not older:
                norm, first, second = ("norm", "linear_fc1", "linear_fc2")
            yield from _norm(f"visual.{merger}.{norm}", norm_width, bias=not older)
            yield from _linear(f"visual.{merger}.{first}", merged * width, merged * width)
            yield from _linear(f"visual.{merger}.{second}", out, merged * width)

    window = None
    windowed = 0
    if older:  # a window is so many patches wide and high, of whole merged ones
        side = size["spatial_merge_size"]
        cells = int(vision.get("window_size", 112)) // side // size["patch_size"]
        window = (cells * side) ** 2
        windowed = size["depth"] - len(vision.get("fullatt_block_indexes", (7, 15, 23, 31)))
    return Tower(
        kind=kind,
        layers=size["depth"],
        width=width,
        inner=inner,
        heads=size["num_heads"],
        head_width=width // size["num_heads"],
        out=out,
        patch_values=math.prod(patch),
        merged=merged,
        gated=older,
        shapes=dict(shapes()),
        deep_features=len(deep),
        window=window,
        windowed=windowed,
    )


def _siglip_sizes(vision: Json) -> dict[str, int]:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    sizes |= {"num_attention_heads": 12}
    return {name: int(vision.get(name, usual)) for name, usual in sizes.items()}


def _siglip_shapes(tower: str, size: Mapping[str, int]) -> Shapes:
    """The layers and the last norm of SigLIP."""
    width, inner = size["hidden_size"], size["intermediate_size"]
    for layer in range(size["num_hidden_layers"]):
        block = f"{tower}.encoder.layers.{layer}"
        yield from _norm(f"{block}.layer_norm1", width)
        yield from _norm(f"{block}.layer_norm2", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{block}.self_attn.{name}", width, width)
        yield from _linear(f"{block}.mlp.fc1", inner, width)
        yield from _linear(f"{block}.mlp.fc2", width, inner)
    yield from _norm(f"{tower}.post_layernorm", width)


def _siglip_head(tower: str, size: Mapping[str, int]) -> Shapes:
    """One that pools all patches. Its parameters are there, and nothing reads what it makes."""
    width, inner = size["hidden_size"], size["intermediate_size"]
    yield f"{tower}.head.probe", (1, 1, width)
    yield f"{tower}.head.attention.in_proj_weight", (3 * width, width)
    yield f"{tower}.head.attention.in_proj_bias", (3 * width,)
    yield from _linear(f"{tower}.head.attention.out_proj", width, width)
    yield from _norm(f"{tower}.head.layernorm", width)
    yield from _linear(f"{tower}.head.mlp.fc1", inner, width)
    yield from _linear(f"{tower}.head.mlp.fc2", width, inner)


def _siglip_tower(
    kind: str,
    size: Mapping[str, int],
    shapes: Mapping[str, Shape],
    *,
    out: int,
    patch: int,
    merged: float,
) -> Tower:
    heads = size["num_attention_heads"]
    return Tower(
        kind=kind,
        layers=size["num_hidden_layers"],
        width=size["hidden_size"],
        inner=size["intermediate_size"],
        heads=heads,
        head_width=size["hidden_size"] // heads,
        out=out,
        patch_values=3 * patch**2,
        merged=merged,
        gated=False,
        shapes=shapes,
    )


def _gemma3(config: Json, vision: Json, text_width: int) -> Tower:
    size = _siglip_sizes(vision)
    width = size["hidden_size"]
    patch = side_of(vision.get("patch_size", 16))
    patches = (side_of(vision.get("image_size", 224)) // patch) ** 2

    def shapes() -> Shapes:
        yield "vision_tower.embeddings.patch_embedding.weight", (width, 3, patch, patch)
        yield "vision_tower.embeddings.patch_embedding.bias", (width,)
        yield "vision_tower.embeddings.position_embedding.weight", (patches, width)
        yield from _siglip_shapes("vision_tower", size)
        if vision.get("vision_use_head", True):
            yield from _siglip_head("vision_tower", size)
        yield "multi_modal_projector.mm_input_projection_weight", (width, text_width)
        yield "multi_modal_projector.mm_soft_emb_norm.weight", (width,)

    return _siglip_tower(
        "gemma3",
        size,
        dict(shapes()),
        out=text_width,
        patch=patch,
        merged=patches / int(config.get("mm_tokens_per_image", 256)),
    )


def _lfm2_vl(config: Json, vision: Json, text_width: int) -> Tower:
    size = _siglip_sizes(vision)
    width = size["hidden_size"]
    patch = side_of(vision.get("patch_size", 16))
    merged = int(config.get("downsample_factor", 2)) ** 2
    inner = int(config.get("projector_hidden_size", 2560))
    bias = bool(config.get("projector_bias", True))

    def shapes() -> Shapes:
        yield from _linear("vision_tower.embeddings.patch_embedding", width, 3 * patch**2)
        positions = int(vision.get("num_patches", 256))
        yield "vision_tower.embeddings.position_embedding.weight", (positions, width)
        yield from _siglip_shapes("vision_tower", size)
        if vision.get("vision_use_head", True):
            yield from _siglip_head("vision_tower", size)
        if config.get("projector_use_layernorm", True):
            yield from _norm("multi_modal_projector.layer_norm", merged * width)
        yield from _linear("multi_modal_projector.linear_1", inner, merged * width, bias=bias)
        yield from _linear("multi_modal_projector.linear_2", text_width, inner, bias=bias)

    return _siglip_tower(
        "lfm2_vl", size, dict(shapes()), out=text_width, patch=patch, merged=merged
    )


def _smolvlm(config: Json, vision: Json, text_width: int) -> Tower:
    usual = {"hidden_size": 1152, "num_attention_heads": 16}
    size = _siglip_sizes(usual | dict(vision))
    width = size["hidden_size"]
    patch = side_of(vision.get("patch_size", 32))
    patches = (side_of(vision.get("image_size", 224)) // patch) ** 2
    merged = int(config.get("scale_factor", 2)) ** 2

    def shapes() -> Shapes:
        yield "vision_model.embeddings.patch_embedding.weight", (width, 3, patch, patch)
        yield "vision_model.embeddings.patch_embedding.bias", (width,)
        yield "vision_model.embeddings.position_embedding.weight", (patches, width)
        yield from _siglip_shapes("vision_model", size)
        yield "connector.modality_projection.proj.weight", (text_width, merged * width)

    return _siglip_tower(
        "smolvlm", size, dict(shapes()), out=text_width, patch=patch, merged=merged
    )


def _gemma4(_config: Json, vision: Json, text_width: int) -> Tower:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
    sizes |= {"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240}
    size = {name: int(vision.get(name, usual)) for name, usual in sizes.items()}
    width, inner = size["hidden_size"], size["intermediate_size"]
    query = size["num_attention_heads"] * size["head_dim"]
    key = size["num_key_value_heads"] * size["head_dim"]

    def shapes() -> Shapes:
        positions = size["position_embedding_size"]
        embedder = "vision_tower.patch_embedder"
        yield f"{embedder}.position_embedding_table", (2, positions, width)
        yield f"{embedder}.input_proj.weight", (width, 3 * size["patch_size"] ** 2)
        for layer in range(size["num_hidden_layers"]):
            block = f"vision_tower.encoder.layers.{layer}"
            for name, outputs in (("q", query), ("k", key), ("v", key)):
                yield f"{block}.self_attn.{name}_proj.linear.weight", (outputs, width)
            yield f"{block}.self_attn.o_proj.linear.weight", (width, query)
            yield f"{block}.self_attn.q_norm.weight", (size["head_dim"],)
            yield f"{block}.self_attn.k_norm.weight", (size["head_dim"],)
            yield f"{block}.mlp.gate_proj.linear.weight", (inner, width)
            yield f"{block}.mlp.up_proj.linear.weight", (inner, width)
            yield f"{block}.mlp.down_proj.linear.weight", (width, inner)
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                yield f"{block}.{norm}_layernorm.weight", (width,)
        yield "embed_vision.embedding_projection.weight", (text_width, width)

    return Tower(
        kind="gemma4",
        layers=size["num_hidden_layers"],
        width=width,
        inner=inner,
        heads=size["num_attention_heads"],
        head_width=size["head_dim"],
        out=text_width,
        patch_values=3 * size["patch_size"] ** 2,
        merged=size["pooling_kernel_size"] ** 2,
        gated=True,
        shapes=dict(shapes()),
    )


def _gemma4_unified(_config: Json, vision: Json, text_width: int) -> Tower:
    """No layers: patches as large as pooled ones are embedded, with a place in two axes."""
    sizes = {
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
    }
    size = {name: int(vision.get(name, usual)) for name, usual in sizes.items()}
    width = size["mm_embed_dim"]
    values = 3 * (size["patch_size"] * size["pooling_kernel_size"]) ** 2

    def shapes() -> Shapes:
        yield "embed_vision.pos_embedding", (size["mm_posemb_size"], 2, width)
        yield from _norm("embed_vision.patch_ln1", values)
        yield from _linear("embed_vision.patch_dense", width, values)
        yield from _norm("embed_vision.patch_ln2", width)
        yield from _norm("embed_vision.pos_norm", width)
        projection = "embed_vision.multimodal_embedder.embedding_projection"
        yield from _linear(projection, text_width, width, bias=False)

    return Tower(
        kind="gemma4_unified",
        layers=0,
        width=width,
        inner=0,
        heads=1,
        head_width=width,
        out=text_width,
        patch_values=values,
        merged=1,
        gated=False,
        shapes=dict(shapes()),
    )


def _mistral3(config: Json, vision: Json, text_width: int) -> Tower:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "patch_size": 14}
    size = {name: int(vision.get(name, usual)) for name, usual in sizes.items()}
    width, inner, patch = size["hidden_size"], size["intermediate_size"], size["patch_size"]
    merged = int(config.get("spatial_merge_size", 2)) ** 2
    bias = bool(config.get("multimodal_projector_bias", False))

    def shapes() -> Shapes:
        yield "vision_tower.patch_conv.weight", (width, 3, patch, patch)
        yield "vision_tower.ln_pre.weight", (width,)
        for layer in range(size["num_hidden_layers"]):
            block = f"vision_tower.transformer.layers.{layer}"
            yield f"{block}.attention_norm.weight", (width,)
            yield f"{block}.ffn_norm.weight", (width,)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{block}.attention.{name}.weight", (width, width)
            yield f"{block}.feed_forward.gate_proj.weight", (inner, width)
            yield f"{block}.feed_forward.up_proj.weight", (inner, width)
            yield f"{block}.feed_forward.down_proj.weight", (width, inner)
        projector = "multi_modal_projector"
        yield f"{projector}.norm.weight", (width,)
        yield f"{projector}.patch_merger.merging_layer.weight", (width, merged * width)
        yield from _linear(f"{projector}.linear_1", text_width, width, bias=bias)
        yield from _linear(f"{projector}.linear_2", text_width, text_width, bias=bias)

    return Tower(
        kind="mistral3",
        layers=size["num_hidden_layers"],
        width=width,
        inner=inner,
        heads=size["num_attention_heads"],
        head_width=width // size["num_attention_heads"],
        out=text_width,
        patch_values=3 * patch**2,
        merged=merged,
        gated=True,
        shapes=dict(shapes()),
        is_joint=True,
    )


def _internvl(config: Json, vision: Json, text_width: int) -> Tower:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16}
    size = {name: int(vision.get(name, usual)) for name, usual in sizes.items()}
    width, inner, heads = (
        size[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    patch = side_of(vision.get("patch_size", 14))
    patches = (side_of(vision.get("image_size", 448)) // patch) ** 2
    merged = round(1 / float(config.get("downsample_ratio", 0.5)) ** 2)
    bias = bool(vision.get("attention_bias", False))

    def shapes() -> Shapes:
        embeddings = "vision_tower.embeddings"
        yield f"{embeddings}.cls_token", (1, 1, width)
        if vision.get("use_absolute_position_embeddings", True):
            yield f"{embeddings}.position_embeddings", (1, patches + 1, width)
        yield f"{embeddings}.patch_embeddings.projection.weight", (width, 3, patch, patch)
        yield f"{embeddings}.patch_embeddings.projection.bias", (width,)
        for layer in range(size["num_hidden_layers"]):
            block = f"vision_tower.encoder.layer.{layer}"
            yield f"{block}.lambda_1", (width,)
            yield f"{block}.lambda_2", (width,)
            for name in ("q_proj", "k_proj", "v_proj"):
                yield from _linear(f"{block}.attention.{name}", width, width, bias=bias)
            yield from _linear(f"{block}.attention.projection_layer", width, width)
            if vision.get("use_qk_norm", False):
                yield f"{block}.attention.q_norm.weight", (width,)
                yield f"{block}.attention.k_norm.weight", (width,)
            yield from _linear(f"{block}.mlp.fc1", inner, width)
            yield from _linear(f"{block}.mlp.fc2", width, inner)
            is_layer_norm = vision.get("norm_type", "layer_norm") == "layer_norm"
            for norm in ("layernorm_before", "layernorm_after"):
                yield from _norm(f"{block}.{norm}", width, bias=is_layer_norm)
        if not vision.get("use_mean_pooling", True):
            yield from _norm("vision_tower.layernorm", width)
        yield from _norm("multi_modal_projector.layer_norm", merged * width)
        yield from _linear("multi_modal_projector.linear_1", text_width, merged * width)
        yield from _linear("multi_modal_projector.linear_2", text_width, text_width)

    return Tower(
        kind="internvl",
        layers=size["num_hidden_layers"],
        width=width,
        inner=inner,
        heads=heads,
        head_width=width // heads,
        out=text_width,
        patch_values=3 * patch**2,
        merged=merged,
        gated=False,
        shapes=dict(shapes()),
    )


_TOWERS: Mapping[str, Callable[[Json, Json, int], Tower]] = MappingProxyType(
    {
        "gemma3": _gemma3,
        "gemma4": _gemma4,
        "gemma4_unified": _gemma4_unified,
        "internvl": _internvl,
        "lfm2_vl": _lfm2_vl,
        "mistral3": _mistral3,
        "qwen2_5_vl": _qwen,
        "qwen3_5": _qwen,
        "qwen3_vl": _qwen,
        "smolvlm": _smolvlm,
    }
)
