"""The end of `bloomery demo chat`: base, adapters and full training side by side, an answer of each, and the reports"""

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
    from bloomery.cli.demo.chat import Tuned
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.train.evaluation.answers import Completion, PromptAndResponse

QUESTIONS = 24  # answered by each model; the loss is over all that were held out
MAX_TOKENS = 160
LINES = 6  # of an answer that is shown
COLUMN = 11


@dataclass(frozen=True)
class Mark:
    """What the exam found out about one model; what a base has not is None."""

    name: str
    loss: float
    ended: float
    in_form: float
    shown: str
    trained: int | None = None
    memory_gib: float | None = None
    seconds: float | None = None


def in_form(text: str, ended: bool) -> bool:
    """Whether an answer is what the training data's answers are: a function that ends, and is Python."""
    if not ended or not text.startswith(("def ", "async def ", "@")):
        return False
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def examine(story: Story, base: Path, runs: "Sequence[Tuned]", began: float) -> dict[str, Any]:
    """Figures, an answer of each, reports and what to type next; returns the document of `--json`."""
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.train.evaluation.answers import shown, validation_prompts

    prepared = runs[0].plan.data.prepared
    tokenizer = load_tokenizer(prepared)
    questions = validation_prompts(prepared, QUESTIONS)
    example = min(range(len(questions)), key=lambda number: len(questions[number].prompt))
    with story.busy("examining the three models on questions that they never saw"):
        marks = [_mark("base", base, prepared, questions, example, tokenizer)]
        marks += [_tuned_mark(run, prepared, questions, example, tokenizer) for run in runs]
    _tell_marks(story, marks, prepared, len(questions))
    asked = questions[example]
    _tell_answers(story, marks, shown(tokenizer, asked.prompt), shown(tokenizer, asked.reference))
    with story.busy("writing the reports"):
        reports = [_report(run, marks) for run in runs]
    for report in reports:
        story.say("report" if report == reports[0] else "", str(_near(report)))
    story.say()
    name = _named(runs[-1].folder)
    story.say("next", f"bloomery chat {name}", f"bloomery chat {_named(runs[0].folder)}",
              f"bloomery export {name} --to hf --out my-model")  # fmt: skip
    return {
        "models": [{key: value for key, value in vars(mark).items() if key != "shown"} for mark in marks],
        "questions": len(questions),
        "seconds": time.time() - began,
        "reports": [str(report) for report in reports],
        "folders": [str(run.folder) for run in runs],
    }


def _mark(
    name: str, model: Path, prepared: Path, questions: "list[PromptAndResponse]", example: int, tokenizer: "Tokenizer"
) -> Mark:
    from bloomery.runs.evaluate import evaluate, load_to_evaluate
    from bloomery.train.evaluation.answers import answer, shown

    decoder, _ = load_to_evaluate(model)
    loss = evaluate(decoder, tokenizer, prepared)[0].loss
    said: list[Completion] = [answer(decoder, tokenizer, question, max_tokens=MAX_TOKENS) for question in questions]
    texts = [shown(tokenizer, one.ids) for one in said]
    good = [in_form(text, one.ended) for text, one in zip(texts, said, strict=True)]
    ended = sum(one.ended for one in said) / len(said)
    return Mark(name, loss, ended, sum(good) / len(good), texts[example] + ("" if said[example].ended else " …"))


def _tuned_mark(
    run: "Tuned", prepared: Path, questions: "list[PromptAndResponse]", example: int, tokenizer: "Tokenizer"
) -> Mark:
    from dataclasses import replace

    from bloomery.cli.demo.chat import trained_parameters
    from bloomery.monitor.events import read_events
    from bloomery.monitor.summary import summary_of

    summary = summary_of(read_events(run.folder / "events.jsonl"))
    mark = _mark(run.kind, run.folder, prepared, questions, example, tokenizer)
    trained = trained_parameters(run.plan)
    return replace(mark, trained=trained, memory_gib=summary.peak_gib, seconds=summary.seconds)


def _tell_marks(story: Story, marks: list[Mark], prepared: Path, count: int) -> None:
    from bloomery.data.shards.format import read_manifest

    held = read_manifest(prepared).validation.documents

    def row(title: str, values: Sequence[str]) -> str:
        return f"{title:<44}" + "".join(f"{value:>{COLUMN}}" for value in values)

    story.say(
        "exam", row(f"on {held} questions that no model saw", [mark.name for mark in marks]),
        row("  loss, nats per token of the answer", [f"{mark.loss:.3f}" for mark in marks]),
        row(f"  of {count} answers, end by themselves", [f"{mark.ended:.0%}" for mark in marks]),
        row("  of these answers, a function that is Python", [f"{mark.in_form:.0%}" for mark in marks]),
        row("  parameters trained", ["" if mark.trained is None else format_count(mark.trained) for mark in marks]),
        row("  memory, GiB", ["" if mark.memory_gib is None else f"{mark.memory_gib:.2f}" for mark in marks]),
        row("  training", ["" if mark.seconds is None else format_seconds(mark.seconds) for mark in marks]),
    )  # fmt: skip
    story.say()


def _tell_answers(story: Story, marks: list[Mark], question: str, reference: str) -> None:
    story.say("asked", *question.splitlines())
    for mark in marks:
        story.say(mark.name, *_cut(mark.shown))
    story.say("library", *_cut(reference))
    story.say()


def _cut(text: str) -> list[str]:
    from bloomery.core.text import harmless

    lines = [line.rstrip() for line in harmless(text).splitlines() if line.strip()] or ["(nothing)"]
    cut = [line if len(line) <= 86 else line[:85] + "…" for line in lines[:LINES]]
    return cut if len(lines) <= LINES else [*cut[:-1], "…"]


def _report(run: "Tuned", marks: list[Mark]) -> Path:
    from bloomery.report import Bars, write_report

    losses = tuple((mark.name, mark.loss) for mark in marks)
    note = "held-out questions, the answers' tokens; lower is better"
    return write_report(run.folder, extras=(Bars("The exam", losses, unit="nats per token", note=note, own=run.kind),))


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _named(folder: Path) -> str:
    return shlex.quote(folder.name if folder.parent == Path("runs") else str(folder))
