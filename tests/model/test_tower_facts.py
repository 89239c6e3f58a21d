"""What is known of a tower without torch: the shapes of its parameters, and its FLOPs, as transformers' module has."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bloomery.facts.picture_sizes import PictureShape
from bloomery.facts.pictures import is_projector
from bloomery.facts.towers import is_linear_map, tower_of
from bloomery.model.io.parameters import is_linear_map as is_linear_module
from tiny_composites import CONFIGS, composite, picture_inputs

# Patches of each piece of `picture_inputs`, and the tokens that all become.
PIECES = {
    "qwen2_5_vl": ((8, 16), 6),
    "qwen3_vl": ((8, 16), 6),
    "qwen3_5": ((8, 16), 6),
    "gemma3": ((16, 16), 8),
    "gemma4": ((16, 16), 8),
    "gemma4_unified": ((4, 4), 8),
    "smolvlm": ((16, 16), 8),
    "mistral3": ((24, 24), 12),
    "lfm2_vl": ((16, 16), 6),
    "internvl": ((17, 17), 8),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_flops_are_those_of_the_module(kind):
    whole = composite(kind).model
    tower = tower_of(CONFIGS[kind] | {"model_type": kind})
    for language_model in ("language_model", "text_model"):
        if hasattr(whole, language_model):
            delattr(whole, language_model)
    assert dict(tower.shapes) == {n: tuple(p.shape) for n, p in whole.named_parameters()}
    assert tower.parameters == sum(p.numel() for p in whole.parameters())
    assert tower.projector_parameters == sum(
        p.numel() for name, p in whole.named_parameters() if is_projector(kind, name)
    )
    linear = {f"{name}.weight" for name, each in whole.named_modules() if is_linear_module(each)}
    assert {n for n, s in tower.shapes.items() if is_linear_map(n, s)} == linear

    pieces, features = PIECES[kind]
    shape = PictureShape(features=features, pieces=pieces, input_bytes=0, made={})
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        whole.get_image_features(**picture_inputs(kind), return_dict=True)
    counted = counter.get_total_flops()
    assert math.isclose(tower.flops(shape), counted, rel_tol=0.11), tower.flops(shape) / counted


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "smolvlm", "vision_config": {}},
        {
            "model_type": "gemma3",
            "vision_config": {"patch_size": 0},
            "text_config": {"hidden_size": 8},
        },
        {
            "model_type": "qwen3_vl",
            "vision_config": {"depth": "x"},
            "text_config": {"hidden_size": 8},
        },
    ],
)
def test_an_unknown_tower_has_no_sizes(config):
    assert tower_of(config) is None
