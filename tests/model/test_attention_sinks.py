"""Attention sinks: transformers' gpt-oss, every backend against the plainest one, packed documents, the cache."""

import shutil

import pytest
import torch
from attention_for_tests import documents_of, inputs
from packed_documents import documents, gradients_of, packed
from torch import Tensor
from torch.testing import assert_close
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from bloomery.facts.attention import BACKENDS, choose_backend, missing_feature
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers, parameter_shapes
from bloomery.model.attention.attend import attend, causal_mask, layout_of
from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder
from bloomery.model.mixers.attention import Attention
from bloomery.model.rope import Frequencies, rotary_tables

CONFIG = ModelConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    attention_bias=True,
    output_bias=True,
    sliding_window=(8, None),
    attention_sinks=True,
)
ALIKE = {name for name, facts in BACKENDS.items() if facts.sinks is None} - {"math"}
PACKED = documents_of([5, 100, 60, -35], [200])
TOKENS = torch.randint(3, 131, (2, 40), generator=torch.Generator().manual_seed(2))


def decoder_of(attention: str) -> Decoder:
    decoder = fresh_decoder(CONFIG, seed=1, attention=attention)
    for name, parameter in decoder.named_parameters():
        if name.endswith("sinks") or parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    return decoder.double()


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_is_that_of_gpt_oss_with_every_gradient(layer: int) -> None:
    their_config = GptOssConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    their_config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = GptOssAttention(their_config, layer).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    ours = Attention(CONFIG, layers(CONFIG)[layer], "blockwise").double()
    ours.load_state_dict(theirs.state_dict())

    x = torch.randn(2, 24, 64, dtype=torch.float64)
    positions = torch.arange(24)[None]
    cos_and_sin = GptOssRotaryEmbedding(their_config)(x, positions)
    window = 8 if layer == 0 else None
    seen = causal_mask(24, 24, window=window, device=x.device)
    mask = torch.zeros(24, 24, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    expected, _ = theirs(x, cos_and_sin, mask[None, None])
    rotation = layers(CONFIG)[layer].rotation
    assert rotation is not None
    rotary = rotary_tables(positions, Frequencies(CONFIG), rotation)
    result = ours(x, rotary, layout_of(None, backend="blockwise"), None)
    assert_close(result, expected, atol=1e-6, rtol=0)

    result.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in theirs.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-6, msg=name)
    assert float(theirs.sinks.grad.abs().min()) > 0


def gradients(backend: str, qkv: tuple[Tensor, ...], sinks: Tensor, window: int | None) -> list:
    output = attend(
        *qkv,
        layout_of(PACKED, backend=backend),
        backend=backend,
        window=window,
        softcap=None,
        scale=0.4,
        dropout=0.0,
        sinks_H=sinks,
    )
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    return [output, *torch.autograd.grad(output, (*qkv, sinks), weights.to(output.dtype))]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("backend", sorted(ALIKE))
def test_backends_agree_with_math(backend: str, window: int | None) -> None:
    if backend == "compiled" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        sinks = torch.tensor([-2.0, 0.5, 3.0, 8.0], dtype=dtype, requires_grad=True)
        qkv = inputs(200, dtype=dtype)
        expected = gradients("math", qkv, sinks, window)
        assert float(expected[-1].abs().min()) > 1e-3
        results = gradients(backend, qkv, sinks, window)
        assert_close(results, expected, atol=tolerance, rtol=tolerance)


def test_a_sink_that_takes_nothing_changes_nothing() -> None:
    qkv = inputs(200)
    options = {"window": None, "softcap": None, "scale": 0.4, "dropout": 0.0}
    layout = layout_of(PACKED, backend="blockwise")
    plain = attend(*qkv, layout, backend="blockwise", **options)
    empty = torch.full((4,), -1e4, dtype=torch.float64)
    with_sinks = attend(*qkv, layout, backend="blockwise", **options, sinks_H=empty)
    assert torch.equal(with_sinks, plain)


def test_packed_documents_are_each_alone_to_the_last_digits_of_float64() -> None:
    rows = documents((23, 1, 30, 2, 5))
    decoder = decoder_of("blockwise")
    alone = torch.cat([decoder(row).head for row in rows], 1)
    logits = packed(decoder, rows)
    assert_close(logits, alone, atol=1e-12, rtol=0)
    expected = gradients_of(decoder, alone)
    assert "model.layers.0.self_attn.sinks" in expected
    for name, gradient in gradients_of(decoder, logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@torch.no_grad()
def test_the_cache_continues_a_text() -> None:
    decoder = decoder_of("blockwise")
    expected = decoder(TOKENS).head
    for pieces in ((1,) * 40, (3, 1, 1, 30, 5)):
        cache = Cache(CONFIG, 40, slots=2)
        cache.rows = range(2)
        logits = [decoder(piece, cache=cache).head for piece in TOKENS.split(list(pieces), 1)]
        assert_close(torch.cat(logits, 1), expected, atol=1e-12, rtol=0)


def test_parameters_are_counted_in_their_order() -> None:
    decoder = decoder_of("math")
    shapes = {name: tuple(value.shape) for name, value in decoder.named_parameters()}
    assert list(shapes.items()) == list(parameter_shapes(CONFIG).items())


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - ALIKE - {"math"}))
def test_backends_without_sinks_say_so(backend: str) -> None:
    device = "cpu" if BACKENDS[backend].runs_on("cpu") else "cuda"
    needs = dict.fromkeys(("packed", "window", "softcap", "dropout"), False)
    assert missing_feature(backend, device_type=device, **needs) is None
    refusal = missing_feature(backend, device_type=device, **needs, sinks=True)
    assert refusal is not None and "sinks" in refusal


@pytest.mark.parametrize(("device", "fused"), [("cpu", False), ("cuda", True), ("cuda", False)])
def test_a_run_with_sinks_gets_a_backend_that_has_them(device: str, fused: bool) -> None:
    choice = choose_backend(
        device,
        arch_has_fused=fused,
        sequence_length=256,
        packed=True,
        window=None,
        softcap=None,
        dropout=0.0,
        sinks=True,
    )
    assert choice.value == "blockwise"
