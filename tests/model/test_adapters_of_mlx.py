"""Adapters that mlx-lm writes: the logits of a base whose weights are changed by hand, as mlx-lm changes them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import saved_reference, tokens
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.export.layouts import export_adapter
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import load_decoder
from models_for_tests import make_tokenizer

SCALE = 3.0
RANK = 4
LAYERS = ("model.layers.2", "model.layers.3")
MODULES = tuple(
    f"{layer}.{leaf}" for layer in LAYERS for leaf in ("self_attn.q_proj", "mlp.up_proj")
)


def saved_as_mlx(folder, modules, *, kind="lora", full_weights=()):
    """folder/base, folder/adapter, and transformers' model with the weights that the two make (mlx_lm/tuner, 0.32)."""
    saved_reference("llama2", folder / "base")
    base = load_file(folder / "base" / "model.safetensors")
    numbers = torch.Generator().manual_seed(0)

    def random_tensor(*shape):
        return torch.empty(shape).normal_(0, 0.1, generator=numbers)

    tensors = {}
    changed_weights = dict(base)
    for module in modules:
        weight = base[f"{module}.weight"]  # [outputs, inputs]; of an embedding [vocabulary, width]
        is_embedding = module.endswith("embed_tokens")
        outer = weight.shape[0] if is_embedding else weight.shape[1]
        inner = weight.shape[1] if is_embedding else weight.shape[0]
        lora_a = random_tensor(outer, RANK)
        lora_b = random_tensor(RANK, inner)
        tensors |= {f"{module}.lora_a": lora_a, f"{module}.lora_b": lora_b}
        product = lora_a @ lora_b
        adapted = weight + SCALE * (product if is_embedding else product.T)
        if kind == "dora":
            tensors[f"{module}.m"] = weight.norm(dim=1) + random_tensor(len(weight)).abs()
            adapted = adapted * (tensors[f"{module}.m"] / adapted.norm(dim=1))[:, None]
        changed_weights[f"{module}.weight"] = adapted
    for name in full_weights:
        tensors[name] = changed_weights[name] = base[name] + random_tensor(*base[name].shape)

    (folder / "adapter").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "adapter" / "adapters.safetensors",
    )
    config = {
        "fine_tune_type": "full" if full_weights else kind,
        "num_layers": 2,
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
        "model": str(folder / "base"),
        "iters": 100,
    }
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    model.load_state_dict({name: tensor.contiguous() for name, tensor in changed_weights.items()})
    return model.eval()


@pytest.mark.parametrize(
    ("modules", "settings"),
    [
        (MODULES, {}),
        (MODULES, {"kind": "dora"}),
        ((*MODULES, "model.embed_tokens", "lm_head"), {}),
        (
            (),
            {
                "full_weights": (
                    "model.layers.3.mlp.up_proj.weight",
                    "model.layers.3.input_layernorm.weight",
                )
            },
        ),
    ],
    ids=["lora", "dora", "embedding and head", "full"],
)
def test_logits_are_those_of_the_changed_weights(modules, settings, tmp_path):
    their_model = saved_as_mlx(tmp_path, modules, **settings)
    with torch.no_grad():
        logits = load_decoder(tmp_path / "adapter")(tokens()).head
        assert_close(logits, their_model(tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_is_exported_as_one_of_peft(kind, tmp_path):
    their_model = saved_as_mlx(tmp_path, (*MODULES, "lm_head"), kind=kind)
    make_tokenizer(tmp_path / "base")
    export_result = export_adapter(find_model(tmp_path / "adapter"), tmp_path / "out")
    assert any("loaded in PEFT" in proof for proof in export_result.proofs)
    with torch.no_grad():
        logits = load_decoder(tmp_path / "out")(tokens()).head
        assert_close(logits, their_model(tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("modules", "change", "problem"),
    [
        (MODULES, {"fine_tune_type": "prefix"}, "fine_tune_type is 'prefix'"),
        (MODULES, {"lora_parameters": {"rank": "many"}}, "rank 'many'"),
        (MODULES, {"lora_parameters": {"rank": 5, "scale": SCALE}}, r"make it \[5"),
        (("model.embed_tokens",), {"fine_tune_type": "dora"}, "rows of an embedding"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused_with_the_fuse_of_mlx(
    modules, change, problem, tmp_path
):
    saved_as_mlx(tmp_path, modules, kind=change.get("fine_tune_type", "lora"))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=problem) as refused:
        load_decoder(tmp_path / "adapter")
    assert "mlx_lm.fuse" in refused.value.fix


def test_stacks_of_experts_are_refused_with_the_fuse_of_mlx(tmp_path):
    saved_as_mlx(tmp_path, MODULES)
    path = tmp_path / "adapter" / "adapters.safetensors"
    name = "model.layers.2.mlp.switch_mlp.gate_proj.lora_a"
    save_file(load_file(path) | {name: torch.zeros(4, RANK, 48)}, path)
    with pytest.raises(UserError, match="LoRA of experts is not read") as refused:
        load_decoder(tmp_path / "adapter")
    assert "mlx_lm.fuse" in refused.value.fix
