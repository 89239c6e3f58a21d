"""Kinds of documents: which kinds a run can mix, how examples are tokenized, rows for rewards, the KL pairs of KTO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer, as_turn
from bloomery.data.examples import PICTURE, Example, pictures_of
from bloomery.data.pictures.references import DATA_URL
from bloomery.data.shards import ShardKind, Texts
from bloomery.data.sources.documents import Dataset, Document, ReadStats, read_documents
from bloomery.data.sources.picture_columns import MARK
from bloomery.data.tokenizer.templates import formats_texts
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import Recipe

KINDS: dict[str, ShardKind] = {
    "chat": "chat",
    "completion": "chat",
    "pair": "pairs",
    "kto": "kto",
    "prompt": "prompts",
}
_MIXED: tuple[ShardKind, ShardKind] = ("text", "chat")  # the kinds that one dataset may mix
_NAMES = {
    "text": "plain text",
    "chat": "conversations",
    "pairs": "preference pairs",
    "kto": "responses with KTO labels",
    "prompts": "prompts without responses",
}


def kind_of(document: Document) -> ShardKind:
    if document.example is None:
        return "text" if document.loss_mask is None else "chat"
    return KINDS[document.example.kind]


class Kinds(NamedTuple):
    """`sources`: the kind of each source; `turns`: whether a source has messages; `texts`: whether a source has
    responses, or prompts alone, that are texts. The chat template formats those with a prompt.
    """

    shard_kind: ShardKind
    sources: tuple[ShardKind, ...]
    turns: bool
    texts: Texts

    def formatted(self, template: str | None, config: Mapping[str, Any], *, verbatim: bool) -> bool:
        """Whether any of it is formatted with the chat template. `verbatim`: texts are not."""
        return self.turns or (
            self.texts == "prompts" and not verbatim and formats_texts(template, config)
        )

    @property
    def plain(self) -> frozenset[int]:
        """Numbers of the sources that are plain text next to conversations."""
        return frozenset(
            number for number, kind in enumerate(self.sources) if kind != self.shard_kind
        )


def kinds_among(first_documents: Sequence[Document | None]) -> Kinds:
    """Kinds by the first document of each source. Raises UserError for a mixture other than plain text with
    conversations.
    """
    present = [document for document in first_documents if document is not None]
    kinds_present = {kind_of(document) for document in present}
    # Shards of plain text with conversations are those of conversations, which have a loss mask.
    shard_kind: ShardKind = "text"
    if kinds_present == set(_MIXED):
        shard_kind = "chat"
    elif present:
        shard_kind = kind_of(present[0])
        for document in present:
            refuse_mixture(document, shard_kind)
    # A source without documents mixes with any kind.
    sources = tuple(
        shard_kind if document is None else kind_of(document) for document in first_documents
    )
    examples = [document.example for document in present if document.example is not None]
    text_examples = [example for example in examples if isinstance(example.prompt, str)]
    texts: Texts = "none"
    if any(not example.implicit for example in text_examples):
        texts = "prompts"
    elif text_examples:
        texts = "whole"
    turns = len(text_examples) < len(examples)
    return Kinds(shard_kind, sources, turns, texts)


def refuse_mixture(document: Document, kind: ShardKind) -> None:
    """Raises UserError for a document of another kind than the ones before it."""
    document_kind = kind_of(document)
    if document_kind == kind:
        return
    if {document_kind, kind} == set(_MIXED):
        rule = "one source has one kind"
        fix = "list them as separate sources in data.sources"
    else:
        rule = "a run trains on one kind"
        fix = "remove one of them, or set data.format"
    problem = f"the dataset has {_NAMES[document_kind]} here and {_NAMES[kind]} before: {rule}"
    raise UserError(problem, where=document.source, fix=fix)


def train_on(recipe: Recipe) -> Literal["assistant", "all", "last"]:
    """Pretraining trains on every token, also of conversations."""
    return "all" if recipe.objective.spec.reads_text else recipe.data.chat.train_on


def max_prompt_tokens(recipe: Recipe) -> int | None:
    """The tokens that a prompt may have: a completion of the longest length shares the sequence with it. None for
    objectives that generate none; below 1 for a recipe that `refuse_no_room` refuses.
    """
    objective = recipe.objective
    if not isinstance(objective, Rollouts):
        return None
    return recipe.data.sequence_length - objective.max_completion_length


def refuse_no_room(recipe: Recipe) -> None:
    """Raises UserError for completions as long as a sequence."""
    objective = recipe.objective
    if isinstance(objective, Rollouts) and (max_prompt_tokens(recipe) or 0) < 1:
        longest = objective.max_completion_length
        raise UserError(
            f"completions of {longest:,} tokens leave no room for a prompt in sequences of"
            f" {recipe.data.sequence_length:,}",
            where="objective.max_completion_length",
            fix=f"set data.sequence_length={2 * longest}, or a smaller objective.max_completion_length",
            code=2,
        )


def row_of(example: Example) -> tuple[str | list[dict[str, Any]], dict[str, Any]]:
    """What rewards are given of a prompt's row: the text or the messages, and the other columns.

    MARK stands for each picture in a message; their paths are in a column `images`, None of one that has none.
    """
    if isinstance(example.prompt, str):
        return example.prompt, example.columns
    turns = [
        as_turn(
            replace(turn, content=turn.content.replace(PICTURE, MARK), pictures=())
            if turn.pictures
            else turn
        )
        for turn in example.prompt
    ]
    references = pictures_of(example.prompt)
    if not references:
        return turns, example.columns
    paths = [None if DATA_URL.match(reference) else reference for reference in references]
    return turns, {"images": paths, **example.columns}


def missing_markup(tokenizer: Tokenizer, template: str | None) -> list[str]:
    """Markup of the chat template without a token of its own in the tokenizer."""
    if not formats_texts(template, tokenizer.config):
        return []
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        return renderer.missing_tokens()


@final
class KtoPairCheck:
    """For KTO: each example with a second response, of another prompt, from which the KL term is estimated
    (arXiv:2402.01306, section 4). The response is that of the nearest earlier example of the split with another prompt;
    without one, of the first example of the source with another prompt, in the same split where there is one.

    Raises UserError when a source has only one prompt.
    """

    def __init__(
        self, dataset: Dataset, split_of: Callable[[Document], str], *, on_error: str
    ) -> None:
        self._dataset = dataset
        self._split_of = split_of
        self._on_error = on_error
        self._last: dict[str, Example] = {}  # of each split
        self._other: dict[str, Example] = {}  # the latest example with another prompt than `_last`

    def of(self, document: Document, split: str) -> Document:
        """The document with both responses. Call in the order of the documents."""
        example = document.example
        assert example is not None
        previous = self._last.get(split)
        self._last[split] = example
        if previous is not None and previous.prompt != example.prompt:
            self._other[split] = previous
        if split not in self._other:
            self._other[split] = self._first_other(example, split)
        own_response = example.responses[0]
        other_response = self._other[split].responses[0]
        # The other response takes the form of its own one: a text, or messages.
        if isinstance(own_response, str) and not isinstance(other_response, str):
            other_response = "\n".join(turn.content for turn in other_response)
        elif isinstance(other_response, str) and not isinstance(own_response, str):
            other_response = (
                replace(own_response[-1], content=other_response, calls=(), thinking=None),
            )
        return replace(document, content=replace(example, responses=(own_response, other_response)))

    def _first_other(self, example: Example, split: str) -> Example:
        elsewhere: Example | None = None
        for document in read_documents(self._dataset, on_error=self._on_error, stats=ReadStats()):
            candidate = document.example
            if candidate is None or candidate.prompt == example.prompt:
                continue
            if self._split_of(document) == split:
                return candidate
            elsewhere = elsewhere or candidate
        if elsewhere is not None:
            return elsewhere
        raise UserError(
            "every row has the same prompt, and KTO needs responses to other prompts for its KL term",
            where=self._dataset.path,
            fix="add rows with other prompts, or set objective.kind=sft",
        )


def checked_tokens(document: Document, tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[Any]]:
    """The tokens of a pre-tokenized document. Raises UserError for an id that the tokenizer does not have."""
    tokens = np.array(document.tokens, np.uint32)
    if int(tokens.max()) >= tokenizer.vocab_size:
        problem = f"token id {tokens.max():,} is outside the tokenizer's vocabulary of {tokenizer.vocab_size:,}"
        fix = "set tokenizer.from to the tokenizer that made these tokens"
        raise UserError(problem, where=document.source, fix=fix)
    return tokens
