"""A run with rewards after its end: `eval`, the report, the card. Oracle: the run's own events and completions."""

import json

import pytest

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.data.prepare.prepare import prepare
from bloomery.evals.evaluate import evaluate_model
from bloomery.export.card import training_of
from bloomery.hardware.detect import detect
from bloomery.monitor.events import EventLog, RunEnded, from_json
from bloomery.plan.gather import gather
from bloomery.plan.resolve import resolve
from bloomery.plan.store import write_plan
from bloomery.recipe.load import dump_recipe, load_recipe
from bloomery.report.page import page
from bloomery.report.record import read_run_record
from bloomery.runs.consent import note_code, reward_files
from bloomery.sweep.ranking import Judged, ranked
from bloomery.sweep.scores import Metric, judge
from ranks import fields, train

RECIPE = """
extends: demo
name: rl
model: {hidden_size: 64, intermediate_size: 128, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 32}
tokenizer: {train: {kind: bpe, vocab_size: 300}}
data: {path: prompts.jsonl, sequence_length: 48, validation: 0.3}
objective: {kind: grpo, num_generations: 4, max_completion_length: 8}
rewards: [{python: "my_rewards.py:vowels"}]
sample: {prompts: []}
train: {max_steps: 4, batch_size: 16, micro_batch_size: 2, precision: float32, compile: false}
optimizer: {kind: adamw, learning_rate: 1e-3, warmup: 1 steps}
eval: {every: 2 steps}
checkpoint: {every: 2 steps}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of four steps, its events, and its plan."""
    folder = tmp_path_factory.mktemp("rewarded")
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = (
        "def vowels(completions, **_):\n    return [text.count('e') / 8 for text in completions]\n"
    )
    (folder / "my_rewards.py").write_text(rewards)
    (folder / "rl.yaml").write_text(RECIPE)
    loaded = load_recipe(str(folder / "rl.yaml"))
    prepare(loaded, folder / "prepared")
    plan = resolve(loaded, gather(loaded, detect(), prepared=folder / "prepared"))
    run_dir = folder / "run"
    events = train(plan, run_dir)
    with EventLog(run_dir / "events.jsonl") as log:
        for event in events:
            log(from_json(json.dumps(event)) if isinstance(event, dict) else event)
        log(RunEnded(step=4, status="done"))
    write_plan(plan, run_dir / "plan.json")
    (run_dir / "recipe.yaml").write_text(dump_recipe(loaded))
    note_code(run_dir, files=reward_files(plan))
    return run_dir, events, plan


def test_eval_repeats_the_reward_of_the_run(run):
    run_dir, events, _ = run
    by_step = {event["step"]: event["metrics"]["reward"] for event in fields(events, "EvalDone")}
    for step in ("2", "4"):
        scores, notes = evaluate_model(run_dir, None, step=step)
        assert scores.reward == pytest.approx(by_step[int(step)], abs=1e-12)
        assert scores.reward_low < scores.reward < scores.reward_high
        assert scores.rewards == {"vowels": pytest.approx(scores.reward)}
        assert any("over prompts" in note for note in notes)


def test_a_sweep_judges_the_run_by_the_rewards_of_its_held_out_prompts(run):
    run_dir, _, _ = run
    scores, _ = evaluate_model(run_dir, None, step="4")
    score = judge(RunFolder(run_dir), Metric("reward"), step="4")
    assert score.step == 4 and score.value == pytest.approx(scores.reward, abs=1e-12)
    estimate = ranked([Judged("run", score.value, score.scores)], lower_is_better=False).rows[0]
    assert (estimate.estimate.low, estimate.estimate.high) == (
        scores.reward_low,
        scores.reward_high,
    )


def test_eval_takes_prompts_of_a_file(run, tmp_path):
    run_dir, _, _ = run
    rows = [{"prompt": f"def f{number}(x): return", "answer": number} for number in range(12)]
    data = tmp_path / "others.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores, _ = evaluate_model(run_dir, data)
    assert scores.prompts == 12
    assert scores.tokens <= 12 * 8


def test_rewards_of_a_run_from_elsewhere_start_only_when_they_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of another user"))
    with pytest.raises(UserError, match="nothing here notes that you asked for it") as refused:
        evaluate_model(run[0], None)
    assert "--trust-code" in refused.value.fix
    scores, _ = evaluate_model(run[0], None, trust_code=True)
    assert scores.prompts > 0


def test_the_report_has_rewards_and_completions(run):
    run_dir, _, _ = run
    html = page(read_run_record(run_dir), (), "rl")
    for title in ("Reward", "Length of completions", "Entropy", "Time of a step"):
        assert f"<b>{title}</b>" in html
    assert "reward of held-out prompts" in html
    assert "validation loss" not in html
    first = json.loads(
        (run_dir / "completions" / "step-00000001.jsonl").read_text().splitlines()[0]
    )
    assert first["prompt"].startswith("def f")
    assert "step 1, 16 completions" in html
    assert "step 4, 16 completions" in html


def test_the_card_has_the_reward(run):
    run_dir, events, _ = run
    training = training_of(run_dir / "checkpoints" / "step-00000004")
    last = fields(events, "StepDone")[-1]["metrics"]["reward"]
    assert training.reward == pytest.approx(last)
