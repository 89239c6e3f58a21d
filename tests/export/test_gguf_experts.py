"""Mixtures of experts in GGUF files: types of each matrix, adapters, and what no graph of llama.cpp computes."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from gguf_models import VOCABULARY, saved_adapter, saved_case, saved_expert_adapter
from safetensors.torch import load_file, save_file

from bloomery.core.errors import UserError
from bloomery.export.gguf import export_gguf, export_gguf_adapter
from bloomery.export.gguf_format import HeadRows
from bloomery.export.gguf_import import import_gguf
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import load_decoder, model_state

WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": []}


def contents_of(path: Path) -> tuple[dict, dict]:
    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    return facts, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_each_matrix_of_an_expert_is_quantized_as_it_would_be_alone(
    kind: str, tmp_path: Path
) -> None:
    source = saved_case("qwen3-moe", tmp_path / "source", **WIDE)
    done = export_gguf(find_model(source), tmp_path / "out.gguf", kind=kind)
    assert not any(proof.startswith("differs") for proof in done.proofs)
    facts, tensors = contents_of(done.folder)
    assert facts["qwen3moe.expert_count"] == 8
    assert facts["qwen3moe.expert_used_count"] == 2
    assert facts["qwen3moe.expert_feed_forward_length"] == 32
    stored = load_file(source / "model.safetensors")
    tensor_type = gguf.GGMLQuantizationType[kind.upper()]
    for name in ("gate", "up", "down"):
        stack = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert stack.tensor_type == tensor_type
        for expert in range(8):
            matrix = stored[f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"].float()
            alone = gguf.quants.quantize(matrix.numpy(), tensor_type)
            np.testing.assert_array_equal(stack.data[expert], alone)
    # What chooses the experts is never rounded.
    router = tensors["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    np.testing.assert_array_equal(router.data, stored["model.layers.1.mlp.gate.weight"].float())


@pytest.mark.parametrize("truncate", [False, True])
def test_biases_and_sinks_stay_float32(truncate: bool, tmp_path: Path) -> None:
    fitting = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "intermediate_size": 32}
    rope = tiny_models.OSS_ROPE | {"truncate": truncate}
    source = saved_case(
        "gpt-oss", tmp_path / "source", hidden_size=64, rope_parameters=rope, **fitting
    )
    done = export_gguf(find_model(source), tmp_path / "out.gguf", kind="q8_0")
    assert any("rounds the limits of YaRN" in proof for proof in done.proofs) != truncate
    _, tensors = contents_of(done.folder)
    stored = load_file(source / "model.safetensors")
    gate_up = stored["model.layers.0.mlp.experts.gate_up_proj_bias"].float()
    for name, expected in (
        ("ffn_gate_exps.bias", gate_up[:, ::2]),
        ("ffn_up_exps.bias", gate_up[:, 1::2]),
        ("attn_sinks.weight", stored["model.layers.0.self_attn.sinks"].float()),
        ("ffn_gate_inp.bias", stored["model.layers.0.mlp.router.bias"].float()),
    ):
        tensor = tensors[f"blk.0.{name}"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensor.data, expected)
    # llama.cpp rounds the limits in any case; the file says whether the model does.
    import_gguf(done.folder, tmp_path / "back")
    scaling = load_decoder(tmp_path / "back").config.rope_scaling
    assert scaling is not None and scaling.truncate == truncate


REFUSED = [
    ("qwen3-moe", {}, "has experts in all layers"),
    ("qwen3-moe", {"mlp_only_layers": [], "norm_topk_prob": False}, "weighs experts by"),
    ("olmoe", {"norm_topk_prob": True}, "weighs experts by softmax, and"),
    ("olmoe", {}, "has keys for each head"),
    ("gpt-oss", {}, "clamps experts"),
    ("lfm2-moe", {}, "does not scale the weights"),
    ("lfm2-moe", {"use_expert_bias": False, "routed_scaling_factor": 1.0}, "a bias for the choice"),
    ("ernie4.5-moe", {"moe_layer_interval": 2}, "has experts after some first layers"),
    ("glm4-moe-lite", {}, "computes rope_interleave True"),
    ("deepseek-v2", {"attention_bias": False}, "by their best two"),
    ("deepseek-v3", {}, "mscale must be the same"),
    ("deepseek-v3", {"rope_parameters": tiny_models.YARN}, "mscale must be the same"),
    ("deepseek-v3", {"rope_parameters": None, "num_hidden_layers": 26}, "makes queries by one"),
]


@pytest.mark.parametrize(("case", "changed", "problem"), REFUSED)
def test_what_no_graph_computes_is_refused(
    case: str, changed: dict, problem: str, tmp_path: Path
) -> None:
    source = saved_case(case, tmp_path / "source", **changed)
    with pytest.raises(UserError, match=problem):
        export_gguf(find_model(source), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v3"])
@torch.no_grad()
def test_an_adapter_is_merged_into_experts(case: str, tmp_path: Path) -> None:
    """PEFT merges it into the same model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fitting = {"rope_parameters": tiny_models.YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}}
    source = saved_case(case, tmp_path / "source", **(fitting if case == "deepseek-v3" else {}))
    files = find_model(saved_expert_adapter(source, tmp_path / "adapter"))
    done = export_gguf(files, tmp_path / "merged.gguf", kind="f32")
    import_gguf(done.folder, tmp_path / "back")
    plain = AutoModelForCausalLM.from_pretrained(source)
    merged = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    tokens = torch.arange(24)[None] % VOCABULARY
    expected = merged(tokens).logits
    torch.testing.assert_close(
        load_decoder(tmp_path / "back")(tokens).head, expected, atol=1e-4, rtol=0
    )
    assert (load_decoder(source)(tokens).head - expected).abs().max() > 0.01


