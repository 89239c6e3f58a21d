"""Whether the weights of a base are those that an adapter was trained on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.core.errors import UserError
from bloomery.model.adapters.settings import Base, base_of, digest

TENSORS = {
    name: torch.randn(64, 64, generator=torch.Generator().manual_seed(n))
    for n, name in enumerate("abc")
}


def save_shards(folder: Path, tensors: dict, shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    shard_of_tensor = {
        name: f"model-{n:05d}-of-00003.safetensors" for n, name in enumerate(tensors)
    }
    for name, file in shard_of_tensor.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": shard_of_tensor})
    )
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_the_digest_follows_the_weights_and_nothing_else(tmp_path, shards):
    folder = save_shards(tmp_path / "a", TENSORS, shards)
    digest_before = digest(folder)
    assert digest(save_shards(tmp_path / "b", TENSORS, shards)) == digest_before
    (folder / "README.md").write_text("something new")
    save_file({"x": torch.zeros(3)}, folder / "adapter_model.safetensors")
    assert digest(folder) == digest_before
    trained_tensors = {
        name: tensor + (1e-3 if name == "b" else 0) for name, tensor in TENSORS.items()
    }
    assert digest(save_shards(folder, trained_tensors, shards)) != digest_before
    assert digest(save_shards(folder, {**TENSORS, "d": torch.zeros(1)}, shards)) != digest_before


def test_a_changed_base_is_refused_and_a_broken_index_is_named(tmp_path):
    base = base_of(save_shards(tmp_path / "a", TENSORS, 3))
    base.refuse_change(base.digest, where="run")
    with pytest.raises(UserError, match="other weights"):
        base.refuse_change("another", where="run")
    (tmp_path / "a" / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(UserError, match="index"):
        digest(tmp_path / "a")
    # A folder that is gone has no other weights.
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(UserError, match="base is not here"):
        base_of(tmp_path / "a").refuse_change(base.digest, where="run")


def test_a_model_in_the_cache_of_the_hub_is_named_by_its_id():
    cached_folder = "/home/a/.cache/huggingface/hub/models--Qwen--Qwen2.5--odd/snapshots/0123"
    assert Base(cached_folder, "").name == "Qwen/Qwen2.5--odd"
    assert Base("/models/mine", "").name == "/models/mine"
