"""What documents are: which kinds go together, what decides how examples become tokens, and twins for KTO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.chat.examples import Example
from bloomery.data.chat.formats import FORMATS
from bloomery.data.chat.render import Renderer
from bloomery.data.chat.templates import BUILTIN, builtin_template, formats_texts
from bloomery.data.shards.format import ShardKind, Texts
from bloomery.data.sources.documents import Dataset, Document, ReadStats, read_documents
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.recipe.schema import Chat, Recipe

KINDS: dict[str, ShardKind] = {"chat": "chat", "completion": "chat", "pair": "pairs", "kto": "kto"}
_MIXED: tuple[ShardKind, ShardKind] = ("text", "chat")  # the kinds that may stand beside each other
_NAMES = {"text": "plain text", "chat": "conversations", "pairs": "preference pairs", "kto": "marked answers"}


def kind_of(document: Document) -> ShardKind:
    if document.example is None:
        return "text" if document.loss_mask is None else "chat"
    return KINDS[document.example.kind]


class Kinds(NamedTuple):
    """`whole`: what the shards hold; `sources`: what each source does; `turns`: whether any of them holds turns;
    `texts`: whether any of them holds answers that are texts, which a template formats where they have a prompt.
    """

    whole: ShardKind
    sources: tuple[ShardKind, ...]
    turns: bool
    texts: Texts

    def formatted(self, asked: str | None, config: Mapping[str, Any], *, verbatim: bool) -> bool:
        """Whether a chat template writes any of it. `verbatim`: texts stay as they are."""
        return self.turns or (self.texts == "prompts" and not verbatim and formats_texts(asked, config))

    @property
    def plain(self) -> frozenset[int]:
        """Numbers of the sources that are text beside conversations."""
        return frozenset(number for number, kind in enumerate(self.sources) if kind != self.whole)


def kinds_of(datasets: list[Dataset], *, on_error: str) -> Kinds:
    """By the first document of each source. Text may stand beside conversations; raises UserError for what else
    differs.
    """
    return kinds_among(
        [next(read_documents(dataset, on_error=on_error, stats=ReadStats()), None) for dataset in datasets]
    )


def kinds_among(firsts: Sequence[Document | None]) -> Kinds:
    """`kinds_of` from those first documents. Raises UserError."""
    found = [document for document in firsts if document is not None]
    mixed = {kind_of(document) for document in found} == set(_MIXED)
    whole: ShardKind = "chat" if mixed else kind_of(found[0]) if found else "text"
    for document in () if mixed else found:
        refuse_mixture(document, whole)
    examples = [document.example for document in found if document.example is not None]
    turns = any(not isinstance(example.responses[0], str) for example in examples)
    spelt = [example for example in examples if isinstance(example.responses[0], str)]
    prompted = any(not example.implicit for example in spelt)
    texts: Texts = "prompts" if prompted else "whole" if spelt else "none"
    return Kinds(whole, tuple(whole if first is None else kind_of(first) for first in firsts), turns, texts)


def refuse_mixture(document: Document, kind: ShardKind) -> None:
    """Raises UserError for a document of another kind than the ones before it."""
    own = kind_of(document)
    if own == kind:
        return
    if {own, kind} == set(_MIXED):
        rule, fix = "a source holds one kind", "make each of them a source of its own: data.sources"
    else:
        rule, fix = "a run learns from one of them", "leave one of them out, or say what its rows are: data.format"
    problem = f"the data is {_NAMES[own]} here, and {_NAMES[kind]} before it: {rule}"
    raise UserError(problem, where=document.source, fix=fix)


def train_on(recipe: Recipe) -> Literal["assistant", "all", "last"]:
    """Pretraining learns every token, of conversations, too."""
    return "all" if recipe.objective.spec.reads_text else recipe.data.chat.train_on


def missing_markup(tokenizer: Tokenizer, asked: str | None) -> list[str]:
    """Markup of the chat template that the tokenizer has no token for. Completions of plain texts need no template."""
    if not formats_texts(asked, tokenizer.config):
        return []
    with Renderer(tokenizer, template=asked, train_on="assistant") as renderer:
        return renderer.missing_tokens()


@final
class KtoPairCheck:
    """For KTO: each example with the answer of another one beside its own, from which its drift is estimated
    (arXiv:2402.01306, section 4): the answer of the nearest example of its split before it that has another prompt.
    Those that have none take it from the first example of the source with another prompt than theirs, of their own
    split where that has two prompts.

    Raises UserError when all prompts of a source are one.
    """

    def __init__(self, dataset: Dataset, split_of: Callable[[Document], str], *, on_error: str) -> None:
        self._dataset, self._split_of, self._on_error = dataset, split_of, on_error
        self._last: dict[str, Example] = {}  # of each split
        self._other: dict[str, Example] = {}  # the latest one whose prompt is not that of `_last`

    def of(self, document: Document, split: str) -> Document:
        """The document with both answers; its place in the order counts."""
        example = document.example
        assert example is not None
        last, self._last[split] = self._last.get(split), example
        if last is not None and last.prompt != example.prompt:
            self._other[split] = last
        if split not in self._other:
            self._other[split] = self._first_other(example, split)
        own, response = example.responses[0], self._other[split].responses[0]
        if isinstance(own, str) and not isinstance(response, str):  # in the form that its own answer has
            response = "\n".join(turn.content for turn in response)
        elif isinstance(response, str) and not isinstance(own, str):
            response = (replace(own[-1], content=response, calls=(), thinking=None),)
        return replace(document, content=replace(example, responses=(own, response)))

    def _first_other(self, example: Example, split: str) -> Example:
        elsewhere: Example | None = None
        for document in read_documents(self._dataset, on_error=self._on_error, stats=ReadStats()):
            found = document.example
            if found is None or found.prompt == example.prompt:
                continue
            if self._split_of(document) == split:
                return found
            elsewhere = elsewhere or found
        if elsewhere is not None:
            return elsewhere
        raise UserError(
            "every row has the same prompt, and kto compares an answer with answers to other prompts",
            where=self._dataset.path,
            fix="add rows with other prompts, or set objective.kind=sft",
        )


def checked_tokens(document: Document, tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[Any]]:
    """Tokens that somebody else made. Raises UserError for one that the tokenizer does not have."""
    tokens = np.array(document.tokens, np.uint32)
    if int(tokens.max()) >= tokenizer.vocab_size:
        problem = f"token id {tokens.max():,} is not below the tokenizer's {tokenizer.vocab_size:,}"
        fix = "name the tokenizer that made these tokens: tokenizer.from"
        raise UserError(problem, where=document.source, fix=fix)
    return tokens


def template_identity(asked: str | None) -> str | None:
    """What decides the template: its text, or that it is the tokenizer's own."""
    if asked is None:
        return None
    if asked in BUILTIN:
        return builtin_template(asked)
    try:
        is_file = Path(asked).is_file()
    except OSError:  # a template in the recipe is longer than any path
        is_file = False
    return Path(asked).read_text(encoding="utf-8", errors="replace") if is_file else asked


def learns_examples(recipe: Recipe) -> bool:
    """Whether chat settings can decide the tokens."""
    data = recipe.data
    formats = {data.format, *(source.format for source in data.sources)}
    if recipe.objective.spec.reads_text:
        mined = data.builtin in ("stdlib-chat", "stdlib-pairs")
        return mined or data.chat != Chat() or bool(formats & set(FORMATS))
    return data.builtin != "stdlib-code" and not formats <= {"text", "code", "tokens"}


def verbatim(recipe: Recipe) -> bool:
    """Whether prompts and answers that are texts stay so whatever the chat template: pretraining reads text."""
    return recipe.objective.spec.reads_text
