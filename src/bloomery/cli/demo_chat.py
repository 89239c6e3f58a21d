"""`bloomery demo chat`: fine-tune the model of `bloomery demo` with LoRA and in full, and compare the results."""

import ast
import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.demo import Story, describe, export_demo_gguf, followed, free_folders
from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import format_count, format_seconds
from bloomery.data.shards import read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.hardware.detect import detect
from bloomery.model.counting import parameter_count
from bloomery.model.presets import read_config
from bloomery.monitor.events import Phase, RunEnded, RunStarted, read_events
from bloomery.monitor.summary import summary_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.runs.folder import all_runs

if TYPE_CHECKING:
    from bloomery.train.evaluation.answers import PromptAndResponse

RECIPES = {"lora": "demo-chat-lora", "full": "demo-chat-full"}
NUM_PROMPTS = 24  # for responses; the loss is over the whole validation set
MAX_TOKENS = 160
LINES = 6  # of a response that are printed
COLUMN = 11


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """The whole demo; returns the document of `--json`. Raises UserError."""
    began = time.time()
    story = Story(to_stderr=as_json)
    story.write("Bloomery chat demo: fine-tune the model of `bloomery demo` with LoRA and in full")
    story.show_status("checking this machine")
    story.write(f"{describe(detect())} · no download")
    story.write()
    base = find_base() or _train_base(story)
    size = format_count(parameter_count(read_config(base)))
    story.write("base", f"{_near(base)}: {size} parameters, pretrained on Python source code")
    folders = (
        [run_dir / kind for kind in RECIPES]
        if run_dir is not None
        else free_folders(*RECIPES.values())
    )
    runs = dict(zip(RECIPES, folders, strict=True))
    _train(story, RECIPES["lora"], runs["lora"], f"model.from={base}")
    plan = read_plan(runs["lora"] / "plan.json")
    same = (f"train.max_steps={plan.train.steps}", f"data.prepared={plan.data.prepared}")
    _train(story, RECIPES["full"], runs["full"], f"model.from={base}", *same)
    return _evaluate_all(story, base, runs, began)


def find_base() -> Path | None:
    """The export of the newest finished run of `bloomery demo`."""
    for folder in reversed(all_runs()):
        events = read_events(folder / "events.jsonl") if (folder / "events.jsonl").is_file() else []
        ended = [event for event in events if isinstance(event, RunEnded)]
        name = folder.name == "demo" or (
            folder.name.startswith("demo-") and folder.name[5:].isdecimal()
        )
        if name and ended and ended[-1].status == "done":
            return _exported(folder)
    return None


def _exported(run: Path) -> Path:
    """The export of a run, created if missing."""
    from bloomery.export.layouts import export
    from bloomery.train.model_folder import model_folder

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
    """Trains and prints the table of the run, below its dataset and trainable parameters."""
    shown = False
    story.show_status("starting")
    with closing(followed(folder, "train", recipe, *overrides, "--run-dir", str(folder))) as events:
        for event in events:
            planned = isinstance(event, RunStarted) or (
                isinstance(event, Phase) and event.name == "length"
            )
            plan = read_plan(folder / "plan.json") if planned else None
            if plan is not None and plan.train.steps is not None and not shown:
                shown = True
                _show_run(story, plan)
                story.begin_table(plan.train.steps)
            story.show(event)
    story.end_table()


def _show_run(story: Story, plan: RunPlan) -> None:
    """Dataset and trainable parameters, once the number of steps is known."""
    steps = f"{plan.train.steps:,} steps x {plan.train.tokens_per_step:,} tokens"
    if plan.adapter.kind == "none" and plan.objective.spec.reads_text:
        story.write("", steps)
        return
    trainable = f"{format_count(_trainable(plan))} trainable parameters, {steps}"
    if plan.adapter.kind == "none":
        story.write("full", f"full fine-tuning: {trainable}")
        return
    manifest = read_manifest(plan.data.prepared)
    train = manifest.train.documents
    validation = manifest.validation.documents
    pairs = f"{train:,} prompts and responses from the docstrings of Python's standard library"
    story.write(
        "dataset",
        f"{pairs}; {validation} more are the validation set",
        "trains on the responses only",
    )
    story.write()
    rank = getattr(plan.adapter, "rank", None)
    story.write("lora", f"LoRA, rank {rank}, base weights frozen: {trainable}")


def _trainable(plan: RunPlan) -> int:
    return TrainedModel.of(plan, plan.model.config).trained_count


@dataclass(frozen=True)
class ChatResult:
    """Evaluation of one model; None: not of a base."""

    name: str
    loss: float
    eos_share: float  # of the responses, that end with EOS
    python_share: float  # of the responses, that are a Python function
    response: str
    trainable: int | None = None
    memory_gib: float | None = None
    seconds: float | None = None


