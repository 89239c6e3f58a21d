"""What `eval` says of a reward model: the run's own figures, and those of transformers by hand."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run
from structured_runs import write_answers

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.evals.evaluate import evaluate, evaluate_pairs, load_to_evaluate
from bloomery.export.layouts import export_adapter, export_merged
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import EvalDone
from bloomery.plan.store import write_plan
from bloomery.recipe.objectives import Reward
from bloomery.recipe.schema import Lora

PAIRS = [
    ("def f(", "x): return x", "y) = 3"),
    ("a = ", "1", "a = = a = = 2 + 2 + 2 + 2"),
    ("value", " + 2", " - 1"),
]


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A run with an adapter, whose rows cut some pairs, and the folder of its base."""
    folder = tmp_path_factory.mktemp("reward")
    (base := folder / "base").mkdir()
    write_model(
        model_state(fresh_decoder(replace(CONFIG, residual_dropout=0.0), seed=3)), CONFIG, base
    )
    for file in prepared.glob("tokenizer*"):
        shutil.copy(file, base)
    pairs = write_answers(folder / "pairs", prepared, "pairs")
    config = replace(CONFIG, residual_dropout=0.0, head="values")
    plan = tiny_plan(pairs, config=config, model={"source": base}, data={"sequence_length": 12})
    plan = plan.model_copy(
        update={"adapter": Lora(kind="lora", rank=4), "objective": Reward(kind="reward")}
    )
    run = Run(plan, folder / "run")
    write_plan(plan, run.folder / "plan.json")
    return run, base


def told(*words: str) -> tuple[dict[str, float], str]:
    result = CliRunner().invoke(
        cli, ["eval", *words, "--json"], catch_exceptions=False, standalone_mode=False
    )
    return json.loads(result.stdout), result.stderr


def test_without_data_it_says_what_the_run_said_of_its_last_step(trained):
    run, _ = trained
    found, notes = told(str(run.folder), "--step", "last")
    last = run.of(EvalDone)[-1]
    assert found.pop("loss") == pytest.approx(last.loss, abs=1e-6)
    assert found.pop("pairs") == 8
    assert found == pytest.approx(last.metrics, abs=1e-6)
    assert "of 8 pairs are truncated" in notes


def test_it_says_what_transformers_says(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    run, base = trained
    merged = export_merged(find_model(run.folder, "last"), tmp_path / "merged").folder
    adapter = export_adapter(find_model(run.folder, "last"), tmp_path / "adapter").folder
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        merged, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)

    def value(text: str) -> float:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits.item()

    sides = np.array(
        [[value(prompt + chosen), value(prompt + rejected)] for prompt, chosen, rejected in PAIRS]
    )
    margins = sides[:, 0] - sides[:, 1]
    expected = {
        "loss": np.log1p(np.exp(-margins)).mean(),
        "accuracy": (margins > 0).mean(),
        "margin": margins.mean(),
        "chosen_reward": sides[:, 0].mean(),
        "rejected_reward": sides[:, 1].mean(),
        "pairs": 3,
    }
    for name in (merged, run.folder, f"{base}+{adapter}"):
        step = ["--step", "last"] if name is run.folder else []
        found, notes = told(str(name), "--data", str(tmp_path / "pairs.jsonl"), *step)
        assert found == pytest.approx(expected, abs=1e-5)
        assert "note:" not in notes


def test_what_is_no_pair_is_refused_and_a_reward_model_prices_no_text(trained, prepared, tmp_path):
    run, _ = trained
    decoder, tokenizer = load_to_evaluate(run.folder)
    rows = {
        "plain text": {"text": "words"},
        "conversations": {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        },
        "responses with KTO labels": {"prompt": "a", "completion": "b", "label": True},
    }
    for kind, row in rows.items():
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row))
        with pytest.raises(
            UserError,
            match=f"requires pairs of a chosen and a rejected response; this data is {kind}",
        ):
            evaluate_pairs(decoder, tokenizer, path)
    with pytest.raises(UserError, match="this data is plain text"):
        evaluate_pairs(decoder, tokenizer, prepared)
    with pytest.raises(UserError, match="gives values and no text"):
        evaluate(decoder, tokenizer, prepared)


def test_diverged_weights_are_no_number(trained):
    run, _ = trained
    decoder, tokenizer = load_to_evaluate(run.folder)
    with torch.no_grad():
        decoder.score.weight.fill_(math.nan)
    with pytest.raises(UserError, match="not finite numbers"):
        evaluate_pairs(decoder, tokenizer, run.folder.parent / "pairs")
