"""llama.cpp itself, as the xllamacpp package has it prebuilt, continues texts as the model does."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
import torch
from gguf_models import (
    saved_adapter,
    saved_case,
    saved_expert_adapter,
    saved_gemma4_pieces,
    tokens,
)
from safetensors.torch import load_file, save_file

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.gguf import export_gguf, export_gguf_adapter
from bloomery.export.verify import TEXTS
from bloomery.infer.model_folder import find_model
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder

llama_cpp = pytest.importorskip("xllamacpp", reason="not installed: pip install xllamacpp")
pytestmark = pytest.mark.soak
CASES = (
    "llama-yarn olmo3 ministral3 granite granite4 lfm2 hunyuan cohere cohere2 glm glm4 nemotron jais2 stablelm"
    " stablelm-parallel exaone4-full seed-oss arcee ernie4.5 starcoder2 exaone4 qwen3.5"
    " gemma4-e2b gemma4-e2b-small-gates gemma4-e4b gemma4-31b gemma4-12b"
    " qwen3-moe mixtral olmoe qwen2-moe gpt-oss granite-moe granite4-moe lfm2-moe qwen3-next qwen3.5-moe"
    " ernie4.5-moe deepseek-v3 deepseek-v2 glm4-moe-lite glm4-moe dots1 gemma4-26b-a4b"
).split()
DEEPSEEK_YARN = tiny_models.YARN | {"mscale": 0.8, "mscale_all_dim": 0.8}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_value_head_dim": 32,
    "linear_key_head_dim": 32,
}
FITTING = {  # what their graphs need
    "qwen3-moe": {"mlp_only_layers": []},
    "qwen2-moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "olmoe": {"num_key_value_heads": 4},
    "gpt-oss": {
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_parameters": tiny_models.YARN | {"rope_theta": 15e4},
    },
    "qwen3-next": HYBRID | {"mlp_only_layers": []},
    "qwen3.5-moe": HYBRID,
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "deepseek-v3": {"rope_parameters": DEEPSEEK_YARN},
    "deepseek-v2": {"topk_method": "greedy", "attention_bias": False},
    "glm4-moe-lite": {"rope_interleave": True, "rms_norm_eps": 1e-6},
    "dots1": {
        "num_key_value_heads": 4,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
    },
    "qwen3.5": HYBRID,
    "seed-oss": {"attention_out_bias": False},
    "arcee": {"mlp_bias": False},
    "ernie4.5": {"use_bias": False},
    "starcoder2": {"sliding_window": None},
    "exaone4": {"sliding_window_pattern": 4, "num_hidden_layers": 64},
    "gemma4-e2b": {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 320},
    "gemma4-e4b": {"vocab_size_per_layer_input": 320},
}
# Of a log-probability; ggml takes GELU from a table in float16.
LIMITS = {"starcoder2": 3e-3, "gemma4-e2b-small-gates": 2e-2}
# Their gates are so large that GELU is x or 0, which no table rounds; norms take the size away again.
LARGE_GATES = ("gemma4-26b-a4b", "gemma4-e2b", "gemma4-e4b", "gemma4-31b", "gemma4-12b")
CONTEXT = 128
SIZES = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": CONTEXT}


def server_of(path: Path, lora: Path | None = None) -> Any:
    """Keys and values stay float32, and one thread computes."""
    settings = llama_cpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx = CONTEXT
    if lora is not None:
        adapter = llama_cpp.CommonAdapterLoraInfo()
        adapter.path = str(lora)
        adapter.scale = 1.0
        settings.lora_adapters = [adapter]
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.warmup = False
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return llama_cpp.Server(settings)


def enlarge_gates(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "per_layer_input_gate.weight")):
            weight *= 2**20
        if name.endswith("experts.gate_up_proj"):
            weight[:, : weight.shape[1] // 2] *= 2**20
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_llama_cpp_continues_a_text_as_the_model_does(case: str, tmp_path: Path) -> None:
    name = case.removesuffix("-small-gates")
    source = saved_case(name, tmp_path / "source", **SIZES | FITTING.get(name, {}))
    if case in LARGE_GATES:
        enlarge_gates(source)
    path = export_gguf(find_model(source), tmp_path / "out.gguf", kind="f32").folder
    assert_same_texts(load_decoder(source), server_of(path), LIMITS.get(case, 1e-4))


def assert_same_texts(decoder: Decoder, server: Any, limit: float) -> None:
    """Both continue a text with the same tokens, and give each the same log-probability."""
    text = tokens(24)
    compared = 0
    for _ in range(24):
        expected = decoder(torch.tensor([text])).head[0, -1].log_softmax(-1)
        answer = server.handle_completions(
            {"prompt": text, "n_predict": 1, "temperature": 0, "n_probs": 320}
        )
        # Of a token that is half a letter llama.cpp's server tells nothing.
        if told := answer["choices"][0]["logprobs"]:
            top = told["content"][0]["top_logprobs"]
            assert top[0]["id"] == int(expected.argmax())
            for entry in top:
                difference = abs(entry["logprob"] - float(expected[entry["id"]]))
                assert difference < limit
            compared += 1
        text.append(int(expected.argmax()))
    assert compared > 5


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTED = {
    "qwen2-moe": [*ATTENTION, *MLP, "shared_expert_gate"],
    "granite4": ["q_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"],
    "granite4-moe": [*ATTENTION, "shared_mlp.input_linear", "shared_mlp.output_linear"],
    "lfm2-moe": ["q_proj", "self_attn.out_proj", "conv.in_proj", "conv.out_proj", "w1", "w3"],
    "qwen3-next": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "linear_attn.out_proj", *MLP],
    "qwen3.5-moe": [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", *MLP],
    "deepseek-v3": ["o_proj", *(f"shared_experts.{name}" for name in MLP)],
}


@pytest.mark.parametrize("case", ADAPTED)
@torch.no_grad()
def test_llama_cpp_adds_an_adapter_to_every_module(case: str, tmp_path: Path) -> None:
    source = saved_case(case, tmp_path / "source", **SIZES | FITTING.get(case, {}))
    with torch.enable_grad():
        files = find_model(saved_adapter(source, tmp_path / "adapter", ADAPTED[case]))
    base = export_gguf(find_model(source), tmp_path / "base.gguf", kind="f32").folder
    lora = export_gguf_adapter(files, tmp_path / "lora.gguf", kind="f32").folder
    assert_same_texts(load_decoder(files.weights, base=source), server_of(base, lora), 1e-4)


@pytest.mark.parametrize("case", ["qwen3-moe", "gpt-oss"])
@torch.no_grad()
def test_llama_cpp_adds_an_adapter_of_experts(case: str, tmp_path: Path) -> None:
    source = saved_case(case, tmp_path / "source", **SIZES | FITTING[case])
    files = find_model(saved_expert_adapter(source, tmp_path / "adapter"))
    base = export_gguf(find_model(source), tmp_path / "base.gguf", kind="f32").folder
    lora = export_gguf_adapter(files, tmp_path / "lora.gguf", kind="f32").folder
    adapted = load_decoder(files.weights, base=source)
    text = torch.tensor([tokens(24)])
    assert (adapted(text).head - load_decoder(source)(text).head).abs().max() > 0.01
    assert_same_texts(adapted, server_of(base, lora), 1e-4)


def test_llama_cpp_cuts_texts_by_the_merges_of_gemma_4(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder, lines = saved_gemma4_pieces(tmp_path / "sp")
    server = server_of(export_gguf(find_model(folder), tmp_path / "out.gguf", kind="f32").folder)
    tokenizer = load_tokenizer(folder)
    for text in [*TEXTS, *lines[:40], "a\n\nb\n\n\n"]:
        if "<" in text:  # the server reads markup in a text as tokens
            continue
        asked = {"content": text, "add_special": True}
        answer = httpx.post(f"{server.listening_address}/tokenize", json=asked).json()
        assert answer["tokens"] == [*tokenizer.prefix, *tokenizer.encode(text)], text
