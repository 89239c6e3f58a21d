"""Figures from the config against the decoder itself and against torch's counter."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import CASES, tiny_reference
from torch.utils.flop_counter import FlopCounterMode

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import flops_per_token, layers, parameter_count, parameter_shapes
from bloomery.facts.hf_config import config_from_hf
from bloomery.facts.presets import PRESETS, preset
from bloomery.model.decoder import Decoder

SHAPES = ["gpt2", "llama-biases-head-dim", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "smollm3"]


def config_of(case: str) -> ModelConfig:
    return config_from_hf(tiny_reference(case).config.to_dict())


def decoder_on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_the_decoder_and_of_transformers(case: str) -> None:
    config = config_of(case)
    decoder = decoder_on_meta(config)
    assert list(parameter_shapes(config).items()) == [
        (n, tuple(p.shape)) for n, p in decoder.named_parameters()
    ]
    reference = tiny_reference(case)
    # numbers of a layer that are stored, and trained by nobody
    untrained = ("layer_scalar", "act_fn.beta", "act_fn.eps", "correction_bias", "expert_bias")
    stored_numbers = sum(
        buffer.numel() for name, buffer in reference.named_buffers() if name.endswith(untrained)
    )
    assert parameter_count(config) == reference.num_parameters() + stored_numbers
    for layer, block in zip(layers(config), decoder.model.layers, strict=True):
        assert list(layer.shapes) == [
            (name, tuple(p.shape)) for name, p in block.named_parameters()
        ]
        assert layer.total_parameters == sum(p.numel() for p in block.parameters())
        assert (layer.active_parameters < layer.total_parameters) == (layer.experts is not None)
        linear_modules = {
            name: module
            for name, module in block.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        assert {m.name: (m.outputs, m.inputs) for m in layer.matrices} == {
            name: (module.out_features, module.in_features)
            for name, module in linear_modules.items()
        }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("backward", [False, True])
def test_flops_equal_the_counter(case: str, backward: bool) -> None:
    config = config_of(case)
    decoder = decoder_on_meta(config)
    tokens = torch.zeros(2, 24, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        logits = decoder(tokens).head
        if backward:
            logits.sum().backward()
    assert counter.get_total_flops() == 2 * 24 * flops_per_token(config, 24, backward=backward)


@pytest.mark.parametrize("length", [24, 64, 100])
def test_flops_of_delta_nets_equal_the_counter(length: int) -> None:
    """Backward computes the rule once more, and a product for each system; nothing reads the first state, and nobody
    the last one.
    """
    config = config_of("qwen3.5")
    decoder = decoder_on_meta(config)
    tokens = torch.zeros(2, length, dtype=torch.long, device="meta")
    forward = round(2 * length * flops_per_token(config, length, backward=False))
    with FlopCounterMode(display=False) as counter:
        loss = decoder(tokens).head.sum()
        assert counter.get_total_flops() == forward
        loss.backward()
    delta_layers = [layer for layer in layers(config) if layer.delta_net is not None]
    assert len(delta_layers) == 3
    again = round(2 * length * sum(layer.mixer_flops(length) for layer in delta_layers))
    sizes = delta_layers[0].delta_net
    product_with_state = 2 * 64 * sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim
    saved = 2 * 3 * 4 * product_with_state
    widths = sizes.num_value_heads * (sizes.key_head_dim + sizes.value_head_dim)
    systems = 2 * 3 * -(-length // 64) * 2 * 64 * 64 * widths
    assert counter.get_total_flops() == 3 * forward + again + systems - saved


@pytest.mark.parametrize(("name", "millions"), [("tiny", 51), ("small", 124), ("medium", 254)])
def test_presets_have_the_sizes_that_their_descriptions_say(name: str, millions: int) -> None:
    assert round(parameter_count(preset(f"go-coder-{name}")) / 1e6) == millions
    assert f"{millions}M" in PRESETS[f"go-coder-{name}"].description


def test_presets_on_meta_equal_the_counter() -> None:
    config = replace(preset("go-coder-small"), num_layers=2)
    assert parameter_count(config) == sum(p.numel() for p in decoder_on_meta(config).parameters())


def test_attention_grows_with_the_length() -> None:
    config = config_of("llama2")
    added_flops = flops_per_token(config, 200) - flops_per_token(config, 100)
    assert math.isclose(
        added_flops, 3 * 4 * 100 * sum(layer.query_width for layer in layers(config))
    )
