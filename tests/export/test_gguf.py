"""A GGUF file computes what the model computes, comes back as it was, and harms nothing when it is made to."""

import json
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from gguf_graph_oracle import check_gguf
from gguf_models import saved_adapter, saved_case, saved_gemma4_pieces, saved_pieces
from safetensors.torch import load_file, save_file

import preloaded
from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export import gguf as gguf_export
from bloomery.export.gguf import export_gguf, export_gguf_adapter
from bloomery.export.gguf_format import GgufTensor, fallbacks, vocabulary
from bloomery.export.gguf_import import import_gguf, read_gguf
from bloomery.export.ollama import export_ollama
from bloomery.export.verify import error_bound
from bloomery.infer.model_folder import find_model
from bloomery.model.configs import read_config
from bloomery.model.io.weights import load_decoder, model_state
from models_for_tests import make_model

# Facts that llama.cpp's graph fixes, in cases that have others
FITTING = {
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {"query_pre_attn_scalar": 20},
    "seed-oss": {"attention_out_bias": False},
    "arcee": {"mlp_bias": False},
    "ernie4.5": {"use_bias": False},
    "glm": {"head_dim": 12},
    "gemma4-e2b": {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 320},
    "gemma4-e4b": {"vocab_size_per_layer_input": 320},
    "qwen3.5": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_value_head_dim": 8,
    },
    "qwen3-moe": {"mlp_only_layers": []},
    "qwen2-moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "olmoe": {"num_key_value_heads": 4},
    "gpt-oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "sliding_window": 128},
    "qwen3-next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_value_head_dim": 8,
        "mlp_only_layers": [],
    },
    "qwen3.5-moe": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_value_head_dim": 8,
    },
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "deepseek-v3": {
        "rope_parameters": tiny_models.YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
    },
    "deepseek-v2": {"topk_method": "greedy", "attention_bias": False},
    "glm4-moe-lite": {"rope_interleave": True},
    "glm4-moe": {"norm_topk_prob": True},
    "dots1": {
        "num_key_value_heads": 4,
        "head_dim": 12,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
    },
}
EXPORTED = ["gpt2", "llama3-gqa-tied", "gemma2", "qwen3", "lfm2", "granite", "ministral3"]
ALSO = [
    "gpt2-erf-wide",
    "llama2",
    "llama-biases-head-dim",
    "llama-linear",
    "llama-dynamic",
    "llama-yarn",
    "gemma",
    "mistral-window",
    "mistral-head-dim",
    "qwen2",
    "qwen2.5-window-tied",
    "gemma3",
    "smollm3",
    "olmo2",
    "phi3",
    "phi3-window",
    "phi4-partial",
    "phi3-longrope",
    "phi3-longrope-short",
    "granite4",
    "olmo3",
]
REFUSED = [
    "gpt2-unscaled",
    "llama-yarn-mscale",
    "qwen3-bias-yarn",
    "gemma2-uncapped",
    "smollm3-window",
    "olmo2-bias",
    "gemma-mqa-untied",
    "lfm2-bias",
    "granite4-unrotated",
    "exaone4",
]


def exported(
    case: str, folder: Path, kind: str = "f32", **changed
) -> tuple[Path, Path, tuple[str, ...]]:
    source = saved_case(case, folder / "source", **FITTING.get(case, {}) | changed)
    done = export_gguf(find_model(source), folder / "out.gguf", kind=kind)
    return source, done.folder, done.proofs


@pytest.mark.parametrize(
    "case", [*EXPORTED, *(pytest.param(case, marks=pytest.mark.soak) for case in ALSO)]
)
def test_every_family_computes_the_same_and_comes_back_whole(case: str, tmp_path: Path) -> None:
    source, path, proofs = exported(case, tmp_path)
    kinds = [proof.split()[0] for proof in proofs if not proof.startswith("differs")]
    assert kinds == ["tensors", "token"]
    check_gguf(path, find_model(source), kind="f32")
    import_gguf(path, tmp_path / "back")
    theirs, ours = (model_state(load_decoder(folder)) for folder in (source, tmp_path / "back"))
    assert ours.keys() == theirs.keys() | ({"lm_head.weight"} & ours.keys())
    for name, values in theirs.items():  # Gemma's norms have 1 added in the file
        torch.testing.assert_close(ours[name], values, atol=1e-6 if "norm" in name else 0, rtol=0)
    tokens = torch.arange(40)[None]
    limit = {
        "mistral-window": 8,
        "qwen2.5-window-tied": 8,
        "phi3-window": 8,
        "llama-dynamic": 24,
    }.get(case, 40)
    before, after = (
        load_decoder(folder)(tokens[:, :limit]).head for folder in (source, tmp_path / "back")
    )
    torch.testing.assert_close(
        after, before, atol=2e-3 if case == "gpt2-erf-wide" else 1e-5, rtol=0
    )