@pytest.mark.parametrize("case", ["mixtral", "gemma4-26b-a4b"])
def test_an_adapter_of_experts_goes_alone(case: str, tmp_path: Path) -> None:
    """llama.cpp adds alpha / rank * B_e @ A_e to the matrix of each expert: the difference that a merge makes."""
    source = saved_case(case, tmp_path / "source")
    prefix = "mlp.experts" if case == "mixtral" else "experts"
    files = find_model(saved_expert_adapter(source, tmp_path / "adapter", prefix))
    merged = export_gguf(files, tmp_path / "merged.gguf", kind="f32").folder
    base = export_gguf(find_model(source), tmp_path / "base.gguf", kind="f32").folder
    alone = export_gguf_adapter(files, tmp_path / "alone.gguf", kind="f32").folder
    whole, plain, pairs = (contents_of(path)[1] for path in (merged, base, alone))
    names = {name.rpartition(".lora_")[0] for name in pairs}
    modules = ("gate", "up", "down") if case == "mixtral" else ("gate_up", "down")
    assert {name for name in names if name.startswith("blk.0.")} == {
        f"blk.0.ffn_{module}_exps.weight" for module in modules
    }
    for name in names:
        A, B = pairs[f"{name}.lora_a"].data, pairs[f"{name}.lora_b"].data
        assert len(A) == len(B) == len(whole[name].data)
        difference = whole[name].data - plain[name].data
        assert np.abs(difference).max() > 0.05
        np.testing.assert_allclose(difference, B @ A / A.shape[1], atol=1e-5)


def test_an_adapter_of_latent_attention_goes_merged_alone(tmp_path: Path) -> None:
    source = saved_case("deepseek-v3", tmp_path / "source", rope_parameters=None)
    adapter = find_model(saved_adapter(source, tmp_path / "adapter", ["q_a_proj", "o_proj"]))
    export_gguf(adapter, tmp_path / "merged.gguf", kind="f32")
    with pytest.raises(UserError, match="latent attention"):
        export_gguf_adapter(adapter, tmp_path / "alone.gguf")
    of_outputs = find_model(saved_adapter(source, tmp_path / "outputs", ["o_proj"]))
    done = export_gguf_adapter(of_outputs, tmp_path / "outputs.gguf")
    assert done.proofs[0].startswith("4 pairs")


@pytest.mark.parametrize(
    ("case", "suffix"), [("granite4", ""), ("granite4-moe", "_shexp")], ids=["dense", "mixture"]
)
def test_an_adapter_of_a_fused_matrix_is_divided_among_the_tensors_of_the_file(
    case: str, suffix: str, tmp_path: Path
) -> None:
    source = saved_case(case, tmp_path / "source")
    targets = ["q_proj", "shared_mlp.input_linear"]
    files = find_model(saved_adapter(source, tmp_path / "adapter", targets))
    merged = export_gguf(files, tmp_path / "merged.gguf", kind="f32").folder
    base = export_gguf(find_model(source), tmp_path / "base.gguf", kind="f32").folder
    alone = export_gguf_adapter(files, tmp_path / "alone.gguf", kind="f32").folder
    whole, plain, pairs = (contents_of(path)[1] for path in (merged, base, alone))
    for module in ("attn_q", f"ffn_gate{suffix}", f"ffn_up{suffix}"):
        name = f"blk.1.{module}.weight"
        A, B = pairs[f"{name}.lora_a"].data, pairs[f"{name}.lora_b"].data
        difference = whole[name].data - plain[name].data
        assert np.abs(difference).max() > 0.05
        np.testing.assert_allclose(difference, B @ A / len(A), atol=1e-5)


