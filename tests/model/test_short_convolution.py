"""LFM2's short convolution at the borders of documents, in files, and in the slots of a cache."""

from pathlib import Path

import pytest
import torch
import transformers
from packed_documents import documents, packed, positions_of
from tiny_models import CASES
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.configs import build_config
from bloomery.model.io.weights import load_decoder
from bloomery.recipe.schema import Model


@torch.no_grad()
def test_transformers_leak_is_what_a_convolution_over_borders_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the small weights of a new model transformers' second document is off by 1e-4 and less: more than float64
    rounds by far, and little against logits. Its attention keeps documents apart."""
    prefix, settings = CASES["lfm2"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings, attn_implementation="eager")
    their_model = transformers.Lfm2ForCausalLM(config).eval()
    their_model.save_pretrained(tmp_path)
    their_model.double()
    decoder = load_decoder(tmp_path, attention="mask").double()
    rows = documents((15, 25))
    theirs = their_model(
        torch.cat(rows, 1), position_ids=positions_of(rows), use_cache=False
    ).logits
    alone = torch.cat([their_model(row).logits for row in rows], 1)
    leak = (theirs - alone).abs().amax((0, 2))
    assert float(leak[:15].max()) < 1e-6  # its norms are float32
    assert 1e-5 < float(leak[15:].max()) < 1e-3, "transformers leaks no more"
    assert_close(packed(decoder, rows), alone, atol=1e-6, rtol=0)
    monkeypatch.setattr(
        "bloomery.model.mixers.convolution._inside_document", lambda tap, _first, _distance: tap
    )
    assert_close(packed(decoder, rows), theirs, atol=1e-6, rtol=0)


PUBLISHED = {  # as LFM2-350M's config.json states them
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
}


def test_older_keys_mean_what_they_mean_in_transformers() -> None:
    config = config_from_hf(PUBLISHED)
    with torch.device("meta"):
        theirs = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**PUBLISHED))
    assert config.intermediate_size == theirs.model.layers[0].feed_forward.w1.out_features == 4608
    kinds = {"conv": "short_convolution", "full_attention": "attention"}
    assert config.mixers == tuple(kinds[kind] for kind in theirs.config.layer_types)
    assert config.tie_embeddings
    assert not config_from_hf(PUBLISHED | {"tie_embedding": False}).tie_embeddings


def test_an_unknown_kind_of_layer_is_refused() -> None:
    with pytest.raises(UserError, match="layer_types"):
        config_from_hf(PUBLISHED | {"layer_types": ["conv", "mamba"] * 8})


def test_a_new_model_has_the_mlp_it_asks_for_and_convolutions() -> None:
    model = Model(family="lfm2", hidden_size=64, intermediate_size=100, num_layers=6, num_heads=4)
    config = build_config(model, vocab_size=300)
    assert config.intermediate_size == 100
    assert [mixer == "attention" for mixer in config.mixers] == [False, False, True] * 2
