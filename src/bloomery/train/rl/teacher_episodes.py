"""Episodes as a teacher with another tokenizer has them: the text of each answer, and results by its own template.

What the model sampled is read as the text that it is; what tools answered is given to the teacher as its own template
gives results. So both have the same messages in their contexts, and only answers are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from bloomery.core.errors import UserError
from bloomery.data.chat.turns import Turns
from bloomery.data.tokenizer.alignment import Span
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.train.rl.teacher_texts import ReadCompletion, TeacherTexts


@final
class TeacherEpisodes:
    """Reads episodes. `texts`: reads one answer; `student`, `teacher`: the turns of both, whose forms of calls are one.

    Raises UserError for a teacher whose template cannot go on behind an answer that calls a tool.
    """

    def __init__(self, texts: TeacherTexts, *, student: Turns, teacher: Turns) -> None:
        markup = frozenset[str]()
        self._call_end = texts.end_id
        if teacher.form is not None:
            written = teacher.form.written("tool", {"argument": "text"})
            if teacher.form.channels is not None:
                written += "".join(teacher.form.channels.markup)
            markup = _names_in(written, texts.student) | _names_in(written, texts.teacher)
            self._call_end = _call_end(teacher, texts.end_id)
        self._end_ids = frozenset(texts.stop_ids)
        self._call_end_ids = frozenset(student.call_ends)
        self._texts = replace(texts, stop_ids=self._end_ids | self._call_end_ids, markup=markup)
        self._turns = teacher

    def read(
        self,
        completion_ids: Sequence[int],
        given: Sequence[Sequence[int]],
        messages: Sequence[Mapping[str, Any]],
        *,
        room: int,
        num_earlier: int = 0,
    ) -> ReadCompletion:
        """At most `room` tokens of the teacher. `given`: from where to where tokens were not sampled; `messages`: the
        answers with their results. `num_earlier`: calls in the prompt.

        An answer that the teacher cannot read to its end is the last one that is compared: what follows it has no
        context that both have.
        """
        starts = [0, *(end for _, end in given)]
        ends = [*(start for start, _ in given), len(completion_ids)]
        ids = list[int]()
        spans = list[Span]()
        for start, end, results in zip(starts, ends, _results(messages), strict=True):
            # 1. The answer.
            sampled_ids = completion_ids[start:end]
            text = self._texts.student.decode(list(sampled_ids[:-1]))
            _, calls = self._turns.read_text(text)
            is_last = end == len(completion_ids)
            end_id = self._call_end
            if is_last:
                end_id = self._last_end(sampled_ids[-1], is_call=bool(calls))
            answer = self._texts.answer(sampled_ids, end_id=end_id, room=room - len(ids))
            spans += [
                Span(
                    start + span.start,
                    start + span.end,
                    len(ids) + span.other_start,
                    len(ids) + span.other_end,
                )
                for span in answer.spans
            ]
            ids += answer.ids

            # 2. What its calls were answered, and the header of the next answer.
            if is_last or not answer.is_read or end_id is None:
                break
            ids += self._turns.given(calls, results, end_id, num_earlier=num_earlier)
            num_earlier += len(calls)
        last = spans[-1].other_end if spans else 0
        return ReadCompletion(tuple(ids[:last]), tuple(spans))

    def _last_end(self, end_id: int, *, is_call: bool) -> int | None:
        """The teacher's token for the one that ended the last answer; None where it has none.

        What ends a call may end no other answer, as with gpt-oss.
        """
        if is_call and end_id in self._call_end_ids:
            return self._call_end
        return self._texts.end_id if end_id in self._end_ids else None


def _results(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Of each answer the texts of the results that follow it."""
    results = list[str]()
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            results.append(message["content"])
        elif number:
            yield results
            results = []
    yield results


def _names_in(written: str, tokenizer: Tokenizer) -> frozenset[str]:
    """The control tokens of a tokenizer that are in a text."""
    return frozenset(name for name in tokenizer.control_tokens() if name in written)


def _call_end(turns: Turns, end_id: int | None) -> int:
    """The token with which a teacher ends an answer that calls a tool. Raises UserError if its template has none."""
    ends = [*turns.call_ends, *([] if end_id is None else [end_id])]
    call_end = next((token for token in ends if turns.ends_turn(token)), None)
    if call_end is None:
        raise UserError(
            "the teacher's chat template ends an answer that calls a tool with no token that ends an answer",
            where="objective.teacher",
            fix="choose a teacher with another chat template, or set tools=[] and environment.python=null",
        )
    turns.check(call_end)
    return call_end
