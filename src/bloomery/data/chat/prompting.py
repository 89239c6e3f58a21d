"""How turns are put to a model that answers them, and what ends its answers"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from bloomery.data.chat.examples import Example, Message
from bloomery.data.chat.render import Renderer
from bloomery.data.chat.templates import own_templates
from bloomery.data.sources.streams import Flaw
from bloomery.data.tokenizer.tokenizer import Tokenizer

Put = Callable[[Sequence[Message]], list[int]]  # turns as tokens, up to where the answer begins


@final
@dataclass(frozen=True)
class Form:
    """How turns are put to a model, which tokens and texts end an answer, and a line about it."""

    put: Put
    ends: tuple[int, ...]
    stops: tuple[str, ...]
    told: str


@contextmanager
def chat_form(tokenizer: Tokenizer, template: str | None) -> Iterator[Form]:
    """By the template that is asked for or the tokenizer's own; without one the model only goes on with a text.

    Raises UserError.
    """
    if template is None and not own_templates(tokenizer.config):
        told = "no chat template: it goes on with what you write. A form of conversation is --template chatml"
        yield Form(continuation(tokenizer), (), (), told)
        return
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        ends = _ends(renderer, tokenizer)
        stops = () if ends else tuple(renderer.missing_tokens())
        yield Form(renderer.prompt, ends, stops, renderer.template.origin)


def _ends(renderer: Renderer, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The control token that the template puts after an answer, where there is one."""
    turns = (Message("user", "a"), Message("assistant", "b"))
    tried = [Example("the template", "chat", (), (said,)) for said in (turns, (Message("system", "c"), *turns))]
    whole = next((found[0] for found in renderer.encode_batch(tried) if not isinstance(found, Flaw)), None)
    if whole is None:
        (whole,) = renderer.encode(tried[0])  # its error
    control = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
    answer = [token for token, learned in zip(whole.ids, whole.learned, strict=True) if learned]
    return tuple(token for token in dict.fromkeys(answer) if token in control)


def continuation(tokenizer: Tokenizer) -> Put:
    """All that was written is one text, which the model goes on with."""

    def put(turns: Sequence[Message]) -> list[int]:
        text = ""
        for turn in turns:
            begins = turn.role == "user" and text and not text.endswith("\n")
            text += ("\n" if begins else "") + turn.content
        return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)

    return put
