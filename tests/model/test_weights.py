"""Reading and writing weights: in place, from shards, and never from where they should not come."""

import json
import os
import pickle
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import saved_reference, tiny_reference, tokens
from torch.testing import assert_close

import bloomery
from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.hf_config import config_from_hf
from bloomery.model.io.safetensors import to_hf_names
from bloomery.model.io.stored import tensor_locations
from bloomery.model.io.weights import fresh_decoder, load_decoder, model_state, write_model

SHAPES = ["gpt2", "phi3", "qwen3", "gemma2", "olmo2", "llama2"]
INDEX = "model.safetensors.index.json"


def equal_states(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return state.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in state.items()
    )


@pytest.mark.parametrize("case", SHAPES)
def test_names_translate_both_ways(case: str) -> None:
    their_model = tiny_reference(case)
    config = config_from_hf(their_model.config.to_dict())
    their_state = {name: parameter.detach() for name, parameter in their_model.named_parameters()}
    our_state = {
        name: (
            their_state[location.name].t() if location.transposed else their_state[location.name]
        )[location.first : location.first + location.rows]
        for name, location in tensor_locations(config).items()
    }
    assert our_state.keys() == model_state(fresh_decoder(config, seed=0)).keys()
    assert equal_states(to_hf_names(our_state, config), their_state)


