"""Completions as a teacher with another tokenizer reads them: its tokens of their text, and common spans. No torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer, chat_format
from bloomery.data.tokenizer.alignment import (
    Span,
    aligned_spans,
    continuing_ids,
    text_of,
    token_ends,
)
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer

TEACHER_VARIABLES = "objective.teacher_template_kwargs"


@final
@dataclass(frozen=True)
class ReadCompletion:
    """The tokens of a completion by a teacher's tokenizer, and the spans that have the same bytes under both.

    A span is (start, end) of the completion's tokens, then of `ids`.
    """

    ids: tuple[int, ...]
    spans: tuple[Span, ...]


@final
@dataclass(frozen=True)
class ReadAnswer:
    """`ids`: the teacher's tokens of all of its text, as far as both read it. `is_read`: to its end."""

    ids: list[int]
    spans: list[Span]
    is_read: bool


@final
@dataclass(frozen=True, kw_only=True)
class TeacherTexts:
    """Reads completions of the student's tokenizer with that of the teacher.

    `stop_ids`: tokens that end a completion; `end_id`: the teacher's, None for none. `space`, `teacher_space`: what the
    chat template of each writes before an answer, which is a part of the first token's text. `markup`: control tokens
    that are read as their names, as those around calls of tools are.
    """

    student: Tokenizer
    teacher: Tokenizer
    stop_ids: Collection[int]
    end_id: int | None
    space: str = ""
    teacher_space: str = ""
    markup: frozenset[str] = frozenset()

    def read(self, completion_ids: Sequence[int], *, room: int) -> ReadCompletion:
        """At most `room` tokens. Compared are spans of which both models give the same event a probability.

        These have the same bytes, after the same text, and the tokens that the student's own tokenizer gives them. The
        first bytes that are no UTF-8, and the first control token but the last one, end them.
        """
        answer = self.answer(completion_ids, end_id=self.end_id, room=room)
        last = answer.spans[-1].other_end if answer.spans else 0
        return ReadCompletion(tuple(answer.ids[:last]), tuple(answer.spans))

    def answer(self, completion_ids: Sequence[int], *, end_id: int | None, room: int) -> ReadAnswer:
        """As `read`, with the token that ends the answer for the teacher, and the text behind the last span."""
        # 1. The text, and the ids that each tokenizer gives it.
        ids = list(completion_ids)
        is_ended = bool(ids) and ids[-1] in self.stop_ids
        ids_of_text = ids[:-1] if is_ended else ids
        text = text_of(self.student, ids_of_text, self.markup)
        space = self.space if text.startswith(self.space) else ""
        teacher_text = self.teacher_space + text.removeprefix(space)
        teacher_ids = continuing_ids(self.teacher, teacher_text, self.markup)[: max(0, room - 1)]
        canonical_ids = continuing_ids(self.student, text, self.markup)

        # 2. Where tokens of both end, counted from the end of the spaces.
        ends = _ends(self.student, ids_of_text, space)
        teacher_ends = _ends(self.teacher, teacher_ids, self.teacher_space)
        canonical_ends = _ends(self.student, canonical_ids, space)
        canonical_place = {end: place for place, end in enumerate([0, *canonical_ends])}
        spans = []
        for span in aligned_spans(ends, teacher_ends):
            # A teacher has one probability of a text, of which another spelling of the student would have a share.
            start = canonical_place.get(ends[span.start - 1] if span.start else 0)
            length = span.end - span.start
            sampled = ids_of_text[span.start : span.end]
            if start is not None and canonical_ids[start : start + length] == sampled:
                spans.append(span)

        # 3. The end of the completion, where both have read all of it.
        size = len(text.encode()) - len(space.encode())
        is_read = _reaches(ends, size) and _reaches(teacher_ends, size)
        if is_ended and is_read and end_id is not None:
            spans.append(Span(len(ids) - 1, len(ids), len(teacher_ids), len(teacher_ids) + 1))
            teacher_ids = [*teacher_ids, end_id]
        return ReadAnswer(teacher_ids, spans, is_ended and is_read)


def _ends(tokenizer: Tokenizer, ids: Sequence[int], space: str) -> list[int]:
    size = len(space.encode())
    return [end - size for end in token_ends(tokenizer, ids)]


def _reaches(ends: Sequence[int], size: int) -> bool:
    """Whether tokens with these ends spell a text of that many bytes."""
    return (ends[-1] if ends else 0) == size


def teacher_texts(
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    turns: bool,
    stop_ids: Collection[int],
    variables: Mapping[str, bool | int | float | str] | None = None,
) -> TeacherTexts:
    """`turns`: prompts are conversations, which the teacher has by its own chat template, with these `variables`.

    Raises UserError for a teacher without one.
    """
    if not turns:
        return TeacherTexts(
            student=student, teacher=teacher, stop_ids=stop_ids, end_id=teacher.eos_id
        )
    if not own_templates(teacher.config):
        raise UserError(
            "the teacher has no chat template, and the prompts are conversations",
            where="objective.teacher",
            fix="choose a teacher that was trained on conversations, or add a chat template to its folder",
        )
    with chat_format(teacher, None) as form:
        end_id = next(iter(form.stop_ids), teacher.eos_id)
    with chat_format(student, None) as form:
        # Cohere's answers end with a token, and its turns with another: the first one is the end of an answer.
        later_ids = form.stop_ids[1:]
    spaces = []
    for tokenizer, of_template in ((student, None), (teacher, variables)):
        with Renderer(
            tokenizer,
            template=None,
            train_on="assistant",
            variables=of_template,
            variables_key=TEACHER_VARIABLES,
        ) as renderer:
            spaces.append(renderer.space_before_answers())
    return TeacherTexts(
        student=student,
        teacher=teacher,
        stop_ids=[token for token in stop_ids if token not in later_ids],
        end_id=end_id,
        space=spaces[0],
        teacher_space=spaces[1],
    )