# Their graphs are compared with llama.cpp itself (`test_gguf_xllamacpp.py`).
OTHERS = [
    *("cohere2", "glm4", "nemotron", "stablelm-parallel", "qwen3.5", "gemma4-e2b"),
    *("qwen3-moe", "gpt-oss", "qwen3-next", "deepseek-v3", "gemma4-26b-a4b"),
]
OTHERS_ALSO = (
    "gemma4-e4b gemma4-31b gemma4-12b cohere hunyuan jais2 stablelm exaone4-full seed-oss arcee ernie4.5"
    " starcoder2 glm mixtral olmoe qwen2-moe granite-moe granite4-moe lfm2-moe qwen3.5-moe ernie4.5-moe"
    " deepseek-v2 glm4-moe-lite glm4-moe dots1"
).split()


@pytest.mark.parametrize(
    "case", [*OTHERS, *(pytest.param(case, marks=pytest.mark.soak) for case in OTHERS_ALSO)]
)
@torch.no_grad()
def test_a_file_without_an_oracle_comes_back_whole(case: str, tmp_path: Path) -> None:
    source, path, proofs = exported(case, tmp_path)
    assert [proof.split()[0] for proof in proofs if not proof.startswith("differs")] == [
        "tensors",
        "token",
    ]
    import_gguf(path, tmp_path / "back")
    before, after = (load_decoder(folder) for folder in (source, tmp_path / "back"))
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(after(tokens).head, before(tokens).head, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "case", [REFUSED[0], *(pytest.param(case, marks=pytest.mark.soak) for case in REFUSED[1:])]
)
def test_what_the_graph_cannot_compute_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"llama\.cpp's .* graph"):
        exported(case, tmp_path)
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".tmp*"))


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0"])
def test_types(kind: str, tmp_path: Path) -> None:
    source, path, proofs = exported("llama2", tmp_path, kind, hidden_size=64, intermediate_size=96)
    assert any(proof.startswith("tensors") and kind in proof for proof in proofs)
    check_gguf(path, find_model(source), kind=kind)
    stored = {
        tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(path).tensors
    }
    assert stored["blk.0.ffn_down.weight"] == kind
    assert stored["blk.0.attn_norm.weight"] == "f32"
    assert stored["output.weight"] == ("q8_0" if kind == "q4_0" else kind)


def test_an_adapter_is_merged_or_goes_alone(tmp_path: Path) -> None:
    """llama.cpp adds alpha / rank * B @ A, the rows of B in the order of its q and k."""
    source = saved_case("llama3-gqa-tied", tmp_path / "source")
    adapter = find_model(
        saved_adapter(source, tmp_path / "adapter", ["q_proj", "k_proj", "down_proj"])
    )
    merged = export_gguf(adapter, tmp_path / "merged.gguf", kind="f32")
    parity = check_gguf(merged.folder, adapter, kind="f32")
    assert parity.greedy == 53
    base = export_gguf(find_model(source), tmp_path / "base.gguf", kind="f32", verify=False)
    lora = export_gguf_adapter(adapter, tmp_path / "lora.gguf", kind="f32")
    facts = {name: field.contents() for name, field in gguf.GGUFReader(lora.folder).fields.items()}
    assert {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 1.0,
    }.items() <= facts.items()
    pairs, whole, plain = (
        {each.name: each.data for each in gguf.GGUFReader(path).tensors}
        for path in (lora.folder, merged.folder, base.folder)
    )
    for name in ("blk.0.attn_q.weight", "blk.1.attn_k.weight", "blk.3.ffn_down.weight"):
        A, B = pairs[f"{name}.lora_a"], pairs[f"{name}.lora_b"]
        assert np.abs(whole[name] - plain[name]).max() > 0.1
        np.testing.assert_allclose(whole[name], plain[name] + B @ A / len(A), atol=1e-5)
    with pytest.raises(UserError, match="full model"):
        export_gguf_adapter(find_model(source), tmp_path / "none.gguf")


