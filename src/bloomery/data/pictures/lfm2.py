"""LFM2-VL's image processor with pillow; transformers' own (`image_processing_lfm2_vl.py`) needs torchvision.

A small picture is resized; a large one becomes tiles of one size, in rows, and a thumbnail after them. Sizes, patches
and masks are those of transformers. Levels of color differ by one of 255 where pillow rounds elsewhere.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from bloomery.core.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

# Where each file has the settings: the older one is the image processor's own, the newer one is of the whole processor.
_FILES = ("preprocessor_config.json", "processor_config.json")
_SECTION = "image_processor"
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Lfm2Settings:
    """The keys of the file that decide patches, by transformers' names and with its values where they are missing."""

    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    resample: int = 2  # pillow's number of bilinear
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    do_pad: bool = True
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def max_num_patches(self) -> int:
        """To which every tile and thumbnail is padded."""
        of_thumbnail = self.max_image_tokens * self.downsample_factor**2
        of_tile = (self.tile_size // self.encoder_patch_size) ** 2
        return max(of_thumbnail, of_tile if self.do_image_splitting else 0)


class Layout(NamedTuple):
    """How a picture is cut: rows and columns of tiles, and the size of the picture or of its thumbnail, in pixels."""

    rows: int
    columns: int
    height: int
    width: int


@final
class Lfm2Images:
    """The image processor in a folder of a model, or of a prepared dataset."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for settings that are damaged."""
        self.settings, self._marks_pictures = _read_settings(folder)

    def __call__(self, pictures: Sequence["Image.Image"], **_: object) -> dict[str, Any]:
        """What transformers makes of RGB pictures, at least one: `pixel_values` [tiles, patches, values],
        `pixel_attention_mask` [tiles, patches] and `spatial_shapes` [tiles, 2] in patches; and of each picture its
        layout, and the text that stands for it. Raises ValueError for a picture that is too narrow.
        """
        import torch

        layouts = [self.layout(picture.height, picture.width) for picture in pictures]
        tiles = [
            tile
            for picture, layout in zip(pictures, layouts, strict=True)
            for tile in self._tiles(picture, layout)
        ]
        patches = [self._patches(tile) for tile in tiles]
        side = self.settings.encoder_patch_size
        most = self.settings.max_num_patches
        longest = max(len(of_tile) for of_tile in patches)
        if longest > most:  # a narrow one, whose short side is stretched to a patch
            raise ValueError(f"it makes {longest} patches, and {most} are read at most")
        if not self.settings.do_pad:
            most = longest
        values = np.zeros((len(tiles), most, patches[0].shape[1]), np.float32)
        mask = np.zeros((len(tiles), most), np.int32)
        for index, of_tile in enumerate(patches):
            values[index, : len(of_tile)] = of_tile
            mask[index, : len(of_tile)] = 1
        shapes = [(tile.height // side, tile.width // side) for tile in tiles]
        return {
            "pixel_values": torch.from_numpy(values),
            "pixel_attention_mask": torch.from_numpy(mask),
            "spatial_shapes": torch.tensor(shapes),
            "layouts": layouts,
            "texts": [self._text(layout) for layout in layouts],
        }

    def layout(self, height: int, width: int) -> Layout:
        """Of a picture of so many pixels."""
        settings = self.settings
        new_height, new_width = self._whole_size(height, width)
        splits = settings.do_image_splitting and not settings.min_tiles == settings.max_tiles == 1
        if not splits or not self._is_large(height, width):
            return Layout(1, 1, new_height, new_width)
        columns, rows = self._grid(height, width)
        return Layout(rows, columns, new_height, new_width)

    def _whole_size(self, height: int, width: int) -> tuple[int, int]:
        """Sides that the downsampled patches divide, of at most and at least so many tokens, of the same ratio."""
        settings = self.settings
        side = settings.encoder_patch_size * settings.downsample_factor
        least = settings.min_image_tokens * side**2
        most = settings.max_image_tokens * side**2
        new_height = max(side, round(height / side) * side)
        new_width = max(side, round(width / side) * side)
        if new_height * new_width > most:
            shrink = math.sqrt(height * width / most)
            new_height = max(side, math.floor(height / shrink / side) * side)
            new_width = max(side, math.floor(width / shrink / side) * side)
        elif new_height * new_width < least:
            grow = math.sqrt(least / (height * width))
            new_height = math.ceil(height * grow / side) * side
            new_width = math.ceil(width * grow / side) * side
        return new_height, new_width

    def _is_large(self, height: int, width: int) -> bool:
        settings = self.settings
        side = settings.encoder_patch_size * settings.downsample_factor
        rounded_height = max(settings.encoder_patch_size, round(height / side) * side)
        rounded_width = max(settings.encoder_patch_size, round(width / side) * side)
        most = settings.max_image_tokens * side**2 * settings.max_pixels_tolerance
        return rounded_height * rounded_width > most

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows of tiles whose ratio is next to the picture's; of two equally near, the larger grid for a
        picture of more than half of its area.
        """
        settings = self.settings
        grids = {
            (columns, rows)
            for columns in range(1, settings.max_tiles + 1)
            for rows in range(1, settings.max_tiles + 1)
            if settings.min_tiles <= columns * rows <= settings.max_tiles
        }
        best = (1, 1)
        least = math.inf
        for columns, rows in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid)):
            difference = abs(width / height - columns / rows)
            area = settings.tile_size**2 * columns * rows
            if difference < least or (difference == least and width * height > 0.5 * area):
                best = (columns, rows)
            least = min(least, difference)
        return best

    def _tiles(self, picture: "Image.Image", layout: Layout) -> list["Image.Image"]:
        settings = self.settings
        whole_size = (layout.width, layout.height)
        if not settings.do_image_splitting or not self._is_large(picture.height, picture.width):
            return [picture.resize(whole_size, settings.resample)]
        side = settings.tile_size
        resized = picture.resize((layout.columns * side, layout.rows * side), settings.resample)
        tiles = [
            resized.crop((left, top, left + side, top + side))
            for top in range(0, resized.height, side)
            for left in range(0, resized.width, side)
        ]
        if settings.use_thumbnail and len(tiles) > 1:
            tiles.append(picture.resize(whole_size, settings.resample))
        return tiles

    def _patches(self, tile: "Image.Image") -> Floats:
        """float32 [patches, values]: of each patch its pixels row by row, of each pixel its three colors."""
        settings = self.settings
        levels: Floats = np.asarray(tile, np.float32)
        mean = np.array(settings.image_mean, np.float32)
        deviation = np.array(settings.image_std, np.float32)
        if settings.do_rescale and settings.do_normalize:  # at once, as in transformers
            scale = np.float32(1 / settings.rescale_factor)
            levels = (levels - mean * scale) / (deviation * scale)
        elif settings.do_normalize:
            levels = (levels - mean) / deviation
        elif settings.do_rescale:
            levels = levels * np.float32(settings.rescale_factor)
        side = settings.encoder_patch_size
        rows = tile.height // side
        columns = tile.width // side
        squares = levels.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
        return squares.reshape(rows * columns, side * side * 3)

    def _text(self, layout: Layout) -> str:
        """What stands for a picture: `models/lfm2_vl/processing_lfm2_vl.py`, _build_image_tokens."""
        settings = self.settings
        patch = settings.encoder_patch_size

        def tokens(height: int, width: int) -> str:
            rows = math.ceil(height // patch / settings.downsample_factor)
            columns = math.ceil(width // patch / settings.downsample_factor)
            return "<image>" * (rows * columns)

        def mark(name: str) -> str:
            return f"<|{name}|>" if self._marks_pictures else ""

        parts = [mark("image_start")]
        whole = tokens(layout.height, layout.width)
        if layout.rows > 1 or layout.columns > 1:
            tile = tokens(settings.tile_size, settings.tile_size)
            parts += [
                mark(f"img_row_{row + 1}_col_{column + 1}") + tile
                for row in range(layout.rows)
                for column in range(layout.columns)
            ]
            if settings.use_thumbnail:
                parts.append(mark("img_thumbnail") + whole)
        else:
            parts.append(whole)
        return "".join([*parts, mark("image_end")])


def _read_settings(folder: Path) -> tuple[Lfm2Settings, bool]:
    """The settings in a folder, and whether marks stand around the tokens of a picture. Raises UserError."""
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    values: dict[str, Any] = {}
    marks_pictures = True
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            section = content.get(_SECTION, content)
            for field in fields(Lfm2Settings):
                if section.get(field.name) is not None:
                    values[field.name] = _checked(section[field.name], field.default)
            marks_pictures = bool(content.get("use_image_special_tokens", marks_pictures))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(
                f"the image processor cannot be read: {reason}",
                where=str(path),
                fix="put the file there that was published with the model",
            ) from error
    settings = Lfm2Settings(**values)
    side = settings.encoder_patch_size * settings.downsample_factor
    if settings.tile_size % side or not 1 <= settings.min_tiles <= settings.max_tiles <= 100:
        raise UserError(
            f"the image processor cuts tiles of {settings.tile_size} pixels, {settings.min_tiles} to"
            f" {settings.max_tiles} of them, which patches of {side} pixels do not fill",
            where=str(folder),
            fix="put the file there that was published with the model",
        )
    return settings, marks_pictures


def _checked(value: object, default: object) -> object:
    """A setting of the type of its default. Raises TypeError or ValueError."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise TypeError(f"{value!r} is neither true nor false")
        return value
    if isinstance(default, tuple):
        numbers = tuple(float(number) for number in value)  # type: ignore[attr-defined]
        if len(numbers) != len(default):
            raise ValueError(f"{numbers} has no number for each color")
        return numbers
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise TypeError(f"{value!r} is no number")
    return int(value) if isinstance(default, int) else float(value)
