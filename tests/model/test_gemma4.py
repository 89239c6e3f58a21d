"""Gemma 4's layers: shared keys and values, inputs of each layer, values that are keys; oracle: transformers."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CASES as CASE_CONFIGS
from tiny_models import saved_reference, tokens
from torch import Tensor
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.facts.counting import layers, parameter_count, parameter_shapes
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.adapters.lora import adapt, init_adapters, trained_state
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation
from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.io.stored import find_tensors
from bloomery.model.io.weights import fresh_decoder, load_decoder, model_state, write_model
from bloomery.plan.gather import _unrun_programs
from bloomery.recipe.schema import Lora

CASES = ("gemma4-e2b", "gemma4-e4b", "gemma4-31b", "gemma4-12b")
TOKENS = tokens()


def gradients_of(model: torch.nn.Module, logits: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    """What transformers does not train, the scalar of a layer, has none."""
    their_model = saved_reference(case, tmp_path).double()
    decoder = load_decoder(tmp_path).double()
    their_gradients = gradients_of(their_model, their_model(TOKENS).logits)
    gradients = gradients_of(decoder, decoder(TOKENS).head)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - their_gradients[name]).norm() / their_gradients[name].norm()
        # transformers norms in float32, whatever the model's dtype
        assert float(error) < 1e-4, name


def test_shapes_are_those_of_the_decoder(tmp_path: Path) -> None:
    for case in CASES:
        config = config_from_hf(
            json.loads(folder_of(case, tmp_path).joinpath("config.json").read_text())
        )
        with torch.device("meta"):
            decoder = Decoder(config)
        shapes = [(name, tuple(p.shape)) for name, p in decoder.named_parameters()]
        assert list(parameter_shapes(config).items()) == shapes
        assert parameter_count(config) == sum(p.numel() for p in decoder.parameters())


def folder_of(case: str, tmp_path: Path) -> Path:
    folder = tmp_path / case
    folder.mkdir()
    saved_reference(case, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_are_each_alone(case: str, tmp_path: Path) -> None:
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path, attention="mask").double()
    rows = [TOKENS[:1, :15], TOKENS[:1, 15:16], TOKENS[:1, 16:]]
    documents = torch.cat([torch.full_like(row, number) for number, row in enumerate(rows)], 1)
    positions = torch.cat([torch.arange(row.shape[1])[None] for row in rows], 1)
    packed = decoder(TOKENS[:1], positions_BT=positions, documents_BT=documents).head
    alone = torch.cat([decoder(row).head for row in rows], 1)
    assert_close(packed, alone, atol=1e-12, rtol=0)
    expected = gradients_of(decoder, alone)
    packed = decoder(TOKENS[:1], positions_BT=positions, documents_BT=documents).head
    for name, gradient in gradients_of(decoder, packed).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [(1,) * 40, (3, 1, 1, 30, 5)])
def test_the_cache_continues_a_text(case: str, pieces: tuple[int, ...], tmp_path: Path) -> None:
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path).double()
    cache = Cache(decoder.config, 40, slots=2)
    cache.rows = range(2)
    parts = [decoder(piece, cache=cache).head for piece in TOKENS.split(list(pieces), 1)]
    assert_close(torch.cat(parts, 1), decoder(TOKENS).head, atol=1e-12, rtol=0)
    cached = sum(0 if past.keys is None else 2 * past.keys[0].numel() for past in cache.layers)
    assert cached == sum(layer.cached_bytes(40, 1) for layer in layers(decoder.config))


@torch.no_grad()
def test_texts_of_several_lengths_share_keys_in_one_cache(tmp_path: Path) -> None:
    saved_reference("gemma4-e2b", tmp_path)
    decoder = load_decoder(tmp_path).double()
    cache = Cache(decoder.config, 40, slots=2)
    for row, length in enumerate((25, 11)):
        cache.rows = range(row, row + 1)
        decoder(TOKENS[row : row + 1, :length], cache=cache)
    cache.swap(0, 1)
    cache.rows = range(2)
    next_tokens = torch.stack((TOKENS[1, 11:12], TOKENS[0, 25:26]))
    logits = decoder(next_tokens, cache=cache).head
    alone = [decoder(TOKENS[1:, :12]).head[0, -1], decoder(TOKENS[:1, :26]).head[0, -1]]
    assert_close(logits[:, 0], torch.stack(alone), atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["first of the kind", "other kind", "own keys"])
def test_keys_of_a_wrong_layer_are_noticed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that computed own keys in these layers reached 14% accuracy, and 97% without the fault."""
    expected = saved_reference("gemma4-e2b", tmp_path)(TOKENS).logits
    decoder = load_decoder(tmp_path)
    assert [layer.keys_of for layer in layers(decoder.config)] == [None, None, None, 1, 2, 1]
    assert_close(decoder(TOKENS).head, expected, atol=1e-4, rtol=0)
    for block in decoder.model.layers:
        attention = block.self_attn
        if block.kind.keys_of is None:
            continue
        lender = decoder.model.layers[block.kind.keys_of].self_attn
        if fault == "own keys":
            # Those of the layer's own input, by the projections of the layer whose keys it uses.
            forward = attention.forward

            def own(x_BTD, rotary, layout, cache, lent, forward=forward, lender=lender):
                return forward(x_BTD, rotary, layout, cache, lender.keys_and_values(x_BTD, rotary))

            monkeypatch.setattr(attention, "forward", own)
        elif fault == "first of the kind" and block.kind.keys_of == 2:
            block.kind = replace(block.kind, keys_of=0)
            decoder.model.layers[0].kind = replace(decoder.model.layers[0].kind, lends_keys=True)
            decoder.model.layers[0].self_attn.lends_keys = True
        elif fault == "other kind":
            attention.window = 8 if attention.window is None else None
    assert float((decoder(TOKENS).head - expected).abs().max()) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("part", ["value norm", "rotation", "layer scalar", "per-layer inputs"])
