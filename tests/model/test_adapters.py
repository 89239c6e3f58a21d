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


def tuned(kind, *, dtype=torch.float32):
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


def step(model):
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
    plain = tuned(kind)
    other = copy.deepcopy(plain)
    # the others are alike, and each compiles anew
    for index, block in enumerate(other.model.layers[:1]):
        checkpoint_block(block, "full", index=index)
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)  # inductor takes a minute
    with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=precision is not None):
        logits, gradients = step(plain)
        logits_too, gradients_too = step(other)
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if precision is None else {"atol": 2e-2, "rtol": 2e-2}
    assert_close(logits_too, logits, **tolerance)
    assert gradients.keys() == gradients_too.keys()
    assert all("lora_" in name for name in gradients)
    for name, gradient in gradients.items():
        assert_close(gradients_too[name], gradient, **tolerance)


@pytest.mark.soak  # half a minute of compilation
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_blocks_compiled_for_good_compute_the_same(kind):
    plain = tuned(kind)
    other = copy.deepcopy(plain)
    for block in other.model.layers:
        block.compile(dynamic=False)
    (logits, gradients), (logits_too, gradients_too) = step(plain), step(other)
    assert_close(logits_too, logits, atol=1e-5, rtol=1e-4)
    for name, gradient in gradients.items():
        assert_close(gradients_too[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near(kind):
    exact = tuned(kind)
    with torch.no_grad():
        expected = exact(TOKENS).head
        for dtype in (torch.bfloat16, torch.float16):
            frozen = copy.deepcopy(exact)
            for name, parameter in frozen.named_parameters():
                if "lora_" not in name:
                    parameter.data = parameter.data.to(dtype)
            with torch.autocast("cpu", dtype=dtype):
                assert_close(frozen(TOKENS).head.float(), expected, atol=0.05, rtol=0.05)
            assert_close(frozen(TOKENS).head.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_adapters_the_base_is_what_it_was(kind):
    model = tuned(kind)
    with torch.no_grad(), adapters_disabled(model):
        assert torch.equal(model(TOKENS).head, fresh_decoder(CONFIG, seed=0)(TOKENS).head)
    with torch.no_grad():
        assert not torch.equal(model(TOKENS).head, fresh_decoder(CONFIG, seed=0)(TOKENS).head)


@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_with_the_function_of_the_base(kind):
    model = fresh_decoder(CONFIG, seed=0)
    before = model(TOKENS).head
    adapt(
        model, Lora(**({"kind": "lora", "rank": 4, "target_modules": ["all-linear"]} | KINDS[kind]))
    )
    init_adapters(model, 0)
    assert_close(model(TOKENS).head, before, atol=1e-6, rtol=1e-6)


def test_the_norm_that_dora_divides_by_is_that_of_the_whole_matrix():
    for _, module in adapted(tuned("dora")):
        whole = module.weight + module.scale * module.lora_B @ module.lora_A
        assert_close(
            module.row_norms(*module.pair(torch.float32)), whole.norm(dim=1), atol=1e-6, rtol=1e-5
        )


def test_dropout_drops_what_the_adapter_reads_and_only_while_training():
    model = fresh_decoder(CONFIG, seed=0)
    adapt(model, Lora(kind="lora", rank=2, dropout=0.5))
    module = next(module for _, module in adapted(model))
    assert isinstance(module, LoraLinear) and isinstance(module, nn.Linear)
    with torch.no_grad():
        module.lora_A.fill_(1.0)
        module.lora_B.fill_(1.0)
    x = torch.ones(400, CONFIG.hidden_size)
    added = module(x).detach() - nn.functional.linear(x, module.weight, module.bias)
    expected = module.scale * 2 * CONFIG.hidden_size
    assert added.std() > 1
    assert abs(float(added.mean()) / expected - 1) < 0.05
    module.eval()
    assert_close(
        module(x) - nn.functional.linear(x, module.weight, module.bias),
        torch.full_like(added, expected),
    )
