"""The language model of a multimodal repository is trained, resumed bitwise, and opens in transformers and PEFT."""

import shutil

import pytest
import torch
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import resumed_bitwise
from test_foreign_runs import foreign_plan
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM

from bloomery.export.layouts import export
from bloomery.model.configs import read_config
from bloomery.model.io.weights import load_decoder
from foreign_models import saved_gemma3

TOKENS = torch.arange(60).view(2, 30)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    saved_gemma3(folder, vocab_size=300)
    return folder


@pytest.fixture
def with_tokenizer(base, prepared):
    """The base with the tokenizer that its dataset was prepared with."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (prepared / name).is_file():
            shutil.copyfile(prepared / name, base / name)
    return base


def test_full_fine_tuning_writes_a_language_model(prepared, base, tmp_path):
    plan = tiny_plan(prepared, config=read_config(base), model={"source": base}, train={"steps": 5})
    run = resumed_bitwise(plan, tmp_path)
    assert run.losses()[5] < run.losses()[1]
    theirs = AutoModelForCausalLM.from_pretrained(run.checkpoint(5)).eval().float()
    assert isinstance(theirs, Gemma3ForCausalLM)
    ours = load_decoder(run.checkpoint(5), dtype=torch.float32)
    assert_close(ours(TOKENS).head.detach(), theirs(TOKENS).logits.detach(), atol=1e-4, rtol=1e-4)


def test_an_adapter_opens_in_peft_on_the_language_model(prepared, with_tokenizer, tmp_path):
    base = with_tokenizer
    plan = foreign_plan(
        prepared, base, adapter={"target_modules": ["all-linear"]}, train={"steps": 5}, native=True
    )
    run = resumed_bitwise(plan, tmp_path)
    # transformers opens the multimodal folder as the whole model: an export is the language model alone.
    text = tmp_path / "text"
    export(base, text)
    plain = AutoModelForCausalLM.from_pretrained(text, attn_implementation="eager").eval()
    assert isinstance(plain, Gemma3ForCausalLM)
    before = plain(TOKENS).logits.detach()
    expected = PeftModel.from_pretrained(plain, run.checkpoint(5)).eval()(TOKENS).logits.detach()
    assert float((expected - before).abs().max()) > 1e-3
    assert_close(
        load_decoder(run.checkpoint(5))(TOKENS).head.detach(), expected, atol=1e-4, rtol=1e-4
    )
