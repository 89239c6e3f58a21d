"""The tower of each kind of multimodal model makes of pictures what transformers' whole model makes of them."""

import pytest
import torch
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.facts.pictures import vision_of
from bloomery.model.vision import load_tower
from tiny_composites import CONFIGS, composite, picture_inputs


@pytest.mark.parametrize("kind", CONFIGS)
def test_features_are_those_of_the_whole_model(kind, tmp_path):
    whole = composite(kind)
    whole.save_pretrained(tmp_path)
    inputs = picture_inputs(kind)
    vision = vision_of(whole.config.to_dict())
    tower = load_tower(vision, tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        expected = whole.model.get_image_features(**inputs, return_dict=True)
    made = tower(inputs | {"not_of_the_tower": torch.zeros(3)})
    expected_ND = torch.cat([each.flatten(0, -2) for each in expected.pooler_output])
    assert made.features_ND.shape[1] == 32
    assert_close(made.features_ND, expected_ND, rtol=0, atol=0)
    for ours, theirs in zip(
        made.deep_features, getattr(expected, "deepstack_features", None) or (), strict=True
    ):
        assert_close(ours, torch.cat(list(theirs)), rtol=0, atol=0)
    assert len(made.deep_features) == (2 if kind == "qwen3_vl" else 0)


def test_a_missing_weight_is_named(tmp_path):
    whole = composite("smolvlm")
    del whole.model.connector
    whole.save_pretrained(tmp_path)
    vision = vision_of(whole.config.to_dict())
    with pytest.raises(UserError, match=r"connector.*is missing"):
        load_tower(vision, tmp_path, dtype=torch.float32, device=torch.device("cpu"))