def test_a_missing_part_is_noticed(part: str, tmp_path: Path) -> None:
    expected = saved_reference("gemma4-e2b", tmp_path)(TOKENS).logits
    decoder = load_decoder(tmp_path)
    if part == "rotation":
        scaling = replace(decoder.config.rope_scaling, turning_share=1.0)
        decoder = load_decoder_with(replace(decoder.config, rope_scaling=scaling), decoder)
    for block in decoder.model.layers:
        if part == "value norm":
            block.self_attn.v_norm = None
        if part == "layer scalar":
            block.layer_scalar = None
    if part == "per-layer inputs":
        decoder.model.per_layer_model_projection.weight.zero_()
    assert float((decoder(TOKENS).head - expected).abs().max()) > 1e-2


def load_decoder_with(config, decoder: Decoder) -> Decoder:
    other = Decoder(config)
    other.load_state_dict(decoder.state_dict())
    other.tie()
    return other.eval()


def test_keys_that_a_published_file_has_and_no_layer_uses_are_left_out(tmp_path: Path) -> None:
    """Published files hold projections of layers that share keys; transformers does not read them either."""
    expected = saved_reference("gemma4-e2b", tmp_path)(TOKENS).logits
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors |= {
        f"model.layers.4.self_attn.{name}.weight": torch.randn(shape)
        for name, shape in (("k_proj", (16, 48)), ("v_proj", (16, 48)), ("k_norm", (8,)))
    }
    save_file(tensors, path, metadata={"format": "pt"})
    with torch.no_grad():
        assert_close(load_decoder(tmp_path)(TOKENS).head, expected, atol=1e-4, rtol=0)
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="has no place"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_all_linear_layers_is_the_same_in_peft(kind: str, tmp_path: Path) -> None:
    """Also of the projection outside the layers. transformers norms in float32: 2e-5 of logits of deviation 3."""
    their_model = saved_reference("gemma4-e2b", tmp_path / "base")
    decoder = load_decoder(tmp_path / "base")
    lora = Lora(kind=kind, rank=4, alpha=8.0, target_modules=["all-linear"])
    adapt(decoder, lora)
    init_adapters(decoder, 0)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=numbers)
    (tmp_path / "adapter").mkdir()
    written = adaptation(decoder.config, lora)
    base = str(tmp_path / "base")
    write_adapter(trained_state(decoder), written, decoder.config, tmp_path / "adapter", base=base)
    theirs = peft.PeftModel.from_pretrained(their_model, tmp_path / "adapter").eval().double()
    loaded = load_decoder(tmp_path / "adapter", dtype=torch.float64)
    with torch.no_grad():
        logits = decoder.double()(TOKENS).head
        assert_close(logits, theirs(TOKENS).logits, atol=1e-4, rtol=0)
        assert_close(logits, loaded(TOKENS).head, atol=1e-5, rtol=0)
        assert float((logits - load_decoder(tmp_path / "base")(TOKENS).head).abs().max()) > 0.1


