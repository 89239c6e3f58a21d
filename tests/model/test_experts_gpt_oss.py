"""gpt-oss against transformers' eager experts: choices, logits, every gradient, files both ways, MXFP4."""

import json
from pathlib import Path

import pytest
import torch
from expert_models import choices_of, gradients_of_both, is_close, pair, parts
from packed_documents import documents, gradients_of, packed
from safetensors.torch import load_file, save_file
from tiny_models import CASES, saved_reference, tokens
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bloomery.core.errors import UserError
from bloomery.model.configs import read_config
from bloomery.model.decoder import Decoder
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import read_headers
from bloomery.model.io.weights import (
    give_memory,
    load_decoder,
    model_state,
    read_model,
    write_model,
    write_model_piecewise,
)
from bloomery.recipe.schema import Quantize

TOKENS = tokens()
ROWS = documents((23, 1, 30, 2, 5))


@torch.no_grad()
def test_a_token_meets_the_experts_that_it_meets_in_transformers(tmp_path: Path) -> None:
    theirs, ours = (model.double() for model in pair("gpt-oss", tmp_path))
    seen: list[tuple[torch.Tensor, ...]] = []
    for layer in theirs.model.layers:
        layer.mlp.router.register_forward_hook(lambda _, __, output: seen.append(output))
    expected = theirs(TOKENS).logits
    choices = choices_of(ours, TOKENS)
    assert len(choices) == len(seen) == 4
    for choice, (logits, weights, experts) in zip(choices, seen, strict=True):
        assert torch.equal(choice.experts_NK, experts)
        assert_close(choice.weights_NK, weights, atol=1e-6, rtol=0)
        assert_close(choice.logits_NE, logits, atol=1e-5, rtol=0)
    assert is_close(ours(TOKENS).head, expected)


def test_every_gradient_is_that_of_transformers(tmp_path: Path) -> None:
    theirs, ours = pair("gpt-oss", tmp_path)
    expected, gradients = gradients_of_both(theirs, ours, TOKENS)
    assert expected.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float(expected[name].abs().max()) > 0, name
        assert is_close(gradient, expected[name]), name


@pytest.mark.parametrize("key", ["swiglu_limit", "swiglu_alpha"])
@torch.no_grad()
def test_both_keys_of_the_activation_are_read(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, settings = CASES["gpt-oss"]
    before = load_logits(tmp_path)
    monkeypatch.setitem(CASES, "gpt-oss", (prefix, settings | {key: 2 * settings[key]}))
    theirs, ours = pair("gpt-oss", tmp_path)
    logits = ours(TOKENS).head
    assert is_close(logits, theirs(TOKENS).logits)
    assert not is_close(logits, before, 1e-3)


def load_logits(folder: Path) -> torch.Tensor:
    saved_reference("gpt-oss", folder)
    logits: torch.Tensor = load_decoder(folder)(TOKENS).head
    return logits


def test_packed_documents_are_each_alone(tmp_path: Path) -> None:
    """Transformers leaks here: its masks are made without positions."""
    theirs, ours = pair("gpt-oss", tmp_path)
    ours = ours.double()
    theirs = theirs.double()
    alone = torch.cat([ours(row).head for row in ROWS], 1)
    logits = packed(ours, ROWS)
    assert_close(logits, alone, atol=1e-12, rtol=0)
    assert is_close(logits, torch.cat([theirs(row).logits for row in ROWS], 1))
    expected = gradients_of(ours, alone)
    for name, gradient in gradients_of(ours, logits).items():
        assert_close(gradient, expected[name], atol=1e-9, rtol=1e-9, msg=name)


@torch.no_grad()
def test_files_both_ways_have_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    saved_reference("gpt-oss", tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs")
    write_model(model_state(ours), ours.config, tmp_path / "ours")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, expected[name]), name
    (tmp_path / "pieces").mkdir()
    write_model_piecewise(
        model_state(ours).__getitem__, ours.config, torch.float32, tmp_path / "pieces"
    )
    pieces = load_file(tmp_path / "pieces" / "model.safetensors")
    assert pieces.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pieces.items())
    layer = "model.layers.0.mlp.experts"
    stack_EDI = expected[f"{layer}.gate_up_proj"]
    gate_bias = expected[f"{layer}.gate_up_proj_bias"][2, ::2]
    assert torch.equal(parts(ours)[f"{layer}.2.up_proj.weight"], stack_EDI[2, :, 1::2].t())
    assert torch.equal(parts(ours)[f"{layer}.2.gate_proj.bias"], gate_bias)


