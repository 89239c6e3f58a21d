"""A decoder with pictures computes what transformers' whole model computes, and so do its gradients."""

import pytest
import torch
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.data.pictures.batches import axis_positions
from bloomery.facts.pictures import PositionAxes, vision_of
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder
from bloomery.model.pictures import SeenPictures, axis_of_frequencies
from bloomery.model.vision import load_tower
from tiny_composites import CONFIGS, PICTURE, composite, picture_inputs

NEEDS_KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "gemma4_unified")


def sizes_of(kind: str, features: torch.Tensor) -> list[int]:
    """Tokens of each of the two pictures of `picture_inputs`."""
    if kind.startswith("qwen"):
        return [2, 4]
    if kind in ("lfm2_vl", "gemma4", "gemma4_unified", "mistral3"):
        sizes = {"lfm2_vl": [4, 2], "gemma4": [4, 4], "gemma4_unified": [4, 3], "mistral3": [6, 6]}
        return sizes[kind]
    return [len(features) // 2] * 2


def tokens_with(sizes: list[int]) -> torch.Tensor:
    """[1, T]: text, a picture, text, a picture, text."""
    first, second = sizes
    return torch.tensor([[5, 6, *[PICTURE] * first, 7, 8, *[PICTURE] * second, 9, 10, 11]])


def axes_of(kind: str, tokens: torch.Tensor) -> torch.Tensor | None:
    if not kind.startswith("qwen"):
        return None
    documents = torch.zeros_like(tokens)
    axes = axis_positions(
        tokens[0].numpy(), documents[0].numpy(), [(1, 2), (2, 2)], picture=PICTURE
    )
    return torch.from_numpy(axes)[:, None]


@pytest.fixture(params=CONFIGS)
def both(request, tmp_path):
    """The whole model of transformers and ours, with tokens and what the tower makes."""
    kind = request.param
    whole = composite(kind)
    whole.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, dtype=torch.float32)
    vision = vision_of(whole.config.to_dict())
    cpu = torch.device("cpu")
    ours.see(load_tower(vision, tmp_path, dtype=torch.float32, device=cpu, train="all"))
    features = ours.vision(picture_inputs(kind))
    tokens = tokens_with(sizes_of(kind, features.features_ND))
    pictures = SeenPictures(
        (tokens.flatten() == PICTURE).nonzero().squeeze(1),
        features.features_ND,
        features.deep_features,
        both_ways=vision.both_ways,
    )
    return kind, whole, ours, tokens, pictures


def masks_of_generation(whole, tokens):
    """Of transformers' `generate`: both ways in layers with a window alone. Its forward without masks has them in all,
    which Gemma 4's other sizes have in neither.
    """
    masks = whole.create_masks_for_generate(
        whole.config,
        whole.get_input_embeddings()(tokens),
        None,
        None,
        torch.arange(tokens.shape[1])[None],
        mm_token_type_ids=(tokens == PICTURE).long(),
    )
    return {"attention_mask": masks}


def test_logits_and_gradients_are_those_of_the_whole_model(both):
    kind, whole, ours, tokens, pictures = both
    kinds = {"mm_token_type_ids": (tokens == PICTURE).long()} if kind in NEEDS_KINDS else {}
    if kind == "gemma3":
        kinds = {"token_type_ids": (tokens == PICTURE).long()}
    if kind == "gemma4_unified":
        kinds = masks_of_generation(whole, tokens)
    expected = whole(input_ids=tokens, **picture_inputs(kind), **kinds).logits
    made = ours(tokens, pictures=pictures, axes_3BT=axes_of(kind, tokens)).head
    assert_close(made, expected, atol=1e-4, rtol=1e-4)

    # Gradients of Gemma 4's shapes are in the hundreds, of which float32 keeps six digits (transformers' norms are
    # float32 in every precision).
    weight_VT = torch.randn(expected.shape) * (0.05 if kind.startswith("gemma4") else 1.0)
    (expected * weight_VT).sum().backward()
    for parameter in ours.parameters():
        parameter.requires_grad_()
    made = ours(tokens, pictures=pictures, axes_3BT=axes_of(kind, tokens)).head
    (made * weight_VT).sum().backward()
    theirs = whole.get_input_embeddings().weight.grad
    mine = ours.model.embed_tokens.weight.grad
    rows = [5, 6, 7, 8, 9, 10, 11]
    assert_close(mine[rows], theirs[rows], atol=1e-4, rtol=1e-4)
    trained = ours.vision.trained
    text = f"model.{ours.vision.language_model}."
    expected = {
        name: parameter
        for name, parameter in whole.named_parameters()
        if not name.startswith((text, "lm_head."))
    }
    assert trained.keys() == {n for n, parameter in expected.items() if parameter.grad is not None}
    for name, parameter in trained.items():
        mine, theirs = parameter.grad, expected[name].grad
        assert theirs.abs().max() > 0 or name.endswith("k_proj.bias"), name
        assert_close(
            mine, theirs, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name} {text}"
        )


def test_text_alone_has_the_bits_of_the_text_model(both, tmp_path):
    kind, _, ours, tokens, _ = both
    text = torch.where(tokens == PICTURE, 12, tokens)
    plain = load_decoder(tmp_path, dtype=torch.float32)
    assert isinstance(plain, Decoder)
    positions = torch.arange(text.shape[1])[None]
    axes = positions.expand(3, 1, -1) if kind.startswith("qwen") else None
    made = ours(text, positions_BT=positions, axes_3BT=axes).head
    assert torch.equal(made, plain(text, positions_BT=positions).head)


def test_sections_that_heads_do_not_have_are_refused():
    axes = PositionAxes(sections=(16, 24, 25), interleaved=False)
    with pytest.raises(UserError, match="65 frequencies; heads have 64"):
        axis_of_frequencies(axes, 64, torch.device("cpu"))
