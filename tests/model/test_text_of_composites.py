"""The language model of each kind of multimodal model computes what transformers' whole model computes of text."""

import pytest
import torch
from torch.testing import assert_close

from bloomery.model.io.weights import load_decoder
from tiny_composites import CONFIGS, composite


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_alone_has_the_logits_of_the_whole_model(kind, tmp_path):
    whole = composite(kind)
    whole.save_pretrained(tmp_path)
    tokens = torch.randint(3, 90, (2, 20))
    kinds = {"mm_token_type_ids": torch.zeros_like(tokens)} if kind.startswith("qwen") else {}
    with torch.no_grad():
        expected = whole(input_ids=tokens, **kinds).logits
        ours = load_decoder(tmp_path, dtype=torch.float32)(tokens).head
    assert_close(ours, expected, atol=1e-4, rtol=1e-4)
