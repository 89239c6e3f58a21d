"""Bytes against hand computation and against what torch really keeps."""

from dataclasses import replace

import pytest
import torch
from plan_help import loaded
from tiny_models import tiny_reference

from autograd_for_tests import kept_bytes
from bloomery.core.units import GIB, MIB
from bloomery.facts.hf_config import config_from_hf
from bloomery.facts.presets import preset
from bloomery.model.adapters.lora import adapt
from bloomery.model.attention.per_document import _padding
from bloomery.model.configs import build_config
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import init_weights
from bloomery.plan.estimate.activations import (
    activation_bytes,
    end_bytes,
    gpu_fallback_bytes,
    kept_layers,
)
from bloomery.plan.estimate.memory import (
    document_lengths,
    estimate_memory,
    overhead_bytes,
    tensor_bytes,
)
from bloomery.plan.estimate.mode import FULL, mode_of
from bloomery.plan.estimate.moments import logit_bytes, moments
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.recipe.schema import Lora, Model

GO_CODER = StepShape(
    model=TrainedModel(preset("go-coder-small")),
    sequence_length=1024,
    micro_batch_size=16,
    precision="float16",
    optimizer="adamw",
    attention="blockwise",
    checkpointing="none",
    compiled=False,
    score_chunk=1024,
    context_bytes=300 * MIB,
    on_gpu=True,
)


def test_activations_are_34_sbh_for_gpt2_in_half_precision_and_4_more_for_the_float32_stream():
    """Both norms read the residual stream, which is float32 under autocast: 2 bytes more a number than in the paper."""
    paper = 34 * 1024 * 16 * 768 * 12
    assert paper / GIB == pytest.approx(4.78, abs=0.005)
    per_row = 16 + 4 * 12  # mean and deviation of two norms, the log-sum-exp of every head
    assert activation_bytes(GO_CODER) == paper * 38 / 34 + per_row * 16 * 1024 * 12
    whole = replace(GO_CODER, precision="bfloat16-pure")
    assert activation_bytes(whole) == paper + per_row * 16 * 1024 * 12


def test_pytorchs_fallback_would_add_5_a_s2_b():
    assert gpu_fallback_bytes(GO_CODER) == 12 * 5 * 12 * 1024**2 * 16
    assert gpu_fallback_bytes(GO_CODER) / GIB == pytest.approx(11.25)


def test_states_of_124_million_parameters():
    parts = tensor_bytes(GO_CODER)
    assert parts["weights"] == 4 * 124_242_432
    assert parts["optimizer"] == 2 * parts["weights"]
    # matrices and their biases; embeddings and norms are never copied
    blocks = 12 * (12 * 768**2 + 9 * 768)
    assert parts["half-precision copies"] == 2 * blocks


def test_gradients_come_while_activations_go_unless_micro_batches_are_accumulated():
    """With all logits of a forward alive no gradient exists yet; from the second micro-batch on all of them do."""
    assert tensor_bytes(GO_CODER)["gradients"] == 0
    assert tensor_bytes(replace(GO_CODER, accumulating=True))["gradients"] == 4 * 124_242_432


def test_a_small_micro_batch_peaks_when_all_gradients_are_there():
    small = tensor_bytes(
        replace(GO_CODER, micro_batch_size=1, sequence_length=128, score_chunk=128)
    )
    assert small["gradients"] == small["weights"]


def test_every_moment_is_counted():
    found = list(moments(GO_CODER))
    assert len(found) == 2 + 12 + 2
    assert (
        max(moment.total for moment in found)
        == found[0].total
        == pytest.approx(6.16 * GIB, rel=0.005)
    )
    assert [moment.gradients for moment in found] == sorted(moment.gradients for moment in found)


def test_logits_beside_their_float32_copy_and_exponentials_unless_compiled():
    logits = 1024 * 50_000
    copy, hidden = 2 * 50_000 * 768, 2 * 16 * 1024 * 768
    assert logit_bytes(GO_CODER)[0] == logits * (2 + 4 + 4) + copy + hidden
    assert (
        logit_bytes(replace(GO_CODER, compiled=True, score_chunk=16 * 1024))[0]
        == 16 * logits * 2 + copy + hidden
    )


def test_on_a_cpu_a_large_vocabulary_costs_no_more_logits():
    here = replace(GO_CODER, on_gpu=False, precision="float32", compiled=True)
    larger = replace(here, model=TrainedModel(replace(here.config, vocab_size=200_000)))
    assert logit_bytes(larger)[0] == logit_bytes(here)[0]


def test_the_whole_card():
    memory = estimate_memory(GO_CODER, limit=11.02 * GIB)
    assert memory.total / GIB == pytest.approx(8.98, abs=0.01)
    assert (memory.low / GIB, memory.high / GIB) == pytest.approx((7.19, 10.78), abs=0.01)
    assert memory.fits
    assert memory.allocated == pytest.approx(sum(tensor_bytes(GO_CODER).values()))


