"""What a multimodal config.json says of pictures: which tower reads them, and how the language model meets them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from bloomery.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PositionAxes:
    """Rotary positions in three axes (time, row, column), as in Qwen2-VL (arXiv:2409.12191, section 2.1).

    `sections`: how many frequencies of a head each axis turns. `interleaved`: they are dealt out in turn, and not in
    blocks one after the other.
    """

    sections: tuple[int, int, int]
    interleaved: bool


# Backends of attention in which tokens of a picture may see those after them.
SEES_BOTH_WAYS = ("mask", "math")
BothWays: TypeAlias = Literal["none", "windows", "all"]


@dataclass(frozen=True, kw_only=True)
class VisionKind:
    """A family of multimodal models, of which transformers has the tower.

    `image_token`: the key of the id that stands where a picture's features do. `both_ways`: the layers in which tokens
    of a picture attend to those after them, too; "windows" where the config.json asks for it, or says nothing and
    transformers' default asks. `projector`: the modules of transformers' model that fit what the tower makes to the
    language model; `projector_in_files`: their names in published files, where these are others.
    """

    image_token: str = "image_token_id"
    both_ways: BothWays = "none"
    asks_by_default: bool = False
    interleaved: bool | None = None  # of positions in three axes; None: positions are the text's
    projector: tuple[str, ...] = ("multi_modal_projector",)
    projector_in_files: tuple[str, ...] = ()


VISION_KINDS: Mapping[str, VisionKind] = MappingProxyType(
    {
        "gemma3": VisionKind(image_token="image_token_index", both_ways="all"),
        "gemma4": VisionKind(both_ways="windows", projector=("embed_vision",)),
        "gemma4_unified": VisionKind(
            both_ways="windows",
            asks_by_default=True,
            # What embeds its patches is in the place of a tower.
            projector=("embed_vision.multimodal_embedder",),
            projector_in_files=("embed_vision.embedding_projection",),
        ),
        "internvl": VisionKind(),
        "lfm2_vl": VisionKind(),
        "mistral3": VisionKind(image_token="image_token_index"),
        "qwen2_5_vl": VisionKind(interleaved=False, projector=("visual.merger",)),
        "qwen3_5": VisionKind(interleaved=True, projector=("visual.merger",)),
        "qwen3_vl": VisionKind(
            interleaved=True, projector=("visual.merger", "visual.deepstack_merger_list")
        ),
        "smolvlm": VisionKind(projector=("connector",)),
    }
)


@dataclass(frozen=True, kw_only=True)
class Vision:
    """The part of a multimodal model that reads pictures. `raw_config`: the whole config.json, as JSON."""

    kind: str
    raw_config: str
    image_token_id: int
    axes: PositionAxes | None = None
    both_ways: BothWays = (
        "none"  # the layers in which tokens of a picture attend to those after them
    )


def is_projector(kind: str, name: str) -> bool:
    """Whether a parameter or module of a multimodal model, not of its language model, is the projector's."""
    inside = name.removeprefix("model.")
    facts = VISION_KINDS[kind]
    modules = (*facts.projector, *facts.projector_in_files)
    return any(inside.startswith(f"{module}.") for module in modules)


def could_see(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model whose pictures are supported."""
    return hf.get("model_type") in VISION_KINDS and "vision_config" in hf


def vision_of(hf: Mapping[str, Any], *, where: str = "config.json") -> Vision | None:
    """What a config.json says of pictures; None of a model that reads text alone, or of a kind that is not supported.

    Raises UserError where the id of the picture's token is missing.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in VISION_KINDS or "vision_config" not in hf:
        return None
    facts = VISION_KINDS[kind]
    token = hf.get(facts.image_token, hf.get("image_token_id", hf.get("image_token_index")))
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise UserError(
            f"{facts.image_token} is {str(token)[:40]}, and no id of a token",
            where=where,
            fix="put the config.json there that was published with the weights",
        )
    return Vision(
        kind=kind,
        raw_config=json.dumps(hf, sort_keys=True),
        image_token_id=token,
        axes=_axes(hf, facts, where=where),
        both_ways=_both_ways(hf, facts),
    )


def _both_ways(hf: Mapping[str, Any], facts: VisionKind) -> BothWays:
    """Gemma 3 always, Gemma 4 in layers with a window where its language model says "vision"."""
    text = hf.get("text_config")
    asked = "vision" if facts.asks_by_default else None
    if isinstance(text, dict):
        asked = text.get("use_bidirectional_attention", asked)
    return "none" if facts.both_ways == "windows" and asked != "vision" else facts.both_ways


def _axes(hf: Mapping[str, Any], facts: VisionKind, *, where: str) -> PositionAxes | None:
    if facts.interleaved is None:
        return None
    text = hf.get("text_config")
    text = text if isinstance(text, dict) else hf
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # transformers' default of Qwen3.5 and Qwen3-VL: models/qwen3_5/modeling_qwen3_5.py, Qwen3_5TextRotaryEmbedding
    sections = rope.get("mrope_section", (11, 11, 10) if facts.interleaved else None)
    if not isinstance(sections, list | tuple) or len(sections) != 3:
        raise UserError(
            f"mrope_section is {str(sections)[:40]}, and not three numbers",
            where=where,
            fix="put the config.json there that was published with the weights",
        )
    time, rows, columns = (int(section) for section in sections)
    return PositionAxes(sections=(time, rows, columns), interleaved=facts.interleaved)
