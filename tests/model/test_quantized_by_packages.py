"""Matrices that bitsandbytes and compressed-tensors themselves pack, where these packages are installed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import find_tensors


def read(
    folder: Path, tensors: dict[str, Tensor], settings: dict, dtype: str = "float32"
) -> Tensor:
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    config = {"dtype": dtype, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    with TensorReader() as reader:
        return reader.read(find_tensors(folder)["m.weight"])


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits_of_bitsandbytes(kind, nested, weight, tmp_path) -> None:
    library = pytest.importorskip("bitsandbytes").functional
    codes, state = library.quantize_4bit(
        weight.bfloat16(), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    parts = {f"m.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ours = read(tmp_path, {"m.weight": codes, **parts}, settings, "bfloat16")
    assert torch.equal(ours, library.dequantize_4bit(codes, state))


def test_8_bits_of_bitsandbytes(weight, tmp_path) -> None:
    library = pytest.importorskip("bitsandbytes").functional
    codes, scales, _ = library.int8_vectorwise_quant(weight.half())
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ours = read(tmp_path, {"m.weight": codes, "m.SCB": scales}, settings)
    theirs = library.int8_vectorwise_dequant(codes, scales).float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-8)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_whole_numbers_of_compressed_tensors(bits, symmetric, weight, tmp_path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    half, random = 2 ** (bits - 1), torch.Generator().manual_seed(1)
    arguments = QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=32, symmetric=symmetric
    )
    scales = 0.002 + 0.01 * torch.rand(96, 4, generator=random)
    zeros = torch.randint(-half, half, (96, 4), generator=random, dtype=torch.int8)
    zeros = zeros * 0 if symmetric else zeros
    codes = quantize(weight, scales, zeros, arguments, dtype=torch.int8)
    parts = {
        "m.weight_packed": pack_to_int32(codes, bits),
        "m.weight_scale": scales,
        "m.weight_shape": torch.tensor([96, 128]),
    }
    if not symmetric:
        parts["m.weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits}}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert torch.equal(read(tmp_path, parts, settings), dequantize(codes, scales, zeros, arguments))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_4_bit_floats_of_compressed_tensors(kind, weight, tmp_path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if kind == "nvfp4":
        compressor = NVFP4PackedCompressor
        keys = {"strategy": "tensor_group", "group_size": 16}
        whole = torch.tensor([448 * 6 / float(weight.abs().max())])
        scale = (weight.view(96, 8, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": whole}
    else:
        compressor = MXFP4PackedCompressor
        keys = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
        largest = weight.view(96, 4, 32).abs().amax(-1)
        state = {"weight": weight, "weight_scale": torch.exp2(largest.log2().floor() - 2)}
    arguments = QuantizationArgs(num_bits=4, type="float", symmetric=True, **keys)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    packed = compressor.compress(state, scheme)
    parts = {f"m.{key}": tensor for key, tensor in packed.items()}
    ours = read(tmp_path, parts, {"quant_method": "compressed-tensors"}, "bfloat16")
    theirs = compressor.decompress(dict(packed), scheme)["weight"]
    # Theirs rounds each step to bfloat16.
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=0)
