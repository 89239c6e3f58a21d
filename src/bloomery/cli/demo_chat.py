"""`bloomery demo chat`: fine-tune the model of `bloomery demo` with LoRA, and compare it with its base."""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.common import shown_path
from bloomery.cli.demo import Story, describe, follow_run, free_folder, run_name
from bloomery.core.errors import UserError
from bloomery.core.run_folder import all_runs
from bloomery.core.text import harmless
from bloomery.core.units import format_count
from bloomery.data.shards import read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.facts.counting import parameter_count
from bloomery.hardware.detect import detect
from bloomery.model.configs import read_config
from bloomery.monitor.events import RunEnded, RunStarted, read_events
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan

if TYPE_CHECKING:
    from bloomery.train.evaluation.answers import PromptAndResponse

RECIPE = "demo-chat-lora"
MAX_TOKENS = 160
NUM_PROMPTS_TRIED = 24  # the shortest is shown
RESPONSE_LINES = 6
RESPONSE_WIDTH = 86


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """Runs the demo from training to the report; returns the document of `--json`. Raises UserError."""
    start_time = time.time()
    story = Story(to_stderr=as_json)
    story.write("Bloomery chat demo: fine-tune the model of `bloomery demo` with LoRA")
    story.show_status("checking this machine")
    story.write(f"{describe(detect())} · no download")
    story.write()

    # The model of `bloomery demo` is the base; without a finished run of it, one is trained first.
    base = find_base() or _train_base(story)
    parameters = format_count(parameter_count(read_config(base)))
    story.write("base", f"{shown_path(base)}: {parameters} parameters, pretrained on Python code")
    folder = run_dir or free_folder(RECIPE)
    _train(story, RECIPE, folder, f"model.from={base}")
    return _compare(story, base, folder, start_time)


def find_base() -> Path | None:
    """The export of the newest finished run of `bloomery demo`."""
    for folder in reversed(all_runs()):
        # Runs of the demo are called demo, demo-2 and so on.
        name, _, number = folder.name.partition("-")
        if name != "demo" or not (folder.name == name or number.isdecimal()):
            continue
        path = folder / "events.jsonl"
        if not path.is_file():
            continue
        final_events = [event for event in read_events(path) if isinstance(event, RunEnded)]
        if final_events and final_events[-1].status == "done":
            return _exported(folder)
    return None


def _exported(run: Path) -> Path:
    """The export of a run, created if missing."""
    from bloomery.export.layouts import export
    from bloomery.infer.model_folder import model_folder

    folder = run / "export" / "hf"
    if not folder.exists():
        export(model_folder(run, "last"), folder)
    return folder.absolute()


def _train_base(story: Story) -> Path:
    """The run of `bloomery demo` without kill and evaluation."""
    folder = Path("runs/demo")
    if folder.exists():
        fix = f"`bloomery resume {folder}`, or delete the folder"
        raise UserError("the run of `bloomery demo` is not finished", where=str(folder), fix=fix)
    story.write("base", "no finished run of `bloomery demo` in runs/: training its model first")
    _train(story, "demo", folder)
    return _exported(folder)


def _train(story: Story, recipe: str, folder: Path, *overrides: str) -> None:
    """Trains, and prints the table of the run below its dataset and trainable parameters."""
    story.show_status("starting")
    arguments = ("train", recipe, *overrides, "--run-dir", str(folder))
    with closing(follow_run(folder, *arguments)) as events:
        for event in events:
            if isinstance(event, RunStarted):
                _show_run(story, read_plan(folder / "plan.json"))
                story.begin_table(event.steps)
            story.show(event)
    story.end_table()


