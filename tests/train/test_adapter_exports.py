"""An adapter leaves as itself or merged into its base, and both compute what the run computed."""

import json
import shutil
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from opened_in_peft import merged
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from safetensors.torch import load_file
from structured_runs import write_answers
from torch.testing import assert_close

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.export.layouts import export, export_adapter, export_merged
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import fresh_decoder, load_decoder, model_state, write_model
from bloomery.recipe.objectives import Reward
from bloomery.recipe.schema import Lora

TOKENS = torch.arange(24)[None] * 7 % CONFIG.vocab_size
SETTINGS = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"kind": "dora", "target_modules": ["all-linear"]},
    "pissa": {"init": "pissa", "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def tuned(request, prepared, tmp_path_factory):
    """A run's folder that holds a trained adapter."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "base").mkdir()
    dtype = torch.bfloat16 if request.param == "lora" else torch.float32
    write_model(model_state(fresh_decoder(CONFIG, seed=3, dtype=dtype)), CONFIG, folder / "base")
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, folder / "base")
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        model={"source": folder / "base"},
        train={"steps": 4},
        optimizer={"learning_rate": 0.03},
    )
    lora = Lora(**({"kind": "lora", "rank": 4, "alpha": 8} | SETTINGS[request.param]))
    run = Run(plan.model_copy(update={"adapter": lora}), folder / "run")
    return run.checkpoint(4)


def logits(model, **settings):
    with torch.no_grad():
        answer = model.eval()(TOKENS, **settings)
    return answer.logits if hasattr(answer, "logits") else answer.head


def test_merged_equals_unmerged(tuned):
    model = load_decoder(tuned, dtype=torch.float32)
    plain = merged(model)
    assert not any("lora" in name for name, _ in plain.named_parameters())
    assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_a_merged_export_is_a_model_of_transformers(tuned, tmp_path, dtype):
    done = export_merged(find_model(tuned), tmp_path / "out", dtype=dtype)
    assert len(done.proofs) == 3 and "tensors differ from the base" in done.proofs[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        done.folder, attn_implementation="eager"
    ).float()
    stored = json.loads((done.folder / "config.json").read_text())["dtype"]
    assert stored == (
        dtype or json.loads((find_model(tuned).base / "config.json").read_text())["dtype"]
    )
    expected = logits(load_decoder(tuned, dtype=torch.float32))
    tolerance = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.05}[stored]
    assert_close(logits(theirs), expected, atol=tolerance, rtol=0)
    assert not (done.folder / "adapter_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merged_export_holds_the_weights_that_peft_merges(prepared, tmp_path, dtype):
    """Bit by bit: W + s B A in float32, rounded once to the dtype of the base."""
    (base := tmp_path / "base").mkdir()
    write_model(model_state(fresh_decoder(CONFIG, seed=3, dtype=dtype)), CONFIG, base)
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, base)
    lora = Lora(kind="lora", rank=4, alpha=8, target_modules=["all-linear"])
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        model={"source": base},
        train={"steps": 4},
        optimizer={"learning_rate": 0.03},
    )
    found = find_model(
        Run(plan.model_copy(update={"adapter": lora}), tmp_path / "run").checkpoint(4)
    )
    export_merged(found, tmp_path / "merged", verify=False)
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    export_adapter(found, tmp_path / "adapter", verify=False)
    state = (
        peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        .merge_and_unload()
        .to(dtype)
        .state_dict()
    )
    before = load_file(base / "model.safetensors")
    changed = [name for name in ours if not torch.equal(ours[name], before[name])]
    assert len(changed) == 7 * CONFIG.num_layers, "every matrix of every layer"
    assert all(ours[name].dtype == dtype and torch.equal(ours[name], state[name]) for name in ours)


def test_an_exported_adapter_opens_in_peft(tuned, tmp_path):
    found = find_model(tuned)
    done = export_adapter(found, tmp_path / "out")
    assert any("PEFT" in proof for proof in done.proofs)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        found.base, attn_implementation="eager", dtype="float32"
    )
    theirs = peft.PeftModel.from_pretrained(base, done.folder)
    assert_close(
        logits(theirs), logits(load_decoder(done.folder, dtype=torch.float32)), atol=1e-5, rtol=0
    )
    card = (done.folder / "README.md").read_text()
    assert "PeftModel" in card and "library_name: peft" in card
    assert {path.name for path in done.folder.iterdir()} >= {
        "adapter_config.json",
        "tokenizer.json",
        "README.md",
    }


def test_an_exported_adapter_of_a_reward_model_gives_its_values_in_peft(prepared, tmp_path):
    (base := tmp_path / "base").mkdir()
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, base)
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, base)
    pairs = write_answers(tmp_path / "pairs", prepared, "pairs")
    plan = tiny_plan(
        pairs, config=replace(CONFIG, head="values"), model={"source": base}, train={"steps": 3}
    )
    asked = {"adapter": Lora(kind="lora", rank=4), "objective": Reward(kind="reward")}
    run = Run(plan.model_copy(update=asked), tmp_path / "run")
    done = export_adapter(find_model(run.checkpoint(3)), tmp_path / "out")
    assert any("PEFT" in proof for proof in done.proofs)
    assert "AutoModelForSequenceClassification" in (done.folder / "README.md").read_text()
    assert "num_labels=1" in (done.folder / "README.md").read_text()


def test_what_cannot_be_exported_so_says_what_can(tuned, tmp_path):
    found = find_model(tuned)
    with pytest.raises(UserError, match="adapter as a full model") as refused:
        export(tuned, tmp_path / "out")
    assert "--to merged" in refused.value.fix
    for write in (export_adapter, export_merged):
        with pytest.raises(UserError, match="this is a full model"):
            write(find_model(found.base), tmp_path / "out")


def test_the_command_writes_both(tuned, tmp_path):
    for layout in ("adapter", "merged"):
        words = [
            "export",
            str(tuned),
            "--to",
            layout,
            "--out",
            str(tmp_path / layout),
            "--no-verify",
        ]
        assert CliRunner().invoke(cli, words).exit_code == 0
        assert (tmp_path / layout / "README.md").is_file()
