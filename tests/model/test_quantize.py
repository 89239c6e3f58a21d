"""Whole models with a quantised base against the same models holding the floats that it stands for."""

import pytest
import torch
from tiny_models import saved_reference, tokens
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.facts.limits import storage_bytes
from bloomery.model.adapters.lora import (
    LoraLinear,
    adapt,
    adapted,
    adapters_disabled,
    init_adapters,
)
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import (
    QuantizedLinear,
    init_weights,
    load_decoder,
    quantize_model,
    quantized_weights,
    read_model,
)
from bloomery.recipe.schema import Lora, Quantize
from bloomery.simulate.tracker import MemoryTracker

NF4 = Quantize(kind="nf4")
INT8 = Quantize(kind="int8")
CASES = ["qwen2", "gpt2", "phi3", "gemma2"]  # biases, transposed, fused, other norms and a soft-cap


def lora(**settings) -> Lora:
    return Lora(
        **({"kind": "lora", "rank": 4, "target_modules": ["q_proj", "down_proj"]} | settings)
    )


def build_quantized(folder, quantize: Quantize, adapter: Lora, *, seed: int = 0) -> Decoder:
    """As a run builds it: without numbers, then read tensor by tensor."""
    with torch.device("meta"):
        model = Decoder(read_config(folder))
        adapt(model, adapter)
    quantize_model(model, quantize)
    model.to_empty(device="cpu")
    model.tie()
    read_model(model, folder)
    init_adapters(model, seed)
    return model.eval()


def with_floats(model: Decoder, folder, adapter: Lora) -> Decoder:
    """A plain adapted model with the same adapter, whose base is what the quantised one reads back."""
    float_model = load_decoder(folder)
    adapt(float_model, adapter)
    weights = {name: weight.dequantized(torch.float32) for name, weight in quantized_weights(model)}
    other_parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in float_model.named_parameters():
            parameter.copy_(weights[name] if name in weights else other_parameters[name])
        for _, module in adapted(float_model):
            module.note_base()
    return float_model.train(model.training)


def with_random_adapters(model: Decoder) -> Decoder:
    """The model, whose adapters then change its outputs."""
    generator = torch.Generator().manual_seed(5)
    for _, module in adapted(model):
        module.lora_B.data.normal_(0.0, 0.05, generator=generator)
    return model


def gradients(model: Decoder, ids: Tensor) -> dict[str, Tensor]:
    model(ids).head.float().logsumexp(-1).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "quantize", [NF4, Quantize(kind="nf4", double_quant=False), INT8], ids=["nf4", "single", "int8"]
)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_dequantized_weights(case, quantize, tmp_path):
    saved_reference(case, tmp_path)
    adapter = lora(modules_to_save=["norms"])
    model = with_random_adapters(build_quantized(tmp_path, quantize, adapter))
    float_model = with_floats(model, tmp_path, adapter)
    ids = tokens()
    torch.testing.assert_close(model(ids).head, float_model(ids).head, atol=1e-6, rtol=1e-5)
    quantized_gradients = gradients(model, ids)
    float_gradients = gradients(float_model, ids)
    assert quantized_gradients.keys() == float_gradients.keys()
    assert all("lora" in name or "norm" in name for name in quantized_gradients)
    for name, gradient in quantized_gradients.items():
        torch.testing.assert_close(
            gradient,
            float_gradients[name],
            atol=1e-6,
            rtol=1e-4,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("settings", [{"kind": "dora"}, {"init": "pissa"}], ids=["dora", "pissa"])
def test_dora_and_pissa_start_as_the_quantised_base(settings, tmp_path):
    saved_reference("qwen2", tmp_path)
    model = build_quantized(tmp_path, NF4, lora(**settings))
    base = load_decoder(tmp_path)
    quantize_model(base.requires_grad_(False), NF4)
    ids = tokens()
    # PiSSA adds a pair and takes it away
    torch.testing.assert_close(model(ids).head, base(ids).head, atol=2e-5, rtol=1e-5)


def test_every_frozen_matrix_of_the_layers_and_nothing_else_is_quantised(tmp_path):
    saved_reference("qwen2", tmp_path)
    model = build_quantized(tmp_path, NF4, lora(modules_to_save=["model.layers.0.mlp.up_proj"]))
    names = {name for name, _ in quantized_weights(model)}
    num_layers = len(model.model.layers)
    assert len(names) == 7 * num_layers - 1 and "model.layers.0.mlp.up_proj.weight" not in names
    assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear)
    assert isinstance(model.model.layers[0].self_attn.k_proj, QuantizedLinear)
    parameter_names = {name for name, _ in model.named_parameters()}
    assert not names & parameter_names
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= parameter_names
    for name, weight in quantized_weights(model):
        buffer_bytes = sum(buffer.nbytes for buffer in weight.buffers())
        assert buffer_bytes == storage_bytes((weight.outputs, weight.inputs), "nf4", True), name