def test_scores_of_a_new_model_are_of_size_one() -> None:
    """Nothing divides them; with gains of 1 they would begin with the deviation 4 of heads of 16 numbers."""
    decoder = fresh_decoder(config_from_hf(PUBLISHED), seed=0)
    for layer, block in zip(layers(decoder.config), decoder.model.layers, strict=True):
        attention = block.self_attn
        x_BTD = torch.randn(1, 64, 48, generator=torch.Generator().manual_seed(0))
        q_BHTE = attention.turned_heads(attention.q_proj(x_BTD), attention.q_norm, None)
        k_BKTE = attention.keys_and_values(x_BTD, None).keys
        scores = q_BHTE[:, :2] @ k_BKTE.mT * layer.attention_scale
        assert 0.8 < float(scores.detach().std()) < 1.2


VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}
UNIFIED_VISION = {"mm_embed_dim": 48, "mm_posemb_size": 16, "output_proj_dims": 48}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 24,
}
WHOLES = {
    "Gemma4": ("gemma4-e2b", {"vision_config": VISION, "audio_config": AUDIO}),
    "Gemma4Unified": (
        "gemma4-12b",
        {"vision_config": UNIFIED_VISION, "audio_config": {"audio_embed_dim": 40}},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", WHOLES)
def test_a_multimodal_folder_opens_as_its_language_model(kind: str, tmp_path: Path) -> None:
    """As E2B and 12B are published: the language model's tensors begin with model.language_model."""
    case, parts = WHOLES[kind]
    config = getattr(transformers, f"{kind}Config")(text_config=CASE_CONFIGS[case][1], **parts)
    torch.manual_seed(0)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(
        config, attn_implementation="eager"
    )
    for name, parameter in whole.eval().named_parameters():
        is_gain = "norm" in name and parameter.ndim == 1
        torch.nn.init.normal_(parameter, 1.0 if is_gain else 0.0, 0.2)
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.language_model.layers.0.") for name in tensors)
    assert any("vision" in name for name in tensors) and any("audio" in name for name in tensors)
    decoder = load_decoder(tmp_path)
    assert_close(decoder(TOKENS).head, whole(TOKENS).logits, atol=1e-4, rtol=0)
    assert not any("vision" in name or "audio" in name for name in find_tensors(tmp_path))
    notes = list(_unrun_programs(str(tmp_path), decoder.config, sees=False))
    assert any("vision and audio weights are left out" in note for note in notes), notes
    (tmp_path / "ours").mkdir()
    write_model(model_state(decoder), decoder.config, tmp_path / "ours")
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(reloaded).__name__ == f"{kind}ForCausalLM"
    assert_close(reloaded(TOKENS).logits, decoder(TOKENS).head, atol=1e-4, rtol=0)


PUBLISHED = {
    "model_type": "gemma4_text",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 131,
}


def test_the_rule_of_windows_and_rotation_are_those_of_transformers() -> None:
    from transformers import Gemma4TextConfig

    theirs = Gemma4TextConfig(**PUBLISHED)
    config = config_from_hf(PUBLISHED)
    assert theirs.layer_types == [
        "full_attention" if layer.window is None else "sliding_attention"
        for layer in layers(config)
    ]
    assert [layer.head_dim for layer in layers(config)] == [
        theirs.per_layer_config[number].head_dim for number in range(7)
    ]
    assert config_from_hf(PUBLISHED | {"rope_parameters": None}) == config


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"enable_moe_block": True, "use_double_wide_mlp": True}, "two widths beside experts"),
        ({"use_bidirectional_attention": "all"}, "tokens would see those after them"),
        ({"vocab_size_per_layer_input": 130}, "vocab_size"),
        ({"num_kv_shared_layers": 7}, "share keys and values"),
        ({"num_kv_shared_layers": 2}, "no earlier layer is of their kind"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ({"rope_scaling": {"factor": 2.0, "type": "linear"}}, "rope_parameters alone"),
    ],
)
def test_what_is_not_computed_is_refused(keys: dict, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        config_from_hf(PUBLISHED | keys)
    assert config_from_hf(PUBLISHED | {"use_bidirectional_attention": "vision"})
