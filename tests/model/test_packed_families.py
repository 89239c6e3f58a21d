"""Families whose layers see more than Llama's do: packed documents, gradients, the cache."""

from pathlib import Path

import pytest
import torch
from packed_documents import documents, gradients_of, packed
from tiny_models import saved_reference
from torch.testing import assert_close

from bloomery.facts.counting import layers
from bloomery.model.cache import Cache, LayerCache
from bloomery.model.io.stored import tensor_locations
from bloomery.model.io.weights import load_decoder
from bloomery.model.mixers.latent_attention import LatentAttention

# Held against transformers document by document in their own test (`test_experts`), which names their parameters.
MIXTURES = ("qwen2-moe", "qwen3-next", "qwen3.5-moe", "lfm2-moe", "ernie4.5-moe", "gemma4-26b-a4b")
FAMILIES = (
    *MIXTURES,
    "lfm2",
    "lfm2-bias",
    "lfm3",
    "olmo3",
    "ministral3",
    "granite",
    "granite4",
    "cohere2",
    "exaone4",
    "hunyuan",
    "nemotron",
    "stablelm-parallel",
    "deepseek-v3",
    "deepseek-v2",
    "glm4-moe-lite",
    "glm4-moe",
    "dots1",
    "minimax-m2",
)
ROWS = documents((23, 1, 30, 2, 5))


@pytest.mark.parametrize("case", FAMILIES)
def test_packed_documents_are_each_alone_to_the_last_digits_of_float64(
    case: str, tmp_path: Path
) -> None:
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path, attention="mask").double()
    alone = torch.cat([decoder(row).head for row in ROWS], 1)
    logits = packed(decoder, ROWS)
    assert_close(logits, alone, atol=1e-12, rtol=0)
    expected = gradients_of(decoder, alone)
    for name, gradient in gradients_of(decoder, logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("case", [case for case in FAMILIES if case not in MIXTURES])
def test_every_gradient_is_that_of_transformers_on_each_document(case: str, tmp_path: Path) -> None:
    their_model = saved_reference(case, tmp_path).double()
    their_model.config._experts_implementation = "eager"  # the others take no float64
    decoder = load_decoder(tmp_path, attention="mask").double()
    expected = torch.cat([their_model(row).logits for row in ROWS], 1)
    logits = packed(decoder, ROWS)
    # Transformers' own norms and rotations are float32 in a float64 model, too.
    assert_close(logits, expected, atol=1e-4, rtol=0)
    their_gradients = gradients_of(their_model, expected)
    stored_names = tensor_locations(decoder.config)
    gradients = gradients_of(decoder, logits)
    # Modules that transformers calls in memory something else than in its files.
    renamed = (("self_attn.gate_proj", "self_attn.g_proj"), ("block_sparse_moe", "mlp"))
    in_memory = {}
    for name, place in stored_names.items():
        in_memory[name] = place.name
        for in_files, theirs in renamed:
            in_memory[name] = in_memory[name].replace(in_files, theirs)
    # Stacks of experts are in memory what they are here.
    their_names = {name: in_memory.get(name, name) for name in gradients}
    assert set(their_names.values()) == set(their_gradients)
    for name, gradient in gradients.items():
        theirs = their_gradients[their_names[name]]
        if (place := stored_names.get(name)) is not None:
            theirs = theirs[place.first : place.first + place.rows]
        assert float((gradient - theirs).norm() / theirs.norm()) < 1e-4, name


@torch.no_grad()
@pytest.mark.parametrize("case", FAMILIES)
def test_the_cache_continues_a_text(case: str, tmp_path: Path) -> None:
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path).double()
    tokens = torch.randint(3, 131, (2, 40), generator=torch.Generator().manual_seed(2))
    expected = decoder(tokens).head
    for pieces in ((40,), (1,) * 40, (3, 1, 1, 30, 5)):
        cache = Cache(decoder.config, 40, slots=2)
        cache.rows = range(2)
        logits = [decoder(piece, cache=cache).head for piece in tokens.split(list(pieces), 1)]
        assert_close(torch.cat(logits, 1), expected, atol=1e-12, rtol=0)
        cached = sum(
            tensor.numel()
            for layer in cache.layers
            if isinstance(layer, LayerCache)
            for tensor in (layer.keys, layer.values)
            if tensor is not None
        )
        of_attention = [layer for layer in layers(decoder.config) if layer.mixer == "attention"]
        assert cached == 2 * sum(layer.cached_bytes(40, 1) for layer in of_attention)


@torch.no_grad()
@pytest.mark.parametrize("case", ["deepseek-v3", "deepseek-v2", "glm4-moe-lite"])
def test_latents_of_texts_of_several_lengths_are_read_as_keys_are_made(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One new token of each text: latent vectors as they are, and keys and values of each head made of them."""
    saved_reference(case, tmp_path)
    decoder = load_decoder(tmp_path).double()
    tokens = torch.randint(3, 131, (2, 20), generator=torch.Generator().manual_seed(2))
    lengths = (7, 13)
    expected = [
        decoder(row[None, : n + 1]).head[:, -1] for row, n in zip(tokens, lengths, strict=True)
    ]
    asked = []
    for reads in (True, False):

        def answers(*_: object, reads: bool = reads) -> bool:
            asked.append(reads)
            return reads

        monkeypatch.setattr(LatentAttention, "reads_latents", answers)
        cache = Cache(decoder.config, 20, slots=2)
        for row, length in enumerate(lengths):
            cache.rows = range(row, row + 1)
            decoder(tokens[row : row + 1, :length], cache=cache)
        cache.rows = range(2)
        new = torch.stack([row[n] for row, n in zip(tokens, lengths, strict=True)])[:, None]
        assert_close(decoder(new, cache=cache).head[:, -1], torch.cat(expected), atol=1e-12, rtol=0)
    assert set(asked) == {True, False}
