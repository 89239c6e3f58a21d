"""Tokens, texts and bytes of pictures from their sizes are those that transformers' image processors make."""

import importlib
import json
import random
import sys
from unittest.mock import MagicMock

import pytest

from bloomery.core.errors import UserError
from bloomery.data.pictures.processor import PictureProcessor, text_from_size
from bloomery.data.prepare import pipeline
from bloomery.data.prepare.prepare import DEFAULT
from bloomery.data.prepare.workers import LocalEncoder
from bloomery.data.shards import read_manifest
from bloomery.facts.picture_sizes import PictureSizes, processor_settings
from bloomery.facts.pictures import vision_of
from pictures_for_tests import BLUE, RED, TEXT, png, prepared_rows, row
from tiny_composites import CONFIGS
from tiny_processors import IMAGES, save_processor

SIZES = [(1, 1), (3, 400), (400, 3), (31, 33), (48, 48), (100, 70), (70, 101), (300, 310)]
# By kind: further settings of its image processor, as published models have them, and what config.json says with them.
PUBLISHED = {
    "qwen2_5_vl": ({"min_pixels": 3136, "max_pixels": 12845056}, {"patch_size": 14}),
    "qwen3_vl": (
        {"patch_size": 16, "size": {"longest_edge": 16777216, "shortest_edge": 65536}},
        {"patch_size": 16},
    ),
    "qwen3_5": ({"patch_size": 16, "min_pixels": 1024, "max_pixels": 100000}, {"patch_size": 16}),
    "gemma3": (
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 32}
        | {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2},
        {},
    ),
    "gemma4": ({}, {}),
    "gemma4_unified": ({"max_soft_tokens": 140}, {}),
    "smolvlm": (
        {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 128}},
        {"image_size": 128},
    ),
    "mistral3": ({"patch_size": {"height": 28, "width": 28}, "size": {"longest_edge": 1540}}, {}),
    "internvl": ({"crop_to_patches": True, "size": {"height": 56, "width": 56}}, {}),
}
# What the tower is given; other figures are the processor's own.
INPUTS = ("pixel_values", "pixel_attention_mask", "image_position_ids", "image_grid_thw")
INPUTS += ("image_sizes", "spatial_shapes")


def folder_of(kind, tmp_path, *, published):
    """A processor's file, and the config.json for it."""
    settings, sizes = PUBLISHED[kind]
    stem = "qwen" if kind.startswith("qwen") else kind
    if kind == "gemma4_unified":
        save_processor(kind, tmp_path, **(settings if published else {}))
    else:
        processor = type(IMAGES[stem]())(**settings) if published else IMAGES[stem]()
        processor.save_pretrained(tmp_path)
    config = json.loads(json.dumps(CONFIGS[kind])) | {"model_type": kind}
    if published:
        config["vision_config"] |= sizes
    elif kind.startswith("qwen"):
        config["vision_config"]["patch_size"] = 16
    return config


@pytest.mark.parametrize("published", [False, True], ids=["tiny", "published"])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_sizes_say_what_the_image_processor_makes(kind, published, tmp_path):
    config = folder_of(kind, tmp_path, published=published)
    vision = vision_of(config)
    processor = PictureProcessor(tmp_path, vision)
    sizes = PictureSizes.of(config, processor_settings(tmp_path))
    dice = random.Random(0)
    pictures = SIZES + [(dice.randint(20, 260), dice.randint(20, 260)) for _ in range(6)]
    for width, height in pictures:
        try:
            made = processor.process([png(width, height)])
        except ValueError:
            with pytest.raises(ValueError):
                sizes.shape(width, height)
            continue
        shape = sizes.shape(width, height)
        size = f"{width} x {height}"
        assert text_from_size(vision, shape) == made.texts[0], size
        assert shape.features == made.num_tokens[0], size
        inputs = [tensor for name, tensor in made.inputs.items() if name in INPUTS]
        assert shape.input_bytes == sum(tensor.nbytes for tensor in inputs), size