def test_an_adapter_of_delta_nets_moves_its_rows_and_columns(tmp_path: Path) -> None:
    """llama.cpp has value heads in another order: the same file comes of merging first, and of adding B @ A there."""
    source = saved_case("qwen3.5", tmp_path / "source", **FITTING["qwen3.5"])
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    adapter = find_model(saved_adapter(source, tmp_path / "adapter", targets))
    merged = export_gguf(adapter, tmp_path / "merged.gguf", kind="f32").folder
    base = export_gguf(find_model(source), tmp_path / "base.gguf", kind="f32").folder
    lora = export_gguf_adapter(adapter, tmp_path / "lora.gguf", kind="f32").folder
    pairs, whole, plain = (
        {each.name: each.data for each in gguf.GGUFReader(path).tensors}
        for path in (lora, merged, base)
    )
    for target in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out"):
        name = f"blk.0.{target}.weight"
        A, B = pairs[f"{name}.lora_a"], pairs[f"{name}.lora_b"]
        assert np.abs(whole[name] - plain[name]).max() > 0.1
        np.testing.assert_allclose(whole[name], plain[name] + B @ A / len(A), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "each n-th layer"),
        ({"linear_value_head_dim": 12}, "values as wide as keys"),
    ],
)
def test_other_delta_nets_are_refused(changed: dict, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        exported("qwen3.5", tmp_path, **changed)


def test_an_adapter_of_what_makes_the_inputs_of_layers_is_merged_alone(tmp_path: Path) -> None:
    """llama.cpp adds no LoRA there, and would leave it out without a word."""
    source = saved_case("gemma4-e2b", tmp_path / "source", **FITTING["gemma4-e2b"])
    inside = ["q_proj", "per_layer_input_gate", "per_layer_projection"]
    adapter = find_model(saved_adapter(source, tmp_path / "inside", inside))
    pairs = gguf.GGUFReader(export_gguf_adapter(adapter, tmp_path / "lora.gguf").folder).tensors
    names = {tensor.name.split(".", 2)[2] for tensor in pairs}
    assert names == {
        f"{name}.weight.lora_{half}" for name in ("attn_q", "inp_gate", "proj") for half in "ab"
    }
    outside = saved_adapter(source, tmp_path / "outside", ["per_layer_model_projection"])
    with pytest.raises(UserError, match="per_layer_model_projection, where it adds none"):
        export_gguf_adapter(find_model(outside), tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"num_kv_shared_layers": 3}, "gives layer 3 the keys of layer 2, the model those of 1"),
        ({"layer_types": ["full_attention"] * 6, "num_kv_shared_layers": 0}, "one kind"),
    ],
)
def test_other_windows_than_llama_cpp_reads_are_refused(
    changed: dict, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        exported("gemma4-e2b", tmp_path, **changed)


def test_what_layers_with_the_keys_of_others_have_in_files_of_llama_cpp_is_left_out(
    tmp_path: Path,
) -> None:
    """Google's E2B has keys in them that nothing reads, and llama.cpp's conversion writes them."""
    source, path, _ = exported("gemma4-e2b", tmp_path)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "gemma4")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            sub = kinds[1] if len(kinds) > 1 else None
            writer.add_key_value(name, field.contents(), kinds[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("blk.4.attn_k.weight", np.ones((16, 48), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    import_gguf(tmp_path / "theirs.gguf", tmp_path / "back")
    before, after = (model_state(load_decoder(folder)) for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rows_that_no_block_divides_are_named(tmp_path: Path) -> None:
    _, path, proofs = exported("gpt2", tmp_path, "q8_0")
    assert "10 of 13 matrices are f16" in proofs[0]
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"F16", "F32", "Q8_0"}


@pytest.mark.parametrize("harm", ["order of q and k", "rope base", "norm"])
def test_the_oracle_finds_what_would_answer_nonsense(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harm == "order of q and k":
        apply = GgufTensor.apply
        monkeypatch.setattr(
            GgufTensor, "apply", lambda self, whole, *, undo=False: apply(self, whole, undo=True)
        )
    elif harm == "rope base":
        monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", lambda self, base: None)
    else:
        key = "llama.attention.layer_norm_rms_epsilon"
        monkeypatch.setattr(
            gguf.GGUFWriter, "add_layer_norm_rms_eps", lambda self, eps: self.add_float32(key, 1e-2)
        )
    files = find_model(saved_case("llama3-gqa-tied", tmp_path / "source"))
    done = export_gguf(files, tmp_path / "out.gguf", kind="f32", verify=False)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_gguf(done.folder, files, kind="f32")


def test_an_export_whose_merges_are_lost_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_merges", lambda self, merges: add(self, merges[:9])
    )
    with pytest.raises(UserError, match="tokens for"):
        exported("llama3-gqa-tied", tmp_path)
    assert not (tmp_path / "out.gguf").exists()


def test_a_tokenizer_without_merges_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    files = find_model(saved_case("llama3-gqa-tied", tmp_path / "source"))
    path = tmp_path / "source" / "tokenizer.json"
    description = json.loads(path.read_text())
    description["model"]["merges"] = []
    path.write_text(json.dumps(description))
    with pytest.raises(UserError, match="the tokenizer has no merges") as caught:
        export_gguf(files, tmp_path / "out.gguf", kind="f32")
    assert "--to merged" in caught.value.fix
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("harm", ["one number", "two rows", "two tensors"])
def test_an_export_with_other_numbers_is_refused(
    kind: str, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are changed on their way into the file, so that nothing but the check can notice."""
    encode = gguf_export.encoded
    earlier = dict[tuple[int, ...], np.ndarray]()

    def harmed(values: torch.Tensor, stored_as: str, name: str) -> np.ndarray:
        if values.ndim == 1:
            return encode(values, stored_as, name)
        if harm == "one number":
            values = values.clone()
            values[0, 0] += 0.5 * values[0, :32].abs().max()
        elif harm == "two rows":
            values = values[[1, 0, *range(2, len(values))]]
        own = encode(values, stored_as, name)
        return earlier.setdefault(own.shape, own) if harm == "two tensors" else own

    monkeypatch.setattr(gguf_export, "encoded", harmed)
    with pytest.raises(UserError, match="is not the model's: its error is"):
        exported("llama2", tmp_path, kind, hidden_size=64, intermediate_size=96)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1"])
def test_the_error_of_a_type_is_within_its_bound(kind: str) -> None:
    """Numbers as they are, tiny and large, blocks of one sign, and blocks with one outlier."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(64, 256, generator=random) * torch.logspace(-9, 2, 64)[:, None]
    values[::4] = values[::4].abs()
    values[1::4, ::32] *= 50
    tensor_type = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values.numpy(), tensor_type)
    errors = (torch.from_numpy(gguf.quants.dequantize(stored, tensor_type)) - values).abs()
    bounds = error_bound(values, kind)
    assert bool((errors <= bounds * (1 + 1e-5)).all())
    assert kind == "F32" or float((errors / bounds).max()) > 0.3, "the bound is not a loose one"


def test_metadata_and_bytes(tmp_path: Path) -> None:
    source = saved_case("llama3-gqa-tied", tmp_path / "source")
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    files = find_model(source)
    first = export_gguf(files, tmp_path / "a.gguf")
    again = export_gguf(files, tmp_path / "b" / "a.gguf", verify=False)
    assert first.folder.read_bytes() == again.folder.read_bytes()
    assert any(proof.startswith("template") for proof in first.proofs)
    facts = {name: field.contents() for name, field in gguf.GGUFReader(first.folder).fields.items()}
    tokenizer = load_tokenizer(source)
    assert {
        "general.architecture": "llama",
        "general.name": "a",
        "general.license": "apache-2.0",
        "general.file_type": 1,
        "llama.context_length": 64,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.ggml.add_bos_token": True,
    }.items() <= facts.items()
    assert facts["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 3, 1]
    assert "rope_freqs.weight" in {tensor.name for tensor in gguf.GGUFReader(first.folder).tensors}


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def split(expression: str) -> dict:
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


PRE = {
    "gpt-2": [LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, LEVEL],
    "qwen2": [split(LATER % ""), LEVEL | {"use_regex": False}],
    "llama-bpe": [split(LATER % "{1,3}"), LEVEL | {"use_regex": False}],
    "dbrx": [split(LATER % "{1,3}"), LEVEL | {"use_regex": False}],
}


@pytest.mark.parametrize("name", PRE)
def test_the_pre_tokenizer_is_found_by_how_it_splits(name: str, tmp_path: Path) -> None:
    make_model(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE[name]}
    description["model"]["ignore_merges"] = name == "llama-bpe"
    assert vocabulary(description, 320, where="").pre == name
    other = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, *PRE["gpt-2"]],
    }
    with pytest.raises(UserError, match="splits words in another way"):
        vocabulary({**description, "pre_tokenizer": other}, 320, where="")


def test_no_other_model_is_named_phi_3(tmp_path: Path) -> None:
    """llama.cpp looks the tokens of Phi-3 up in every model of that name, and fails without them."""
    source = make_model(tmp_path / "source")
    done = export_gguf(find_model(source), tmp_path / "like-Phi-3.gguf", verify=False)
    assert gguf.GGUFReader(done.folder).fields["general.name"].contents() == "like-phi_3"


def test_a_few_rows_at_a_time_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but q and k, whose heads are reordered as a whole."""
    files = find_model(
        saved_case("llama2", tmp_path / "source", hidden_size=64, intermediate_size=128)
    )
    whole = export_gguf(files, tmp_path / "a" / "out.gguf", verify=False).folder.read_bytes()
    largest, encode = dict[str, int](), gguf_export.encoded

    def watched(values: torch.Tensor, kind: str, name: str) -> np.ndarray:
        largest[name] = max(largest.get(name, 0), values.nbytes)
        return encode(values, kind, name)

    monkeypatch.setattr(gguf_export, "encoded", watched)
    monkeypatch.setattr("bloomery.model.io.safetensors.STAGE_BYTES", 2048)
    parts = export_gguf(files, tmp_path / "b" / "out.gguf", verify=False).folder.read_bytes()
    assert parts == whole
    assert (
        max(size for name, size in largest.items() if "attn_q" not in name and "attn_k" not in name)
        <= 2048
    )


PEAK = """
import sys
from pathlib import Path
from bloomery.export.gguf import export_gguf
from bloomery.infer.model_folder import find_model
export_gguf(find_model(Path(sys.argv[1])), Path(sys.argv[1] + ".gguf"), verify=False)
(peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(peak.split()[1])  # the ru_maxrss of a child includes that of its parent
"""


@pytest.mark.soak
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Twelve times the layers and four times the width of the MLP: 400 MB more on disk, hardly more in memory."""
    peaks = []
    for layers, wide in ((2, 2048), (24, 8192)):
        sizes = {"hidden_size": 512, "intermediate_size": wide, "num_hidden_layers": layers}
        folder = saved_case("llama2", tmp_path / f"model-{layers}", torch_dtype="bfloat16", **sizes)
        done = subprocess.run([sys.executable, "-c", PEAK, folder], capture_output=True, text=True)
        peaks.append(int(done.stdout) // 1024)
    assert (
        (tmp_path / "model-24.gguf").stat().st_size
        > 600e6
        > 10 * (tmp_path / "model-2.gguf").stat().st_size
    )
    assert peaks[1] - peaks[0] < 100, peaks  # MiB


def test_weights_that_are_not_finite_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for value, problem in ((float("nan"), "not finite"), (1e6, "65,504")):
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = value
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(UserError, match=problem):
            export_gguf(find_model(source), tmp_path / "out.gguf", kind="f16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_model(tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_export, "encoded", full)
    with pytest.raises(UserError, match="No space left"):
        export_gguf(find_model(source), tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.01, 0.0, 0.6, 0.999])
@pytest.mark.parametrize(
    "what",
    [
        "gguf",
        "gguf-adapter",
        *(pytest.param(what, marks=pytest.mark.soak) for what in ("ollama", "import")),
    ],
)
def test_a_disk_that_fills_at_any_byte_leaves_nothing(
    what: str, share: float, tmp_path: Path
) -> None:
    """The kernel refuses to let a file grow beyond a limit, in the header or at its end."""
    source = saved_case("llama3-gqa-tied", tmp_path / "source")
    adapter = (
        saved_adapter(source, tmp_path / "adapter", ["q_proj"])
        if what == "gguf-adapter"
        else source
    )
    whole = export_gguf(
        find_model(source), tmp_path / "whole.gguf", kind="f32", verify=False
    ).folder
    write = {
        "gguf": lambda out: export_gguf(
            find_model(source), out.with_suffix(".gguf"), kind="f32", verify=False
        ),
        "gguf-adapter": lambda out: export_gguf_adapter(
            find_model(adapter), out.with_suffix(".gguf"), kind="f32"
        ),
        "ollama": lambda out: export_ollama(find_model(source), out, kind="f32", verify=False),
        "import": lambda out: import_gguf(whole, out),
    }[what]
    write(tmp_path / "good")
    made = tmp_path / "good" if (tmp_path / "good").is_dir() else tmp_path / "good.gguf"
    largest = max(path.stat().st_size for path in ([*made.iterdir()] if made.is_dir() else [made]))
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * largest), limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write the export"):
            write(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == before
    write(tmp_path / "out")


KILLED = """
import os, signal, sys
from pathlib import Path
from bloomery.export import gguf
from bloomery.infer.model_folder import find_model
encode, left = gguf.encoded, [int(sys.argv[2])]
def counted(*given):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*given)
gguf.encoded = counted
print("ready", flush=True)
gguf.export_gguf(find_model(Path(sys.argv[1])), Path("out.gguf"), kind="f32", verify=len(sys.argv) > 3)
"""


def test_a_killed_export_leaves_no_file_and_the_next_one_clears_its_draft(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source")
    done = preloaded.run([sys.executable, "-c", KILLED, source, "9"], cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    (draft,) = [path.name for path in tmp_path.iterdir() if path != source]
    assert draft.startswith(".tmp-out.gguf-")
    export_gguf(find_model(source), tmp_path / "out.gguf", verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "source"]


@pytest.mark.soak
def test_exports_killed_at_any_moment(tmp_path: Path) -> None:
    source = saved_case(
        "llama3-gqa-tied", tmp_path / "source", hidden_size=256, intermediate_size=1024
    )
    draw = random.Random(0)

    def start() -> subprocess.Popen[str]:
        words = [sys.executable, "-c", KILLED, source, "0", "verify"]
        child = preloaded.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        return child

    undisturbed = start()
    began = time.monotonic()  # once it is ready: its imports take longer than the export
    assert undisturbed.wait() == 0
    seconds, path, ends = time.monotonic() - began, tmp_path / "out.gguf", []
    whole = path.read_bytes()
    path.unlink()
    for _ in range(25):
        child = start()
        time.sleep(draw.uniform(0, 1.1 * seconds))
        child.kill()
        ends.append(child.wait())
        if path.exists():
            assert path.read_bytes() == whole
            path.unlink()
    assert -signal.SIGKILL in ends
    assert start().wait() == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.gguf", "source"]


def test_without_the_package_the_error_has_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model(tmp_path / "source")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError) as raised:
        export_gguf(find_model(source), tmp_path / "out.gguf")
    assert raised.value.fix.endswith("pip install 'gguf>=0.17'")


def test_a_model_with_a_sentencepiece_file_alone(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder, _, lines = saved_pieces(tmp_path / "sp", 420)
    done = export_gguf(find_model(folder), tmp_path / "out.gguf", kind="f32")
    assert any(proof.startswith("token ids   equal") for proof in done.proofs)
    facts = {name: field.contents() for name, field in gguf.GGUFReader(done.folder).fields.items()}
    assert (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.bos_token_id"]) == ("llama", 1)
    import_gguf(done.folder, tmp_path / "back")
    for text in [*lines[:40], "größer 世界  x"]:
        assert load_tokenizer(tmp_path / "back").encode(text) == load_tokenizer(folder).encode(text)


def test_gemma_4_states_its_merges(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder, lines = saved_gemma4_pieces(tmp_path / "sp")
    done = export_gguf(find_model(folder), tmp_path / "out.gguf", kind="f32")
    assert any(proof.startswith("token ids   equal") for proof in done.proofs)
    facts = {name: field.contents() for name, field in gguf.GGUFReader(done.folder).fields.items()}
    assert facts["tokenizer.ggml.model"] == "gemma4"
    import_gguf(done.folder, tmp_path / "back")
    before, after = load_tokenizer(folder), load_tokenizer(tmp_path / "back")
    assert after.prefix == before.prefix == [before.bos_id]
    for text in [*lines[:40], "größer 世界  x\n\n\n y"]:
        assert after.encode(text) == before.encode(text)
        assert after.decode(after.encode(text)) == text


def test_rows_that_no_k_block_divides_are_named(tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path))
    assert [note.split(":")[0] for note in fallbacks(config, "q4_K_M")] == [
        "16 of 16 matrices are a larger type"
    ]
    assert not list(
        fallbacks(replace(config, hidden_size=256, intermediate_size=256, head_dim=128), "q6_K")
    )


def test_k_types_need_their_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_model(tmp_path / "source")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="llama-quantize"):
        export_gguf(find_model(source), tmp_path / "out.gguf", kind="q4_K_M")


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    words = ["export", "model", "--to", "gguf", "--type", "f32", "--devices", "cpu", "--out"]
    done = CliRunner().invoke(cli, [*words, "new/model.gguf"], catch_exceptions=False)
    assert (
        done.stdout.startswith("export     new/model.gguf (") and done.stderr.count("verified") == 2
    )
    back = CliRunner().invoke(
        cli, ["import", "new/model.gguf", "--out", "back"], catch_exceptions=False
    )
    assert back.stdout.startswith("import     back (")
    assert read_config(Path("back")) == read_config(Path("model"))
    text = "def f(x): größer 東京 <s>"
    one, other = (
        load_tokenizer(Path(name)).encode(text, special=True) for name in ("back", "model")
    )
    assert one == other
    for out, problem in (("new/model.gguf", "exists"), ("plain", "ends in .gguf")):
        raised = CliRunner().invoke(cli, [*words, out]).exception
        assert isinstance(raised, UserError) and problem in raised.problem


def test_quantize_is_another_name_of_type(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    for number, (option, kind) in enumerate(
        (("--type", "q8_0"), ("--quantize", "Q8_0"), ("--quant", "q8_0"))
    ):
        words = [
            "export",
            str(tmp_path / "model"),
            "--to",
            "gguf",
            option,
            kind,
            "--no-verify",
            "--out",
        ]
        done = CliRunner().invoke(
            cli, [*words, str(tmp_path / f"{number}.gguf")], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
    made = [(tmp_path / f"{number}.gguf").stat().st_size for number in range(3)]
    assert made[0] == made[1] == made[2]
    refused = CliRunner().invoke(cli, [*words[:5], "q4_k_x", "--out", str(tmp_path / "x")])
    assert (
        refused.exit_code == 2
        and "--quantize" in refused.output
        and "q4_k_m" in refused.output.lower()
    )


# Files made to harm


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, count) + rest


def tensor(
    name: str = "t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HOSTILE = {
    "empty": b"",
    "magic": b"GGML" + bytes(40),
    "version": header(version=99, rest=bytes(64)),
    "2^63 tensors": header(2**63, 0, bytes(64)),
    "2^63 keys": header(0, 2**63, bytes(64)),
    "2^63 letters": header(0, 1, struct.pack("<Q", 2**63) + bytes(64)),
    "value of 2^63 letters": header(0, 1, text("k") + struct.pack("<IQ", 8, 2**63) + bytes(64)),
    "2^40 numbers": header(0, 1, array(4, 2**40, bytes(64))),
    "2^40 texts": header(0, 1, array(8, 2**40, bytes(64))),
    "2^64 / 4 numbers": header(0, 1, array(4, 2**62, bytes(64))),
    "nested": header(0, 1, array(9, 1, struct.pack("<IQ", 9, 1) * 50_000)),
    "unknown type": header(0, 1, text("k") + struct.pack("<I", 77) + bytes(64)),
    "not UTF-8": header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64)),
    "same key twice": header(0, 2, (text("k") + struct.pack("<II", 4, 1)) * 2 + bytes(32)),
    "same tensor twice": header(2, 0, tensor() * 2 + bytes(512)),
    "outside": header(1, 0, tensor(offset=2**40) + bytes(512)),
    "huge shape": header(1, 0, tensor(shape=(2**40, 2**40)) + bytes(512)),
    "wrapping shape": header(1, 0, tensor(shape=(2**63, 2, 2**63, 2)) + bytes(512)),
    "many dimensions": header(1, 0, text("t") + struct.pack("<I", 2**31) + bytes(512)),
    "unknown tensor type": header(1, 0, tensor(kind=999) + bytes(512)),
    "in two places of one": header(2, 0, tensor("a") + tensor("b") + bytes(512)),
    "a gap": header(2, 0, tensor("a") + tensor("b", offset=256) + bytes(1024)),
    "more bytes than tensors": header(1, 0, tensor() + bytes(4096)),
    "many entries": header(
        0, 2, (array(0, 2**21 + 1, bytes(2**21 + 1)) * 2).replace(b"k", b"l", 1)
    ),
    "alignment 0": header(
        1, 1, text("general.alignment") + struct.pack("<II", 4, 0) + tensor() + bytes(512)
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(HOSTILE[name])
    begin = time.process_time()
    with pytest.raises(UserError, match="not a valid GGUF file"):
        import_gguf(path, tmp_path / "out")
    assert time.process_time() - begin < 2
    assert [each.name for each in tmp_path.iterdir()] == ["bad.gguf"]


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """NaN and infinity as weights, and as the scale of a block."""
    for kind in ("f16", "q8_0"):
        _, path, _ = exported("llama2", tmp_path / kind, kind, hidden_size=64, intermediate_size=96)
        content = bytearray(path.read_bytes())
        tensors = gguf.GGUFReader(path).tensors
        place = next(each for each in tensors if each.name == "blk.1.ffn_up.weight")
        for number in (b"\xff\xff", b"\x00\x7c"):  # NaN and infinity as float16
            content[place.data_offset : place.data_offset + 2] = number
            path.write_bytes(content)
            with pytest.raises(
                UserError, match=r"blk\.1\.ffn_up\.weight holds numbers that are not finite"
            ):
                import_gguf(path, tmp_path / "out")
            assert not (tmp_path / "out").exists()


def test_numbers_beyond_the_range_of_the_type_are_refused(tmp_path: Path) -> None:
    _, path, _ = exported("llama2", tmp_path, "f32")
    content = bytearray(path.read_bytes())
    place = next(
        each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight"
    )
    content[place.data_offset : place.data_offset + 4] = struct.pack("<f", 1e6)
    path.write_bytes(content)
    with pytest.raises(UserError, match="beyond the range of float16"):
        import_gguf(path, tmp_path / "out", dtype="float16")
    import_gguf(path, tmp_path / "out")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("quarter", range(4))
def test_a_header_value_that_changes_the_bytes_read_is_refused(
    quarter: int, tmp_path: Path
) -> None:
    """Every type and offset of a quarter of the tensors, each changed to all others: no file reads other bytes."""
    _, path, _ = exported("llama2", tmp_path, "f16")
    content, other = path.read_bytes(), tmp_path / "other.gguf"
    for one in gguf.GGUFReader(path).tensors[quarter::4]:
        type_at = content.index(text(one.name)) + 8 + len(one.name) + 4 + 8 * len(one.shape)
        own_type, own_offset = struct.unpack_from("<IQ", content, type_at)
        changes = [(kind, own_offset) for kind in range(40) if kind != own_type]
        changes += [(own_type, own_offset + 32 * step) for step in (-4, -1, 1, 64)]
        changes += [(own_type, 0)] * (own_offset > 0)
        for kind, offset in changes:
            changed = bytearray(content)
            struct.pack_into("<IQ", changed, type_at, kind, offset % 2**64)
            other.write_bytes(changed)
            with pytest.raises(UserError):
                import_gguf(other, tmp_path / "out")


def test_a_folder_is_refused_with_what_to_use(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    raised = (
        CliRunner()
        .invoke(cli, ["import", str(tmp_path / "model"), "--out", str(tmp_path / "out")])
        .exception
    )
    assert isinstance(raised, UserError) and "as it is" in raised.fix


def fuzzed(rounds: int, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    export_gguf(find_model(tmp_path / "model"), tmp_path / "good.gguf", verify=False)
    good, choose, path = (
        (tmp_path / "good.gguf").read_bytes(),
        random.Random(0),
        tmp_path / "bad.gguf",
    )
    end = len(good) - sum(
        block.data.nbytes for block in read_gguf(tmp_path / "good.gguf")[1].values()
    )
    for _ in range(rounds):
        content = bytearray(good)
        for _ in range(choose.choice((1, 1, 2, 8))):
            at = choose.randrange(4, end)
            content[at : at + 8] = choose.choice(
                (bytes(8), b"\xff" * 8, struct.pack("<Q", 2**63), choose.randbytes(8))
            )
        path.write_bytes(content[: choose.choice((len(content), len(content), end, at))])
        begin = time.process_time()
        try:
            import_gguf(path, tmp_path / "out")
            shutil.rmtree(tmp_path / "out")
        except UserError:
            assert not (tmp_path / "out").exists()
        assert time.process_time() - begin < 5


def test_fuzzed_headers_are_read_or_refused(tmp_path: Path) -> None:
    fuzzed(25, tmp_path)


@pytest.mark.soak
def test_many_fuzzed_headers_are_read_or_refused(tmp_path: Path) -> None:
    fuzzed(1500, tmp_path)


def test_every_float_of_a_quantized_file_is_what_the_package_makes_of_it(tmp_path: Path) -> None:
    _, path, _ = exported("llama2", tmp_path, "q8_0", hidden_size=64, intermediate_size=96)
    import_gguf(path, tmp_path / "back", dtype="float32")
    stored = next(
        each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_up.weight"
    )
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    found = load_file(tmp_path / "back" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(found.numpy(), expected)
