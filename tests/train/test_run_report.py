"""The report, `eval` and the live figures of a run that was really trained."""

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run

from bloomery.data.shards import open_split
from bloomery.evals.evaluate import evaluate, load_to_evaluate
from bloomery.monitor.events import EvalDone, EventLog, RunEnded
from bloomery.plan.store import write_plan
from bloomery.report import write_report


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    plan = tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 12},
        eval={"every_steps": 12},
        sample={"prompts": ("def f",)},
    )
    run = Run(plan, folder)
    with EventLog(folder / "events.jsonl") as emit:
        for event in run.events:
            emit(event)
        emit(RunEnded(step=12, status="done"))
    write_plan(plan, folder / "plan.json")
    return run, plan


def test_the_report_shows_planned_and_measured_memory(trained):
    run, _ = trained
    text = write_report(run.folder).read_text()
    assert "Memory per device" in text and "measured peak" in text


def test_eval_of_the_validation_split_counts_its_text(trained):
    """All documents, whole, where training's own evaluation cuts them to its rows: more tokens, about the same loss."""
    run, plan = trained
    decoder, tokenizer = load_to_evaluate(run.folder, step="last")
    result, _ = evaluate(decoder, tokenizer, plan.data.prepared)
    split = open_split(plan.data.prepared, "validation")
    assert result.bytes == split.record.bytes and result.tokens == split.record.tokens - len(split)
    (inside,) = run.of(EvalDone)[-1:]
    assert abs(result.loss - inside.loss) < 0.25 * inside.loss
    assert next(decoder.parameters()).dtype == torch.float32