def test_an_adapter_of_attention_in_a_mixture_goes_alone(tmp_path: Path) -> None:
    source = saved_case("qwen3-moe", tmp_path / "source", mlp_only_layers=[])
    adapter = find_model(saved_adapter(source, tmp_path / "adapter", ["q_proj", "o_proj"]))
    done = export_gguf_adapter(adapter, tmp_path / "alone.gguf", kind="f32")
    _, tensors = contents_of(done.folder)
    assert {name.split(".", 2)[2] for name in tensors} == {
        f"{module}.weight.lora_{half}" for module in ("attn_q", "attn_output") for half in "ab"
    }


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("expert_count", 3, "its metadata makes it of 3 experts"),
        ("expert_count", 2**14, "its metadata makes it of 16384 experts"),
        ("block_count", 2**12, "layers are stated"),
        ("expert_used_count", 5, "there are 4 experts"),
        ("feed_forward_length", 23, "its metadata makes it"),
    ],
)
def test_a_file_that_states_other_experts_than_it_has_is_refused(
    key: str, value: int, problem: str, tmp_path: Path
) -> None:
    source = saved_case("mixtral", tmp_path / "source")
    path = export_gguf(find_model(source), tmp_path / "out.gguf", kind="f32").folder
    content = path.read_bytes()
    stated = f"llama.{key}".encode()
    place = content.index(stated) + len(stated) + 4  # after the type of the value
    path.write_bytes(content[:place] + value.to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(UserError, match=problem):
        import_gguf(path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_file_in_float16_comes_back_in_float16(tmp_path: Path) -> None:
    source = saved_case("mixtral", tmp_path / "source")
    path = export_gguf(find_model(source), tmp_path / "out.gguf", kind="f16").folder
    import_gguf(path, tmp_path / "back")
    back = model_state(load_decoder(tmp_path / "back"))
    assert {values.dtype for values in back.values()} == {torch.float16}
    for name, values in model_state(load_decoder(source)).items():
        torch.testing.assert_close(back[name], values.half(), atol=0, rtol=0)


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_that_share_a_matrix_hold_every_row_once(turned: bool) -> None:
    matrix = torch.arange(1.0, 3 * 7 * 4 + 1).reshape(21, 4)
    first = HeadRows(3, 7, ((0, 2),), turned=turned)
    second = HeadRows(3, 7, ((2, 1), (3, 4)))
    whole = first.apply(first.apply(matrix), undo=True)
    whole += second.apply(second.apply(matrix), undo=True)
    torch.testing.assert_close(whole, matrix, atol=0, rtol=0)
    heads = matrix.reshape(3, 7, 4)
    expected = heads[:, :2].transpose(1, 2) if turned else heads[:, :2]
    torch.testing.assert_close(first.apply(matrix), expected.flatten(0, 1), atol=0, rtol=0)
    rows = torch.cat([heads[:, 2:3].flatten(0, 1), heads[:, 3:].flatten(0, 1)])
    torch.testing.assert_close(second.apply(matrix), rows, atol=0, rtol=0)


def test_experts_in_mxfp4_are_written_and_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """From a folder as gpt-oss is published, and from a GGUF file as llama.cpp's conversion makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    fitting = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "intermediate_size": 32}
    source = saved_case("gpt-oss", tmp_path / "source", hidden_size=64, **fitting)
    stored = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    stacks: dict[str, torch.Tensor] = {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stacks[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))

    path = export_gguf(find_model(source), tmp_path / "out.gguf", kind="f32").folder
    _, tensors = contents_of(path)
    for layer in range(4):
        gate_up = stacks[f"model.layers.{layer}.mlp.experts.gate_up_proj"].float()  # [E, D, 2I]
        down = stacks[f"model.layers.{layer}.mlp.experts.down_proj"].float()
        for module, expected in (
            ("gate", gate_up[:, :, ::2]),
            ("up", gate_up[:, :, 1::2]),
            ("down", down),
        ):
            written = tensors[f"blk.{layer}.ffn_{module}_exps.weight"].data
            np.testing.assert_array_equal(written, expected.transpose(1, 2))

    # The same file with the experts in ggml's MXFP4, which holds them without another rounding.
    packed = tmp_path / "packed.gguf"
    repack(path, packed, gguf.GGMLQuantizationType.MXFP4)
    import_gguf(packed, tmp_path / "back", dtype="float32")
    back = model_state(load_decoder(tmp_path / "back"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    rows = stacks[name].float().transpose(1, 2)
    expected_rows = torch.cat((rows[:, ::2], rows[:, 1::2]), 1)
    torch.testing.assert_close(back[name], expected_rows, atol=0, rtol=0)


def repack(path: Path, out: Path, tensor_type: gguf.GGMLQuantizationType) -> None:
    """A copy of a file with the matrices of experts in another type, by the gguf package."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name.endswith("_exps.weight"):
            data = gguf.quants.quantize(np.array(tensor.data), tensor_type)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor_type)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
