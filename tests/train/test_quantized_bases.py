"""Adapters on weights that other programs quantized: trained, exported with the base they belong to, merged."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.export.layouts import export, export_adapter, export_merged
from bloomery.infer.model_folder import find_model
from bloomery.model.configs import read_config
from bloomery.model.io.weights import load_decoder
from bloomery.plan.gather import refuse_training_codes
from bloomery.recipe.schema import Lora, Quantize, Recipe

sys.path.append(str(Path(__file__).parents[1] / "model"))
from packed_checkpoints import write_packed

TOKENS = torch.arange(24)[None] * 7 % CONFIG.vocab_size


def trained(name: str, quantize: str, prepared: Path, folder: Path):
    """transformers' model with the base's values, and the checkpoint of an adapter trained on it for 3 steps."""
    base = folder / "base"
    theirs = write_packed(base, name, vocab_size=CONFIG.vocab_size)
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, base)
    plan = tiny_plan(
        prepared,
        config=read_config(base),
        model={"source": base},
        train={"steps": 3},
        optimizer={"learning_rate": 0.03},
    )
    lora = Lora(kind="lora", rank=4, alpha=8, target_modules=["all-linear"])
    changes = {"adapter": lora, "quantize": Quantize(kind=quantize)}
    return theirs, Run(plan.model_copy(update=changes), folder / "run").checkpoint(3)


@pytest.mark.parametrize(("name", "quantize"), [("fp8-blocks", "none"), ("gptq-4-ordered", "nf4")])
def test_an_adapter_on_a_quantized_base_is_trained_and_merged(name, quantize, prepared, tmp_path):
    theirs, checkpoint = trained(name, quantize, prepared, tmp_path)
    found = find_model(checkpoint)
    done = export_adapter(found, tmp_path / "adapter")
    settings = json.loads((done.folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert any("belongs to" in proof and "stored as" in proof for proof in done.proofs)

    # Merged: what the codes stand for plus the change, as PEFT merges it, in transformers' own format.
    merged = export_merged(found, tmp_path / "merged", dtype="float32").folder
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    opened = transformers.AutoModelForCausalLM.from_pretrained(merged)
    import peft

    expected = peft.PeftModel.from_pretrained(theirs, done.folder).eval()
    with torch.no_grad():
        logits = expected(TOKENS).logits
        assert_close(opened(TOKENS).logits, logits, atol=1e-4, rtol=0)
        assert_close(
            load_decoder(done.folder, dtype=torch.float32)(TOKENS).head, logits, atol=1e-4, rtol=0
        )
        with expected.disable_adapter():
            assert not torch.allclose(expected(TOKENS).logits, logits, atol=1e-2)


def test_full_training_names_the_way_out_and_the_way_out_works(prepared, tmp_path):
    theirs = write_packed(tmp_path / "base", "awq", vocab_size=CONFIG.vocab_size)
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "base")
    full = Recipe.model_validate(
        {"model": {"from": str(tmp_path / "base")}, "data": {"path": "chats.jsonl"}}
    )
    with pytest.raises(UserError, match="AWQ, 4 bits") as caught:
        refuse_training_codes(full, str(tmp_path / "base"))
    assert f"bloomery export {tmp_path / 'base'} --to hf" in caught.value.fix
    lora = full.model_copy(update={"adapter": Lora(kind="lora")})
    refuse_training_codes(lora, str(tmp_path / "base"))

    plain = export(tmp_path / "base", tmp_path / "plain").folder
    refuse_training_codes(full, str(plain))
    opened = transformers.AutoModelForCausalLM.from_pretrained(plain)
    assert opened.dtype == torch.bfloat16
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name).bfloat16()), name
