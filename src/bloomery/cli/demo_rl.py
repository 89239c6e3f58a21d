"""`bloomery demo rl`: a small model learns from rewards (GRPO), is killed within a rollout and resumed."""

import time
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.common import shown_path
from bloomery.cli.demo import (
    Kill,
    Story,
    describe,
    follow_run,
    free_folder,
    resume_killed,
    run_name,
    write_bars,
    write_next_steps,
)
from bloomery.core.files import read_whole
from bloomery.core.text import harmless
from bloomery.core.units import format_count, format_seconds
from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.shards import read_manifest
from bloomery.facts.counting import parameter_count
from bloomery.hardware.detect import detect
from bloomery.monitor.events import Phase, RunStarted, Saved, StepDone
from bloomery.monitor.words import progress_text
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Grpo

if TYPE_CHECKING:
    from bloomery.evals.rewards import RewardScores

BASE_RECIPE = "demo-rl-base"
RECIPE = "demo-rl"
KILL_AT = 0.4  # of the run's steps: after the first checkpoint from there on
NUM_REPEATED = 5  # steps between that checkpoint and the kill
NUM_SAMPLES = 6  # held-out prompts that are shown with their completions
POLL_SECONDS = 0.01  # a rollout takes a tenth of a second
COMPARED = "completions and losses"


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """Runs the demo from the base model to the report; returns the document of `--json`. Raises UserError."""
    start_time = time.time()
    story = Story(to_stderr=as_json)
    story.write("Bloomery demo: a small model learns to add by reinforcement learning (GRPO)")
    story.show_status("checking this machine")
    story.write(f"{describe(detect())} · no download")
    story.write()

    # GRPO raises the probability of what a model sometimes does: the base has to know sums among other answers.
    folder = run_dir or free_folder(RECIPE)
    base_run = free_folder(BASE_RECIPE)
    if run_dir is not None:
        base_run = run_dir.with_name(f"{run_dir.name}-base")
    base = _train_base(story, base_run)
    try:
        kill = _train_and_kill(folder, story, base)
        if kill is not None:
            resume_killed(folder, story, kill, lambda step: result_of(folder, step), COMPARED)
    finally:
        story.end_table()
    return _compare(folder, story, base, kill, start_time)


def _train_base(story: Story, folder: Path) -> Path:
    """The base model's export, once it is trained."""
    start_time = time.time()
    num_steps = 0
    loss: float | None = None
    arguments = ("train", BASE_RECIPE, "--run-dir", str(folder))
    with story.busy("starting"), closing(follow_run(folder, *arguments)) as events:
        for event in events:
            if isinstance(event, RunStarted):
                num_steps = event.steps
            if isinstance(event, StepDone):
                loss = event.loss
            if isinstance(event, RunStarted | Phase | StepDone):
                story.show_status(progress_text(event, num_steps))

    # torch is imported here: until now the training process did all of the work.
    with story.busy("writing the base model"):
        from bloomery.export.layouts import export
        from bloomery.infer.model_folder import model_folder

        model = folder / "export" / "hf"
        export(model_folder(folder, "last"), model)
    plan = read_plan(folder / "plan.json")
    parameters = format_count(parameter_count(plan.model.config))
    seconds = format_seconds(time.time() - start_time)
    story.write(
        "base",
        f"{parameters} parameters · supervised fine-tuning, {num_steps} steps to a loss of {loss:.2f} in {seconds}",
        "Its data has three answers to each sum, and one is right: 17+8= is 25, 17 or 8.",
    )
    return model.absolute()


def _train_and_kill(folder: Path, story: Story, base: Path) -> Kill | None:
    """Trains until some steps after a checkpoint, and kills the process in its next rollout.

    No kill when training ended before that.
    """
    results: dict[int, Any] = {}
    num_steps = 0
    saved_step = 0
    arguments = ("train", RECIPE, f"model.from={base}", "--run-dir", str(folder))
    story.show_status("starting")
    with closing(follow_run(folder, *arguments, poll_seconds=POLL_SECONDS)) as events:
        for event in events:
            if isinstance(event, RunStarted):
                num_steps = event.steps
                _show_plan(story, read_plan(folder / "plan.json"))
                story.begin_table(num_steps, event)
            if not isinstance(event, StepDone):
                story.show(event)
                if isinstance(event, Saved) and not event.weights_only:
                    saved_step = event.step
                continue
            # Killed before anything else: the process samples the completions of the next step already.
            is_late = saved_step >= KILL_AT * num_steps
            is_last = is_late and event.step >= saved_step + NUM_REPEATED
            if is_last:
                events.close()
            results[event.step] = result_of(folder, event)
            story.show(event)
            if is_last:
                return _killed(folder, story, event, saved_step, results)
    return None


def _killed(
    folder: Path, story: Story, last_step: StepDone, saved_step: int, results: dict[int, Any]
) -> Kill:
    """The kill after that step, which a line of the table tells."""
    text = "training process killed on purpose (kill -9)"
    # A rollout is written when all of its completions have rewards.
    if not _completions(folder, last_step.step + 1).exists():
        text += f" while it sampled the completions of step {last_step.step + 1}"
    story.note(last_step.step, text)
    repeated = {step: result for step, result in results.items() if step > saved_step}
    return Kill(last_step.step, saved_step, repeated)


