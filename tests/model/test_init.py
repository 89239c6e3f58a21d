"""Fresh weights: where they start, and that they depend on seed and name alone."""

import math

import pytest
import torch

from bloomery.facts.config import ModelConfig
from bloomery.facts.families import FAMILIES
from bloomery.facts.hf_config import fresh_config
from bloomery.facts.presets import PRESETS, preset
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import fresh_decoder, init_weights, model_state

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "name",
    [
        "go-coder-tiny",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in PRESETS
            if name != "go-coder-tiny"
        ),
    ],
)
@torch.no_grad()
def test_the_first_loss_is_that_of_equal_probabilities(name: str) -> None:
    config = preset(name)
    decoder = fresh_decoder(config, seed=0)
    tokens = torch.randint(
        4, config.vocab_size, (2, 97), generator=torch.Generator().manual_seed(0)
    )
    head = LabelScores(tokens[:, 1:].contiguous(), torch.ones(2, 96), ScoreSettings(192))
    loss = -float(decoder(tokens[:, :-1], head=head).head.mean())
    assert abs(loss - math.log(config.vocab_size)) < 0.1


def test_a_preset_has_the_sizes_of_its_guide() -> None:
    config = preset("go-coder-small")
    sizes = (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.intermediate_size,
        config.max_positions,
    )
    assert sizes == (768, 12, 12, 3072, 1024)
    assert (config.activation, config.norm_eps, config.initializer_range) == ("gelu", 1e-5, 0.02)
    assert config.vocab_size == 50_000
    assert {config.embedding_dropout, config.residual_dropout, config.attention_dropout} == {0.1}


def test_deviations_follow_gpt2() -> None:
    config = ModelConfig(
        **SIZES | dict(hidden_size=256, intermediate_size=512, head_dim=128, num_layers=8)
    )
    state = model_state(fresh_decoder(config, seed=3))
    assert float(state["model.layers.3.self_attn.q_proj.weight"].std()) == pytest.approx(
        0.02, rel=0.03
    )
    assert float(state["model.layers.3.self_attn.o_proj.weight"].std()) == pytest.approx(
        0.02 / 4, rel=0.03
    )
    assert float(state["model.layers.0.mlp.down_proj.weight"].std()) == pytest.approx(
        0.02 / 4, rel=0.03
    )


def test_each_parameter_has_a_stream_of_its_own() -> None:
    """More layers, another family or another device's module order change nothing for a name that both have."""
    state_of_one_layer, state_of_two_layers = (
        model_state(fresh_decoder(ModelConfig(**SIZES | dict(num_layers=n)), seed=5))
        for n in (1, 2)
    )
    assert torch.equal(
        state_of_one_layer["model.layers.0.mlp.up_proj.weight"],
        state_of_two_layers["model.layers.0.mlp.up_proj.weight"],
    )
    assert not torch.equal(
        state_of_two_layers["model.layers.0.mlp.up_proj.weight"],
        state_of_two_layers["model.layers.1.mlp.up_proj.weight"],
    )
    state_of_another_seed = model_state(fresh_decoder(ModelConfig(**SIZES), seed=6))
    assert not torch.equal(
        state_of_another_seed["lm_head.weight"], state_of_two_layers["lm_head.weight"]
    )


def test_fresh_weights_draw_nothing_from_the_global_generator() -> None:
    state_before = torch.get_rng_state()
    fresh_decoder(ModelConfig(**SIZES), seed=0)
    assert torch.equal(torch.get_rng_state(), state_before)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_finite_and_tied_as_it_says(family: str) -> None:
    decoder = fresh_decoder(fresh_config(family, SIZES), seed=0)
    assert bool(torch.isfinite(decoder(torch.arange(20)[None]).head).all())
    is_tied = decoder.lm_head.weight is decoder.model.embed_tokens.weight
    assert is_tied == decoder.config.tie_embeddings


def test_bfloat16_starts_where_float32_does() -> None:
    config = ModelConfig(**SIZES)
    float32_state, bfloat16_state = (
        model_state(fresh_decoder(config, seed=1, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(
        torch.equal(float32_state[name].bfloat16(), bfloat16_state[name]) for name in float32_state
    )


def test_dropout_acts_in_training_alone() -> None:
    config = ModelConfig(
        **SIZES, embedding_dropout=0.5, residual_dropout=0.5, attention_dropout=0.5
    )
    decoder = fresh_decoder(config, seed=0)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert not torch.equal(decoder(tokens).head, decoder(tokens).head)
        decoder.eval()
        assert torch.equal(decoder(tokens).head, decoder(tokens).head)
        decoder_without_dropout = Decoder(ModelConfig(**SIZES))
        init_weights(decoder_without_dropout, 0)
        assert torch.equal(decoder(tokens).head, decoder_without_dropout(tokens).head)


@pytest.mark.parametrize("kind", ["embedding_dropout", "residual_dropout", "attention_dropout"])
def test_each_dropout_reaches_the_logits(kind: str) -> None:
    decoder = fresh_decoder(ModelConfig(**SIZES, **{kind: 0.5}), seed=0)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert not torch.equal(decoder(tokens).head, decoder(tokens).head)
