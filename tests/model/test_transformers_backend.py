"""Transformers' layers under our head: its own forward, its own files and our own decoder are the oracles."""

import json
import logging
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.facts.counting import parameter_shapes
from bloomery.model import configs as transformers_config
from bloomery.model import transformers_backend as transformers_backend
from bloomery.model.cache import Cache
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import (
    give_memory,
    load_decoder,
    model_state,
    read_model,
    write_model,
)
from bloomery.model.transformers_checks import check_rows
from foreign_models import SIZES, saved_model

LACKED = sorted(set(SIZES) - {"llama"})
TOKENS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", LACKED)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = saved_model(kind, tmp_path)
    ours = load_decoder(tmp_path)
    torch.testing.assert_close(ours(TOKENS).head, theirs(TOKENS).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", LACKED)
def test_parameters_are_planned_as_they_are_and_files_are_written_as_transformers_reads_them(
    kind: str, tmp_path: Path
) -> None:
    theirs = saved_model(kind, tmp_path)
    ours = load_decoder(tmp_path)
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    assert parameter_shapes(ours.config) == shapes
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()
    again = tmp_path / "again"
    again.mkdir()
    write_model(model_state(ours), ours.config, again)
    opened, told = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert torch.equal(opened.eval()(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize("kind", LACKED)
def test_scores_and_gradients_of_labels_are_those_of_cross_entropy(
    kind: str, tmp_path: Path
) -> None:
    theirs = saved_model(kind, tmp_path)
    ours = load_decoder(tmp_path)
    labels, weights = TOKENS.roll(-1, 1), torch.ones(TOKENS.shape)
    weights[:, ::3] = 0
    scores = ours(TOKENS, head=LabelScores(labels, weights, ScoreSettings(7, into_grad=True))).head
    (-(scores * weights).sum()).backward()
    nats = F.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), labels.flatten(), reduction="none")
    (nats * weights.flatten()).sum().backward()
    torch.testing.assert_close(-scores.flatten(), nats * weights.flatten(), atol=1e-4, rtol=0)
    expected = dict(theirs.named_parameters())
    for name, stored, _ in ours.config.transformers_backend.parameters:
        of = expected.get(stored, expected.get("lm_head.weight"))
        torch.testing.assert_close(
            ours.get_parameter(name).grad, of.grad, atol=1e-3, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("kind", LACKED)
def test_documents_of_a_row_do_not_see_each_other(kind: str, tmp_path: Path) -> None:
    theirs = saved_model(kind, tmp_path)
    ours = load_decoder(tmp_path)
    documents = torch.arange(24).ge(10).long().expand(2, 24)
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, 24)
    together = ours(TOKENS, documents_BT=documents, positions_BT=positions).head
    alone = torch.cat((theirs(TOKENS[:, :10]).logits, theirs(TOKENS[:, 10:]).logits), 1)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_an_architecture_without_a_mask_of_documents_says_which_layout_it_needs(
    tmp_path: Path,
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    SIZES["bloom"] = sizes
    saved_model("bloom", tmp_path)
    ours = load_decoder(tmp_path)
    check_rows(ours, 1e-3, packed=False)
    with pytest.raises(UserError, match="no mask of documents"):
        check_rows(ours, 1e-3, packed=True)
    del SIZES["bloom"]


@pytest.mark.parametrize("kind", ["gpt_neox", "opt", "mpt"])
def test_the_past_is_kept_cut_and_read_on(kind: str, tmp_path: Path) -> None:
    theirs = saved_model(kind, tmp_path)
    ours = load_decoder(tmp_path)
    cache = Cache(ours.config, 24)
    with torch.no_grad():
        ours(TOKENS[:, :16], cache=cache)
        assert cache.cut(12)
        last = ours(TOKENS[:, 12:], cache=cache).head
        torch.testing.assert_close(last, theirs(TOKENS).logits[:, 12:], atol=1e-4, rtol=0)


def test_a_known_family_computes_the_same_through_transformers(tmp_path: Path) -> None:
    saved_model("llama", tmp_path)
    ours, config = load_decoder(tmp_path), read_config(tmp_path, "transformers")
    assert ours.config.transformers_backend is None and config.transformers_backend is not None
    with torch.device("meta"):
        through = Decoder(config)
    give_memory(through.to(torch.float32), "cpu")
    read_model(through, tmp_path)
    torch.testing.assert_close(through.eval()(TOKENS).head, ours(TOKENS).head, atol=1e-4, rtol=0)
    assert parameter_shapes(config) == parameter_shapes(ours.config)


def test_buffers_that_the_config_does_not_tell_are_loaded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = saved_model("gpt_neox", tmp_path)
    assert read_config(tmp_path).transformers_backend.safe_reason == ""

    def unlike(raw_config: str, attention: str) -> dict[str, torch.Tensor]:
        raise transformers_backend.Unlike("a buffer does not follow from config.json")

    transformers_config._quietly_probed.cache_clear()
    monkeypatch.setattr(transformers_backend, "computed_buffers", unlike)
    ours = load_decoder(tmp_path)
    transformers_config._quietly_probed.cache_clear()
    assert "does not follow" in ours.config.transformers_backend.safe_reason
    torch.testing.assert_close(ours(TOKENS).head, theirs(TOKENS).logits, atol=1e-5, rtol=0)


def test_random_and_borrowed_buffers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("drawn", torch.rand(3), persistent=False)

    monkeypatch.setattr(transformers_backend, "blank_model", lambda *_: (Drawn(), "sdpa"))
    with pytest.raises(transformers_backend.Unlike, match="drawn"):
        transformers_backend.computed_buffers("{}", "none")


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"model_type": "t5"}, "encoder"),
        ({"model_type": "llava", "text_config": {}, "vision_config": {}}, "multimodal"),
        ({"model_type": "my_own", "auto_map": {"AutoConfig": "evil.Config"}}, "never run"),
        ({"model_type": "gpt_neox", "quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "gpt_neox", "num_hidden_layers": "many"}, "num_hidden_layers"),
        (
            {
                "model_type": "mixtral",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_local_experts": 2,
            },
            "mixture",
        ),
        ({"model_type": "vit"}, "writes no text"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    said: dict[str, object], match: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=match):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe"]
)
@pytest.mark.parametrize("implementation", ["auto", "native", "transformers"])
def test_a_mixture_of_experts_is_refused_as_one(
    kind: str, implementation: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"{kind} is a mixture of \d+ experts") as refused:
        read_config(tmp_path, implementation)
    assert "dense model" in refused.value.fix


def test_transformers_prints_no_config_before_our_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = BufferingHandler(capacity=100)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger(), "handlers", [heard])
    said = {"model_type": "mamba", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="layer_types"):
        read_config(tmp_path)
    assert not heard.buffer


def test_a_head_that_is_more_than_a_matrix_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model("cohere", tmp_path)
    right = read_config(tmp_path)
    wrong = replace(right, transformers_backend=replace(right.transformers_backend, factor=1.0))
    monkeypatch.setattr("bloomery.model.io.weights.read_config", lambda *_: wrong)
    with pytest.raises(UserError, match="more than a matrix"):
        load_decoder(tmp_path)