def mxfp4_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tiny model with experts in MXFP4, bfloat16 elsewhere; the experts' numbers as transformers reads them."""
    saved_reference("gpt-oss", folder)
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    written: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(("gate_up_proj", "down_proj")) and tensor.ndim == 3:
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        else:
            written[name] = expected[name] = tensor.bfloat16()
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    # As published: modules that keep their numbers, by transformers' names.
    config |= {"dtype": "bfloat16"} | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    }
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of MXFP4 are 32 inputs."""
    prefix, settings = CASES["gpt-oss"]
    sizes = dict(hidden_size=64, intermediate_size=32)
    monkeypatch.setitem(CASES, "gpt-oss", (prefix, settings | sizes))


@pytest.mark.usefixtures("wide")
@torch.no_grad()
def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    expected = mxfp4_folder(tmp_path)
    ours = load_decoder(tmp_path)
    (tmp_path / "ours").mkdir()
    write_model(model_state(ours), ours.config, tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name]), name
    assert "quantization_config" not in (tmp_path / "ours" / "config.json").read_text()


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operation has made; `present`: one that was there before."""

    def __init__(self, present: torch.Tensor) -> None:
        super().__init__()
        self.present = present.data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            is_new = storage.data_ptr() != self.present
            self.bytes = max(self.bytes, storage.nbytes() if is_new else 0)
        return result


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("is_packed", [True, False])
@torch.no_grad()
def test_a_reader_holds_one_matrix_of_one_expert(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, settings = CASES["gpt-oss"]
    experts = dict(num_local_experts=64, num_hidden_layers=1)
    monkeypatch.setitem(CASES, "gpt-oss", (prefix, settings | experts))
    if is_packed:
        mxfp4_folder(tmp_path)
    else:
        saved_reference("gpt-oss", tmp_path)
    headers = read_headers(tmp_path, read_config(tmp_path))
    stack = torch.empty(64, 64, 64, dtype=torch.bfloat16)
    with TensorReader() as reader, Largest(stack) as largest:
        for number, part in enumerate(("gate_proj", "up_proj") * 64):
            tensor = headers.by_name[f"model.layers.0.mlp.experts.{number // 2}.{part}.weight"]
            rows = stack[number // 2, 32 * (number % 2) :][:32]
            reader.fill(rows, tensor, first=0, transposed=False)
    assert 0 < largest.bytes <= 4 * 64 * 64 < stack.nbytes / 16


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@torch.no_grad()
def test_mxfp4_is_quantized_straight_from_its_blocks(kind: str, tmp_path: Path) -> None:
    expected = mxfp4_folder(tmp_path)
    headers = read_headers(tmp_path, read_config(tmp_path))
    assert any("MXFP4" in note for note in headers.notes)
    layer = "model.layers.1.mlp.experts"
    for module, columns in (("gate_proj", slice(0, None, 2)), ("down_proj", slice(None))):
        stack = "down_proj" if module == "down_proj" else "gate_up_proj"
        matrix = expected[f"{layer}.{stack}"][3, :, columns].t().contiguous()
        ours, theirs = (QuantizedWeight(matrix.shape, Quantize(kind=kind)) for _ in range(2))
        with TensorReader() as reader:
            pieces = reader.pieces(
                headers.by_name[f"{layer}.3.{module}.weight"],
                0,
                len(matrix),
                device=torch.device("cpu"),
                multiple=ours.rows_at_once,
            )
            ours.fill((piece for _, piece in pieces), name="x")
        theirs.fill([matrix.float()], name="x")
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scales, theirs.scales)


@pytest.mark.usefixtures("wide")
@torch.no_grad()
def test_mxfp4_through_transformers_layers_has_the_same_logits(tmp_path: Path) -> None:
    """Its memory has the stacks of files."""
    mxfp4_folder(tmp_path)
    native = load_decoder(tmp_path, dtype=torch.float32)
    with torch.device("meta"):
        through = Decoder(read_config(tmp_path, "transformers"))
    give_memory(through, "cpu")
    read_model(through, tmp_path)
    assert is_close(through.eval()(TOKENS).head, native(TOKENS).head)


BLOCKS = "model.layers.0.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.0.mlp.experts.gate_up_proj_scales"


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: {k: v for k, v in t.items() if k != SCALES}, "gate_up_proj_scales is missing"),
        (lambda t: t | {BLOCKS: t[BLOCKS][:3], SCALES: t[SCALES][:3]}, r"is \[3, 64, 64\]"),
        (lambda t: t | {SCALES: t[SCALES][:, :-1].clone()}, r"_scales is \[4, 63, 2\]"),
        (
            lambda t: t | {BLOCKS.removesuffix("_blocks"): torch.zeros(4, 64, 64)},
            "gate_up_proj is there twice, once quantized",
        ),
    ],
    ids=["scales", "experts", "rows", "twice"],
)
def test_blocks_that_contradict_are_refused(change, problem: str, tmp_path: Path) -> None:
    mxfp4_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=problem):
        load_decoder(tmp_path)


@pytest.mark.usefixtures("wide")
def test_blocks_of_which_the_config_says_nothing_are_named(tmp_path: Path) -> None:
    mxfp4_folder(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantized \(.*_blocks\), and config.json does not"):
        load_decoder(tmp_path)
