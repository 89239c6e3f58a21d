"""Towers have numbers that are no parameters: limits of Gemma 4's linear layers, and what standardizes its output."""

import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForImageTextToText

from bloomery.export.layouts import export
from bloomery.facts.pictures import vision_of
from bloomery.model.configs import stated_config
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import vision_tensors
from bloomery.model.vision import load_tower
from tiny_composites import CONFIGS, picture_inputs
from tiny_processors import save_processor


@torch.no_grad()
def test_a_tower_has_the_limits_and_the_scale_of_its_files(tmp_path):
    config = AutoConfig.for_model("gemma4", **CONFIGS["gemma4"])
    config.vision_config.use_clipped_linears = True
    config.vision_config.standardize = True
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    tower = whole.model.vision_tower
    for name, buffer in tower.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(0.02 if name.endswith("max") else -0.03)
        if name.startswith("std_"):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    whole.save_pretrained(tmp_path)
    inputs = picture_inputs("gemma4")
    expected = torch.cat(
        list(whole.model.get_image_features(**inputs, return_dict=True).pooler_output)
    )
    vision = vision_of(stated_config(tmp_path))
    made = load_tower(vision, tmp_path, dtype=torch.float32, device=torch.device("cpu"))(inputs)
    assert_close(made.features_ND, expected, atol=1e-6, rtol=1e-6)

    # An exported model keeps them.
    save_processor("gemma4", tmp_path)
    export(tmp_path, tmp_path / "exported", keeps_vision=True, verify=False)
    before, after = (vision_tensors(folder) for folder in (tmp_path, tmp_path / "exported"))
    assert any(name.endswith("input_max") for name in before)
    with TensorReader() as reader:
        assert before.keys() == after.keys()
        assert all(
            torch.equal(reader.read(before[name]), reader.read(after[name])) for name in before
        )