def test_lfm2_is_the_arithmetic_of_its_image_processor(monkeypatch):
    """Its module imports torchvision, which computes pixels, and lays them out without it."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    module = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    monkeypatch.delitem(sys.modules, module, raising=False)
    Theirs = importlib.import_module(module).Lfm2VlImageProcessor
    monkeypatch.delitem(sys.modules, module)
    theirs = object.__new__(Theirs)
    sides = {"downsample_factor": 2, "encoder_patch_size": 16, "max_image_tokens": 256}
    config = {"model_type": "lfm2_vl", "vision_config": {}}
    sizes = PictureSizes.of(config, {"image_processor_type": "Lfm2VlImageProcessorFast"})
    dice = random.Random(0)
    for _ in range(300):
        width, height = (int(2 ** dice.uniform(0, 12)) for _ in range(2))
        shape = sizes.shape(width, height)
        seen_width, seen_height = theirs.smart_resize(
            height=height, width=width, min_image_tokens=64, **sides
        )
        assert shape.made["image_sizes"] == [seen_height, seen_width]
        tokens = seen_height * seen_width // 32**2
        num_pieces = 1
        if theirs._is_image_too_large(height, width, max_pixels_tolerance=2.0, **sides):
            columns, rows, _, _, count = theirs._get_grid_layout(
                height, width, min_tiles=2, max_tiles=10, tile_size=512
            )
            assert (shape.made["image_rows"], shape.made["image_cols"]) == (rows, columns)
            tokens += count * 16**2
            num_pieces += count
        assert shape.features == tokens
        assert shape.pieces == (1024,) * num_pieces


def counted_calls(monkeypatch):
    """The numbers of pictures that the image processor was given, call by call."""
    calls = []
    process = PictureProcessor.process

    def counting(self, contents):
        calls.append(len(contents))
        return process(self, contents)

    monkeypatch.setattr(PictureProcessor, "process", counting)
    return calls


def test_preparation_needs_the_image_processor_for_its_first_pictures_alone(tmp_path, monkeypatch):
    calls = counted_calls(monkeypatch)
    prepared_rows(tmp_path, [row(RED, TEXT, BLUE)] * 6)
    assert calls == [1, 1]


def test_an_image_processor_that_is_not_known_says_what_it_makes(tmp_path, monkeypatch):
    monkeypatch.setattr(PictureSizes, "of", lambda *_: None)
    calls = counted_calls(monkeypatch)
    folder = prepared_rows(tmp_path, [row(RED, TEXT, BLUE)] * 6)
    assert calls == [2] * 6
    assert read_manifest(folder).has_pictures


def test_another_count_than_the_image_processors_stops_the_preparation(tmp_path, monkeypatch):
    shape = PictureSizes.shape
    monkeypatch.setattr(PictureSizes, "shape", lambda self, w, h: shape(self, 2 * w, h))
    with pytest.raises(UserError, match="the image processor makes something else of 40 x 60"):
        prepared_rows(tmp_path, [row(RED, TEXT)] * 6)


def test_rows_with_pictures_take_as_many_processes_as_their_pictures(tmp_path, monkeypatch):
    sizes = []
    picture_bytes = DEFAULT.batch_bytes // 5
    monkeypatch.setattr(pipeline, "PICTURE_BYTES", picture_bytes)
    monkeypatch.setattr(pipeline, "count_workers", lambda _, size, **__: sizes.append(size) or 0)
    encoded = []
    encode = LocalEncoder.encode
    monkeypatch.setattr(
        LocalEncoder, "encode", lambda self, rows: encoded.append(len(rows)) or encode(self, rows)
    )
    prepared_rows(tmp_path, [row(RED, TEXT)] * 12)
    assert sizes[0] == pytest.approx(12 * picture_bytes, rel=0.25)  # by bytes of rows
    assert encoded == [5, 5, 2]  # a batch is not all pictures of the dataset at once
