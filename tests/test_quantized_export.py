"""Folders of 4 and 8 bits, against the compressed-tensors library and transformers."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from click.testing import CliRunner
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file
from torch.testing import assert_close

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.export.quantize import export_quantized, pack, quantize, read_quantized, unpack
from bloomery.model.io.weights import load_decoder
from bloomery.train.model_folder import find_model
from models_for_tests import make_model

TOKENS = torch.arange(40)[None]


@pytest.fixture(autouse=True)
def alone() -> None:
    """A step that a test simulated in this process leaves its ranks, which compressed-tensors would talk to."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_numbers_are_those_of_the_library(bits: int) -> None:
    random = torch.Generator().manual_seed(bits)
    levels = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 96), generator=random).to(
        torch.int8
    )
    assert pack(levels, bits).equal(pack_to_int32(levels, bits))
    assert unpack(pack(levels, bits), bits).equal(levels)
    assert unpack_from_int32(pack(levels, bits), bits, levels.shape).equal(levels)


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_are_the_nearest_and_a_clipped_scale_is_no_worse(bits: int) -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    weight[0, 0], weight[1] = 30.0, 0.0  # an outlier, and a row of zeros
    levels, scales = quantize(weight, bits, 64, torch.float32)
    spread = scales.repeat_interleave(64, 1)
    assert_close(
        levels,
        (weight / spread).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8),
    )
    error = (levels * spread - weight).square().sum()
    plain = weight.view(16, 2, 64).abs().amax(-1).repeat_interleave(64, 1).clamp_min(1e-9) / (
        2 ** (bits - 1) - 0.5
    )
    naive = (
        ((weight / plain).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * plain - weight)
        .square()
        .sum()
    )
    assert error <= naive * 1.0001
    assert levels[1].any().logical_not()
    inside = weight.abs() <= (2 ** (bits - 1) - 0.5) * spread  # not clipped: within half a step
    assert inside.double().mean() > 0.95
    assert bool(((levels * spread - weight).abs() <= 0.5001 * spread)[inside].all())


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_transformers_opens_a_quantized_folder(tmp_path: Path, kind: str) -> None:
    source = make_model(tmp_path / "source")
    done = export_quantized(find_model(source), tmp_path / "out", kind=kind)
    assert [proof.split()[0] for proof in done.proofs] == ["14", "KL", "loaded"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        done.folder, dtype=torch.float32
    ).eval()
    mine = read_quantized(done.folder, kind)
    with torch.no_grad():
        assert_close(theirs(TOKENS).logits, mine(TOKENS), atol=1e-4, rtol=0)
        far = (mine(TOKENS) - load_decoder(source)(TOKENS)).abs().max()
    assert 0 < far < {"int4": 0.2, "int8": 0.02}[kind]
    stored = load_file(done.folder / "model.safetensors")
    assert stored["model.layers.0.mlp.down_proj.weight_packed"].dtype == torch.int32
    assert stored["model.embed_tokens.weight"].dtype == torch.float32
    assert (
        json.loads((done.folder / "config.json").read_text())["quantization_config"]["format"]
        == "pack-quantized"
    )


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    one, two = (
        export_quantized(find_model(source), tmp_path / name / "m", kind="int4", verify=False)
        for name in "ab"
    )
    for path in one.folder.iterdir():
        assert path.read_bytes() == (two.folder / path.name).read_bytes()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    source = make_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError, match="no linear layers"):
        export_quantized(find_model(source), tmp_path / "out", kind="int4")
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(
        cli, ["export", str(source), "--to", "adapter", "--type", "int4", "--out", "x"]
    )
    assert isinstance(done.exception, UserError) and done.exception.where == "--type"


def test_a_quantized_folder_is_refused_by_name(tmp_path: Path) -> None:
    done = export_quantized(
        find_model(make_model(tmp_path / "source")), tmp_path / "out", kind="int8", verify=False
    )
    with pytest.raises(UserError, match="quantized"):
        load_decoder(done.folder)
