"""Tensors of mmproj files are those of llama.cpp's own conversion: `BLOOMERY_LLAMA_CPP=CHECKOUT make soak`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.gguf_format import gguf_library
from bloomery.export.mmproj import Mmproj, plan_mmproj, write_mmproj
from bloomery.facts.gguf_projectors import GGUF_PROJECTORS
from bloomery.facts.pictures import vision_of
from bloomery.infer.model_folder import find_model
from bloomery.model.configs import stated_config
from bloomery.model.io.safetensors import TensorReader
from pictures_for_tests import save_base

CHECKOUT = Path(os.environ.get("BLOOMERY_LLAMA_CPP", "no-checkout"))
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (CHECKOUT / "convert_hf_to_gguf.py").is_file(),
        reason="BLOOMERY_LLAMA_CPP names no checkout of llama.cpp",
    ),
]
# Names that published files have, where transformers writes others.
PUBLISHED_NAMES = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "lfm2_vl": {"vision_tower.": "vision_tower.vision_model."},
    "internvl": {"vision_tower.": "model.vision_tower.", "multi_modal": "model.multi_modal"},
}


def saved_as_published(kind: str, folder: Path) -> Path:
    """With what the conversion asks for and tiny files lack."""
    # Its table of names has numbers below that of layers: for `mlp.2`, too.
    vision = {"depth": 4} if kind.startswith("qwen") else {"num_hidden_layers": 4}
    vision = {} if kind == "gemma4_unified" else vision
    vision |= {"vision_use_head": False} if kind in ("gemma3", "lfm2_vl") else {}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 112, "fullatt_block_indexes": [1, 3]}
    save_base(kind, folder, weights=True, vision_config=vision)
    weights = load_file(folder / "model.safetensors")
    for old, new in PUBLISHED_NAMES.get(kind, {}).items():
        weights = {
            name.replace(old, new) if new not in name else name: w for name, w in weights.items()
        }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    config = json.loads((folder / "config.json").read_text())
    if kind == "internvl":
        config["vision_config"]["architectures"] = ["InternVisionModel"]
    if kind == "gemma4_unified":
        config["audio_config"] = {"audio_embed_dim": 32}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "preprocessor_config.json"
    numbers = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    path.write_text(json.dumps(numbers | json.loads(path.read_text())))
    return folder


def tensors_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.tensor_type.name, list(tensor.shape), tensor.data.tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


CASES = [(kind, "q8_0") for kind in GGUF_PROJECTORS]
CASES += [("qwen3_vl", "f32"), ("gemma3", "f16"), ("mistral3", "bf16")]


@pytest.mark.parametrize(("kind", "file_type"), CASES)
def test_tensors_are_those_of_the_conversion(kind: str, file_type: str, tmp_path: Path) -> None:
    folder = saved_as_published(kind, tmp_path / "base")
    theirs = tmp_path / "mmproj-theirs.gguf"
    command = [sys.executable, str(CHECKOUT / "convert_hf_to_gguf.py"), str(folder), "--mmproj"]
    command += ["--outtype", file_type, "--outfile", str(theirs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    ours = tmp_path / "ours.gguf"
    vision = vision_of(stated_config(folder))
    assert vision is not None
    with TensorReader() as reader:
        planned = plan_mmproj(
            find_model(folder),
            vision,
            file_type,
            reader,
            load_tokenizer(folder),
            lambda _: torch.zeros(32),
        )
        assert isinstance(planned, Mmproj), planned
        write_mmproj(ours, planned, gguf_library())
    expected, made = tensors_of(theirs), tensors_of(ours)
    # The conversion finds no embedding under the name that transformers writes today, and llama.cpp needs it.
    made.pop("v.token_embd.img_break", None)
    assert made == expected
