"""A merge that does not change what its adapter changes is an error, for every kind of adapter."""

import shutil

import peft
import pytest
import torch
from gguf_models import saved_adapter, saved_case, saved_expert_adapter
from safetensors.torch import load_file, save_file
from tiny_models import saved_reference
from transformers import AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.export.gguf import export_gguf
from bloomery.export.layouts import open_merged
from bloomery.export.merge import merge
from bloomery.export.merge_proof import proof_of_change
from bloomery.infer.model_folder import find_model
from bloomery.model.adapters.lora import ExpertLora, LoraLinear
from bloomery.model.io.weights import write_model_piecewise

# Widths that are whole blocks of quantized types.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapter_of(case, folder, config):
    """Random numbers in what trains, and the base beside it."""
    saved_reference(case, folder / "base")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), config)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.empty(parameter.shape).normal_(0, 0.1, generator=numbers)
    model.save_pretrained(folder / "adapter")


def proof(folder) -> str:
    """Of the model that is merged anew."""
    shutil.rmtree(folder / "merged", ignore_errors=True)
    (folder / "merged").mkdir()
    with open_merged(folder / "adapter", folder / "base", torch.float32, "cpu") as opened:
        read_parameter, config = opened
        write_model_piecewise(read_parameter, config, torch.float32, folder / "merged")
    return proof_of_change(folder / "merged", folder / "base", folder / "adapter")


def set_tensors(folder, change):
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({n: change(n, t).clone() for n, t in load_file(path).items()}, path, {"format": "pt"})


def of_experts(folder):
    adapter_of(
        "qwen3-moe",
        folder,
        peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKS),
    )


def test_changes_are_counted_by_kind_and_expert(tmp_path) -> None:
    of_experts(tmp_path)
    text = proof(tmp_path)
    assert "76 tensors" in text  # 4 of attention, 3 layers of 8 experts with 3 matrices
    assert "q_proj 4 of 4" in text and "gate_up_proj 48 of 48" in text

    # An expert that no token met in training has not changed; the others have.
    def without_last_expert(name, tensor):
        is_B = name.endswith("experts.lora_B.weight")
        return tensor * (torch.arange(16) % 8 < 7) if is_B else tensor

    set_tensors(tmp_path, without_last_expert)
    assert "down_proj 21 of 24" in proof(tmp_path)


@pytest.mark.parametrize(
    ("owner", "method", "kinds"),
    [
        (ExpertLora, "add_to", "gate_up_proj, down_proj"),
        (LoraLinear, "merged_weight", "q_proj"),
    ],
)
def test_a_merge_that_loses_a_kind_is_an_error_that_names_it(
    owner, method, kinds, tmp_path, monkeypatch
) -> None:
    of_experts(tmp_path)
    lost = {"add_to": lambda *_: None, "merged_weight": lambda self: self.base_weight()}
    monkeypatch.setattr(owner, method, lost[method])
    with pytest.raises(UserError, match=rf"no change in {kinds}\n") as refused:
        proof(tmp_path)
    assert "float32" in refused.value.fix


def test_an_adapter_that_is_zero_changes_nothing(tmp_path) -> None:
    of_experts(tmp_path)
    set_tensors(tmp_path, lambda name, tensor: tensor * (0 if "lora_B" in name else 1))
    with pytest.raises(UserError, match="no change in gate_up_proj, down_proj, q_proj"):
        proof(tmp_path)

    # Of one kind alone it is what the adapter says.
    set_tensors(tmp_path, lambda name, tensor: tensor + (0.1 if "q_proj.lora_B" in name else 0))
    text = proof(tmp_path)
    assert "q_proj 4 of 4" in text and "down_proj" not in text


@pytest.mark.parametrize(
    ("case", "settings", "kinds"),
    [
        ("llama2", {"target_modules": ["v_proj"], "use_dora": True}, ["v_proj 4 of 4"]),
        ("gpt2", {"target_modules": ["c_attn"]}, ["q_proj 3 of 3", "v_proj 3 of 3"]),
        (
            "llama3-gqa-tied",
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            ["q_proj 4 of 4", "lm_head 1 of 1"],
        ),
        ("llama2", {"target_modules": ["embed_tokens", "q_proj"]}, ["embed_tokens 1 of 1"]),
        ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}, ["q_proj.bias 4 of 4"]),
    ],
)
def test_every_kind_of_adapter_is_proved(case, settings, kinds, tmp_path) -> None:
    adapter_of(case, tmp_path, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings))
    text = proof(tmp_path)
    assert all(kind in text for kind in kinds), text


def test_a_method_of_peft_must_change_something(tmp_path) -> None:
    config = peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False)
    adapter_of("llama2", tmp_path, config)
    with pytest.raises(UserError, match="numbers of its base"):
        proof_of_change(tmp_path / "base", tmp_path / "base", tmp_path / "adapter")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(saved, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    text = proof_of_change(tmp_path / "merged", tmp_path / "base", tmp_path / "adapter")
    assert text.startswith("merged: 4 tensors") and "q_proj 4 of 4" in text


def test_a_gguf_file_with_the_numbers_of_its_base_is_an_error(tmp_path) -> None:
    base = saved_case("qwen3-moe", tmp_path / "base", mlp_only_layers=[], **WIDE)
    adapter = saved_expert_adapter(base, tmp_path / "adapter")
    files = find_model(adapter)
    proofs = export_gguf(files, tmp_path / "merged.gguf", kind="q8_0", verify=False).proofs
    # Each matrix of an expert by itself, though a tensor of the file has all of a layer.
    assert any("gate_up_proj 64 of 64, down_proj 32 of 32" in proof for proof in proofs), proofs

    # What one expert gains is seen, and no file stays of an adapter that is 0.
    def first_expert(name, tensor):
        is_B = name.endswith("experts.lora_B.weight")
        return tensor * (torch.arange(tensor.shape[1]) % 8 == 0) if is_B else tensor

    set_tensors(tmp_path, first_expert)
    proofs = export_gguf(files, tmp_path / "first.gguf", verify=False).proofs
    assert any("down_proj 4 of 32" in proof for proof in proofs), proofs
    set_tensors(tmp_path, lambda name, tensor: tensor * (0 if "lora_B" in name else 1))
    with pytest.raises(UserError, match="no change in gate_up_proj, down_proj") as refused:
        export_gguf(files, tmp_path / "zero.gguf", verify=False)
    assert "--type f32" in refused.value.fix
    assert not (tmp_path / "zero.gguf").exists()


def test_rows_that_the_file_moves_are_compared_where_they_lie(tmp_path) -> None:
    base = saved_case("llama2", tmp_path / "base")
    files = find_model(saved_adapter(base, tmp_path / "adapter", ["q_proj", "down_proj"]))
    proofs = export_gguf(files, tmp_path / "merged.gguf", verify=False).proofs
    assert any("down_proj 4 of 4, q_proj 4 of 4" in proof for proof in proofs), proofs
    set_tensors(tmp_path, lambda name, tensor: tensor * (0 if "lora_B" in name else 1))
    with pytest.raises(UserError, match="no change in down_proj, q_proj"):
        export_gguf(files, tmp_path / "zero.gguf", verify=False)


def test_models_that_are_one_are_not_merged(tmp_path) -> None:
    base = find_model(saved_case("llama2", tmp_path / "base"))
    with pytest.raises(UserError, match="has the numbers of base: the merge changes nothing"):
        merge([base, base], tmp_path / "merged", verify=False)
    assert not (tmp_path / "merged").exists()
    # A weight of 0 asks for a copy.
    merge([base, base], tmp_path / "copy", weights=[1, 0], verify=False)
