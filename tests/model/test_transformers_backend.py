"""Transformers' layers under our head: its own forward, its own files and our own decoder are the oracles."""

import json
import logging
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

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
from foreign_models import SIZES, saved_model

LACKED = sorted(set(SIZES) - {"llama"})
TOKENS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", LACKED)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    their_model = saved_model(kind, tmp_path)
    our_model = load_decoder(tmp_path)
    torch.testing.assert_close(
        our_model(TOKENS).head, their_model(TOKENS).logits, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", LACKED)
def test_planned_shapes_are_the_models_and_transformers_reads_written_files(
    kind: str, tmp_path: Path
) -> None:
    their_model = saved_model(kind, tmp_path)
    our_model = load_decoder(tmp_path)
    shapes = {name: tuple(parameter.shape) for name, parameter in our_model.named_parameters()}
    assert parameter_shapes(our_model.config) == shapes
    assert sum(p.numel() for p in our_model.parameters()) == their_model.num_parameters()
    written_folder = tmp_path / "written"
    written_folder.mkdir()
    write_model(model_state(our_model), our_model.config, written_folder)
    opened_model, loading_info = AutoModelForCausalLM.from_pretrained(
        written_folder, output_loading_info=True
    )
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    assert torch.equal(opened_model.eval()(TOKENS).logits, their_model(TOKENS).logits)


@pytest.mark.parametrize("kind", LACKED)
def test_scores_and_gradients_of_labels_are_those_of_cross_entropy(
    kind: str, tmp_path: Path
) -> None:
    their_model = saved_model(kind, tmp_path)
    our_model = load_decoder(tmp_path)
    labels = TOKENS.roll(-1, 1)
    weights = torch.ones(TOKENS.shape)
    weights[:, ::3] = 0
    scores = our_model(
        TOKENS, head=LabelScores(labels, weights, ScoreSettings(7, into_grad=True))
    ).head
    (-(scores * weights).sum()).backward()
    nats = F.cross_entropy(
        their_model(TOKENS).logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    (nats * weights.flatten()).sum().backward()
    torch.testing.assert_close(-scores.flatten(), nats * weights.flatten(), atol=1e-4, rtol=0)
    their_parameters = dict(their_model.named_parameters())
    for name, stored_name, _ in our_model.config.transformers_backend.parameters:
        name_in_memory = stored_name.replace("block_sparse_moe.gate", "mlp.router")
        their_parameter = their_parameters.get(
            name_in_memory, their_parameters.get(name, their_parameters.get("lm_head.weight"))
        )
        torch.testing.assert_close(
            our_model.get_parameter(name).grad, their_parameter.grad, atol=1e-3, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("kind", LACKED)
def test_documents_of_a_row_do_not_see_each_other(kind: str, tmp_path: Path) -> None:
    their_model = saved_model(kind, tmp_path)
    our_model = load_decoder(tmp_path)
    documents = torch.arange(24).ge(10).long().expand(2, 24)
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, 24)
    packed_logits = our_model(TOKENS, documents_BT=documents, positions_BT=positions).head
    separate_logits = torch.cat(
        (their_model(TOKENS[:, :10]).logits, their_model(TOKENS[:, 10:]).logits), 1
    )
    torch.testing.assert_close(packed_logits, separate_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gpt_neox", "opt", "mpt"])
def test_a_cache_that_was_cut_continues_the_text(kind: str, tmp_path: Path) -> None:
    their_model = saved_model(kind, tmp_path)
    our_model = load_decoder(tmp_path)
    cache = Cache(our_model.config, 24)
    with torch.no_grad():
        our_model(TOKENS[:, :16], cache=cache)
        assert cache.cut(12)
        last_logits = our_model(TOKENS[:, 12:], cache=cache).head
        torch.testing.assert_close(
            last_logits, their_model(TOKENS).logits[:, 12:], atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("kind", ["gpt_neox", "bamba"])
def test_matrices_in_fewer_digits_than_the_rest_are_checked_with_theirs(
    kind: str, tmp_path: Path
) -> None:
    saved_model(kind, tmp_path)

    def arrange(model: Decoder) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(torch.bfloat16)

    model = load_decoder(tmp_path, arrange=arrange)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}


def test_a_known_family_computes_the_same_through_transformers(tmp_path: Path) -> None:
    saved_model("llama", tmp_path)
    native_model = load_decoder(tmp_path)
    config = read_config(tmp_path, "transformers")
    assert (
        native_model.config.transformers_backend is None and config.transformers_backend is not None
    )
    with torch.device("meta"):
        transformers_model = Decoder(config)
    give_memory(transformers_model.to(torch.float32), "cpu")
    read_model(transformers_model, tmp_path)
    torch.testing.assert_close(
        transformers_model.eval()(TOKENS).head, native_model(TOKENS).head, atol=1e-4, rtol=0
    )
    assert parameter_shapes(config) == parameter_shapes(native_model.config)


def test_buffers_that_do_not_follow_from_the_config_are_loaded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    their_model = saved_model("gpt_neox", tmp_path)
    assert read_config(tmp_path).transformers_backend.safe_reason == ""

    def refuse_buffers(raw_config: str, attention: str) -> dict[str, torch.Tensor]:
        raise transformers_backend.Unlike("a buffer does not follow from config.json")

    transformers_config._quietly_probed.cache_clear()
    monkeypatch.setattr(transformers_backend, "computed_buffers", refuse_buffers)
    our_model = load_decoder(tmp_path)
    transformers_config._quietly_probed.cache_clear()
    assert "does not follow" in our_model.config.transformers_backend.safe_reason
    torch.testing.assert_close(
        our_model(TOKENS).head, their_model(TOKENS).logits, atol=1e-5, rtol=0
    )


def test_random_and_borrowed_buffers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class RandomBuffer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("drawn", torch.rand(3), persistent=False)

    monkeypatch.setattr(transformers_backend, "blank_model", lambda *_: (RandomBuffer(), "sdpa"))
    with pytest.raises(transformers_backend.Unlike, match="drawn"):
        transformers_backend.computed_buffers("{}", "none")


@pytest.mark.parametrize(
    ("raw_config", "problem"),
    [
        ({"model_type": "t5"}, "encoder"),
        ({"model_type": "llava", "text_config": {}, "vision_config": {}}, "multimodal"),
        ({"model_type": "my_own", "auto_map": {"AutoConfig": "evil.Config"}}, "never run"),
        ({"model_type": "gpt_neox", "quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "gpt_neox", "num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"model_type": "vit"}, "writes no text"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_with_the_reason(
    raw_config: dict[str, object], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config))
    with pytest.raises(UserError, match=problem):
        read_config(tmp_path)


def test_transformers_logs_no_config_before_our_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_handler = BufferingHandler(capacity=100)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger(), "handlers", [log_handler])
    raw_config = {
        "model_type": "mamba",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw_config))
    with pytest.raises(UserError, match="layer_types"):
        read_config(tmp_path)
    assert not log_handler.buffer


def test_a_head_that_is_more_than_a_matrix_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model("cohere", tmp_path)
    config = read_config(tmp_path)
    config_without_factor = replace(
        config, transformers_backend=replace(config.transformers_backend, factor=1.0)
    )
    monkeypatch.setattr("bloomery.model.io.weights.read_config", lambda *_: config_without_factor)
    with pytest.raises(UserError, match="more than a matrix"):
        load_decoder(tmp_path)
