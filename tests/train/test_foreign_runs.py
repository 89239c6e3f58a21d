"""Runs of architectures that our decoder lacks: resumed bitwise, opened by transformers and PEFT, equal to our own."""

import shutil

import pytest
import torch
from opened_in_peft import assert_opens_in_peft
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run, crossed, resumed_bitwise
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bloomery.model.configs import build_config, read_config
from bloomery.model.io.weights import load_decoder
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Distill
from bloomery.recipe.schema import Lora, Model, Peft, Quantize
from bloomery.train.objectives import teacher as teacher_module
from bloomery.train.state import build_state
from foreign_models import saved_model

TOKENS = torch.arange(60).view(2, 30)
KINDS = ["gpt_neox", "phi", "opt", "phimoe"]
TARGETS = {
    "gpt_neox": ["query_key_value", "dense"],
    "phi": ["q_proj", "fc2"],
    "opt": ["v_proj", "fc1"],
    "phimoe": ["q_proj", "o_proj"],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in (*KINDS, "llama", "mpt")}
    for kind, folder in folders.items():
        saved_model(kind, folder, vocab_size=300)
    return folders


def foreign_plan(prepared, base, *, adapter=None, base_in="none", native=False, **sections):
    config = read_config(base, "auto" if native else "transformers")
    plan = tiny_plan(
        prepared,
        config=config,
        **sections | {"model": {"source": base} | sections.get("model", {})},
    )
    changed = {"quantize": Quantize(kind=base_in)}
    if adapter is not None:
        changed["adapter"] = Lora(**{"kind": "lora", "rank": 4, "alpha": 8.0} | adapter)
    plan = plan.model_copy(update=changed)
    return RunPlan.model_validate_json(plan.model_dump_json())  # as a run reads it


@pytest.mark.parametrize(
    ("kind", "train"),
    crossed(
        {kind: kind for kind in KINDS},
        {
            "float32": {"precision": "float32"},
            "bfloat16": {"precision": "bfloat16", "activation_checkpointing": "full"},
            "bfloat16-pure": {"precision": "bfloat16-pure"},
            "float16": {"precision": "float16", "activation_checkpointing": "selective"},
        },
        quick="gpt_neox-bfloat16 phi-float16 phimoe-bfloat16",
    ),
)
def test_a_resumed_run_equals_the_undisturbed_one_and_opens_in_transformers(
    prepared, bases, tmp_path, kind, train
):
    run = resumed_bitwise(foreign_plan(prepared, bases[kind], train={"steps": 5} | train), tmp_path)
    assert run.losses()[5] < run.losses()[1]
    theirs = AutoModelForCausalLM.from_pretrained(run.checkpoint(5)).eval().float()
    ours = load_decoder(run.checkpoint(5), dtype=torch.float32)
    assert_close(ours(TOKENS).head, theirs(TOKENS).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "facts"),
    crossed(
        {kind: kind for kind in KINDS},
        {
            "lora": ({}, "none"),
            "dora": ({"kind": "dora"}, "none"),
            "whole": ({"modules_to_save": ["embed_tokens", "lm_head"]}, "none"),
            "qlora": ({}, "nf4"),
        },
        quick="phi-whole opt-qlora phimoe-lora",
    ),
)
def test_an_adapter_is_resumed_opens_in_peft_and_merges(prepared, bases, tmp_path, kind, facts):
    adapter, base_in = facts
    if kind == "phimoe":
        base_in = "none"  # experts in one tensor are not quantized
    if kind != "phi" and "modules_to_save" in adapter:
        adapter = {"modules_to_save": ["embed_tokens"]}
    adapter = {"target_modules": TARGETS[kind]} | adapter
    plan = foreign_plan(prepared, bases[kind], adapter=adapter, base_in=base_in, train={"steps": 5})
    run = resumed_bitwise(plan, tmp_path)
    assert_opens_in_peft(bases[kind], run.checkpoint(5), TOKENS)


@pytest.mark.parametrize("base_in", ["none", "nf4"])
def test_a_safe_load_is_asked_for_and_trains_the_same(prepared, bases, tmp_path, base_in):
    adapter = {"target_modules": TARGETS["opt"]}
    plan = foreign_plan(
        prepared, bases["opt"], adapter=adapter, base_in=base_in, train={"steps": 2}
    )
    config = build_config(
        Model(**{"from": str(bases["opt"])}, load_with="transformers"), vocab_size=300
    )
    assert config.transformers_backend.safe_reason == "model.load_with=transformers asks for it"
    asked = plan.model_copy(update={"model": plan.model.model_copy(update={"config": config})})
    assert Run(asked, tmp_path / "safe").losses() == Run(plan, tmp_path / "fast").losses()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("also", [None, ["embed_tokens", "lm_head"]], ids=["full", "lora"])
