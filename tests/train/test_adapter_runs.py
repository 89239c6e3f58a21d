"""Runs that train an adapter: their checkpoints are PEFT's, and resumed runs equal undisturbed ones bitwise."""

import json

import pytest
import torch
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, crossed, resumed_bitwise
from transformers import AutoModelForCausalLM

from bloomery.core.errors import UserError
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe.schema import Lora
from bloomery.train.state import build_state, empty_model
from device_for_tests import DEVICE

TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, folder)
    return folder


def adapter_plan(prepared, base, *, adapter=None, **sections):
    facts = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": TARGETS} | (adapter or {})
    sections["model"] = {"source": base} | sections.get("model", {})
    return tiny_plan(prepared, config=CONFIG, **sections).model_copy(
        update={"adapter": Lora(**facts)}
    )


@pytest.mark.parametrize(
    ("adapter", "precision"),
    crossed(
        {
            "rslora": {"dropout": 0.2, "use_rslora": True},
            "dora": {"kind": "dora"},
            "pissa": {"init": "pissa", "dtype": "bfloat16"},
            "whole": {"modules_to_save": ["embed_tokens", "norms"]},
        },
        {name: name for name in ("float32", "bfloat16", "bfloat16-pure", "float16")},
        quick="rslora-bfloat16 dora-float16 pissa-bfloat16-pure whole-float32",
    ),
)
def test_a_resumed_adapter_equals_the_undisturbed_one_bitwise(
    prepared, base, tmp_path, adapter, precision
):
    plan = adapter_plan(prepared, base, adapter=adapter, train={"steps": 5, "precision": precision})
    losses = resumed_bitwise(plan, tmp_path).losses()
    assert losses[5] < losses[1]


@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"kind": "dora", "use_rslora": True},
        {"init": "pissa"},
        {"modules_to_save": ["embed_tokens", "norms"]},
        {"target_modules": ["model.layers.0.*_proj", "model.layers.1.self_attn.q_proj"]},
    ],
    ids=["lora", "dora", "pissa", "whole", "pattern"],
)
def test_peft_opens_a_checkpoint_and_computes_the_same(prepared, base, tmp_path, adapter):
    plan = adapter_plan(
        prepared, base, adapter=adapter, train={"steps": 3}, optimizer={"learning_rate": 0.03}
    )
    folder = Run(plan, tmp_path / "run").checkpoint(3)
    ours = build_state(plan, resume_from=folder).model_and_optimizer.model.eval()
    reference = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    tokens = torch.arange(24)[None] * 7 % CONFIG.vocab_size
    with torch.no_grad():
        plain, mine = reference(tokens).logits.clone(), ours(tokens.to(DEVICE)).head.cpu()
        theirs = PeftModel.from_pretrained(reference, folder).eval()(tokens).logits
    assert (mine - plain).abs().max() > 1e-2
    assert torch.allclose(mine, theirs, atol=1e-5, rtol=0), float((mine - theirs).abs().max())
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base)
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("precision", "frozen", "trained"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float32"),
        ("bfloat16-pure", "bfloat16", "bfloat16"),
    ],
)
def test_frozen_weights_are_kept_as_products_read_them(base, precision, frozen, trained):
    plan = adapter_plan(
        base, base, adapter={"modules_to_save": ["norm"]}, train={"precision": precision}
    )
    model = empty_model(plan)
    layer = model.model.layers[0]
    assert (
        layer.mlp.up_proj.weight.dtype
        is layer.self_attn.q_proj.weight.dtype
        is getattr(torch, frozen)
    )
    assert model.model.norm.weight.dtype is getattr(torch, trained)
    assert layer.self_attn.q_proj.lora_A.dtype is torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype is (
        torch.float32 if precision == "float16" else getattr(torch, frozen)
    )


def test_only_the_adapter_is_trained_and_remembered(prepared, base, tmp_path):
    run = Run(adapter_plan(prepared, base, train={"steps": 3}), tmp_path / "run")
    state = run.tensors(3)
    weights = [name for name in state if name.startswith("adapter_model/")]
    modules = {name.split("base_model.model.")[-1].rsplit(".lora", 1)[0] for name in weights}
    assert len(modules) == len(TARGETS) * CONFIG.num_layers
    assert all(".lora_" in name for name in state if name.startswith("optimizer/"))


def test_a_base_that_changed_is_refused(prepared, base, tmp_path):
    own = tmp_path / "base"
    own.mkdir()
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, own)
    plan = adapter_plan(prepared, own, train={"steps": 3})
    run = Run(plan, tmp_path / "run")
    write_model(model_state(fresh_decoder(CONFIG, seed=4)), CONFIG, own)
    with pytest.raises(UserError, match="trained on other weights"):
        build_state(plan, resume_from=run.checkpoint(3))
