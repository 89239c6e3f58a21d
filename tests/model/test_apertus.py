"""Apertus: an activation whose numbers are trained, and two that files keep; oracle: transformers."""

from pathlib import Path

import pytest
import torch
from packed_documents import documents, gradients_of, packed
from safetensors.torch import load_file
from tiny_models import saved_reference, tokens
from torch.testing import assert_close
from transformers.activations import XIELUActivation

from bloomery.core.errors import UserError
from bloomery.export.gguf_format import unsupported
from bloomery.facts.counting import parameter_shapes
from bloomery.model.adapters.settings import modules_to_save
from bloomery.model.cache import Cache
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.io.weights import (
    fresh_decoder,
    load_decoder,
    model_state,
    write_model,
    write_model_piecewise,
)
from bloomery.model.native import Uncompiled
from bloomery.model.xielu import XIELU

TOKENS = tokens()
ALPHAS = ("alpha_p", "alpha_n")


def both_activations() -> tuple[XIELU, XIELUActivation]:
    theirs = XIELUActivation(dtype=torch.float64)
    ours = XIELU().double()
    with torch.no_grad():
        theirs.alpha_p.fill_(0.7)
        theirs.alpha_n.fill_(-0.4)
        theirs.beta.fill_(0.3)
        theirs.eps.fill_(-0.05)  # far enough from 0 for numbers between the two
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_the_activation_and_its_gradients_are_those_of_transformers() -> None:
    ours, theirs = both_activations()
    x = torch.cat((torch.linspace(-200, 200, 33), torch.linspace(-0.1, 0.1, 41))).double()
    weights = torch.randn(len(x), generator=torch.Generator().manual_seed(1)).double()
    results = []
    for module in (ours, theirs):
        inputs = x.clone().requires_grad_()
        module(inputs).mul(weights).sum().backward()
        gradients = [module.get_parameter(name).grad for name in ALPHAS]
        results.append([module(x).detach(), inputs.grad, *gradients])
    assert_close(results[0], results[1], atol=1e-12, rtol=1e-12)


def test_gradients_are_those_of_finite_differences_and_backward_keeps_the_input_alone() -> None:
    ours, _ = both_activations()
    x = torch.tensor([-3.0, -0.5, -0.02, 0.4, 2.0], dtype=torch.float64, requires_grad=True)

    def of(x, alpha_p, alpha_n):
        numbers = {"alpha_p": alpha_p, "alpha_n": alpha_n}
        return torch.func.functional_call(ours, numbers, x)

    assert torch.autograd.gradcheck(of, (x, ours.alpha_p, ours.alpha_n))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()), lambda t: t):
        ours(torch.ones(1000, dtype=torch.float64, requires_grad=True))
    assert sum(saved) == 1000 + 4


def test_every_gradient_is_that_of_transformers(tmp_path: Path) -> None:
    """The two numbers that transformers keeps as buffers have none."""
    their_model = saved_reference("apertus", tmp_path).double()
    decoder = load_decoder(tmp_path).double()
    their_gradients = gradients_of(their_model, their_model(TOKENS).logits)
    gradients = gradients_of(decoder, decoder(TOKENS).head)
    names = {"input_layernorm": "attention_layernorm", "post_attention_": "feedforward_"}
    renamed = {}
    for name, gradient in gradients.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        renamed[name] = gradient
    assert renamed.keys() == their_gradients.keys()
    assert {f"model.layers.0.mlp.act_fn.{name}" for name in ALPHAS} <= renamed.keys()
    for name, gradient in renamed.items():
        error = (gradient - their_gradients[name]).norm() / their_gradients[name].norm()
        # transformers norms in float32, whatever the model's dtype
        assert float(error) < 1e-4, name


@pytest.mark.parametrize("number", ["alpha_p", "alpha_n", "beta"])
def test_a_number_that_is_not_read_is_noticed(number: str, tmp_path: Path) -> None:
    expected = saved_reference("apertus", tmp_path)(TOKENS).logits
    decoder = load_decoder(tmp_path)
    fresh = XIELU()
    fresh.initialize()
    with torch.no_grad():
        for block in decoder.model.layers:
            block.mlp.act_fn.get_parameter(number).copy_(fresh.get_parameter(number))
        assert float((decoder(TOKENS).head - expected).abs().max()) > 1e-2


def test_packed_documents_are_each_alone_to_the_last_digits_of_float64(tmp_path: Path) -> None:
    saved_reference("apertus", tmp_path)
    decoder = load_decoder(tmp_path, attention="mask").double()
    rows = documents((23, 1, 13, 3))
    alone = torch.cat([decoder(row).head for row in rows], 1)
    logits = packed(decoder, rows)
    assert_close(logits, alone, atol=1e-12, rtol=0)
    expected = gradients_of(decoder, alone)
    for name, gradient in gradients_of(decoder, logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@torch.no_grad()
def test_the_cache_continues_a_text(tmp_path: Path) -> None:
    saved_reference("apertus", tmp_path)
    decoder = load_decoder(tmp_path).double()
    expected = decoder(TOKENS).head
    for pieces in ((1,) * 40, (3, 1, 1, 30, 5)):
        cache = Cache(decoder.config, 40, slots=2)
        cache.rows = range(2)
        logits = [decoder(piece, cache=cache).head for piece in TOKENS.split(list(pieces), 1)]
        assert_close(torch.cat(logits, 1), expected, atol=1e-12, rtol=0)


def test_a_new_model_begins_as_in_transformers(tmp_path: Path) -> None:
    saved_reference("apertus", tmp_path)
    decoder = fresh_decoder(load_decoder(tmp_path).config, seed=0)
    theirs = XIELUActivation(dtype=torch.float32)
    for block in decoder.model.layers:
        assert_close(block.mlp.act_fn.state_dict(), theirs.state_dict())
    trained = {name for name, value in decoder.named_parameters() if value.requires_grad}
    never = {name for name in parameter_shapes(decoder.config) if name.endswith(("beta", "eps"))}
    assert trained == parameter_shapes(decoder.config).keys() - never


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_keep_single_numbers_and_both_writers_agree(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    saved_reference("apertus", tmp_path / "theirs")
    decoder = load_decoder(tmp_path / "theirs", dtype=dtype)
    state = model_state(decoder)
    stored = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number:
            write_model_piecewise(state.__getitem__, decoder.config, dtype, folder)
        else:
            write_model(state, decoder.config, folder)
        stored.append(load_file(folder / "model.safetensors"))
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert stored[0].keys() == stored[1].keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(stored[0][name], tensor.to(dtype)), name
        assert torch.equal(stored[1][name], tensor.to(dtype)), name
    assert theirs["model.layers.1.mlp.act_fn.beta"].shape == ()


def test_what_does_not_compute_it_says_so(tmp_path: Path) -> None:
    saved_reference("apertus", tmp_path)
    decoder = load_decoder(tmp_path)
    with pytest.raises(Uncompiled, match="its activation has numbers of its own"):
        CompiledStep(decoder)
    assert "is not known here" in str(unsupported(decoder.config))
    # PEFT's files know a module by its weight, and the activation has none.
    with pytest.raises(UserError, match="act_fn"):
        modules_to_save(decoder.config, ["act_fn"])
