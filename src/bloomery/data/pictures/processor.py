"""What a model's tower is given of pictures, and the text that stands for one.

The image processor is transformers', with pillow and without code of the model's author. The texts are those of
transformers' `processing_*.py` of each kind; its processors themselves need packages for video.
"""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, final

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.data.pictures.lfm2 import Lfm2Images
from bloomery.facts.picture_sizes import PROCESSOR_FILES, PictureShape
from bloomery.facts.pictures import Vision

if TYPE_CHECKING:
    from torch import Tensor

# Settings of image processors that two towers must share to read the same numbers.
SCALING = (
    *("do_normalize", "image_mean", "image_std", "do_rescale", "rescale_factor"),
    *("patch_size", "merge_size", "temporal_patch_size"),
)
Json = Mapping[str, Any]


class Processed(NamedTuple):
    """`inputs`: tensors by the names that transformers' model takes. `texts`: what stands for each picture, in which
    `num_tokens` are those that the tower's output replaces.
    """

    inputs: "dict[str, Tensor]"
    texts: list[str]
    num_tokens: list[int]


class PictureText(NamedTuple):
    """`mark`: what a chat template writes for a picture. `token`: the one that the tower's output replaces. `text_of`:
    what takes the place of the mark, of the config.json, of what the image processor made of all pictures, and of the
    number of one.
    """

    mark: str
    token: str
    text_of: Callable[[Json, Json, int], str]
    settings: Json = MappingProxyType({})  # of the image processor


