"""The markup around a model's thoughts in chat templates, and answers without their thought."""

from dataclasses import dataclass
from typing import final

from bloomery.data.chat.channels import Channels, spoken_in


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
