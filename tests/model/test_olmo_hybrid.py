"""OLMo-Hybrid: delta nets with separate projections beside OLMo 2's attention; oracle: transformers."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from packed_documents import documents, gradients_of, packed
from safetensors.torch import load_file, save_file
from tiny_models import CASES, saved_reference, tiny_reference, tokens
from torch import Tensor
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.export.gguf_format import unsupported
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.adapters.lora import adapt, init_adapters, trained_state
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation
from bloomery.model.cache import Cache
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder, model_state, write_model
from bloomery.model.native import Uncompiled, find_compiler
from bloomery.recipe.schema import Lora

TOKENS = tokens()
IN_MEMORY = {
    "in_proj_z": "g_proj",
    "in_proj_b": "b_proj",
    "in_proj_a": "a_proj",
    "out_proj": "o_proj",
    "linear_attn.norm": "linear_attn.o_norm",
}


def reference(case: str, monkeypatch: pytest.MonkeyPatch) -> transformers.PreTrainedModel:
    """Of a case; "unequal": values as wide as no key."""
    if case == "unequal":
        prefix, settings = CASES["olmo-hybrid"]
        monkeypatch.setitem(CASES, case, (prefix, settings | {"linear_value_head_dim": 20}))
    return tiny_reference(case)


def save_as_published(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Norms of attention layers keep their names, and each convolution is cut where its part ends.

    transformers cuts in equal thirds when it saves.
    """
    config = model.config
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    value_width = config.linear_num_value_heads * config.linear_value_head_dim
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "conv1d" in name:
            parts = tensor.split((key_width, key_width, value_width))
            for letter, part in zip("qkv", parts, strict=True):
                tensors[name.replace("conv1d", f"{letter}_conv1d")] = part.contiguous()
            continue
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if layer >= 0 and config.layer_types[layer] == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


def in_transformers(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names in transformers' memory, where the three convolutions are one."""
    renamed: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        for ours, theirs in IN_MEMORY.items():
            name = name.replace(ours, theirs)
        if "_conv1d" in name:
            stem = name.replace("q_conv1d", "conv1d").replace("k_conv1d", "conv1d")
            stem = stem.replace("v_conv1d", "conv1d")
            parts = [renamed[stem], gradient] if stem in renamed else [gradient]
            renamed[stem] = torch.cat(parts)
        else:
            renamed[name] = gradient
    return renamed


@pytest.mark.parametrize("case", ["olmo-hybrid", "olmo-hybrid-rotated", "unequal"])
def test_published_files_give_the_logits_and_every_gradient_of_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    their_model = reference(case, monkeypatch)
    save_as_published(their_model, tmp_path)
    decoder = load_decoder(tmp_path).double()
    their_model.double()
    expected = their_model(TOKENS).logits
    logits = decoder(TOKENS).head
    # transformers computes the delta rule and norms in float32, whatever the model's dtype
    assert_close(logits, expected, atol=1e-4, rtol=0)
    their_gradients = gradients_of(their_model, expected)
    gradients = in_transformers(gradients_of(decoder, logits))
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - their_gradients[name]).norm() / their_gradients[name].norm()
        assert float(error) < 1e-4, name