@pytest.mark.parametrize("case", CASES)
def test_a_model_read_in_pieces_has_the_bits_of_one_read_at_once(case, tmp_path, monkeypatch):
    """Also with a stage so small that every tensor takes several readings."""
    saved_reference(case, tmp_path)
    model_read_at_once = load_decoder(tmp_path)
    quantize_model(model_read_at_once.requires_grad_(False), NF4)
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 1000)
    monkeypatch.setattr("bloomery.model.io.quantized.AT_ONCE", 500)
    model_read_in_pieces = build_quantized(tmp_path, NF4, lora())
    expected = dict(quantized_weights(model_read_at_once))
    for name, weight in quantized_weights(model_read_in_pieces):
        for buffer, expected_buffer in zip(weight.buffers(), expected[name].buffers(), strict=True):
            assert torch.equal(buffer, expected_buffer), name


def test_reading_allocates_one_piece_next_to_the_model(tmp_path, monkeypatch):
    saved_reference("llama2", tmp_path)
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 2048)
    monkeypatch.setattr("bloomery.model.io.quantized.AT_ONCE", 256)
    model = build_quantized(tmp_path, NF4, lora())
    with MemoryTracker() as tracker:
        read_model(model, tmp_path)
    model_bytes = {
        id(tensor.untyped_storage()): tensor.nbytes
        for tensor in (*model.parameters(), *model.buffers())
    }
    largest_count = max(weight.outputs * weight.inputs for _, weight in quantized_weights(model))
    assert sum(tracker.peak.values()) < sum(model_bytes.values()) + 4 * largest_count


def test_with_adapters_disabled_the_logits_are_those_of_the_quantised_base(tmp_path):
    saved_reference("qwen2", tmp_path)
    model = with_random_adapters(build_quantized(tmp_path, NF4, lora()))
    base = load_decoder(tmp_path)
    quantize_model(base.requires_grad_(False), NF4)
    ids = tokens()
    with adapters_disabled(model):
        assert torch.equal(model(ids).head, base(ids).head)
    assert not torch.equal(model(ids).head, base(ids).head)


def test_fresh_weights_are_those_of_a_float_model(tmp_path):
    saved_reference("qwen2", tmp_path)
    config = read_config(tmp_path)
    base = Decoder(config)
    init_weights(base, 7)
    quantize_model(base.requires_grad_(False), NF4)
    model = build_quantized(tmp_path, NF4, lora())
    init_weights(model, 7)
    expected = dict(quantized_weights(base))
    for name, weight in quantized_weights(model):
        assert torch.equal(weight.codes, expected[name].codes), name


def test_a_base_that_is_not_finite_is_refused_by_name(tmp_path):
    reference = saved_reference("qwen2", tmp_path)
    reference.model.layers[1].mlp.up_proj.weight.data[2, 3] = float("nan")
    reference.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        build_quantized(tmp_path, NF4, lora())
