"""Evaluation of `bloomery demo chat`: base, LoRA and full fine-tuning compared, with sample responses and reports."""

import ast
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.demo.story import Story
from bloomery.core.units import format_count, format_seconds

if TYPE_CHECKING:
    from bloomery.cli.demo.chat import FineTuned
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.train.evaluation.answers import Completion, PromptAndResponse

NUM_PROMPTS = 24  # for responses; the loss is over the whole validation set
MAX_TOKENS = 160
LINES = 6  # of a response that are printed
COLUMN = 11


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


def is_function(text: str, ended: bool) -> bool:
    """Whether a response is complete and a valid Python function, as all responses of the dataset."""
    if not ended or not text.startswith(("def ", "async def ", "@")):
        return False
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def evaluate_chat_demo(story: Story, base: Path, runs: "Sequence[FineTuned]", began: float) -> dict[str, Any]:
    """Prints results, a response of each model, reports and next commands; returns the document of `--json`."""
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.train.evaluation.answers import shown, validation_prompts

    prepared = runs[0].plan.data.prepared
    tokenizer = load_tokenizer(prepared)
    prompts = validation_prompts(prepared, NUM_PROMPTS)
    example = min(range(len(prompts)), key=lambda number: len(prompts[number].prompt))
    with story.busy("evaluating the three models on the validation set"):
        results = [_evaluate("base", base, prepared, prompts, example, tokenizer)]
        results += [_evaluate_run(run, prepared, prompts, example, tokenizer) for run in runs]
    _show_results(story, results, prepared, len(prompts))
    prompt, reference = prompts[example].prompt, prompts[example].reference
    story.write("prompt", *shown(tokenizer, prompt).splitlines())
    for result in results:
        story.write(result.name, *_cut(result.response))
    story.write("reference", *_cut(shown(tokenizer, reference)))
    story.write()
    with story.busy("writing the reports"):
        reports = [_report(run, results) for run in runs]
    for report in reports:
        near = report.relative_to(Path.cwd()) if report.is_relative_to(Path.cwd()) else report
        story.write("report" if report == reports[0] else "", str(near))
    story.write()
    lora, full = (
        shlex.quote(run.folder.name if run.folder.parent == Path("runs") else str(run.folder)) for run in runs
    )
    story.write(
        "next", f"bloomery chat {full}", f"bloomery chat {lora}", f"bloomery export {full} --to hf --out my-model"
    )
    return {
        "models": [{key: value for key, value in vars(result).items() if key != "response"} for result in results],
        "prompts": len(prompts),
        "seconds": time.time() - began,
        "reports": [str(report) for report in reports],
        "folders": [str(run.folder) for run in runs],
    }


def _evaluate(
    name: str, model: Path, prepared: Path, prompts: "list[PromptAndResponse]", example: int, tokenizer: "Tokenizer"
) -> ChatResult:
    from bloomery.runs.evaluate import evaluate, load_to_evaluate
    from bloomery.train.evaluation.answers import answer, shown

    decoder, _ = load_to_evaluate(model)
    loss = evaluate(decoder, tokenizer, prepared)[0].loss
    responses: list[Completion] = [answer(decoder, tokenizer, each, max_new_tokens=MAX_TOKENS) for each in prompts]
    texts, count = [shown(tokenizer, response.ids) for response in responses], len(responses)
    functions = sum(is_function(text, each.ended) for text, each in zip(texts, responses, strict=True))
    whole = texts[example] + ("" if responses[example].ended else " …")
    return ChatResult(name, loss, sum(each.ended for each in responses) / count, functions / count, whole)


def _evaluate_run(
    run: "FineTuned", prepared: Path, prompts: "list[PromptAndResponse]", example: int, tokenizer: "Tokenizer"
) -> ChatResult:
    from dataclasses import replace

    from bloomery.cli.demo.chat import trainable_parameters
    from bloomery.monitor.events import read_events
    from bloomery.monitor.summary import summary_of

    summary = summary_of(read_events(run.folder / "events.jsonl"))
    result = _evaluate(run.kind, run.folder, prepared, prompts, example, tokenizer)
    trainable = trainable_parameters(run.plan)
    return replace(result, trainable=trainable, memory_gib=summary.peak_gib, seconds=summary.seconds)


def _show_results(story: Story, results: list[ChatResult], prepared: Path, count: int) -> None:
    from bloomery.data.shards.format import read_manifest

    def row(title: str, values: Sequence[str]) -> str:
        return f"{title:<44}" + "".join(f"{value:>{COLUMN}}" for value in values)

    story.write(
        "result",
        row(f"validation set, {read_manifest(prepared).validation.documents} prompts", [r.name for r in results]),
        row("  loss, nats per response token", [f"{r.loss:.3f}" for r in results]),
        row(f"  {count} responses: end with EOS", [f"{r.eos_share:.0%}" for r in results]),
        row(f"  {count} responses: valid Python function", [f"{r.python_share:.0%}" for r in results]),
        row("  trainable parameters", ["" if r.trainable is None else format_count(r.trainable) for r in results]),
        row("  peak memory, GiB", ["" if r.memory_gib is None else f"{r.memory_gib:.2f}" for r in results]),
        row("  training time", ["" if r.seconds is None else format_seconds(r.seconds) for r in results]),
    )
    story.write()


def _cut(text: str) -> list[str]:
    from bloomery.core.text import harmless

    lines = [line.rstrip() for line in harmless(text).splitlines() if line.strip()] or ["(empty)"]
    cut = [line if len(line) <= 86 else line[:85] + "…" for line in lines[:LINES]]
    return cut if len(lines) <= LINES else [*cut[:-1], "…"]


def _report(run: "FineTuned", results: list[ChatResult]) -> Path:
    from bloomery.report import Bars, write_report

    losses, note = tuple((result.name, result.loss) for result in results), "Response tokens. Lower is better."
    bars = Bars("Validation loss", losses, unit="nats per token", note=note, own=run.kind)
    return write_report(run.folder, extras=(bars,))
