"""LFM2-VL's pictures without torchvision: golden values are those of transformers' image processor with it.

Of torchvision 0.28 and transformers 5.23, with which 4,000 random sizes had equal layouts, and levels of color differed
by one of 255 at most.
"""

import json

import numpy as np
import pytest
from PIL import Image

from bloomery.core.errors import UserError
from bloomery.data.pictures.lfm2 import Lfm2Images

SMALL = {"tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6}
# Width and height: rows and columns of tiles, height and width of the picture or of its thumbnail.
LAYOUTS = {
    (40, 60): (1, 1, 320, 224),
    (512, 512): (1, 1, 512, 512),
    (700, 400): (1, 1, 384, 672),
    (1, 1): (1, 1, 256, 256),
    (300, 2000): (7, 1, 1312, 192),
    (1600, 1200): (2, 3, 416, 576),
    (33, 900): (1, 1, 1344, 64),
    (724, 724): (2, 2, 512, 512),
    (3000, 1000): (1, 3, 288, 864),
    (800, 1400): (4, 2, 672, 384),
}
# Of each tile the colors of three pixels: in its patches 0, 3 and 5, after 0, 100 and 255 others.
COLORS = {
    (40, 60): [[[0, 0, 0], [206, 15, 122], [122, 81, 192]]],
    (300, 200): [
        [[0, 0, 4], [69, 12, 57], [41, 62, 231]],
        [[85, 0, 48], [154, 12, 101], [126, 62, 19]],
        [[170, 0, 92], [239, 12, 145], [211, 62, 63]],
        [[0, 127, 191], [69, 139, 244], [41, 189, 163]],
        [[85, 127, 235], [154, 139, 33], [126, 189, 207]],
        [[170, 127, 23], [239, 139, 77], [211, 189, 205]],
        [[0, 1, 8], [104, 16, 203], [189, 40, 124]],
    ],
}
SHAPES = {(40, 60): [[6, 4]], (300, 200): [[4, 4]] * 6 + [[6, 8]]}


def drawn(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    stripes = (rows * 7 + columns * 3) % 256
    levels = np.stack([columns * 255 // width, rows * 255 // height, stripes], -1)
    return Image.fromarray(levels.astype(np.uint8), "RGB")


@pytest.fixture
def processor(tmp_path):
    """A function from settings to the image processor of a folder with them."""

    def make(settings, name="preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(settings))
        return Lfm2Images(tmp_path)

    return make


def test_layouts_are_those_of_transformers(processor):
    images = processor({})
    for (width, height), expected in LAYOUTS.items():
        assert tuple(images.layout(height, width)) == expected, (width, height)


@pytest.mark.parametrize("size", COLORS)
def test_patches_are_those_of_transformers(processor, size):
    made = processor(SMALL)([drawn(*size)])
    assert made["spatial_shapes"].tolist() == SHAPES[size]
    assert made["pixel_values"].shape == (len(SHAPES[size]), 64, 3 * 16 * 16)
    counts = [rows * columns for rows, columns in SHAPES[size]]
    assert made["pixel_attention_mask"].sum(1).tolist() == counts
    levels = (made["pixel_values"] * 0.5 + 0.5) * 255
    for tile, colors in enumerate(COLORS[size]):
        for (patch, pixel), expected in zip(((0, 0), (3, 100), (5, 255)), colors, strict=True):
            found = levels[tile, patch, 3 * pixel : 3 * pixel + 3]
            assert np.abs(found.numpy() - expected).max() < 1.01


def test_the_text_has_a_token_for_each_square_of_patches_and_names_tiles(processor):
    images = processor(SMALL)
    small, large = images([drawn(40, 60), drawn(300, 200)])["texts"]
    assert small == f"<|image_start|>{'<image>' * 6}<|image_end|>"
    tiles = "".join(
        f"<|img_row_{row}_col_{column}|>" + "<image>" * 4 for row in (1, 2) for column in (1, 2, 3)
    )
    thumbnail = f"<|img_thumbnail|>{'<image>' * 12}"
    assert large == f"<|image_start|>{tiles}{thumbnail}<|image_end|>"


def test_settings_may_be_in_the_file_of_the_whole_processor(processor):
    settings = {"image_processor": SMALL | {"use_thumbnail": False}}
    settings["use_image_special_tokens"] = False
    images = processor(settings, "processor_config.json")
    assert images([drawn(300, 200)])["texts"] == ["<image>" * 24]
    whole = processor({"image_processor": {"do_image_splitting": False}}, "processor_config.json")
    assert whole.layout(1200, 1600).rows == 1


@pytest.mark.parametrize(
    "settings", [{"tile_size": "64"}, {"image_mean": [0.5]}, {"tile_size": 65}, {"min_tiles": 0}]
)
def test_damaged_settings_are_named(processor, settings):
    with pytest.raises(UserError, match="the image processor") as caught:
        processor(settings)
    assert caught.value.fix


def test_a_picture_too_narrow_for_its_patches_is_refused(processor):
    with pytest.raises(ValueError, match="80 patches"):
        processor(SMALL)([drawn(33, 900)])
