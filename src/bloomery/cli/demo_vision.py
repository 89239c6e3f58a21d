"""`bloomery demo vision`: a small model learns to answer questions about pictures, is killed and resumed."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.common import shown_path
from bloomery.cli.demo import (
    KILL_AT,
    NUM_REPEATED,
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
from bloomery.core.units import format_count, format_seconds
from bloomery.data.shards import read_manifest
from bloomery.data.sources.shapes import other_examples
from bloomery.hardware.detect import detect
from bloomery.monitor.events import RunStarted, Saved, StepDone
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan

if TYPE_CHECKING:
    from bloomery.evals.picture_scores import PictureScores

RECIPE = "demo-vision"
NUM_ASKED = 360  # new pictures that the model is asked about: 20 of each combination
CONTROL = "shuffled"


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """Runs the demo from training to the report; returns the document of `--json`. Raises UserError."""
    start_time = time.time()
    folder = run_dir or free_folder(RECIPE)
    story = Story(to_stderr=as_json)
    story.write("Bloomery demo: a small model learns to see, from random weights")
    story.show_status("checking this machine")
    story.write(f"{describe(detect())} · no download")
    story.write()
    story.show_status("starting")
    try:
        kill = _train_and_kill(folder, story)
        if kill is not None:
            resume_killed(folder, story, kill, _result_of, "losses and gradients")
    finally:
        story.end_table()
    return _ask(folder, story, kill, start_time)


def _result_of(step: StepDone) -> tuple[float | None, float | None]:
    return step.loss, step.grad_norm


def _train_and_kill(folder: Path, story: Story) -> Kill | None:
    """Trains until some steps after a checkpoint, and kills the process there. No kill when training ended before."""
    results: dict[int, Any] = {}
    num_steps = 0
    saved_step = 0
    with closing(follow_run(folder, "train", RECIPE, "--run-dir", str(folder))) as events:
        for event in events:
            if isinstance(event, RunStarted):
                num_steps = event.steps
                _show_plan(story, read_plan(folder / "plan.json"), event)
                story.begin_table(num_steps, event)
            story.show(event)
            if isinstance(event, Saved) and not event.weights_only:
                saved_step = event.step
            if not isinstance(event, StepDone):
                continue
            results[event.step] = _result_of(event)
            # Some steps after a checkpoint, so that the resumed run has results to repeat.
            if saved_step >= KILL_AT * num_steps and event.step >= saved_step + NUM_REPEATED:
                events.close()
                story.note(event.step, "training process killed on purpose (kill -9)")
                repeated = {step: result for step, result in results.items() if step > saved_step}
                return Kill(event.step, saved_step, repeated)
    return None


def _show_plan(story: Story, plan: RunPlan, started: RunStarted) -> None:
    manifest = read_manifest(plan.data.prepared)
    story.write(
        "dataset",
        f"{manifest.train.documents:,} pictures of a circle, a square or a triangle in red, green or blue; each has"
        " one question, which shape or which color, with three answers",
    )
    story.write(
        "plan",
        f"{format_count(started.trainable or 0)} parameters, all of them trained: vision tower, projector,"
        f" language model · {plan.train.steps:,} steps · {plan.train.precision}",
    )


def _ask(folder: Path, story: Story, kill: Kill | None, start_time: float) -> dict[str, Any]:
    """Right answers of each checkpoint, the control, export and page of the finished run; the document of `--json`."""
    plan = read_plan(folder / "plan.json")
    assert plan.model.source is not None and plan.train.steps is not None
    # torch is imported here: until now the training processes did all of the work.
    with story.busy("asking the model"):
        from bloomery.export.layouts import export
        from bloomery.infer.model_folder import model_folder
        from bloomery.report import Bars, write_report

        first = _scores_of(plan.model.source, "last", control=False)
        accuracies = {"step 0": first.right}
        saved_steps = (
            int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")
        )
        for step in sorted(saved_steps):
            story.show_status(f"asking the model of step {step:,}")
            scores = _scores_of(folder, str(step), control=step == plan.train.steps)
            accuracies[f"step {step}"] = scores.right
        control = scores.control_right
        assert control is not None, "a finished run has the checkpoint of its last step"

    story.write(
        "result",
        f"share of right answers about {NUM_ASKED} new pictures; a guess is right a third of the time."
        f" {CONTROL.capitalize()}: the last model, with the picture of another question",
    )
    write_bars(story, {**accuracies, CONTROL: control}, longest=1.0)
    story.write()

    export_folder = folder / "export" / "hf"
    with story.busy("writing the report"):
        if not export_folder.exists():
            export(model_folder(folder, "last"), export_folder, keeps_vision=True)
        last_step = next(reversed(accuracies))
        bars = Bars(
            "Right answers about new pictures",
            (*accuracies.items(), (CONTROL, control)),
            unit="share of right answers",
            note="Shuffled: with the picture of another question. A guess is right a third of the time.",
            highlighted=last_step,
        )
        report = write_report(folder, extras=(bars,))
    seconds = time.time() - start_time
    story.write("took", f"{format_seconds(seconds)} in all")
    story.write("report", f"{shown_path(report):<33}training curves, events, settings")
    story.write("model", f"{shown_path(export_folder):<33}opens in transformers")
    story.write()
    write_next_steps(
        story,
        {
            f"bloomery chat {run_name(folder)}": "/image FILE, then ask",
            f"bloomery eval {run_name(folder)} --data ROWS": "your own questions",
            "bloomery train smolvlm2-500m-lora data.path=~/receipts": "your own pictures",
        },
    )
    return {
        "accuracy": accuracies[last_step],
        "control_accuracy": control,
        "accuracies": accuracies,
        "pictures": NUM_ASKED,
        "seconds": seconds,
        "report": str(report),
        "folder": str(folder),
        "killed_at_step": kill.step if kill else None,
        "repeated_steps": len(kill.results_before) if kill else 0,
        "differing_steps": len(kill.differing_steps) if kill else 0,
    }


def _scores_of(model: Path, step: str, *, control: bool) -> "PictureScores":
    from bloomery.evals.evaluate import load_files
    from bloomery.evals.picture_scores import score_pictures
    from bloomery.infer.held_model import held_model
    from bloomery.infer.picture_prompts import open_eyes

    with held_model(model, step) as files:
        decoder, tokenizer = load_files(files)
        encoder = open_eyes(decoder, files)
        examples = other_examples(NUM_ASKED)
        scores, _ = score_pictures(
            decoder, tokenizer, encoder, examples, where=str(model), control=control
        )
    return scores
