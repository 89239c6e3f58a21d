"""Checkpoints of other quantizers as a base: each read by its format's rule, compared with its definition by hand."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from packed_checkpoints import FORMATS, SIZES, pack_model, write_packed
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.model.configs import headers_of, read_config
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import find_tensors
from bloomery.model.io.weights import load_decoder, quantize_model
from bloomery.recipe.schema import Quantize

UP = "model.layers.0.mlp.up_proj.weight"


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Tensors of the up projection, by what follows its name with _ for a dot; None removes one."""
    stored = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        name = f"{UP.removesuffix('.weight')}.{key}"
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def settings(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= keys
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_as_it_is_defined(name: str, tmp_path: Path) -> None:
    theirs = write_packed(tmp_path, name)
    tensors = find_tensors(tmp_path)
    with TensorReader() as reader:
        for path in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
            expected = theirs.get_submodule(f"model.layers.0.{path}").weight.detach()
            tensor = tensors[f"model.layers.0.{path}.weight"]
            values = torch.empty(expected.shape)
            reader.fill(values, tensor, first=0, transposed=False)
            # Float32 against float64: two roundings of numbers of the size of the largest.
            assert_close(values, expected, rtol=0, atol=float(expected.abs().max()) * 3e-7)
            # Some rows alone, as a rank or a quantizer reads them, and all in the model's dtype.
            some = torch.empty(9, expected.shape[1])
            reader.fill(some, tensor, first=19, transposed=False)
            assert torch.equal(some, values[19:28])
            assert torch.equal(reader.read(tensor), values.bfloat16())
    ours = load_decoder(tmp_path, dtype=torch.float32)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert_close(ours(ids).head, theirs(ids).logits, atol=1e-4, rtol=0)
    (note,) = headers_of(tmp_path).notes[-1:]
    assert FORMATS[name][2] in note and "7 of its matrices" in note


@pytest.mark.parametrize("name", ["gptq-4-ordered", "fp8-blocks"])
@pytest.mark.parametrize("family", ["Phi3", "GPTNeoX"])
def test_fused_matrices_and_layers_of_transformers_read_them_too(family, name, tmp_path) -> None:
    """Phi-3 stores q, k and v as one matrix; GPT-NeoX runs through transformers' layers."""
    torch.manual_seed(0)
    sizes = SIZES | {"pad_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    theirs = pack_model(model, tmp_path, name)
    ours = load_decoder(tmp_path, dtype=torch.float32)
    assert (ours.config.transformers_backend is not None) == (family == "GPTNeoX")
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert_close(ours(ids).head, theirs(ids).logits, atol=1e-4, rtol=0)


def test_the_language_model_of_a_multimodal_one_is_read(tmp_path: Path) -> None:
    """As Ministral 3 is published: FP8 with a scale per tensor, and a prefix in front of the names."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).float()
    theirs = pack_model(model, tmp_path, "fp8-tensor", prefix="language_model.")
    assert "language_model.model.layers.0.mlp.up_proj.weight_scale_inv" in load_file(
        tmp_path / "model.safetensors"
    )
    ours = load_decoder(tmp_path, dtype=torch.float32)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert_close(ours(ids).head, theirs(ids).logits, atol=1e-4, rtol=0)


def test_few_rows_at_a_time_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 4 * 64 * 7)
    for name in ("fp8-blocks", "gptq-3", "awq", "bnb-nf4", "ct-packed-4-zeros"):
        theirs = write_packed(tmp_path / name, name)
        with TensorReader() as reader:
            values = torch.empty(96, 64)
            reader.fill(values, find_tensors(tmp_path / name)[UP], first=0, transposed=False)
        expected = theirs.model.layers[0].mlp.up_proj.weight.detach()
        assert_close(values, expected, rtol=0, atol=float(expected.abs().max()) * 3e-7)


def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    write_packed(tmp_path, "fp8-exponents")
    stored = load_file(tmp_path / "model.safetensors")
    with TensorReader() as reader:
        for name, tensor in find_tensors(tmp_path).items():
            if tensor.packing is not None:
                theirs = Fp8Dequantize(None)._dequantize_one(
                    stored[name], stored[f"{name}_scale_inv"], torch.bfloat16
                )
                assert torch.equal(reader.read(tensor), theirs)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(118, 130, (3, 10, 2), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    tensor = find_tensors(tmp_path)[name]
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert tensor.shape == theirs.shape == (3, 64, 10)
    with TensorReader() as reader:
        assert torch.equal(reader.read(tensor), theirs)
        assert torch.equal(reader.read(tensor, (1, 2)), theirs[1:])


def test_nf4_of_bitsandbytes_becomes_ours_without_loss(tmp_path: Path) -> None:
    theirs = write_packed(tmp_path, "bnb-nf4")
    ours = load_decoder(
        tmp_path,
        dtype=torch.float32,
        arrange=lambda model: quantize_model(
            model.requires_grad_(False), Quantize(kind="nf4", double_quant=False)
        ),
    )
    num_compared = 0
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedWeight):
            expected = theirs.get_submodule(name.removesuffix(".stored")).weight.detach()
            limit = float(expected.abs().max()) * 3e-7
            assert_close(module.dequantized(torch.float32), expected, rtol=0, atol=limit)
            num_compared += 1
    assert num_compared == 7


def test_bytes_of_mi300_and_of_others_are_told_apart(tmp_path: Path) -> None:
    def first_value() -> float:
        with TensorReader() as reader:
            return float(reader.read(find_tensors(tmp_path)[UP])[0, 0])

    write_packed(tmp_path, "fp8-tensor")
    codes = load_file(tmp_path / "model.safetensors")[UP].view(torch.uint8)
    codes[codes == 0x80] = 0  # -0 of OCP is the NaN of FNUZ
    codes[0, 0] = 0x3F
    change(tmp_path, weight=codes.view(torch.float8_e4m3fn))
    as_ocp = first_value()
    change(tmp_path, weight=codes.view(torch.float8_e4m3fnuz))
    assert first_value() == as_ocp / 2 != 0

    settings(tmp_path, fmt="e4m3")
    change(tmp_path, weight=codes.view(torch.float8_e4m3fnuz))
    with pytest.raises(UserError, match="stored as F8_E4M3FNUZ"):
        find_tensors(tmp_path)
    settings(tmp_path, fmt=None)
    codes[3, 3] = 0x80
    change(tmp_path, weight=codes.view(torch.float8_e4m3fnuz))
    with pytest.raises(UserError, match="not finite"):
        first_value()


@pytest.mark.parametrize(
    ("name", "tensors", "keys", "problem"),
    [
        ("fp8-blocks", {"weight_scale_inv": None}, {}, "without a scale"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(4, 3)}, {}, r"make it \[4, 2\]"),
        ("fp8-blocks", {}, {"quant_method": "hqq"}, "HQQ"),
        ("fp8-blocks", {}, {"quant_method": "torchao"}, "torchao"),
        ("fp8-blocks", {}, {"quant_method": "mine"}, "'mine' are not read"),
        ("gptq-4-v2", {}, {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq-4-v2", {}, {"bits": 5}, "5 bits"),
        ("gptq-4-v2", {"scales": torch.ones(3, 96)}, {}, r"make it \[4, 96\]"),
        ("gptq-4-v2", {"qzeros": None}, {}, "qzeros is missing"),
        ("awq", {}, {"version": "gemv"}, "gemv"),
        ("ct-packed-4", {}, {"sparsity_config": {"format": "marlin-24"}}, "sparsity_config"),
        ("ct-packed-4", {"weight_shape": torch.tensor([96, 40])}, {}, r"\[96, 40\] in none"),
        ("bnb-nf4", {"weight.quant_state.bitsandbytes__nf4": None}, {}, "no quant_state"),
        ("bnb-int8", {"SCB": torch.ones(3)}, {}, r"make it \[96\]"),
    ],
)
def test_what_cannot_be_read_is_refused(
    name: str, tensors: dict, keys: dict, problem: str, tmp_path: Path
) -> None:
    write_packed(tmp_path, name)
    change(tmp_path, **tensors)
    settings(tmp_path, **keys)
    with pytest.raises(UserError, match=problem):
        headers_of(tmp_path)


def test_groups_beyond_the_scales_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, "gptq-4-ordered")
    change(tmp_path, g_idx=torch.full((64,), 4, dtype=torch.int32))
    with pytest.raises(UserError, match="beyond the 4"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-2", "ct-packed-8"])
def test_codes_without_a_config_that_explains_them_are_refused(name: str, tmp_path: Path) -> None:
    write_packed(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_config(tmp_path)
    with pytest.raises(UserError, match="does not say how"):
        load_decoder(tmp_path)
