"""Bytes against hand computation and against what torch really keeps."""

from dataclasses import replace

import pytest
import torch

from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores
from bloomery.model.presets import build_config, preset
from bloomery.plan.memory import (
    Occupancy,
    activation_bytes,
    estimate_memory,
    kept_layers,
    optimizer_bytes,
    quadratic_bytes,
    tensor_bytes,
)
from bloomery.recipe.schema import Model
from bloomery.units import GIB, MIB

GO_CODER = Occupancy(
    config=preset("go-coder-small"), sequence_length=1024, micro_batch=16, precision="float16", optimizer="adamw",
    attention="blockwise", checkpointing="none", compiled=False, score_chunk=1024, context_bytes=300 * MIB, on_gpu=True,
)  # fmt: skip


def test_activations_are_34_sbh_for_gpt2_in_half_precision():
    formula = 34 * 1024 * 16 * 768 * 12
    assert formula / GIB == pytest.approx(4.78, abs=0.005)
    sums = 4 * 12 * 16 * 1024 * 12  # the log-sum-exp of every query and head
    assert activation_bytes(GO_CODER) == formula + sums


def test_quadratic_attention_adds_5_a_s2_b():
    assert quadratic_bytes(GO_CODER) == 5 * 12 * 1024**2 * 16
    assert quadratic_bytes(GO_CODER) * 12 / GIB == pytest.approx(11.25)
    math = activation_bytes(replace(GO_CODER, attention="math"))
    assert math / GIB == pytest.approx(4.78 + 11.25, abs=0.01)


def test_states_of_124_million_parameters():
    parts = tensor_bytes(GO_CODER)
    assert parts["weights"] == parts["gradients"] == 4 * 124_242_432
    assert parts["optimizer"] / GIB == pytest.approx(0.93, abs=0.005)
    assert parts["half-precision copies"] / GIB == pytest.approx(0.23, abs=0.005)


def test_the_whole_card():
    memory = estimate_memory(GO_CODER, limit=11.02 * GIB)
    assert memory.total / GIB == pytest.approx(8.8, abs=0.05)
    assert (memory.low / GIB, memory.high / GIB) == pytest.approx((7.05, 10.58), abs=0.05)
    assert memory.fits
    assert memory.allocated == pytest.approx(sum(tensor_bytes(GO_CODER).values()))


def test_pure_bfloat16_halves_weights_and_states():
    pure = tensor_bytes(replace(GO_CODER, precision="bfloat16-pure"))
    whole = tensor_bytes(replace(GO_CODER, precision="float32"))
    for part in ("weights", "gradients", "optimizer"):
        assert pure[part] * 2 == whole[part]
    assert "half-precision copies" not in pure


def test_muon_keeps_one_number_for_matrices_of_blocks():
    config = preset("go-coder-tiny")
    matrices = 8 * (4 * 512 * 512 + 2 * 512 * 2048)
    rest = (50_000 + 1024) * 512 + 8 * 13 * 512 + 2 * 512  # embeddings; biases and norms
    assert optimizer_bytes(config, "muon", 4) == 4 * (matrices + 2 * rest)
    assert optimizer_bytes(config, "adafactor", 4) < optimizer_bytes(config, "muon", 4) / 20


@pytest.mark.parametrize(("mode", "kept"), [("none", 12), ("full", 0), ("selective", 6), ("every-3", 8)])
def test_checkpointing_keeps_fewer_layers(mode, kept):
    assert kept_layers(mode, 12) == kept


def test_full_checkpointing_keeps_inputs_and_one_layer():
    full = activation_bytes(replace(GO_CODER, checkpointing="full"))
    one_layer = activation_bytes(GO_CODER) / 12
    assert full == pytest.approx(12 * 2 * 1024 * 16 * 768 + one_layer)


def small(family: str) -> Model:
    sizes = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "max_positions": 128, "vocab_size": 512}
    heads = {} if family == "gpt2" else {"num_kv_heads": 2}
    return Model(family=family, **sizes, **heads)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "blockwise"])
def test_activations_are_what_autograd_keeps(family, attention):
    """Bytes saved for backward in float32, without parameters: within 2%."""
    config = build_config(small(family), vocab_size=512)
    torch.manual_seed(0)
    decoder = Decoder(config, attention=attention).train()
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    tokens = torch.randint(0, 512, (4, 128))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(tokens, head=LabelScores(tokens, torch.ones(4, 128), chunk=64))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    load = replace(
        GO_CODER, config=config, sequence_length=128, micro_batch=4, precision="float32", attention=attention
    )
    last_hidden = 2 * 4 * 128 * config.hidden_size * 4  # counted with the scores
    assert activation_bytes(load) + last_hidden == pytest.approx(measured, rel=0.02)
