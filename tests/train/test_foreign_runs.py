"""Runs of architectures that our decoder lacks: resumed bitwise, opened by transformers and PEFT, equal to our own."""

import pytest
import torch
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run, resumed_bitwise
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bloomery.errors import UserError
from bloomery.model.merge import merged
from bloomery.model.presets import read_config
from bloomery.model.weights import load_decoder
from bloomery.plan.types import Plan
from bloomery.recipe.schema import Lora, Quantize
from foreign_models import SIZES, saved_model

TOKENS = torch.arange(60).view(2, 30)
KINDS = ["gpt_neox", "phi", "opt"]
TARGETS = {"gpt_neox": ["query_key_value", "dense"], "phi": ["q_proj", "fc2"], "opt": ["v_proj", "fc1"]}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in (*KINDS, "llama", "mpt")}
    for kind, folder in folders.items():
        saved_model(kind, folder, vocab_size=300)
    return folders


def foreign_plan(prepared, base, *, adapter=None, base_in="none", **sections):
    config = read_config(base, "foreign")
    plan = tiny_plan(prepared, config=config, **sections | {"model": {"source": base} | sections.get("model", {})})
    changed = {"quantize": Quantize(base=base_in)}
    if adapter is not None:
        changed["adapter"] = Lora(**{"kind": "lora", "rank": 4, "alpha": 8.0} | adapter)
    plan = plan.model_copy(update=changed)
    return Plan.model_validate_json(plan.model_dump_json())  # as a run reads it


@pytest.mark.parametrize("train", [
    {"precision": "float32"}, {"precision": "bfloat16", "activation_checkpointing": "full"},
    {"precision": "bfloat16-pure"}, {"precision": "float16", "activation_checkpointing": "selective"},
], ids=lambda train: train["precision"])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_undisturbed_one_and_opens_in_transformers(prepared, bases, tmp_path, kind, train):
    run = resumed_bitwise(foreign_plan(prepared, bases[kind], train={"steps": 5} | train), tmp_path)
    assert run.losses()[5] < run.losses()[1]
    theirs = AutoModelForCausalLM.from_pretrained(run.checkpoint(5)).eval().float()
    ours = load_decoder(run.checkpoint(5), dtype=torch.float32)
    assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("adapter", "base_in"), [
    ({}, "none"), ({"kind": "dora"}, "none"), ({"train_also": ["embed_tokens", "lm_head"]}, "none"), ({}, "nf4"),
], ids=["lora", "dora", "whole", "qlora"])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_resumed_opens_in_peft_and_merges(prepared, bases, tmp_path, kind, adapter, base_in):
    if kind != "phi" and "train_also" in adapter:
        adapter = {"train_also": ["embed_tokens"]}
    adapter = {"targets": TARGETS[kind]} | adapter
    plan = foreign_plan(prepared, bases[kind], adapter=adapter, base_in=base_in, train={"steps": 5})
    run = resumed_bitwise(plan, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(bases[kind]).eval()
    before = plain(TOKENS).logits
    theirs = PeftModel.from_pretrained(plain, run.checkpoint(5)).eval()
    ours = load_decoder(run.checkpoint(5))
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert float((expected - before).abs().max()) > 1e-3, "the adapter changes something"
        assert_close(ours(TOKENS), expected, atol=1e-5, rtol=1e-4)
        assert_close(merged(ours)(TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_a_known_family_has_the_same_losses_through_transformers(prepared, bases, tmp_path):
    through = Run(foreign_plan(prepared, bases["llama"]), tmp_path / "through")
    plan = tiny_plan(prepared, config=read_config(bases["llama"]), model={"source": bases["llama"]})
    own = Run(plan, tmp_path / "own")
    assert own.losses().keys() == through.losses().keys()
    for step, loss in own.losses().items():
        assert through.losses()[step] == pytest.approx(loss, abs=1e-4)


def test_an_architecture_that_takes_no_mask_trains_in_padded_rows(prepared, bases, tmp_path):
    Run(foreign_plan(prepared, bases["mpt"], model={"attention": "math"}, train={"steps": 2}), tmp_path / "packed")
    SIZES["bloom"] = {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    saved_model("bloom", base := tmp_path / "bloom")
    del SIZES["bloom"]
    with pytest.raises(UserError, match="padded"):
        Run(foreign_plan(prepared, base, model={"attention": "math"}), tmp_path / "refused")
    sections = {"model": {"attention": "math"}, "data": {"layout": "padded"}, "train": {"steps": 5}}
    run = resumed_bitwise(foreign_plan(prepared, base, **sections), tmp_path)
    assert run.losses()[5] < run.losses()[1]
