"""What an image processor makes of a picture, from the picture's size alone: its squares, its patches, its tokens.

The arithmetic is that of transformers' image processors, `models/*/image_processing_*.py`. No torch, no pixels.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

Json = Mapping[str, Any]
Square = tuple[int, int]  # height and width, or rows and columns

# What an image processor is read from. transformers prefers the second, where that holds settings of pictures.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
FLOAT32 = 4
INT64 = 8
INT32 = 4
MAX_RATIO = 200  # of the sides: Qwen's processor refuses more
SMOLVLM_LONGEST = 4096


@dataclass(frozen=True, kw_only=True)
class PictureShape:
    """What becomes of a picture of one size.

    `features`: tokens whose embeddings the tower's output replaces. `pieces`: the patches of each part that the tower
    computes alone, padding included. `input_bytes`: of what the image processor makes of the pixels. `made`: its
    figures of one picture, by its own names, from which the text that stands for the picture follows.
    """

    features: int
    pieces: tuple[int, ...]
    input_bytes: int
    made: Json

    @property
    def patches(self) -> int:
        return sum(self.pieces)


@dataclass(frozen=True)
class _Processor:
    """`names`: of transformers' classes, without "Fast" and "Pil"; `defaults`: of their settings."""

    names: tuple[str, ...]
    defaults: Json
    shape: Callable[[Json, Json, int, int], PictureShape]


@final
class PictureSizes:
    """The image processor of a model, as arithmetic. `config`: the model's config.json; `settings`: the processor's."""

    def __init__(self, config: Json, settings: Json) -> None:
        self._config = config
        self._settings = settings
        self._shape = _PROCESSORS[config["model_type"]].shape
        self._shapes = dict[tuple[int, int], PictureShape]()

    @classmethod
    def of(cls, config: Json, settings: Json) -> "PictureSizes | None":
        """None of an image processor that is not known, and of one that does not resize."""
        processor = _PROCESSORS.get(str(config.get("model_type")))
        name = settings.get("image_processor_type")
        if processor is None or not isinstance(config.get("vision_config"), Mapping):
            return None
        if name is not None and _stem(str(name)) not in processor.names:
            return None
        if not settings.get("do_resize", True) or settings.get("do_center_crop"):
            return None
        stated = {key: value for key, value in settings.items() if value is not None}
        return cls(config, {**processor.defaults, **stated})

    def shape(self, width: int, height: int) -> PictureShape:
        """Of a picture with these sides in pixels. Raises ValueError for one that the image processor refuses, and for
        settings that are no numbers.
        """
        size = (width, height)
        if size not in self._shapes:
            try:
                self._shapes[size] = self._shape(self._config, self._settings, width, height)
            except (KeyError, TypeError, ArithmeticError) as error:
                raise ValueError(f"settings of pictures: {error}") from error
        return self._shapes[size]


def _stem(name: str) -> str:
    return name.removesuffix("Fast").removesuffix("Pil")


def processor_settings(folder: Path) -> Json | None:
    """Of the image processor in a folder; None without one, and where its file is no JSON object."""
    for name in reversed(PROCESSOR_FILES):
        try:
            read = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        settings = read.get("image_processor") if isinstance(read, dict) else None
        if name == PROCESSOR_FILES[0] and settings is None:
            settings = read
        if isinstance(settings, dict):
            return settings
    return None


def side_of(value: object, name: str = "height") -> int:
    """Of a setting that is a number, a pair or an object: 14, [14, 14], {"height": 14, "width": 14}."""
    if isinstance(value, Mapping):
        return int(value[name])
    if isinstance(value, list | tuple):
        return int(value[0 if name == "height" else 1])
    return int(value)  # type: ignore[call-overload, no-any-return]  # whatever JSON holds; ValueError otherwise


