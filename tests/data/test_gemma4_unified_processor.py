"""Gemma 4 12B's image processor, whose class needs torchvision: what stands in for it makes the same patches."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from bloomery.data.pictures.processor import PictureProcessor
from bloomery.facts.pictures import Vision
from tiny_processors import save_processor

SIDE = 16  # of a patch that is projected: two small ones of 8 pixels


def made_of(picture, folder, **settings):
    save_processor("gemma4_unified", folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    vision = Vision(kind="gemma4_unified", raw_config="{}", image_token_id=0)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return PictureProcessor(folder, vision).process([stream.getvalue()])


@pytest.mark.parametrize("nested", [False, True], ids=["preprocessor", "processor"])
def test_patches_are_small_ones_joined(nested, tmp_path):
    """Of a picture that needs no resizing: 10 x 7 patches are all 70 that may be."""
    pixels = np.random.default_rng(0).integers(0, 256, (7 * SIDE, 10 * SIDE, 3), dtype=np.uint8)
    made = made_of(Image.fromarray(pixels), tmp_path)
    if nested:  # as newer transformers write it
        settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
        (tmp_path / "preprocessor_config.json").unlink()
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
        vision = Vision(kind="gemma4_unified", raw_config="{}", image_token_id=0)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        made = PictureProcessor(tmp_path, vision).process([stream.getvalue()])
    values = made.inputs["pixel_values"][0]
    # transformers: patches_merge gives row by row of large patches, each as rows, columns and colors of its pixels.
    expected = pixels.reshape(7, SIDE, 10, SIDE, 3).transpose(0, 2, 1, 3, 4).reshape(70, -1) / 255
    torch.testing.assert_close(values.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)
    places = [[column, row] for row in range(7) for column in range(10)]
    assert made.inputs["image_position_ids"][0].tolist() == places
    assert made.texts == ["<|image>" + "<|image|>" * 70 + "<image|>"]


def test_fewer_patches_are_padded_with_places_of_minus_one(tmp_path):
    made = made_of(Image.new("RGB", (40, 40), "red"), tmp_path)
    places = made.inputs["image_position_ids"][0]
    assert made.inputs["pixel_values"].shape == (1, 70, 3 * SIDE * SIDE)
    assert int((places[:, 0] >= 0).sum()) == 64 == made.texts[0].count("<|image|>")
    assert places[64:].tolist() == [[-1, -1]] * 6
