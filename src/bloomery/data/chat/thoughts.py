"""The markup around a model's thoughts in chat templates, and around its answer, and answers without both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bloomery.data.chat.channels import Channels, spoken_in
from bloomery.data.chat.tool_arguments import held


@final
@dataclass(frozen=True)
class ThoughtFormat:
    """The markup around a thought."""

    opening: str
    closing: str


# Of Qwen, DeepSeek, GLM, SmolLM3 and others; Magistral; Command A; Seed; Gemma 4.
FORMATS = (
    ThoughtFormat("<think>", "</think>"),
    ThoughtFormat("[THINK]", "[/THINK]"),
    ThoughtFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtFormat("<seed:think>", "</seed:think>"),
    ThoughtFormat("<|channel>thought", "<channel|>"),
)

# Around the text of an answer, beside calls and thoughts: of Command R7B and A, and of North.
COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


def answer_marks(template: str) -> tuple[str, ...]:
    """The markup around answers that the text of a chat template writes."""
    return tuple(mark for mark in COHERE_ANSWER if mark in template)


def thought_format(template: str) -> ThoughtFormat | None:
    """The markup in the text of a chat template. A template that only drops old thoughts names its end alone."""
    return next((form for form in FORMATS if form.closing in template), None)


def is_thinking(prompt: str, form: ThoughtFormat | Channels | None) -> bool:
    """Whether a prompt ends inside a thought, which the template has begun."""
    return isinstance(form, ThoughtFormat) and prompt.rstrip().endswith(form.opening)


def has_thought(prompt: str, form: ThoughtFormat | Channels | None) -> bool:
    """Whether a prompt ends with a thought, such as an empty one of a template that is told not to think."""
    return isinstance(form, ThoughtFormat) and prompt.rstrip().endswith(form.closing)


def without_thought(
    answer: str, form: ThoughtFormat | Channels | None, *, inside: bool
) -> str | None:
    """The answer behind its thought; None where the thought has no end. `inside`: the prompt has begun it."""
    if form is None:
        return answer
    if isinstance(form, Channels):
        return spoken_in(answer, form)
    begins = inside or answer.lstrip().startswith(form.opening)
    if not begins:
        return answer
    _, closing, rest = answer.partition(form.closing)
    return rest.lstrip() if closing else None


@final
class Unwrapped:
    """A text without the markup around it, while it is written."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._text = ""

    def push(self, piece: str) -> str:
        """What is certain so far."""
        if not self._marks:
            return piece
        self._text += piece
        for mark in self._marks:
            self._text = self._text.replace(mark, "")
        num_held = max(held(self._text, mark) for mark in self._marks)
        certain = self._text[: len(self._text) - num_held]
        self._text = self._text[len(certain) :]
        return certain

    def flush(self) -> str:
        """What is left at the end, which began like a mark."""
        text = self._text
        self._text = ""
        return text
