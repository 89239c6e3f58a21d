"""PEFT as the judge of an adapter's checkpoint."""

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bloomery.export.layouts import merged_state
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder, load_decoder


def merged(model: Decoder) -> Decoder:
    """A plain decoder with the merged weights."""
    plain = fresh_decoder(model.config, seed=0)
    plain.load_state_dict(
        merged_state(model, torch.float32), strict=not model.config.tie_embeddings
    )
    return plain.eval()


def assert_opens_in_peft(
    base: Path, checkpoint: Path, tokens_BT: Tensor, *, merged_within: float = 1e-4
) -> None:
    """The adapter changes something, and PEFT on transformers, our decoder and the merged one compute the same."""
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    before = plain(tokens_BT).logits
    theirs, ours = PeftModel.from_pretrained(plain, checkpoint).eval(), load_decoder(checkpoint)
    with torch.no_grad():
        expected = theirs(tokens_BT).logits
        assert float((expected - before).abs().max()) > 1e-3, "the adapter changes something"
        assert_close(ours(tokens_BT).head, expected, atol=1e-5, rtol=1e-4)
        assert_close(merged(ours)(tokens_BT).head, expected, atol=merged_within, rtol=1e-4)
