"""A run on pictures is evaluated with them on its validation set; what would be scored blindly is refused."""

import re
import shutil

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run

from bloomery.core.errors import UserError
from bloomery.evals.evaluate import evaluate_model
from bloomery.model.configs import read_config
from bloomery.monitor.events import EvalDone
from bloomery.plan.store import write_plan
from bloomery.recipe.objectives import Preference, Sft
from bloomery.recipe.schema import Lora, NoAdapter
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row

LORA = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj"])
ROWS = [row(RED, TEXT, answer=f"red {n}") for n in range(8)]
ROWS += [row(BLUE, TEXT, answer=f"blue {n}") for n in range(8)]


def trained(folder, kind, *, adapter=LORA, objective=None, rows=ROWS):
    objective = objective or Sft(kind="sft")
    prepared = prepared_rows(
        folder, rows, kind=kind, weights=True, validation=0.3, objective=objective.kind
    )
    base = folder / "base"
    plan = tiny_plan(
        prepared,
        config=read_config(base),
        model={"source": base},
        data={"sequence_length": 256},
        train={"steps": 2, "micro_batch_size": 2, "accumulation": 1, "tokens_per_step": 512},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 2},
    ).model_copy(update={"adapter": adapter, "objective": objective})
    run = Run(plan, folder / "run")
    write_plan(plan, run.folder / "plan.json")
    return run


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_run_has_the_loss_of_its_own_evaluation(kind, tmp_path):
    run = trained(tmp_path, kind)
    scores, (note,) = evaluate_model(run.folder, None, step="last")
    assert scores.loss == pytest.approx(run.of(EvalDone)[-1].loss, rel=1e-6)
    assert note.startswith("same as in training") and "--data" not in note


@pytest.mark.parametrize("data", ["rows/train.jsonl", "prepared-stop"])
def test_what_would_be_scored_without_its_pictures_is_refused(data, tmp_path):
    run = trained(tmp_path, "gemma3")
    with pytest.raises(UserError, match="has pictures, and would be scored without them"):
        evaluate_model(run.folder, tmp_path / data, step="last")
    with pytest.raises(UserError, match="the dataset has pictures"):
        evaluate_model(run.folder, None, step="last", bos=False)


def test_a_run_on_pairs_with_pictures_is_refused(tmp_path):
    pairs = [
        {
            "prompt": [{"role": "user", "content": [RED, TEXT]}],
            "chosen": [{"role": "assistant", "content": f"red {number}"}],
            "rejected": [{"role": "assistant", "content": "blue"}],
        }
        for number in range(12)
    ]
    run = trained(tmp_path, "gemma3", objective=Preference(kind="dpo", beta=0.5), rows=pairs)
    with pytest.raises(UserError, match="the dataset has pictures"):
        evaluate_model(run.folder, None, step="last")


def test_a_run_in_full_whose_base_is_gone_is_told_so(tmp_path):
    run = trained(tmp_path, "gemma3", adapter=NoAdapter())
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "base"))):
        evaluate_model(run.folder, None, step="last")
