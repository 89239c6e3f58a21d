"""Adapters inside a decoder: compiled, recomputed, in half precision, switched off."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bloomery.facts.config import ModelConfig
from bloomery.model.adapters.lora import (
    LoraLinear,
    adapt,
    adapted,
    adapters_disabled,
    init_adapters,
)
from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel.apply import checkpoint_block
from bloomery.recipe.schema import Lora

CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    attention_bias=True,
)
TOKENS = torch.arange(20)[None] * 7 % 61
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True, "dtype": "bfloat16"},
    "dora": {"kind": "dora"},
    "pissa": {"init": "pissa"},
}


def trained_decoder(kind, *, dtype=torch.float32):
    """A decoder whose adapters have moved away from where they begin."""
    model = fresh_decoder(CONFIG, seed=0, dtype=dtype)
    adapt(
        model,
        Lora(
            **(
                {"kind": "lora", "rank": 4, "alpha": 8, "target_modules": ["all-linear"]}
                | KINDS[kind]
            )
        ),
    )
    init_adapters(model, 0)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.empty(parameter.shape).normal_(0, 0.05, generator=numbers)
    return model


def logits_and_gradients(model):
    """Logits, and every gradient by name."""
    logits = model(TOKENS).head
    logits.square().sum().backward()
    return logits.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("dora", None),
        *(
            pytest.param(kind, precision, marks=pytest.mark.soak)
            for kind, precision in (
                ("rslora", torch.bfloat16),
                ("dora", torch.float16),
                ("pissa", torch.bfloat16),
            )
        ),
    ],
)
def test_compiled_and_recomputed_blocks_compute_the_same(kind, precision):
    torch._dynamo.reset()
    model = trained_decoder(kind)
    compiled_model = copy.deepcopy(model)
    # the others are alike, and each compiles anew
    for index, block in enumerate(compiled_model.model.layers[:1]):
        checkpoint_block(block, "full", index=index)
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)  # inductor takes a minute
    with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=precision is not None):
        expected_logits, expected_gradients = logits_and_gradients(model)
        logits, gradients = logits_and_gradients(compiled_model)
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if precision is None else {"atol": 2e-2, "rtol": 2e-2}
    assert_close(logits, expected_logits, **tolerance)
    assert expected_gradients.keys() == gradients.keys()
    assert all("lora_" in name for name in expected_gradients)
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, **tolerance)


@pytest.mark.soak  # half a minute of compilation
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_blocks_compiled_by_inductor_compute_the_same(kind):
    model = trained_decoder(kind)
    compiled_model = copy.deepcopy(model)
    for block in compiled_model.model.layers:
        block.compile(dynamic=False)
    expected_logits, expected_gradients = logits_and_gradients(model)
    logits, gradients = logits_and_gradients(compiled_model)
    assert_close(logits, expected_logits, atol=1e-5, rtol=1e-4)
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_in_half_precision_stays_near_float32(kind):
    model = trained_decoder(kind)
    with torch.no_grad():
        expected = model(TOKENS).head
        for dtype in (torch.bfloat16, torch.float16):
            model_with_half_base = copy.deepcopy(model)
            for name, parameter in model_with_half_base.named_parameters():
                if "lora_" not in name:
                    parameter.data = parameter.data.to(dtype)
            with torch.autocast("cpu", dtype=dtype):
                assert_close(
                    model_with_half_base(TOKENS).head.float(), expected, atol=0.05, rtol=0.05
                )
            assert_close(model_with_half_base(TOKENS).head.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_with_adapters_disabled_the_logits_are_those_of_the_base(kind):
    model = trained_decoder(kind)
    with torch.no_grad(), adapters_disabled(model):
        assert torch.equal(model(TOKENS).head, fresh_decoder(CONFIG, seed=0)(TOKENS).head)
    with torch.no_grad():
        assert not torch.equal(model(TOKENS).head, fresh_decoder(CONFIG, seed=0)(TOKENS).head)


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_adapters_leave_the_logits_of_the_base(kind):
    model = fresh_decoder(CONFIG, seed=0)
    base_logits = model(TOKENS).head
    adapt(
        model, Lora(**({"kind": "lora", "rank": 4, "target_modules": ["all-linear"]} | KINDS[kind]))
    )
    init_adapters(model, 0)
    assert_close(model(TOKENS).head, base_logits, atol=1e-6, rtol=1e-6)


def test_the_norm_that_dora_divides_by_is_that_of_the_whole_matrix():
    for _, module in adapted(trained_decoder("dora")):
        adapted_weight = module.weight + module.scale * module.lora_B @ module.lora_A
        assert_close(
            module.row_norms(*module.pair(torch.float32)),
            adapted_weight.norm(dim=1),
            atol=1e-6,
            rtol=1e-5,
        )


def test_dropout_is_of_the_adapters_inputs_and_only_in_training():
    model = fresh_decoder(CONFIG, seed=0)
    adapt(model, Lora(kind="lora", rank=2, dropout=0.5))
    module = next(module for _, module in adapted(model))
    assert isinstance(module, LoraLinear) and isinstance(module, nn.Linear)
    with torch.no_grad():
        module.lora_A.fill_(1.0)
        module.lora_B.fill_(1.0)
    x = torch.ones(400, CONFIG.hidden_size)
    adapter_output = module(x).detach() - nn.functional.linear(x, module.weight, module.bias)
    expected = module.scale * 2 * CONFIG.hidden_size
    assert adapter_output.std() > 1
    assert abs(float(adapter_output.mean()) / expected - 1) < 0.05
    module.eval()
    assert_close(
        module(x) - nn.functional.linear(x, module.weight, module.bias),
        torch.full_like(adapter_output, expected),
    )