def _show_run(story: Story, plan: RunPlan) -> None:
    steps = f"{plan.train.steps:,} steps x {plan.train.tokens_per_step:,} tokens"
    if plan.adapter.kind != "lora":  # the base
        story.write("", steps)
        return
    manifest = read_manifest(plan.data.prepared)
    story.write(
        "dataset",
        f"{manifest.train.documents:,} prompts and responses from the docstrings of Python's "
        f"standard library; {manifest.validation.documents} more are the validation set",
        "trains on the responses only",
    )
    trainable = format_count(TrainedModel.of(plan, plan.model.config).trainable_count)
    story.write(
        "lora",
        f"rank {plan.adapter.rank}, base weights frozen: {trainable} trainable parameters, {steps}",
    )


@dataclass(frozen=True)
class ChatResult:
    """Evaluation of one model. `loss`: nats per response token of the validation set."""

    name: str
    loss: float
    response: str


def _compare(story: Story, base: Path, run: Path, start_time: float) -> dict[str, Any]:
    """Prints the losses and a response of base and adapter, the page and next commands; returns the document."""
    with story.busy("loading the model"):
        from bloomery.report import Bars, write_report
        from bloomery.train.evaluation.answers import readable_text, validation_prompts

    # Both models answer the shortest of some prompts, so that the page stays short.
    prepared = read_plan(run / "plan.json").data.prepared
    tokenizer = load_tokenizer(prepared)
    prompts = validation_prompts(prepared, NUM_PROMPTS_TRIED)
    prompt = min(prompts, key=lambda item: len(item.prompt))
    with story.busy("evaluating both models on the validation set"):
        results = [
            _evaluate(name, model, prepared, prompt, tokenizer)
            for name, model in (("base", base), ("lora", run))
        ]

    num_prompts = read_manifest(prepared).validation.documents
    losses = (f"{result.name} {result.loss:.3f}" for result in results)
    unit = f"nats per response token on {num_prompts} prompts of the validation set"
    story.write("result", f"loss: {' · '.join(losses)} ({unit}; lower is better)")
    story.write()
    story.write("prompt", *readable_text(tokenizer, prompt.prompt).splitlines())
    for result in results:
        story.write(result.name, *_shortened(result.response))
    story.write("reference", *_shortened(readable_text(tokenizer, prompt.reference)))
    story.write()

    # The report of the LoRA run gets the comparison as bars.
    with story.busy("writing the report"):
        bars = Bars(
            "Validation loss",
            tuple((result.name, result.loss) for result in results),
            unit="nats per token",
            note="Response tokens. Lower is better.",
            highlighted="lora",
        )
        report = write_report(run, extras=(bars,))
    story.write("report", shown_path(report))
    name = run_name(run)
    export_command = f"bloomery export {name} --to merged --out my-model"
    story.write("next", f"bloomery chat {name}", export_command)
    return {
        "models": [{"name": result.name, "loss": result.loss} for result in results],
        "seconds": time.time() - start_time,
        "report": str(report),
        "folder": str(run),
    }


def _evaluate(
    name: str, model: Path, prepared: Path, prompt: "PromptAndResponse", tokenizer: Tokenizer
) -> ChatResult:
    from bloomery.evals.evaluate import evaluate, load_to_evaluate
    from bloomery.train.evaluation.answers import readable_text, sample_answer

    decoder, _ = load_to_evaluate(model)
    loss = evaluate(decoder, tokenizer, prepared)[0].loss
    completion = sample_answer(decoder, tokenizer, prompt, max_new_tokens=MAX_TOKENS)
    ellipsis = "" if completion.ended else " …"
    return ChatResult(name, loss, readable_text(tokenizer, completion.ids) + ellipsis)


def _shortened(text: str) -> list[str]:
    """The first lines without blank ones, cut at the margin; "…" stands for what is left out."""
    lines = [line.rstrip() for line in harmless(text).splitlines() if line.strip()] or ["(empty)"]
    cut_lines = [
        line if len(line) <= RESPONSE_WIDTH else f"{line[: RESPONSE_WIDTH - 1]}…" for line in lines
    ]
    if len(cut_lines) <= RESPONSE_LINES:
        return cut_lines
    return [*cut_lines[: RESPONSE_LINES - 1], "…"]