def test_a_vocabulary_grows_by_mean_rows_and_opens_in_transformers_and_peft(
    prepared, bases, tmp_path, also, safe
):
    section = {"from": str(bases["phi"]), "load_with": "transformers" if safe else "native"}
    config = build_config(Model(**section), vocab_size=303)
    adapter = None if also is None else {"target_modules": ["q_proj"], "modules_to_save": also}
    plan = foreign_plan(
        prepared, bases["phi"], adapter=adapter, train={"steps": 3}, model={"config": config}
    )
    plain = AutoModelForCausalLM.from_pretrained(bases["phi"]).eval()
    begun = build_state(plan).model_and_optimizer.model
    for name, module in {
        "model.embed_tokens": plain.model.embed_tokens,
        "lm_head": plain.lm_head,
    }.items():
        weight = begun.get_submodule(name).weight
        assert torch.equal(weight[:300], module.weight)
        assert_close(weight[300:], module.weight.mean(0).expand(3, -1))
    assert_close(begun.lm_head.bias[300:], plain.lm_head.bias.mean().expand(3))
    run = Run(plan, tmp_path / "run")
    ours = load_decoder(run.checkpoint(3))
    if also is None:
        theirs = AutoModelForCausalLM.from_pretrained(run.checkpoint(3))
    else:
        plain.resize_token_embeddings(303, mean_resizing=False)
        theirs = PeftModel.from_pretrained(plain, run.checkpoint(3))
    assert_close(ours(TOKENS * 5).head, theirs.eval()(TOKENS * 5).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (
            "gpt_neox",
            {
                "method": "adalora",
                "init_r": 4,
                "target_r": 2,
                "target_modules": TARGETS["gpt_neox"],
            },
        ),
        ("opt", {"method": "vera", "r": 4, "target_modules": ["q_proj", "v_proj"]}),
        (
            "opt",
            {"method": "ia3", "target_modules": ["k_proj", "fc2"], "feedforward_modules": ["fc2"]},
        ),
    ],
    ids=["adalora", "vera", "ia3"],
)
def test_a_method_of_peft_is_resumed_opens_in_peft_and_merges(
    prepared, bases, tmp_path, kind, method
):
    plan = foreign_plan(
        prepared, bases[kind], train={"steps": 5}, optimizer={"learning_rate": 0.05}
    )
    plan = plan.model_copy(update={"adapter": Peft(kind="peft", **method)})
    run = resumed_bitwise(plan, tmp_path)
    assert_opens_in_peft(bases[kind], run.checkpoint(5), TOKENS)


def test_a_foreign_model_learns_from_a_foreign_teacher_whose_logits_have_a_bias(
    prepared, bases, tmp_path
):
    teacher = tmp_path / "teacher"
    shutil.copytree(bases["phi"], teacher)
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, teacher)
    plan = foreign_plan(
        prepared, bases["phi"], train={"steps": 1, "accumulation": 1}, data={"layout": "padded"}
    )
    asked = Distill(kind="distill", teacher=str(teacher), kd_ratio=1.0)
    run = Run(plan.model_copy(update={"objective": asked}), tmp_path / "same")
    assert run.losses()[1] == pytest.approx(0, abs=1e-5), "a model is its own best pupil"
    sharp = load_file(teacher / "model.safetensors")
    sharp["lm_head.bias"] = torch.linspace(-5, 5, 300)
    save_file(sharp, teacher / "model.safetensors", metadata={"format": "pt"})
    teacher_module._load.cache_clear()
    assert Run(plan.model_copy(update={"objective": asked}), tmp_path / "other").losses()[1] > 1


def test_a_known_family_has_the_same_losses_through_transformers(prepared, bases, tmp_path):
    through = Run(foreign_plan(prepared, bases["llama"]), tmp_path / "through")
    plan = tiny_plan(prepared, config=read_config(bases["llama"]), model={"source": bases["llama"]})
    own = Run(plan, tmp_path / "own")
    assert own.losses().keys() == through.losses().keys()
    for step, loss in own.losses().items():
        assert through.losses()[step] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("bamba", ["in_proj", "q_proj"]), ("granitemoehybrid", ["all-linear"])],
)
def test_an_adapter_of_a_hybrid_is_resumed_and_opens_in_peft(prepared, tmp_path, kind, targets):
    saved_model(kind, base := tmp_path / kind, vocab_size=300)
    adapter = {"target_modules": targets}
    plan = foreign_plan(
        prepared, base, adapter=adapter, model={"attention": "mask"}, train={"steps": 4}
    )
    run = resumed_bitwise(plan, tmp_path)
    assert any("a row of its own" in warning.reason for warning in run.warnings())
    checkpoint = run.checkpoint(4)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint)
    with torch.no_grad():
        ours = load_decoder(checkpoint, base=base)(TOKENS).head
        assert_close(ours, opened.eval()(TOKENS).logits, atol=1e-4, rtol=0)


def test_an_architecture_that_takes_no_mask_computes_packed_documents_as_rows(
    prepared, bases, tmp_path
):
    saved_model("bloom", base := tmp_path / "bloom", vocab_size=300)
    plan = foreign_plan(prepared, base, model={"attention": "mask"}, train={"steps": 5})
    assert plan.model.config.transformers_backend.documents == "rows"
    run = resumed_bitwise(plan, tmp_path)
    assert run.losses()[5] < run.losses()[1]
    (line,) = (warning.reason for warning in run.warnings())
    assert "a row of its own" in line and "% of what" in line
