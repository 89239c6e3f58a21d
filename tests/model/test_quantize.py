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

NF4, INT8 = Quantize(kind="nf4"), Quantize(kind="int8")
CASES = ["qwen2", "gpt2", "phi3", "gemma2"]  # biases, transposed, fused, other norms and a soft-cap


def lora(**settings) -> Lora:
    return Lora(
        **({"kind": "lora", "rank": 4, "target_modules": ["q_proj", "down_proj"]} | settings)
    )


def built(folder, quantize: Quantize, adapter: Lora, *, seed: int = 0) -> Decoder:
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
    other = load_decoder(folder)
    adapt(other, adapter)
    weights = {name: weight.dequantized(torch.float32) for name, weight in quantized_weights(model)}
    rest = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name] if name in weights else rest[name])
        for _, module in adapted(other):
            module.note_base()
    return other.train(model.training)


def stirred(model: Decoder) -> Decoder:
    """With adapters that do something."""
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
def test_outputs_and_gradients_are_those_of_the_floats_it_stands_for(case, quantize, tmp_path):
    saved_reference(case, tmp_path)
    adapter = lora(modules_to_save=["norms"])
    model = stirred(built(tmp_path, quantize, adapter))
    other = with_floats(model, tmp_path, adapter)
    ids = tokens()
    torch.testing.assert_close(model(ids).head, other(ids).head, atol=1e-6, rtol=1e-5)
    ours, theirs = gradients(model, ids), gradients(other, ids)
    assert ours.keys() == theirs.keys() and all("lora" in name or "norm" in name for name in ours)
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient, theirs[name], atol=1e-6, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("settings", [{"kind": "dora"}, {"init": "pissa"}], ids=["dora", "pissa"])
def test_dora_and_pissa_start_as_the_quantised_base(settings, tmp_path):
    saved_reference("qwen2", tmp_path)
    model = built(tmp_path, NF4, lora(**settings))
    plain = load_decoder(tmp_path)
    quantize_model(plain.requires_grad_(False), NF4)
    ids = tokens()
    # PiSSA adds a pair and takes it away
    torch.testing.assert_close(model(ids).head, plain(ids).head, atol=2e-5, rtol=1e-5)


def test_every_frozen_matrix_of_the_layers_and_nothing_else_is_quantised(tmp_path):
    saved_reference("qwen2", tmp_path)
    model = built(tmp_path, NF4, lora(modules_to_save=["model.layers.0.mlp.up_proj"]))
    names = {name for name, _ in quantized_weights(model)}
    layers = len(model.model.layers)
    assert len(names) == 7 * layers - 1 and "model.layers.0.mlp.up_proj.weight" not in names
    assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear)
    assert isinstance(model.model.layers[0].self_attn.k_proj, QuantizedLinear)
    held = {name for name, _ in model.named_parameters()}
    assert not names & held and {"model.embed_tokens.weight", "lm_head.weight"} <= held
    for name, weight in quantized_weights(model):
        held = sum(buffer.nbytes for buffer in weight.buffers())
        assert held == storage_bytes((weight.outputs, weight.inputs), "nf4", True), name


@pytest.mark.parametrize("case", CASES)
def test_read_piece_by_piece_is_read_whole(case, tmp_path, monkeypatch):
    """Also with a stage so small that every tensor takes several readings."""
    saved_reference(case, tmp_path)
    whole = load_decoder(tmp_path)
    quantize_model(whole.requires_grad_(False), NF4)
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 1000)
    monkeypatch.setattr("bloomery.model.io.quantized.AT_ONCE", 500)
    parts = built(tmp_path, NF4, lora())
    expected = dict(quantized_weights(whole))
    for name, weight in quantized_weights(parts):
        for ours, theirs in zip(weight.buffers(), expected[name].buffers(), strict=True):
            assert torch.equal(ours, theirs), name


def test_reading_holds_the_bits_and_one_piece(tmp_path, monkeypatch):
    saved_reference("llama2", tmp_path)
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 2048)
    monkeypatch.setattr("bloomery.model.io.quantized.AT_ONCE", 256)
    model = built(tmp_path, NF4, lora())
    with MemoryTracker() as tracker:
        read_model(model, tmp_path)
    held = {
        id(tensor.untyped_storage()): tensor.nbytes
        for tensor in (*model.parameters(), *model.buffers())
    }
    largest = max(weight.outputs * weight.inputs for _, weight in quantized_weights(model))
    assert sum(tracker.peak.values()) < sum(held.values()) + 4 * largest


def test_without_its_adapters_it_is_the_quantised_base(tmp_path):
    saved_reference("qwen2", tmp_path)
    model = stirred(built(tmp_path, NF4, lora()))
    plain = load_decoder(tmp_path)
    quantize_model(plain.requires_grad_(False), NF4)
    ids = tokens()
    with adapters_disabled(model):
        assert torch.equal(model(ids).head, plain(ids).head)
    assert not torch.equal(model(ids).head, plain(ids).head)


def test_fresh_weights_are_those_of_a_float_model(tmp_path):
    saved_reference("qwen2", tmp_path)
    config = read_config(tmp_path)
    plain = Decoder(config)
    init_weights(plain, 7)
    quantize_model(plain.requires_grad_(False), NF4)
    model = built(tmp_path, NF4, lora())
    init_weights(model, 7)
    expected = dict(quantized_weights(plain))
    for name, weight in quantized_weights(model):
        assert torch.equal(weight.codes, expected[name].codes), name


def test_a_base_that_is_not_finite_is_refused_by_name(tmp_path):
    reference = saved_reference("qwen2", tmp_path)
    reference.model.layers[1].mlp.up_proj.weight.data[2, 3] = float("nan")
    reference.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        built(tmp_path, NF4, lora())