def _qwen(config: Json, made: Json, index: int) -> str:
    merged = int(config["vision_config"].get("spatial_merge_size", 2)) ** 2
    return "<|image_pad|>" * (math.prod(map(int, made["image_grid_thw"][index])) // merged)


def _gemma3(config: Json, made: Json, index: int) -> str:
    tokens = "<image_soft_token>" * int(config.get("mm_tokens_per_image", 256))
    picture = f"\n\n<start_of_image>{tokens}<end_of_image>\n\n"
    num_crops = int(made["num_crops"][index])
    if not num_crops:
        return picture
    return (
        f"Here is the original image {picture} and here are some crops to help you see better "
        + " ".join([picture] * num_crops)
    )


def _gemma4(_config: Json, made: Json, index: int) -> str:
    count = int(made["num_soft_tokens_per_image"][index])
    return f"<|image>{'<|image|>' * count}<image|>"


def _smolvlm(config: Json, made: Json, index: int) -> str:
    vision = config["vision_config"]
    side = int(vision.get("image_size", 512)) // int(vision.get("patch_size", 16))
    tokens = "<image>" * (side // int(config.get("scale_factor", 4))) ** 2
    rows, columns = (_flat(made[name])[index] for name in ("rows", "cols"))
    whole = f"<fake_token_around_image><global-img>{tokens}<fake_token_around_image>"
    if rows == columns == 0:
        return whole
    crops = "".join(
        "".join(
            f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>{tokens}"
            for column in range(columns)
        )
        + "\n"
        for row in range(rows)
    )
    return f"{crops}\n{whole}"


def _mistral3(config: Json, made: Json, index: int) -> str:
    patch = int(config["vision_config"].get("patch_size", 14))
    side = patch * int(config.get("spatial_merge_size", 2))
    height, width = (int(size) // side for size in made["image_sizes"][index])
    row = "[IMG]" * width
    return "[IMG_BREAK]".join([row] * height) + "[IMG_END]"


def _internvl(config: Json, made: Json, index: int) -> str:
    count = int(config.get("image_seq_length", 256)) * int(made["num_patches"][index])
    return f"<img>{'<IMG_CONTEXT>' * count}</img>"


def _lfm2_vl(_config: Json, made: Json, index: int) -> str:
    return str(made["texts"][index])


def _flat(nested: Sequence[Any]) -> list[int]:
    return [int(number) for numbers in nested for number in numbers]


TEXTS: Mapping[str, PictureText] = MappingProxyType(
    {
        "gemma3": PictureText("<start_of_image>", "<image_soft_token>", _gemma3),
        "gemma4": PictureText("<|image|>", "<|image|>", _gemma4),
        "gemma4_unified": PictureText("<|image|>", "<|image|>", _gemma4),
        "internvl": PictureText("<IMG_CONTEXT>", "<IMG_CONTEXT>", _internvl),
        "lfm2_vl": PictureText("<image>", "<image>", _lfm2_vl),
        "mistral3": PictureText("[IMG]", "[IMG]", _mistral3),
        "qwen2_5_vl": PictureText("<|image_pad|>", "<|image_pad|>", _qwen),
        "qwen3_5": PictureText("<|image_pad|>", "<|image_pad|>", _qwen),
        "qwen3_vl": PictureText("<|image_pad|>", "<|image_pad|>", _qwen),
        "smolvlm": PictureText("<image>", "<image>", _smolvlm, {"return_row_col_info": True}),
    }
)


def text_from_size(vision: Vision, shape: PictureShape) -> str:
    """What stands for a picture of this shape: the text of `PictureProcessor.process`, without its pixels."""
    made = {name: [figure] for name, figure in shape.made.items()}
    return TEXTS[vision.kind].text_of(json.loads(vision.raw_config), made, 0)


@final
class PictureProcessor:
    """The image processor in a folder of a model, or of a prepared dataset."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        """Raises UserError without one, and where it needs a package that is not here."""
        self._config: Json = json.loads(vision.raw_config)
        self._text = TEXTS[vision.kind]
        self._images = _image_processor(folder, vision.kind)

    @property
    def mark(self) -> str:
        """What a chat template writes for a picture."""
        return self._text.mark

    @property
    def scaling(self) -> Json:
        """What makes numbers of the same picture, as large, differ between two processors."""
        settings = self._images.to_dict()
        return {name: settings.get(name) for name in SCALING}

    def process(self, contents: Sequence[bytes]) -> Processed:
        """Of pictures as `reader` leaves them, at least one."""
        from PIL import Image
        from torch import Tensor

        pictures = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
        made = self._images(pictures, return_tensors="pt", **self._text.settings)
        texts = [self._text.text_of(self._config, made, index) for index in range(len(pictures))]
        inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        return Processed(inputs, texts, [text.count(self._text.token) for text in texts])


def size_of(content: bytes) -> tuple[int, int]:
    """Width and height in pixels, of a picture as `reader` leaves it."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        width, height = picture.size
    return int(width), int(height)


def _image_processor(folder: Path, kind: str) -> Any:
    files = " or ".join(PROCESSOR_FILES)
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise UserError(
            "the folder has no image processor",
            where=str(folder),
            fix=f"put {files} there, as published with the model",
        )
    if kind == "lfm2_vl":
        return Lfm2Images(folder)
    try:
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise UserError(
            "transformers, which has the image processor, is not installed", fix=install_extra("hf")
        ) from error
    try:
        if kind == "gemma4_unified":
            return _without_pooling(folder)
        processor: Any = AutoImageProcessor
        return processor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except ImportError as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"the image processor needs a package that is not installed: {reason}",
            where=str(folder),
            fix="pip install torchvision",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"the image processor cannot be opened: {reason}",
            where=str(folder),
            fix=f"put {files} there, as published with the model",
        ) from error


def _without_pooling(folder: Path) -> Any:
    """What Gemma 4's processor makes of patches as large as those that the 12B model projects. Its own class, which
    makes small patches and joins them, needs torchvision.
    """
    import transformers

    path = next(folder / name for name in PROCESSOR_FILES if (folder / name).is_file())
    settings: Json = json.loads(path.read_text(encoding="utf-8"))
    settings = settings.get("image_processor", settings)
    processor: Any = transformers
    joined = int(settings.get("pooling_kernel_size", 3))
    kept = ("do_resize", "resample", "do_rescale", "rescale_factor", "do_convert_rgb")
    return processor.Gemma4ImageProcessorPil(
        patch_size=joined * int(settings.get("patch_size", 16)),
        pooling_kernel_size=1,
        max_soft_tokens=int(settings.get("max_soft_tokens", 280)),
        **{key: settings[key] for key in kept if key in settings},
    )