@torch.no_grad()
def test_values_of_another_width_are_written_as_three_convolutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers opens them. What it saves itself is cut elsewhere, and is refused."""
    their_model = reference("unequal", monkeypatch)
    (tmp_path / "published").mkdir()
    (tmp_path / "ours").mkdir()
    save_as_published(their_model, tmp_path / "published")
    decoder = load_decoder(tmp_path / "published")
    write_model(model_state(decoder), decoder.config, tmp_path / "ours")
    shapes = {n: tuple(t.shape) for n, t in load_file(tmp_path / "ours/model.safetensors").items()}
    assert shapes["model.layers.0.linear_attn.q_conv1d.weight"] == (32, 1, 4)
    assert shapes["model.layers.0.linear_attn.v_conv1d.weight"] == (80, 1, 4)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert_close(reloaded(TOKENS).logits, their_model(TOKENS).logits, atol=0, rtol=0)
    assert torch.equal(load_decoder(tmp_path / "ours")(TOKENS).head, decoder(TOKENS).head)
    their_model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="conv1d"):
        load_decoder(tmp_path / "theirs")


def test_packed_documents_are_each_alone_to_the_last_digits_of_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_published(reference("unequal", monkeypatch), tmp_path)
    decoder = load_decoder(tmp_path, attention="mask").double()
    rows = documents((37, 1, 64, 90, 5))
    alone = torch.cat([decoder(row).head for row in rows], 1)
    logits = packed(decoder, rows)
    assert_close(logits, alone, atol=1e-12, rtol=0)
    expected = gradients_of(decoder, alone)
    for name, gradient in gradients_of(decoder, logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.soak  # it compiles
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_the_delta_net_in_cpp_is_that_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_published(reference("unequal", monkeypatch), tmp_path)
    results = []
    for backend in ("mask", "compiled"):
        decoder = load_decoder(tmp_path, attention=backend)
        logits = packed(decoder, documents((37, 1, 20)))
        results.append((logits.detach(), gradients_of(decoder, logits)))
    assert_close(results[1][0], results[0][0], atol=1e-4, rtol=0)
    for name, gradient in results[0][1].items():
        error = (results[1][1][name] - gradient).norm() / gradient.norm()
        assert float(error) < 1e-4, name


@torch.no_grad()
def test_the_cache_continues_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_published(reference("unequal", monkeypatch), tmp_path)
    decoder = load_decoder(tmp_path).double()
    expected = decoder(TOKENS).head
    for pieces in ((1,) * 40, (3, 1, 1, 30, 5)):
        cache = Cache(decoder.config, 40, slots=2)
        cache.rows = range(2)
        logits = [decoder(piece, cache=cache).head for piece in TOKENS.split(list(pieces), 1)]
        # states are float32 in every precision
        assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["strength", "rotation", "placement", "epsilon"])
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    expected = saved_reference("olmo-hybrid", tmp_path)(TOKENS).logits
    decoder = load_decoder(tmp_path)
    config = decoder.config
    assert config.delta_net is not None
    if fault == "strength":
        config = replace(config, delta_net=replace(config.delta_net, negative_eigenvalues=False))
    elif fault == "rotation":
        config = replace(config, rotary_layers=())
    elif fault == "epsilon":
        config = replace(config, delta_net=replace(config.delta_net, norm_eps=0.1))
    other = Decoder(config)
    other.load_state_dict(decoder.state_dict())
    if fault == "placement":
        other.model.layers[3].placement = "before"
        other.model.layers[3].input_layernorm = other.model.layers[3].post_attention_layernorm
    assert float((other.eval()(TOKENS).head - expected).abs().max()) > 1e-2


def test_an_adapter_of_all_linear_layers_is_the_same_in_peft(tmp_path: Path) -> None:
    their_model = saved_reference("olmo-hybrid", tmp_path / "base")
    decoder = load_decoder(tmp_path / "base")
    lora = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["all-linear"])
    adapt(decoder, lora)
    init_adapters(decoder, 0)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=numbers)
    (tmp_path / "adapter").mkdir()
    base = str(tmp_path / "base")
    written = adaptation(decoder.config, lora)
    write_adapter(trained_state(decoder), written, decoder.config, tmp_path / "adapter", base=base)
    theirs = peft.PeftModel.from_pretrained(their_model, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = decoder(TOKENS).head
        assert_close(logits, theirs(TOKENS).logits, atol=2e-4, rtol=0)
        assert_close(logits, load_decoder(tmp_path / "adapter")(TOKENS).head, atol=1e-5, rtol=0)
        assert float((logits - load_decoder(tmp_path / "base")(TOKENS).head).abs().max()) > 0.1


def test_what_does_not_compute_it_says_so(tmp_path: Path) -> None:
    saved_reference("olmo-hybrid", tmp_path)
    decoder = load_decoder(tmp_path)
    with pytest.raises(Uncompiled, match="norms in two places"):
        CompiledStep(decoder)
    assert "is not known here" in str(unsupported(decoder.config))


@pytest.mark.parametrize(
    ("keys", "rotates"),
    [
        ({}, True),
        ({"rope_parameters": None}, True),
        ({"rope_theta": None}, False),
        ({"rope_theta": None, "rope_parameters": None, "rope_scaling": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": None}}, False),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, True),
    ],
)
def test_a_null_base_says_that_nothing_rotates(keys: dict, rotates: bool) -> None:
    raw_config = dict(CASES["olmo-hybrid"][1])
    raw_config.pop("rope_parameters")
    theirs = transformers.OlmoHybridConfig(**raw_config, **keys)
    assert (theirs.rope_parameters["rope_theta"] is not None) == rotates
    config = config_from_hf(
        json.loads(json.dumps(raw_config | keys | {"model_type": "olmo_hybrid"}))
    )
    assert (config.rotary_layers == ()) == rotates


def test_sizes_that_a_file_leaves_out_are_those_of_transformers() -> None:
    raw_config = {k: v for k, v in CASES["olmo-hybrid"][1].items() if not k.startswith("linear")}
    for num_layers in (3, 9):
        raw_config["num_hidden_layers"] = num_layers
        theirs = transformers.OlmoHybridConfig(**raw_config)
        config = config_from_hf(raw_config | {"model_type": "olmo_hybrid"})
        kinds = {"attention": "full_attention", "delta_net": "linear_attention"}
        assert [kinds[mixer] for mixer in config.mixers] == theirs.layer_types
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
            assert getattr(config.delta_net, name) == getattr(theirs, f"linear_{name}"), name