def _qwen(config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """`smart_resize` of Qwen2-VL: sides are multiples of merged patches, and their product lies between two limits."""
    vision = config["vision_config"]
    patch = int(settings["patch_size"])
    merged = int(settings["merge_size"])
    side = patch * merged
    least = int(settings.get("min_pixels") or settings["size"]["shortest_edge"])
    most = int(settings.get("max_pixels") or settings["size"]["longest_edge"])
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"one side is over {MAX_RATIO} times the other")
    rows, columns = (round(size / side) for size in (height, width))
    if rows * columns * side * side > most:
        factor = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(size / factor / side)) for size in (height, width))
    elif rows * columns * side * side < least:
        factor = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(size * factor / side) for size in (height, width))
    patches = rows * columns * merged**2
    values = 3 * int(settings["temporal_patch_size"]) * patch**2
    return PictureShape(
        features=patches // int(vision.get("spatial_merge_size", 2)) ** 2,
        pieces=(patches,),
        input_bytes=FLOAT32 * patches * values + 3 * INT64,
        made={"image_grid_thw": [1, rows * merged, columns * merged]},
    )


def _gemma3(config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """One square of every picture, and with pan and scan crops of one that is long."""
    vision = config["vision_config"]
    num_crops = _gemma3_crops(settings, width, height) if settings["do_pan_and_scan"] else 0
    sides = [side_of(settings["size"], name) for name in ("height", "width")]
    patches = math.prod(side // int(vision.get("patch_size", 16)) for side in sides)
    return PictureShape(
        features=(1 + num_crops) * int(config.get("mm_tokens_per_image", 256)),
        pieces=(patches,) * (1 + num_crops),
        input_bytes=(1 + num_crops) * FLOAT32 * 3 * math.prod(sides),
        made={"num_crops": num_crops},
    )


def _gemma3_crops(settings: Json, width: int, height: int) -> int:
    long, short = max(width, height), min(width, height)
    smallest = int(settings["pan_and_scan_min_crop_size"])
    if long / short < float(settings["pan_and_scan_min_ratio_to_activate"]):
        return 0
    count = min(long // smallest, math.floor(long / short + 0.5))
    count = min(int(settings["pan_and_scan_max_num_crops"]), max(2, count))
    return 0 if min(math.ceil(long / count), short) < smallest else count


def _gemma4(_config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """The largest sides of whole pooled patches that stay within the patches of a picture, which is padded to them."""
    patch = int(settings["patch_size"])
    pooled = int(settings["pooling_kernel_size"])
    most_tokens = int(settings["max_soft_tokens"])
    most_patches = most_tokens * pooled**2
    side = patch * pooled
    factor = math.sqrt(most_patches * patch**2 / (height * width))
    rows, columns = (math.floor(factor * size / side) for size in (height, width))
    if rows == columns == 0:
        raise ValueError("no patch is left of it")
    if rows == 0:
        rows, columns = 1, min(width // height, most_tokens)
    elif columns == 0:
        rows, columns = min(height // width, most_tokens), 1
    return PictureShape(
        features=rows * columns,
        pieces=(most_patches,),
        input_bytes=most_patches * (FLOAT32 * 3 * patch**2 + 2 * INT64),
        made={"num_soft_tokens_per_image": rows * columns},
    )


def _gemma4_unified(config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """The same of patches as large as pooled ones, which nothing pools."""
    side = int(settings["patch_size"]) * int(settings["pooling_kernel_size"])
    joined = {**settings, "patch_size": side, "pooling_kernel_size": 1}
    return _gemma4(config, joined, width, height)


def _smolvlm(config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """Squares of one side, and the whole picture as one more."""
    vision = config["vision_config"]
    side = int(settings["max_image_size"]["longest_edge"])
    size = settings["size"]
    if size.get("longest_edge"):
        height, width = _smolvlm_resized(height, width, int(size["longest_edge"]))
    else:
        height, width = int(size["height"]), int(size["width"])
    rows = columns = 0
    if settings["do_image_splitting"]:
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
    if rows <= 1 and columns <= 1:
        rows = columns = 0
    squares = rows * columns + 1
    patches = int(vision.get("image_size", 224)) // int(vision.get("patch_size", 32))
    tokens = (patches // int(config.get("scale_factor", 2))) ** 2
    return PictureShape(
        features=squares * tokens,
        pieces=(patches**2,) * squares,
        input_bytes=squares * side**2 * (3 * FLOAT32 + INT64),
        made={"rows": [rows], "cols": [columns]},
    )


def _smolvlm_resized(height: int, width: int, longest: int) -> Square:
    """The longer side becomes `longest`, the other an even number."""
    ratio = width / height
    if width >= height:
        height, width = int(longest / ratio), longest
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > SMOLVLM_LONGEST:
        height, width = int(SMOLVLM_LONGEST / ratio), SMOLVLM_LONGEST
    elif height > width and height > SMOLVLM_LONGEST:
        height, width = SMOLVLM_LONGEST, int(SMOLVLM_LONGEST * ratio)
    return max(height, 1), max(width, 1)


def _mistral3(config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """Not larger than its longest side, rounded up to whole patches of the processor."""
    size = settings["size"]
    longest = size.get("longest_edge")
    most_height, most_width = (longest or size[name] for name in ("height", "width"))
    ratio = max(height / int(most_height), width / int(most_width))
    if ratio > 1:
        height, width = (math.floor(side / ratio) for side in (height, width))
    if not height or not width:
        raise ValueError("nothing is left of one side")
    patch_height, patch_width = (side_of(settings["patch_size"], n) for n in ("height", "width"))
    height = ((height - 1) // patch_height + 1) * patch_height
    width = ((width - 1) // patch_width + 1) * patch_width
    patch = int(config["vision_config"].get("patch_size", 16))
    merged = patch * int(config.get("spatial_merge_size", 2))
    return PictureShape(
        features=(height // merged) * (width // merged),
        pieces=((height // patch) * (width // patch),),
        input_bytes=FLOAT32 * 3 * height * width + 2 * INT64,
        made={"image_sizes": [height, width]},
    )


def _internvl(config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """One square, or with `crop_to_patches` a grid of them and the whole picture as one more."""
    vision = config["vision_config"]
    sides = [side_of(settings["size"], name) for name in ("height", "width")]
    squares = 1
    if settings["crop_to_patches"] and int(settings["max_patches"]) > 1:
        grids = _grids(int(settings["min_patches"]), int(settings["max_patches"]))
        rows, columns = _nearest_grid(grids, width, height, area=math.prod(sides))
        squares = rows * columns + (rows * columns > 1)
    patches = math.prod(
        side // side_of(vision.get("patch_size", 14), name)
        for side, name in zip(sides, ("height", "width"), strict=True)
    )
    return PictureShape(
        features=squares * int(config.get("image_seq_length", 256)),
        pieces=(patches + 1,) * squares,  # and the token of the class
        input_bytes=squares * FLOAT32 * 3 * math.prod(sides),
        made={"num_patches": squares},
    )


@cache
def _grids(fewest: int, most: int) -> tuple[Square, ...]:
    """Columns and rows of all grids with so many squares, the smallest first."""
    pairs = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1)]
    return tuple(sorted((p for p in pairs if fewest <= p[0] * p[1] <= most), key=math.prod))


def _nearest_grid(grids: tuple[Square, ...], width: int, height: int, *, area: int) -> Square:
    """Rows and columns of the grid whose sides have the picture's ratio most nearly; of equals the larger one, as long
    as the picture has half of its pixels. `area`: of a square.
    """
    nearest_difference = math.inf
    nearest = (1, 1)
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        is_equal = difference == nearest_difference
        if difference < nearest_difference or (
            is_equal and width * height > 0.5 * area * columns * rows
        ):
            nearest_difference = difference
            nearest = (rows, columns)
    return nearest


def _lfm2_vl(_config: Json, settings: Json, width: int, height: int) -> PictureShape:
    """The picture with about its own sides, or tiles of it and a smaller copy, where it has too many pixels."""
    patch = int(settings["encoder_patch_size"])
    merged = int(settings["downsample_factor"])
    side = patch * merged
    least, most = (int(settings[f"{end}_image_tokens"]) for end in ("min", "max"))
    fewest, most_tiles = int(settings["min_tiles"]), int(settings["max_tiles"])
    splits = bool(settings["do_image_splitting"]) and not fewest == most_tiles == 1

    # The sides of the whole picture, in tokens.
    rows, columns = (max(1, round(size / side)) for size in (height, width))
    if rows * columns > most:
        factor = math.sqrt(height * width / (most * side**2))
        rows, columns = (max(1, math.floor(size / factor / side)) for size in (height, width))
    elif rows * columns < least:
        factor = math.sqrt(least * side**2 / (height * width))
        rows, columns = (math.ceil(size * factor / side) for size in (height, width))

    # A side that rounds to less than a patch has one, where the size is compared.
    pixels = math.prod(max(patch, round(size / side) * side) for size in (height, width))
    tile = int(settings["tile_size"])
    tile_patches = (tile // patch) ** 2 if settings["do_image_splitting"] else 0
    padded = max(most * merged**2, tile_patches)
    features = rows * columns
    tile_rows = tile_columns = 1
    pieces = 1
    if splits and pixels > most * side**2 * float(settings["max_pixels_tolerance"]):
        grids = _grids(fewest, most_tiles)
        tile_rows, tile_columns = _nearest_grid(grids, width, height, area=tile**2)
        pieces = tile_rows * tile_columns
        has_thumbnail = bool(settings["use_thumbnail"]) and pieces != 1
        features = (features if has_thumbnail else 0) + pieces * (tile // side) ** 2
        pieces += has_thumbnail
    return PictureShape(
        features=features,
        pieces=(padded,) * pieces,
        input_bytes=pieces * (padded * (FLOAT32 * 3 * patch**2 + INT32) + 2 * INT64),
        made={
            "image_rows": tile_rows,
            "image_cols": tile_columns,
            "image_sizes": [rows * side, columns * side],
        },
    )


_QWEN = _Processor(
    ("Qwen2VLImageProcessor",),
    {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    },
    _qwen,
)
_PROCESSORS: Mapping[str, _Processor] = MappingProxyType(
    {
        "gemma3": _Processor(
            ("Gemma3ImageProcessor",),
            {
                "size": {"height": 224, "width": 224},
                "do_pan_and_scan": False,
            },
            _gemma3,
        ),
        "gemma4": _Processor(
            ("Gemma4ImageProcessor",),
            {"patch_size": 16, "max_soft_tokens": 280, "pooling_kernel_size": 3},
            _gemma4,
        ),
        "gemma4_unified": _Processor(
            ("Gemma4UnifiedImageProcessor",),
            {"patch_size": 16, "max_soft_tokens": 280, "pooling_kernel_size": 3},
            _gemma4_unified,
        ),
        "internvl": _Processor(
            ("GotOcr2ImageProcessor",),
            {
                "size": {"height": 384, "width": 384},
                "crop_to_patches": False,
                "min_patches": 1,
                "max_patches": 12,
            },
            _internvl,
        ),
        "lfm2_vl": _Processor(
            ("Lfm2VlImageProcessor",),
            {
                "downsample_factor": 2,
                "do_image_splitting": True,
                "min_tiles": 2,
                "max_tiles": 10,
                "use_thumbnail": True,
                "min_image_tokens": 64,
                "max_image_tokens": 256,
                "encoder_patch_size": 16,
                "tile_size": 512,
                "max_pixels_tolerance": 2.0,
            },
            _lfm2_vl,
        ),
        "mistral3": _Processor(
            ("PixtralImageProcessor",),
            {"patch_size": 16, "size": {"longest_edge": 1024}},
            _mistral3,
        ),
        "qwen2_5_vl": _QWEN,
        "qwen3_5": _QWEN,
        "qwen3_vl": _QWEN,
        "smolvlm": _Processor(
            ("SmolVLMImageProcessor", "Idefics3ImageProcessor"),
            {
                "size": {"longest_edge": 4 * 364},
                "max_image_size": {"longest_edge": 364},
                "do_image_splitting": True,
            },
            _smolvlm,
        ),
    }
)
