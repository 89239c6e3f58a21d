"""mmproj files of llama.cpp: names and keys are those of its own package, numbers those of transformers' model."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from bloomery.cli.common import show_export
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.convert import Changes, convert
from bloomery.export.gguf import export_gguf, export_gguf_adapter
from bloomery.export.gguf_format import gguf_library
from bloomery.export.gguf_import import import_gguf
from bloomery.export.layouts import export_merged
from bloomery.export.mmproj import Mmproj, plan_mmproj, verify_mmproj, write_mmproj
from bloomery.export.ollama import export_ollama
from bloomery.facts.pictures import vision_of
from bloomery.infer.model_folder import find_model
from bloomery.model.configs import read_config, stated_config
from bloomery.model.io.safetensors import TensorReader
from pictures_for_tests import save_base
from tiny_composites import CONFIGS

NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 4)
# What llama.cpp's conversion names by code and not in its table (conversion/qwen3vl.py, gemma.py, internvl.py).
BY_CODE = {
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.layer_norm": {"internvl": "mm.model.mlp.0", "lfm2_vl": "mm.input_norm"},
    "multi_modal_projector.linear_1": {"internvl": "mm.model.mlp.1"},
    "multi_modal_projector.linear_2": {"internvl": "mm.model.mlp.3"},
    "deepstack_merger_list.0": "v.deepstack.0",
    "deepstack_merger_list.1": "v.deepstack.1",
}

PARAMETERS = (".lambda_1", ".lambda_2", ".position_embeddings", ".position_embedding_table")


def saved(kind: str, folder: Path) -> Path:
    save_base(kind, folder, weights=True)
    if kind == "qwen2_5_vl":
        change_config(folder, vision_config={"window_size": 112})
    return folder


def change_config(folder: Path, **sections: dict) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, keys in sections.items():
        config[name] |= keys
    path.write_text(json.dumps(config))


def written(folder: Path, out: Path, kind: str = "f32") -> tuple[Mmproj, gguf.GGUFReader]:
    """The mmproj file alone, read by the package of llama.cpp."""
    vision = vision_of(stated_config(folder))
    with TensorReader() as reader:
        tokenizer = load_tokenizer(folder)
        planned = plan_mmproj(
            find_model(folder),
            vision,
            kind,
            reader,
            tokenizer,
            lambda token: torch.ones(32) * token,
        )
        assert isinstance(planned, Mmproj), planned
        write_mmproj(out, planned, gguf_library())
        assert str(len(planned.tensors)) in verify_mmproj(out, planned, where=out)
    return planned, gguf.GGUFReader(out)


def numbers(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    return {
        tensor.name: torch.from_numpy(np.array(tensor.data, dtype=np.float32))
        for tensor in reader.tensors
    }


def name_in_llama_cpp(name: str, kind: str) -> str:
    for start, by_code in BY_CODE.items():
        target = by_code if isinstance(by_code, str) else by_code.get(kind)
        if name.startswith(start) and target is not None:
            return target + name.removeprefix(start)
    for prefix in ("model.", ""):
        for inner in (name, name.replace("vision_tower.", "vision_tower.vision_model.")):
            found = NAMES.get_name(prefix + inner, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return f"{found}.weight" if name.endswith(PARAMETERS) else found
    raise AssertionError(f"llama.cpp has no name for {name}")


def tower_of(folder: Path) -> dict[str, Tensor]:
    weights = load_file(folder / "model.safetensors")
    text = ("lm_head.", "language_model.", "text_model.", "embed_tokens.", "layers.", "norm.")
    text += ("vision_tower.head.",)  # of SigLIP: no language model is given its output
    names = {name: name.removeprefix("model.") for name in weights}
    return {inner: weights[name] for name, inner in names.items() if not inner.startswith(text)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if not kind.startswith("gemma4")])
def test_each_tensor_is_the_models_by_the_name_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "base")
    _, reader = written(folder, tmp_path / "mmproj.gguf")
    in_file = numbers(reader)
    heads = json.loads((folder / "config.json").read_text())["vision_config"].get(
        "num_attention_heads"
    )
    for name, tensor in tower_of(folder).items():
        if "patch_embed" in name and tensor.ndim > 1:
            continue  # below
        target = name_in_llama_cpp(name, kind)
        if kind == "qwen2_5_vl" and ".attn.qkv." in name:
            made = torch.cat([in_file.pop(target.replace("qkv", letter)) for letter in "qkv"])
        else:
            made = in_file.pop(target)
        if kind == "mistral3" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp rotates neighbors, transformers the halves of a head: LlamaModel.permute of its conversion
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if name.endswith("mm_soft_emb_norm.weight"):
            tensor = tensor + 1
        if name.endswith("mm_input_projection_weight"):
            tensor = tensor.half().float()  # in files of any type
        assert torch.equal(made, tensor), name
    if kind == "mistral3":
        row_end = load_tokenizer(folder).id_of("[IMG_BREAK]")
        assert torch.equal(in_file.pop("v.token_embd.img_break"), torch.full((32,), float(row_end)))
    assert all("patch_embd" in name for name in in_file)


def test_patches_are_convolutions_as_in_the_model(tmp_path: Path) -> None:
    """Of two slices in time, of channels behind pixels, and plain ones."""
    picture = torch.rand(1, 3, 32, 32)
    patches = picture.reshape(3, 2, 16, 2, 16)
    for kind, name in (
        ("qwen3_vl", "visual.patch_embed.proj"),
        ("lfm2_vl", "vision_tower.embeddings.patch_embedding"),
        ("smolvlm", "vision_model.embeddings.patch_embedding"),
    ):
        folder = saved(kind, tmp_path / kind)
        _, reader = written(folder, tmp_path / f"{kind}.gguf")
        in_file = numbers(reader)
        weight = tower_of(folder)[f"{name}.weight"]
        made = F.conv2d(picture, in_file["v.patch_embd.weight"], stride=16)
        if kind == "qwen3_vl":
            made += F.conv2d(picture, in_file["v.patch_embd.weight.1"], stride=16)
            expected = F.conv3d(
                picture[:, :, None].repeat(1, 1, 2, 1, 1), weight, stride=(2, 16, 16)
            )
            expected = expected[:, :, 0]
        elif kind == "lfm2_vl":
            flat = patches.permute(1, 3, 2, 4, 0).reshape(2, 2, -1)
            expected = (flat @ weight.T).permute(2, 0, 1)[None]
        else:
            expected = F.conv2d(picture, weight, stride=16)
        assert_close(made, expected, atol=1e-5, rtol=0)


def keys_of(namespace: type) -> set[str]:
    keys = set()
    for value in vars(namespace).values():
        keys |= (
            {value}
            if isinstance(value, str)
            else keys_of(value)
            if isinstance(value, type)
            else set()
        )
    return keys


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_keys_and_types_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "base")
    planned, reader = written(folder, tmp_path / "mmproj.gguf", "f16")
    known = keys_of(gguf.Keys.Clip) | keys_of(gguf.Keys.ClipVision)
    # Newer than the package: llama.cpp's tools/mtmd/clip-impl.h has them.
    known |= {
        f"clip.vision.{name}"
        for name in (
            "image_resize_algo",
            "preproc_min_tiles",
            "preproc_max_tiles",
            "image_min_pixels",
            "image_max_pixels",
        )
    }
    assert planned.metadata.keys() <= known, planned.metadata.keys() - known
    projector = planned.metadata.get(
        "clip.projector_type", planned.metadata.get("clip.vision.projector_type")
    )
    assert projector in set(vars(gguf.VisionProjectorType).values()) | {"gemma4v", "gemma4uv"}
    stated = {name: field.contents() for name, field in reader.fields.items()}
    assert stated["general.architecture"] == "clip" and stated["general.type"] == "mmproj"
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    assert stated["clip.vision.embedding_length"] == 32
    assert stated["clip.vision.block_count"] == tower.get(
        "depth", tower.get("num_hidden_layers", 0)
    )
    assert stated["clip.vision.projection_dim"] == 32
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types.get("v.blk.0.ffn_up.weight", "F16") == "F16"
    assert all(types[name] == "F32" for name in types if name.endswith((".bias", "ln1.weight")))


NOTES = {
    "gemma3": ({}, ["no empty line before and after a picture"]),
    "gemma4": (
        {},
        ["see those after them in all layers, this model in no layer", "70 to 1,120 tokens"],
    ),
    "smolvlm": ({"do_image_splitting": False}, ["cuts pictures into squares"]),
    "mistral3": ({"size": {"longest_edge": 1540}}, ["GELU by tanh", "--image-max-tokens 3025"]),
    "internvl": ({}, ["GELU by tanh", "56 pixels twice", "the position of the one before it"]),
    "lfm2_vl": (
        {"tile_size": 512, "min_image_tokens": 64, "max_image_tokens": 256, "max_tiles": 4},
        ["GELU by tanh", "max_tiles 10, and this model's processor by 4"],
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", NOTES)
def test_what_llama_cpp_does_otherwise_is_named(kind: str, tmp_path: Path) -> None:
    processor, parts = NOTES[kind]
    folder = saved(kind, tmp_path / "base")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | processor))
    planned, _ = written(folder, tmp_path / "mmproj.gguf", "q4_0")
    assert planned.kind == "f16"  # llama.cpp has no towers of fewer bits than 8
    assert len(planned.notes) == len(parts)
    assert all(part in note for part, note in zip(parts, planned.notes, strict=True)), planned.notes


def test_files_state_the_pictures_of_the_processor(tmp_path: Path) -> None:
    planned, _ = written(saved("qwen3_vl", tmp_path / "qwen"), tmp_path / "qwen.gguf")
    assert planned.metadata["clip.vision.image_min_pixels"] == 1024
    assert planned.metadata["clip.vision.image_max_pixels"] == 8192
    # One square a picture, of which llama.cpp else makes up to twelve.
    planned, _ = written(saved("internvl", tmp_path / "internvl"), tmp_path / "internvl.gguf")
    assert planned.metadata["clip.vision.preproc_max_tiles"] == 1


def test_export_writes_both_files_and_the_mmproj_depends_on_the_tower_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved("qwen3_vl", tmp_path / "base")
    done = export_gguf(find_model(base), tmp_path / "out.gguf", kind="q8_0")
    assert done.mmproj == tmp_path / "mmproj-out.gguf"
    assert done.bytes == done.folder.stat().st_size + done.mmproj.stat().st_size
    assert done.next.splitlines() == [
        f"llama-mtmd-cli -m {done.folder} --mmproj {done.mmproj} --image PICTURE -p TEXT",
        f"llama-server -m {done.folder} --mmproj {done.mmproj}",
    ]

    show_export(done)
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [
        f"{word:10} {path} ({format_bytes(path.stat().st_size)})"
        for word, path in (("export", done.folder), ("mmproj", done.mmproj))
    ]

    # Another language model, under another name.
    weights = load_file(base / "model.safetensors")
    weights = {n: t * 1.5 if "language_model" in n else t for n, t in weights.items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    other = export_gguf(find_model(base), tmp_path / "other.gguf", kind="q8_0")
    assert other.folder.read_bytes() != done.folder.read_bytes()
    assert other.mmproj.read_bytes() == done.mmproj.read_bytes()

    # The language model's file says how pictures are read, and is read back as a model of texts.
    fields = gguf.GGUFReader(done.folder).fields
    assert fields["general.architecture"].contents() == "qwen3vl"
    assert fields["qwen3vl.n_deepstack_layers"].contents() == 2
    assert fields["qwen3vl.rope.dimension_sections"].contents() == [2, 1, 1, 0]
    imported = import_gguf(done.folder, tmp_path / "text")
    assert "the mmproj file beside it" in imported.proofs[-1]
    assert read_config(tmp_path / "text").family.startswith("qwen3")
    with pytest.raises(UserError, match="mmproj"):
        import_gguf(done.mmproj, tmp_path / "no-text")


def saved_adapter_on_all_parts(base: Path, folder: Path) -> Path:
    """LoRA on the language model and on the tower, and a projector that is trained in full."""
    targets = r"model\.(text_model|vision_model)\..*q_proj"
    settings = LoraConfig(r=2, target_modules=targets, modules_to_save=["connector"])
    model = get_peft_model(AutoModelForImageTextToText.from_pretrained(base), settings)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
            assert "lora" in name or "connector" in name
    model.save_pretrained(folder)
    return folder


def test_what_an_adapter_changes_of_a_tower_is_in_the_file(tmp_path: Path) -> None:
    base = saved("smolvlm", tmp_path / "base")
    files = find_model(saved_adapter_on_all_parts(base, tmp_path / "adapter"))
    of_base = export_gguf(find_model(base), tmp_path / "base.gguf", kind="f32")
    tuned = export_gguf(files, tmp_path / "tuned.gguf", kind="f32")
    export_merged(files, tmp_path / "merged", verify=False)
    merged = export_gguf(find_model(tmp_path / "merged"), tmp_path / "merged.gguf", kind="f32")
    assert tuned.mmproj.read_bytes() == merged.mmproj.read_bytes()
    before, after = numbers(gguf.GGUFReader(of_base.mmproj)), numbers(gguf.GGUFReader(tuned.mmproj))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"v.blk.0.attn_q.weight", "v.blk.1.attn_q.weight", "mm.model.fc.weight"}
    with pytest.raises(UserError, match="changes of what reads pictures"):
        export_gguf_adapter(files, tmp_path / "adapter.gguf")


def test_a_conversion_writes_both_files_or_says_why_not(tmp_path: Path) -> None:
    base = saved("smolvlm", tmp_path / "base")
    done = convert(base, tmp_path / "out.gguf", gguf=True, verify=False)
    assert done.mmproj == tmp_path / "mmproj-out.gguf"
    longer = convert(
        base, tmp_path / "longer.gguf", gguf=True, changes=Changes(context=1024), verify=False
    )
    assert longer.mmproj is None and any("no mmproj file" in proof for proof in longer.proofs)


def test_ollamas_folder_names_both_files(tmp_path: Path) -> None:
    done = export_ollama(find_model(saved("smolvlm", tmp_path / "base")), tmp_path / "out")
    lines = (done.folder / "Modelfile").read_text().splitlines()
    assert lines[:2] == ["FROM ./out.gguf", "FROM ./mmproj-out.gguf"]
    assert (done.folder / "mmproj-out.gguf").is_file()


def test_an_existing_mmproj_file_is_not_overwritten(tmp_path: Path) -> None:
    base = saved("smolvlm", tmp_path / "base")
    (tmp_path / "mmproj-out.gguf").write_text("mine")
    with pytest.raises(UserError, match="nothing was overwritten"):
        export_gguf(find_model(base), tmp_path / "out.gguf")
    assert (tmp_path / "mmproj-out.gguf").read_text() == "mine"
    assert not (tmp_path / "out.gguf").exists()


def test_towers_that_llama_cpp_computes_otherwise_are_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    base = saved("smolvlm", tmp_path / "base")

    def note(number: int) -> str:
        done = export_gguf(find_model(base), tmp_path / f"{number}.gguf", verify=False)
        assert done.mmproj is None and done.next == ""
        assert not (tmp_path / f"mmproj-{number}.gguf").exists()
        (proof,) = (proof for proof in done.proofs if "no mmproj file" in proof)
        return proof

    change_config(base, vision_config={"hidden_act": "relu"})
    assert "hidden_act 'gelu_pytorch_tanh', and the tower has 'relu'" in note(1)
    change_config(base, vision_config={"hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 3})
    assert "the files have 2 layers of the tower, and config.json 3" in note(2)
    change_config(base, vision_config={"num_hidden_layers": 2})
    (base / "preprocessor_config.json").unlink()
    (base / "processor_config.json").unlink(missing_ok=True)
    assert "image_mean in preprocessor_config.json is None" in note(3)
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if "vision_model." in name or "connector." in name]:
        del weights[name]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert "no weights of the tower" in note(4)