@pytest.mark.parametrize("case", ["gpt2", "phi3", "llama2"])
@torch.no_grad()
def test_shards_are_read_and_written(case: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    their_model = tiny_reference(case)
    their_model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / INDEX).exists()
    our_model = load_decoder(tmp_path / "theirs")
    assert_close(our_model(tokens()).head, their_model(tokens()).logits, atol=1e-4, rtol=0)
    (tmp_path / "ours").mkdir()
    write_model(model_state(our_model), our_model.config, tmp_path / "ours", shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    assert equal_states(model_state(load_decoder(tmp_path / "ours")), model_state(our_model))
    reloaded_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert torch.equal(reloaded_model(tokens()).logits, their_model(tokens()).logits)


def test_bloomery_load_opens_a_folder(tmp_path: Path) -> None:
    saved_reference("qwen3", tmp_path)
    decoder = bloomery.load(str(tmp_path), device="cpu").decoder
    assert not decoder.training
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_file_is_kept_unless_another_is_given(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_reference("gpt2").to(dtype).save_pretrained(tmp_path)
    assert {p.dtype for p in load_decoder(tmp_path).parameters()} == {dtype}
    assert {p.dtype for p in load_decoder(tmp_path, dtype=torch.float32).parameters()} == {
        torch.float32
    }
    decoder = load_decoder(tmp_path)
    (tmp_path / "written").mkdir()
    write_model(model_state(decoder), decoder.config, tmp_path / "written")
    assert json.loads((tmp_path / "written" / "config.json").read_text())["dtype"] == str(
        dtype
    ).removeprefix("torch.")


def test_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    saved_reference("llama2", tmp_path)
    path = tmp_path / "model.safetensors"
    old_buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((6,), float("nan"))}
    save_file(load_file(path) | old_buffers, path)
    assert bool(torch.isfinite(load_decoder(tmp_path)(tokens()).head).all())


PROBE = """
import sys
from pathlib import Path
from bloomery.model.io.weights import load_decoder
def peak(): return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
load_decoder(Path(sys.argv[2]))  # what torch imports on the way is not the model's
before = peak()
decoder = load_decoder(Path(sys.argv[1]))
size = sum(p.nbytes for p in decoder.parameters())
print((peak() - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gpt2", "llama"])  # the first transposes what it loads
def test_loading_makes_no_second_copy(family: str, tmp_path: Path) -> None:
    """200 MB: the peak of resident memory, mapped files included, stays below 1.2 times the model."""
    sizes = dict(
        hidden_size=512,
        intermediate_size=2048,
        num_layers=14,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
    )
    gpt2 = {
        "norm": "layer",
        "gated_mlp": False,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "family": "gpt2",
        "tie_embeddings": True,
    }
    config = ModelConfig(
        vocab_size=8000, max_positions=1024, **sizes, **(gpt2 if family == "gpt2" else {})
    )
    for name, saved_config in (
        ("large", config),
        ("small", replace(config, vocab_size=10, num_layers=1)),
    ):
        (tmp_path / name).mkdir()
        write_model(model_state(fresh_decoder(saved_config, seed=0)), saved_config, tmp_path / name)
    command = [sys.executable, "-c", PROBE, str(tmp_path / "large"), str(tmp_path / "small")]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < 1.2


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tiny_reference("llama2").save_pretrained(tmp_path / "model", max_shard_size="40KB")
        return tmp_path / "model"

    def assert_refused(self, folder: Path, problem: str) -> None:
        with pytest.raises(UserError, match=problem) as refusal:
            load_decoder(folder)
        assert str(folder) in str(refusal.value)

    def edit(self, folder: Path, change: dict) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= change
        (folder / INDEX).write_text(json.dumps(index))

    def test_a_folder_without_weights(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        (tmp_path / "model.safetensors").unlink()
        self.assert_refused(tmp_path, "no model.safetensors")

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))
        self.assert_refused(tmp_path, "pickle")

    def test_a_missing_shard(self, folder: Path) -> None:
        next(iter(folder.glob("model-*.safetensors"))).unlink()
        self.assert_refused(folder, "missing")

    @pytest.mark.parametrize(
        "name", ["../secret.safetensors", "/etc/passwd", "", ".", "a/b.safetensors", "..\x00"]
    )
    def test_a_shard_outside_the_folder(self, folder: Path, name: str) -> None:
        save_file({"x": torch.zeros(1)}, folder.parent / "secret.safetensors")
        self.edit(folder, {"model.norm.weight": name})
        self.assert_refused(folder, "not a file of this folder|missing")

    def test_a_link_that_leads_out_of_the_folder(self, folder: Path) -> None:
        shard = sorted(folder.glob("model-*.safetensors"))[0]
        shard.rename(folder.parent / "elsewhere.safetensors")
        shard.symlink_to(folder.parent / "elsewhere.safetensors")
        self.assert_refused(folder, "link that leads out")

    def test_the_links_of_the_hubs_cache_are_followed(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--x" / "snapshots" / "abc"
        blobs = tmp_path / "models--x" / "blobs"
        saved_reference("llama2", snapshot)
        blobs.mkdir()
        for path in list(snapshot.iterdir()):
            path.rename(blobs / path.name)
            path.symlink_to(os.path.relpath(blobs / path.name, snapshot))
        assert load_decoder(snapshot).config.num_layers == 4

    def test_a_tensor_in_two_shards(self, folder: Path) -> None:
        shards = sorted(folder.glob("model-*.safetensors"))
        save_file(load_file(shards[1]) | load_file(shards[0]), shards[1])
        self.assert_refused(folder, "two shards")

    def test_a_tensor_in_no_shard(self, folder: Path) -> None:
        name = sorted(path.name for path in folder.glob("model-*.safetensors"))[0]
        self.edit(folder, {"model.layers.9.mlp.up_proj.weight": name})
        self.assert_refused(folder, "in no shard")

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
    )
    def test_a_file_that_is_no_index(self, folder: Path, text: str) -> None:
        (folder / INDEX).write_text(text)
        self.assert_refused(folder, "weight_map|missing")

    def test_a_missing_tensor(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        self.assert_refused(tmp_path, "model.norm.weight is missing")

    def test_a_tensor_of_another_shape(self, tmp_path: Path) -> None:
        saved_reference("gpt2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(48, 145)
        save_file(tensors, tmp_path / "model.safetensors")
        self.assert_refused(
            tmp_path, r"c_attn.weight is \[48, 145\]; config.json makes it \[48, 144\]"
        )

    def test_a_quantized_folder_is_refused_by_name(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight_packed"] = torch.zeros(4, 4, dtype=torch.int32)
        save_file(tensors, tmp_path / "model.safetensors")
        self.assert_refused(tmp_path, "quantized")

    def test_a_tensor_that_the_model_lacks(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors") | {
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)
        }
        save_file(tensors, tmp_path / "model.safetensors")
        self.assert_refused(tmp_path, "q_proj.bias has no place")

    @pytest.mark.parametrize(
        "damage", [b"", b"abc", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"{}x"]
    )
    def test_a_damaged_file(self, tmp_path: Path, damage: bytes) -> None:
        saved_reference("llama2", tmp_path)
        (tmp_path / "model.safetensors").write_bytes(damage)
        self.assert_refused(tmp_path, "cannot be read as safetensors|missing")

    def test_a_config_larger_than_its_weights_takes_no_memory(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        raw_config = json.loads((tmp_path / "config.json").read_text())
        huge = {
            "hidden_size": 2**18,
            "intermediate_size": 2**21,
            "num_attention_heads": 4096,
            "num_key_value_heads": 4,
        }
        (tmp_path / "config.json").write_text(json.dumps(raw_config | huge | {"head_dim": 64}))
        self.assert_refused(tmp_path, "config.json makes it")

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        saved_reference("llama2", tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        self.assert_refused(tmp_path, "cannot be read as safetensors")
