"""Held-out questions with the answers of the model that a run started from and of the one that it made, side by side"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.core.text import scrub
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.plan.types import Plan
from bloomery.report.heldout import MOST_PARAMETERS
from bloomery.report.html import Html, el, join

if TYPE_CHECKING:
    from bloomery.train.evaluation.answers import Question
    from bloomery.train.model_folder import Found
    from bloomery.train.use import Use

_QUESTIONS = 4
_LOOKED_AT = 64  # questions of which the shortest are taken
MAX_TOKENS = 160
_MARK = "QUESTION"


@dataclass(frozen=True)
class Answered:
    question: str
    reference: str
    before: str
    after: str


def compare_answers(plan: Plan, checkpoints: Path, parameters: int, use: "Use | None" = None) -> list[Answered]:
    """The shortest of the held-out questions with both answers.

    Empty where a run has no model that it started from, no conversations, no checkpoint, or is too large to be loaded
    twice.
    """
    from bloomery.train.evaluation.answers import held_out_questions
    from bloomery.train.model_folder import Found, find_model
    from bloomery.train.sealed import newest_valid

    aim = plan.objective.spec
    if plan.model.source is None or aim.reads_text or aim.values or parameters > MOST_PARAMETERS:
        return []
    checkpoint = newest_valid(checkpoints, on_damage=lambda _: None) if checkpoints.is_dir() else None
    if checkpoint is None:
        return []
    try:
        tokenizer = load_tokenizer(plan.data.prepared)
        questions = held_out_questions(plan.data.prepared, _LOOKED_AT)
        once = {tuple(question.prompt): question for question in reversed(questions)}.values()  # pairs share a prompt
        chosen = sorted(once, key=lambda question: len(question.prompt))[:_QUESTIONS]
        size = plan.model.config.vocab_size  # a base may lack tokens that the run has added
        found = find_model(checkpoint)
        base = Found(plan.model.source, None, found.tokenizer, found.trained)
        before, after = (_answers(one, chosen, tokenizer, size, use) for one in (base, found))
    except UserError:  # the section above says what is wrong with the text or the model
        return []
    around = _around(tokenizer)
    asked = [(_bare(_text(tokenizer, q.prompt), *around), _text(tokenizer, q.reference)) for q in chosen]
    return [Answered(*texts, old, new) for texts, old, new in zip(asked, before, after, strict=True)]


def _answers(
    found: "Found", questions: "list[Question]", tokenizer: Tokenizer, vocab_size: int, use: "Use | None"
) -> list[str]:
    """One model at a time is in memory."""
    import torch

    from bloomery.train.evaluation.answers import answer
    from bloomery.train.use import Use, load_used

    decoder = load_used(found, use or Use("cpu"), dtype=torch.float32, vocab_size=vocab_size)
    said = [answer(decoder, tokenizer, question, max_tokens=MAX_TOKENS) for question in questions]
    return [_text(tokenizer, one.ids) + ("" if one.ended else " …") for one in said]


def _around(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template writes before a question and behind it, as it is shown; nothing where there is none."""
    from bloomery.data.chat.examples import Message
    from bloomery.data.chat.render import Renderer

    try:
        with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
            written = _text(tokenizer, renderer.prompt([Message("user", _MARK)]))
    except UserError:  # prompts of plain text need no template
        return "", ""
    before, found, after = written.partition(_MARK)
    return (before.strip(), after.strip()) if found else ("", "")


def _bare(question: str, before: str, after: str) -> str:
    """The question alone; one behind another system message or turns keeps these."""
    return question.removesuffix(after).removeprefix(before).strip()


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    from bloomery.train.evaluation.answers import shown

    return scrub(shown(tokenizer, ids))


def draw_answers(answered: Sequence[Answered]) -> Html | None:
    """A question and three answers each."""
    names = "before training", "after training", "reference"
    texts = [(one.question, list(zip(names, (one.before, one.after, one.reference), strict=True))) for one in answered]
    return draw_asked(texts)


def draw_asked(asked: Sequence[tuple[str, Sequence[tuple[str, str]]]], *, form: str = "") -> Html | None:
    """Each question with its answers side by side, each with its title. `form`: how they were put."""
    if not asked:
        return None
    note = f"drawn alike, {MAX_TOKENS} tokens at most; … where a model did not end by itself"
    told = el("p", f"{form}; {note}" if form else note, class_="note")
    return join(told, *(_drawn(question, columns) for question, columns in asked))


def _drawn(question: str, columns: Sequence[tuple[str, str]]) -> Html:
    figures = [el("figure", el("figcaption", el("b", title)), el("pre", text)) for title, text in columns]
    return el("div", el("p", question, class_="asked"), el("div", *figures, class_="three"))
