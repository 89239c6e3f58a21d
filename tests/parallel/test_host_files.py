"""Frozen weights that stay in files give the bits of those in memory."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_expert_ranks import mixture
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.weights import (
    fresh_decoder,
    give_memory,
    model_state,
    quantize_model,
    read_model,
    write_model,
)
from bloomery.parallel.streamed import StreamedWeights
from bloomery.parallel.streamed_experts import StreamedExperts
from bloomery.recipe.schema import Quantize

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 64,
}
TOKENS = torch.arange(24).view(2, 12) % 64


def saved(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Path:
    folder.mkdir()
    write_model(model_state(fresh_decoder(config, seed=0, dtype=dtype)), config, folder)
    return folder


def frozen(folder: Path, dtype: torch.dtype, quantize: str = "none") -> Decoder:
    """On the meta device."""
    with torch.device("meta"):
        decoder = Decoder(read_config(folder))
    decoder.to(dtype).requires_grad_(False)
    if quantize != "none":
        quantize_model(decoder, Quantize(kind=quantize))
    return decoder


def in_memory(folder: Path, dtype: torch.dtype, quantize: str = "none") -> Tensor:
    decoder = frozen(folder, dtype, quantize)
    give_memory(decoder, "cpu")
    read_model(decoder, folder)
    return logits(decoder)


@torch.no_grad()
def logits(decoder: Decoder) -> Tensor:
    scores: Tensor = decoder(TOKENS).head
    return scores


def streamed(
    folder: Path, own: Path, dtype: torch.dtype, quantize: str = "none"
) -> tuple[Decoder, StreamedWeights]:
    decoder = frozen(folder, dtype, quantize)
    stream = StreamedWeights(decoder, CPU, placement="mapped")
    decoder.weight_stream = stream
    stream.allocate(folder, own)
    with stream.filling():
        read_model(decoder, folder)
    return decoder, stream


@pytest.mark.parametrize(
    ("stored", "dtype", "quantize", "is_kept_again"),
    [
        (torch.bfloat16, torch.bfloat16, "none", False),
        (torch.bfloat16, torch.float32, "none", True),
        (torch.float32, torch.float32, "nf4", True),
    ],
)
def test_the_bits_are_those_of_weights_in_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    dtype: torch.dtype,
    quantize: str,
    is_kept_again: bool,
) -> None:
    """What has the form of the model's files is not read into memory, nor kept once more."""
    folder = saved(tmp_path / "model", ModelConfig(**SIZES), stored)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    expected = in_memory(folder, dtype, quantize)
    read: list[str] = []
    fill = TensorReader.fill

    def noted(self: TensorReader, target: Tensor, *args: object, **kwargs: object) -> None:
        read.append(str(tuple(target.shape)))
        fill(self, target, *args, **kwargs)

    monkeypatch.setattr(TensorReader, "fill", noted)
    decoder, stream = streamed(folder, tmp_path / "run", dtype, quantize)
    assert torch.equal(logits(decoder), expected)
    assert torch.equal(logits(decoder), expected)  # nothing was lost on the way
    if is_kept_again:
        assert str(tmp_path / "run") in str(stream.note)
        assert list((tmp_path / "run").iterdir()) == []  # a file without a name
    else:
        assert stream.note is None
        assert not (tmp_path / "run").exists()
        assert len(read) == 3  # the embedding, the last norm and the head
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_reward_model_begins_with_the_layers_of_a_language_model(tmp_path: Path) -> None:
    """Its values head is in no file."""
    folder = saved(tmp_path / "model", ModelConfig(**SIZES), torch.bfloat16)
    config = replace(read_config(folder), head="values", tie_embeddings=False)
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.to(torch.bfloat16).requires_grad_(False)
    stream = StreamedWeights(decoder, CPU, placement="mapped")
    decoder.weight_stream = stream
    stream.allocate(folder, tmp_path / "run")
    with stream.filling():
        read_model(decoder, folder, seed=1)
    assert stream.note is None
    assert bool(torch.isfinite(logits(decoder)).all())


def test_experts_stay_in_a_file(tmp_path: Path) -> None:
    """Their stacks are many tensors of the model's files."""
    config = mixture(hidden_size=64, num_layers=2, vocab_size=64)
    folder = saved(tmp_path / "model", config, torch.float32)
    expected = in_memory(folder, torch.float32)
    decoder = frozen(folder, torch.float32)
    stream = StreamedExperts(decoder, CPU, is_recomputed=lambda _layer: True, placement="mapped")
    decoder.weight_stream = stream
    stream.allocate(folder, tmp_path / "run")
    with stream.filling():
        read_model(decoder, folder)
    assert torch.equal(logits(decoder), expected)
    assert stream.note is not None


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", ModelConfig(**SIZES), torch.bfloat16)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left"):
        streamed(folder, tmp_path / "run", torch.float32)


def test_a_file_that_is_cut_is_said(tmp_path: Path) -> None:
    """Layers are read and not mapped: the process would be killed."""
    folder = saved(tmp_path / "model", ModelConfig(**SIZES), torch.bfloat16)
    decoder, _ = streamed(folder, tmp_path / "run", torch.bfloat16)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(4000)
    with pytest.raises(UserError, match="ends too early"):
        logits(decoder)
