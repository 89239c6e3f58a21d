"""A run that trained an adapter, an adapter's folder, and BASE+ADAPTER are models like any other."""

import json
import shutil

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.evals.evaluate import load_to_evaluate
from bloomery.infer.generate import load_model
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe.schema import Lora
from bloomery.runs.chosen_model import model_path
from bloomery.train.state import build_state

TOKENS = torch.arange(24)[None] * 7 % CONFIG.vocab_size


@pytest.fixture(scope="module")
def tuned(prepared, tmp_path_factory):
    """A finished run, its plan, and the base."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "base").mkdir()
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, folder / "base")
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, folder / "base")
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        model={"source": folder / "base"},
        train={"steps": 3},
        optimizer={"learning_rate": 0.03},
    )
    lora = Lora(
        kind="dora", rank=4, alpha=8, target_modules=["all-linear"], modules_to_save=["norm"]
    )
    plan = plan.model_copy(update={"adapter": lora})
    run = Run(plan, folder / "run")
    (folder / "run" / "recipe.yaml").write_text("{}")
    return run, plan, folder / "base"


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).head


def test_a_run_is_loaded_with_its_base(tuned):
    run, plan, _ = tuned
    trained = build_state(plan, resume_from=run.checkpoint(3)).model_and_optimizer.model
    for load in (load_model, load_to_evaluate):
        decoder, tokenizer = load(run.folder)
        assert_close(logits(decoder), logits(trained), atol=1e-5, rtol=0)
        assert tokenizer.encode("def")


def test_an_adapter_without_a_tokenizer_takes_that_of_its_base(tuned, tmp_path):
    run, _, base = tuned
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(run.checkpoint(3) / file, tmp_path)
    assert find_model(tmp_path).tokenizer == base
    decoder, _ = load_model(tmp_path)
    assert_close(logits(decoder), logits(load_model(run.folder)[0]), atol=0, rtol=0)


def test_base_plus_adapter_chooses_the_base(tuned, tmp_path):
    run, _, base = tuned
    moved = shutil.copytree(base, tmp_path / "moved")
    adapter = shutil.copytree(run.checkpoint(3), tmp_path / "a+b")
    config = adapter / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/gone"})
    )
    with pytest.raises(UserError, match="damaged checkpoint"):
        load_model(model_path(str(adapter)))
    (adapter / "MANIFEST.json").unlink()  # a folder that was changed on purpose
    with pytest.raises(UserError, match="not here"):
        load_model(model_path(str(adapter)))
    decoder, _ = load_model(model_path(f"{moved}+{adapter}"))
    assert_close(logits(decoder), logits(load_model(run.folder)[0]), atol=0, rtol=0)
    assert find_model(model_path(f"{moved}+{run.folder}")).weights == run.checkpoint(3)


def test_a_base_with_other_weights_is_refused(tuned, tmp_path):
    run, _, base = tuned
    other = shutil.copytree(base, tmp_path / "other")
    write_model(model_state(fresh_decoder(CONFIG, seed=4)), CONFIG, other)
    with pytest.raises(UserError, match="trained on other weights") as refused:
        load_model(model_path(f"{other}+{run.folder}"))
    words = refused.value.fix.removeprefix("name the base that it was trained on: ")
    load_model(model_path(words))
    with pytest.raises(UserError, match="not an adapter"):
        find_model(model_path(f"{other}+{base}"))