def test_pure_bfloat16_halves_weights_and_states():
    pure = tensor_bytes(replace(GO_CODER, precision="bfloat16-pure"))
    whole = tensor_bytes(replace(GO_CODER, precision="float32"))
    for part in ("weights", "optimizer"):
        assert pure[part] * 2 == whole[part]
    assert "half-precision copies" not in pure


def test_muon_keeps_one_number_for_matrices_of_blocks():
    config = preset("go-coder-tiny")
    matrices = 8 * (4 * 512 * 512 + 2 * 512 * 2048)
    rest = (50_000 + 1024) * 512 + 8 * 13 * 512 + 2 * 512  # embeddings; biases and norms
    muon, adafactor = (
        TrainedModel(config).optimizer_bytes(kind, "float32") for kind in ("muon", "adafactor")
    )
    assert muon == 4 * (matrices + 2 * rest)
    assert adafactor < muon / 20


@pytest.mark.parametrize(
    ("mode", "kept"), [("none", 12), ("full", 0), ("selective", 6), ("every-3", 8), ("every-5", 9)]
)
def test_checkpointing_keeps_fewer_layers(mode, kept):
    assert kept_layers(mode, 12) == kept


def test_full_checkpointing_keeps_the_input_of_every_layer():
    assert activation_bytes(replace(GO_CODER, checkpointing="full")) == 12 * 4 * 1024 * 16 * 768


def small(family: str) -> Model:
    sizes = {
        "hidden_size": 128,
        "num_layers": 3,
        "num_heads": 4,
        "max_positions": 128,
        "vocab_size": 512,
    }
    heads = {} if family == "gpt2" else {"num_kv_heads": 2}
    return Model(family=family, **sizes, **heads)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "blockwise"])
def test_activations_are_what_autograd_keeps(family, attention):
    """Bytes saved for backward in float32, without parameters: within 2%."""
    config = build_config(small(family), vocab_size=512)
    torch.manual_seed(0)
    decoder = Decoder(config, attention=attention).train()
    tokens = torch.randint(0, 512, (4, 128))
    head = LabelScores(tokens, torch.ones(4, 128), ScoreSettings(chunk=64))
    measured = kept_bytes(decoder, lambda: decoder(tokens, head=head).head)
    load = replace(
        GO_CODER,
        model=TrainedModel(config),
        sequence_length=128,
        micro_batch_size=4,
        precision="float32",
        attention=attention,
        on_gpu=False,
    )
    assert activation_bytes(load) + end_bytes(load) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("trained", ["all", "LoRA", "LoRA of layers"])
@pytest.mark.parametrize("case", ["gemma4-e2b", "gemma4-12b"])
def test_shared_keys_and_inputs_of_layers_are_what_autograd_keeps(case, trained):
    """Bytes saved for backward in float32, without parameters: within 2%."""
    config = config_from_hf(tiny_reference(case).config.to_dict())
    targets = ["all-linear"] if trained == "LoRA" else ["self_attn.*", "per_layer_input_gate"]
    if case == "gemma4-12b":
        targets = targets[:1]
    adapter = Lora(kind="lora", rank=4, target_modules=targets)
    mode = FULL
    decoder = Decoder(config, attention="sdpa")
    if trained != "all":
        adapt(decoder, adapter)
        mode = mode_of(loaded(adapter=adapter.model_dump()).recipe, config)
    init_weights(decoder.train(), 0)
    tokens = torch.randint(0, 131, (4, 128))
    head = LabelScores(tokens, torch.ones(4, 128), ScoreSettings(chunk=64))
    measured = kept_bytes(decoder, lambda: decoder(tokens, head=head).head)
    load = replace(
        GO_CODER,
        model=TrainedModel(config, mode),
        sequence_length=128,
        micro_batch_size=4,
        precision="float32",
        attention="sdpa",
        on_gpu=False,
    )
    assert activation_bytes(load) + end_bytes(load) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("longest", [64, 300, 512, 1024, 2048, 4096])
def test_kernels_of_attention_on_a_cpu_are_counted_for_each_length_that_documents_are_lengthened_to(
    longest,
):
    empty = torch.empty(1, 1, longest, 1, dtype=torch.bfloat16)
    lengths = {length + _padding(empty[:, :, :length]) for length in range(1, longest + 1)}
    assert document_lengths(longest) == len(lengths)
    load = replace(
        GO_CODER,
        on_gpu=False,
        attention="per_document",
        precision="bfloat16",
        sequence_length=longest,
    )
    assert overhead_bytes(load, {"activations": 0.0, "logits": 0.0})["kernels"] == 3e6 * len(
        lengths
    )
    assert "kernels" not in overhead_bytes(
        replace(load, precision="float32"), {"activations": 0.0, "logits": 0.0}
    )
    assert "kernels" not in overhead_bytes(
        replace(load, attention="mask"), {"activations": 0.0, "logits": 0.0}
    )