def _evaluate_all(story: Story, base: Path, runs: dict[str, Path], began: float) -> dict[str, Any]:
    """Prints results, a response of each model, reports and next commands; returns the document of `--json`."""
    with story.busy("loading the model"):
        from bloomery.report import Bars, write_report
        from bloomery.train.evaluation.answers import shown, validation_prompts

    prepared = read_plan(runs["lora"] / "plan.json").data.prepared
    tokenizer = load_tokenizer(prepared)
    prompts = validation_prompts(prepared, NUM_PROMPTS)
    example = min(range(len(prompts)), key=lambda number: len(prompts[number].prompt))
    with story.busy("evaluating the three models on the validation set"):
        results = [_evaluate("base", base, prepared, prompts, example, tokenizer)]
        for name, run in runs.items():
            summary = summary_of(read_events(run / "events.jsonl"))
            result = _evaluate(name, run, prepared, prompts, example, tokenizer)
            trainable = _trainable(read_plan(run / "plan.json"))
            results.append(
                replace(
                    result,
                    trainable=trainable,
                    memory_gib=summary.peak_gib,
                    seconds=summary.seconds,
                )
            )
    _show_results(story, results, read_manifest(prepared).validation.documents, len(prompts))
    story.write("prompt", *shown(tokenizer, prompts[example].prompt).splitlines())
    for result in results:
        story.write(result.name, *_cut(result.response))
    story.write("reference", *_cut(shown(tokenizer, prompts[example].reference)))
    story.write()
    losses = tuple((result.name, result.loss) for result in results)
    note = "Response tokens. Lower is better."
    with story.busy("writing the reports"):
        bars = [
            Bars("Validation loss", losses, unit="nats per token", note=note, own=name)
            for name in runs
        ]
        full_run = runs["full"]
        gguf, gguf_line = export_demo_gguf(full_run, full_run / "export" / f"{full_run.name}.gguf")
        reports = [
            write_report(run, extras=(chart,))
            for run, chart in zip(runs.values(), bars, strict=True)
        ]
    for title, report in zip(("report", ""), reports, strict=True):
        story.write(title, str(_near(report)))
    story.write("gguf", gguf_line)
    story.write()
    lora, full = (
        shlex.quote(run.name if run.parent == Path("runs") else str(run)) for run in runs.values()
    )
    export = f"bloomery export {full} --to hf --out my-model"
    story.write("next", f"bloomery chat {full}", f"bloomery chat {lora}", export)
    return {
        "models": [
            {key: value for key, value in vars(result).items() if key != "response"}
            for result in results
        ],
        "prompts": len(prompts),
        "seconds": time.time() - began,
        "reports": [str(report) for report in reports],
        "gguf": None if gguf is None else str(gguf),
        "folders": [str(run) for run in runs.values()],
    }


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _evaluate(
    name: str,
    model: Path,
    prepared: Path,
    prompts: "list[PromptAndResponse]",
    example: int,
    tokenizer: Tokenizer,
) -> ChatResult:
    from bloomery.runs.evaluate import evaluate, load_to_evaluate
    from bloomery.train.evaluation.answers import answer, shown

    decoder, _ = load_to_evaluate(model)
    loss = evaluate(decoder, tokenizer, prepared)[0].loss
    responses = [answer(decoder, tokenizer, each, max_new_tokens=MAX_TOKENS) for each in prompts]
    texts = [shown(tokenizer, response.ids) for response in responses]
    count = len(responses)
    functions = sum(
        is_function(text, each.ended) for text, each in zip(texts, responses, strict=True)
    )
    whole = texts[example] + ("" if responses[example].ended else " …")
    return ChatResult(
        name, loss, sum(each.ended for each in responses) / count, functions / count, whole
    )


def is_function(text: str, ended: bool) -> bool:
    """Whether a response is complete and a valid Python function, as all responses of the dataset."""
    if not ended or not text.startswith(("def ", "async def ", "@")):
        return False
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _show_results(story: Story, results: list[ChatResult], documents: int, count: int) -> None:
    def row(title: str, values: Sequence[str]) -> str:
        return f"{title:<44}" + "".join(f"{value:>{COLUMN}}" for value in values)

    story.write(
        "result",
        row(f"validation set, {documents} prompts", [r.name for r in results]),
        row("  loss, nats per response token", [f"{r.loss:.3f}" for r in results]),
        row(f"  {count} responses: end with EOS", [f"{r.eos_share:.0%}" for r in results]),
        row(
            f"  {count} responses: valid Python function",
            [f"{r.python_share:.0%}" for r in results],
        ),
        row(
            "  trainable parameters",
            ["" if r.trainable is None else format_count(r.trainable) for r in results],
        ),
        row(
            "  peak memory, GiB",
            ["" if r.memory_gib is None else f"{r.memory_gib:.2f}" for r in results],
        ),
        row(
            "  training time",
            ["" if r.seconds is None else format_seconds(r.seconds) for r in results],
        ),
    )
    story.write()


def _cut(text: str) -> list[str]:
    lines = [line.rstrip() for line in harmless(text).splitlines() if line.strip()] or ["(empty)"]
    cut = [line if len(line) <= 86 else line[:85] + "…" for line in lines[:LINES]]
    return cut if len(lines) <= LINES else [*cut[:-1], "…"]