def _completions(folder: Path, step: int) -> Path:
    return folder / "completions" / f"step-{step:08d}.jsonl"


def result_of(folder: Path, step: StepDone) -> tuple[Any, ...]:
    """All that a step gives: its loss, gradient norm and metrics, and the bytes of its completions and rewards."""
    digest = sha256(read_whole(_completions(folder, step.step))).hexdigest()
    return step.loss, step.grad_norm, step.metrics, digest


def _show_plan(story: Story, plan: RunPlan) -> None:
    objective = plan.objective
    assert isinstance(objective, Grpo)
    manifest = read_manifest(plan.data.prepared)
    num_completions = plan.train.sequences_per_step
    story.write(
        "reward",
        f"1 for the right sum, else 0 (verifier exact_match) · {manifest.train.documents} prompts; "
        f"{manifest.validation.documents} others are held out",
    )
    story.write(
        "grpo",
        f"{plan.train.steps} steps x {num_completions} completions: {objective.num_generations} of each of "
        f"{num_completions // objective.num_generations} prompts · {plan.train.precision}",
    )


@dataclass(frozen=True)
class ModelResult:
    """What a model does with held-out prompts: its rewards, and its completions of some of them."""

    scores: "RewardScores"
    completions: list[str]


def _compare(
    folder: Path, story: Story, base: Path, kill: Kill | None, start_time: float
) -> dict[str, Any]:
    """Rewards and completions of the base and the trained model, export and page; the document of `--json`."""
    plan = read_plan(folder / "plan.json")
    with story.busy("evaluating both models"):
        from bloomery.export.layouts import export
        from bloomery.infer.model_folder import model_folder
        from bloomery.report import Bars, write_report

        checkpoint = model_folder(folder, "last")
        held_out = Prompts(plan.data.prepared, seed=plan.train.seed, split="validation")
        # From all parts of the table of sums.
        shown_prompts = list(held_out)[NUM_SAMPLES // 2 :: max(1, len(held_out) // NUM_SAMPLES)]
        before = _evaluate(base, plan, folder, shown_prompts)
        after = _evaluate(checkpoint, plan, folder, shown_prompts)

    story.write(
        "result",
        f"share of right sums on {before.scores.prompts} held-out prompts, which GRPO never trained on",
    )
    rewards = {"before": before.scores.reward, "after": after.scores.reward}
    write_bars(story, rewards, longest=1.0)
    story.write("samples", f"{'':<9}{'before':>6}{'after':>9}")
    completions = zip(shown_prompts, before.completions, after.completions, strict=True)
    for prompt, text_before, text_after in completions:
        story.write("", f"{prompt.text:<9}{text_before:>6}{text_after:>9}")
    story.write()

    export_folder = folder / "export" / "hf"
    with story.busy("writing the report"):
        if not export_folder.exists():
            export(checkpoint, export_folder)
        bars = Bars(
            "Reward on held-out prompts",
            tuple(rewards.items()),
            unit="share of right sums",
            note="One completion of each prompt, sampled as in training. Higher is better.",
            highlighted="after",
        )
        report = write_report(folder, extras=(bars,))
    seconds = time.time() - start_time
    story.write("took", f"{format_seconds(seconds)} in all")
    story.write(
        "report", f"{shown_path(report):<33}curves of reward, length and entropy; completions"
    )
    rollouts = shown_path(folder / "completions")
    story.write("rollouts", f"{rollouts:<33}every completion with its reward and advantage")
    story.write()
    name = run_name(folder)
    write_next_steps(
        story,
        {
            f'bloomery generate {name} --prompt "17+8="': "",
            f"bloomery eval {name}": "reward, 95% interval",
            f"bloomery train {RECIPE} objective.loss_type=dr_grpo": "another loss",
            "bloomery recipes show qwen2.5-1.5b-grpo": "for a 16 GB GPU",
        },
    )
    return {
        "reward_before": before.scores.reward,
        "reward_after": after.scores.reward,
        "prompts": before.scores.prompts,
        "seconds": seconds,
        "report": str(report),
        "folder": str(folder),
        "killed_at_step": kill.step if kill else None,
        "repeated_steps": len(kill.results_before) if kill else 0,
        "differing_steps": len(kill.differing_steps) if kill else 0,
    }


def _evaluate(
    model: Path, plan: RunPlan, run_dir: Path, shown_prompts: list[Prompt]
) -> ModelResult:
    """With the same random numbers for every model."""
    from bloomery.evals.evaluate import load_to_evaluate
    from bloomery.evals.rewards import complete_as_trained, evaluate_rewards
    from bloomery.train.rl.scoring import visible_ids

    decoder, tokenizer = load_to_evaluate(model)
    scores, _ = evaluate_rewards(decoder, tokenizer, plan, run_dir, None)
    completions = complete_as_trained(decoder, tokenizer, plan, shown_prompts)
    texts = [harmless(tokenizer.decode(visible_ids(completion))) for completion in completions]
    return ModelResult(scores, texts)
