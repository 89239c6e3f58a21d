"""A held-out text priced token by token, and answers to held-out questions, before training and after."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.text import redact_secrets
from bloomery.data.shards.format import Split, open_split
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.plan.types import RunPlan

if TYPE_CHECKING:
    from bloomery.train.evaluation.answers import PromptAndResponse
    from bloomery.train.model_folder import ModelFiles
    from bloomery.train.use import Use

_TOKENS = 260  # of one document: what two columns show without scrolling for long
_ENOUGH = 64  # a document with fewer tokens says little
_LOOKED_AT = 200  # documents
MOST_PARAMETERS = 1_500_000_000  # above that, loading the model twice costs more than the picture is worth
_EDGES = (0.5, 1.0, 2.0, 3.5, 5.5, 8.0)  # nats; a token given half its probability costs 0.69
LEGEND = (f"below {_EDGES[0]:g}", *(f"from {edge:g}" for edge in _EDGES))
_QUESTIONS = 4
_QUESTIONS_LOOKED_AT = 64  # of which the shortest are taken
MAX_TOKENS = 160
ANSWERS_NOTE = f"drawn alike, {MAX_TOKENS} tokens at most; … where a model did not end by itself"
_MARK = "QUESTION"
Excerpt = tuple[list[int], list[bool]]  # tokens, and which of them are learned


@dataclass(frozen=True)
class Priced:
    """A stretch of text and the nats that its tokens cost together; None for what is not scored."""

    text: str
    nats: float | None


@dataclass(frozen=True)
class HeldOut:
    before: list[Priced]
    after: list[Priced]
    step: int  # of the checkpoint that `after` is from


def price_held_out(plan: RunPlan, checkpoints: Path, parameters: int, use: "Use | None" = None) -> HeldOut | str:
    """Both prices of the first long enough document of the validation split, or why there are none."""
    from bloomery.train.sealed import newest_valid

    if plan.objective.spec.values:
        return "a reward model gives values and no text"
    if parameters > MOST_PARAMETERS:
        return "the model is too large to be loaded twice for a picture"
    checkpoint = newest_valid(checkpoints, on_damage=lambda _: None) if checkpoints.is_dir() else None
    if checkpoint is None:
        return "there is no checkpoint"
    try:
        tokenizer = load_tokenizer(plan.data.prepared)
        tokens, learned = excerpt(_validation(open_split(plan.data.prepared, "validation")), tokenizer)
    except UserError as error:
        return f"the held-out text cannot be read: {error.where} {error.problem}"
    if len(tokens) < 2:
        return "the validation split is empty"
    return _price(plan, checkpoint, tokens, learned, tokenizer, use)


def _price(
    plan: RunPlan, checkpoint: Path, tokens: list[int], learned: list[bool], tokenizer: Tokenizer, use: "Use | None"
) -> HeldOut:
    import torch

    from bloomery.model.io.weights import fresh_decoder
    from bloomery.train.evaluation.scoring import score_documents
    from bloomery.train.model_folder import ModelFiles, find_model
    from bloomery.train.use import Use, load_used

    use, found = use or Use("cpu"), find_model(checkpoint)
    if plan.model.source is None:
        before = fresh_decoder(plan.model.config, seed=plan.train.seed, device=use.device)
    else:
        base, size = ModelFiles(plan.model.source, None, found.tokenizer, found.trained), plan.model.config.vocab_size
        before = load_used(base, use, dtype=torch.float32, vocab_size=size)
    first = next(score_documents(before, [tokens]))
    del before  # only one model at a time
    last = next(score_documents(load_used(found, use, dtype=torch.float32), [tokens]))
    step = int(checkpoint.name.rpartition("-")[2])
    told = [stretches(tokens, nats, tokenizer, learned) for nats in (first, last)]
    return HeldOut(told[0], told[1], step)


def _validation(split: Split) -> Iterable[Excerpt]:
    for index in range(len(split)):
        tokens: list[int] = split.document(index)[:_TOKENS].tolist()
        start = int(split.bounds[index])
        flags = None if split.loss_mask is None else split.loss_mask[start : start + len(tokens)].astype(bool).tolist()
        yield tokens, [True] * len(tokens) if flags is None else flags


def excerpt(documents: Iterable[Excerpt], tokenizer: Tokenizer) -> Excerpt:
    """The beginning of the first document that is long enough and holds no secret (a token could hide in two pieces),
    and which of its tokens are learned.
    """
    found: Excerpt = ([], [])
    for whole, flags in islice(documents, _LOOKED_AT):
        tokens, learned = whole[:_TOKENS], flags[:_TOKENS]
        text = tokenizer.decode(tokens)
        if len(tokens) > len(found[0]) and any(learned[1:]) and redact_secrets(text) == text:
            found = tokens, learned
        if len(found[0]) >= _ENOUGH:
            break
    return found


def stretches(
    tokens: list[int], nats: np.ndarray, tokenizer: Tokenizer, learned: list[bool] | None = None
) -> list[Priced]:
    """Text token by token, without the BOS; tokens that only together make a character share a stretch.

    `nats`: float [len(tokens) - 1], of every token but the first; those that are not learned are read and not priced.
    """
    flags = np.array(learned[1:] if learned else [True] * len(nats))
    found: list[Priced] = []
    start = 1 if tokens[0] == tokenizer.bos_id else 0
    shown = tokenizer.decode(tokens[:start])
    for end in range(start + 1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        if text.endswith("�") and end < len(tokens):
            continue
        here = slice(max(start - 1, 0), end - 1)
        prices = nats[here][flags[here]]
        found.append(Priced(text[len(shown) :], float(prices.sum()) if len(prices) else None))
        start, shown = end, text
    return [one for one in found if one.text]


def level(nats: float | None) -> int:
    """0, unmarked, to 6."""
    return 0 if nats is None else sum(nats >= edge for edge in _EDGES)


@dataclass(frozen=True)
class Answered:
    question: str
    reference: str
    before: str
    after: str


def compare_answers(plan: RunPlan, checkpoints: Path, parameters: int, use: "Use | None" = None) -> list[Answered]:
    """The shortest of the held-out questions with both answers.

    Empty where a run has no model that it started from, no conversations, no checkpoint, or is too large to be loaded
    twice.
    """
    from bloomery.train.evaluation.answers import validation_prompts
    from bloomery.train.model_folder import ModelFiles, find_model
    from bloomery.train.sealed import newest_valid

    aim = plan.objective.spec
    if plan.model.source is None or aim.reads_text or aim.values or parameters > MOST_PARAMETERS:
        return []
    checkpoint = newest_valid(checkpoints, on_damage=lambda _: None) if checkpoints.is_dir() else None
    if checkpoint is None:
        return []
    try:
        tokenizer = load_tokenizer(plan.data.prepared)
        questions = validation_prompts(plan.data.prepared, _QUESTIONS_LOOKED_AT)
        once = {tuple(question.prompt): question for question in reversed(questions)}.values()  # pairs share a prompt
        chosen = sorted(once, key=lambda question: len(question.prompt))[:_QUESTIONS]
        size = plan.model.config.vocab_size  # a base may lack tokens that the run has added
        found = find_model(checkpoint)
        base = ModelFiles(plan.model.source, None, found.tokenizer, found.trained)
        before, after = (_answers(one, chosen, tokenizer, size, use) for one in (base, found))
    except UserError:  # the section above says what is wrong with the text or the model
        return []
    before_it, after_it = _around(tokenizer)  # one behind another system message or turns keeps these
    bare = [_text(tokenizer, q.prompt).removesuffix(after_it).removeprefix(before_it).strip() for q in chosen]
    asked = zip(bare, (_text(tokenizer, q.reference) for q in chosen), strict=True)
    return [Answered(*texts, old, new) for texts, old, new in zip(asked, before, after, strict=True)]


def _answers(
    found: "ModelFiles", questions: "list[PromptAndResponse]", tokenizer: Tokenizer, vocab_size: int, use: "Use | None"
) -> list[str]:
    """One model at a time is in memory."""
    import torch

    from bloomery.train.evaluation.answers import answer
    from bloomery.train.use import Use, load_used

    decoder = load_used(found, use or Use("cpu"), dtype=torch.float32, vocab_size=vocab_size)
    said = [answer(decoder, tokenizer, question, max_new_tokens=MAX_TOKENS) for question in questions]
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


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    from bloomery.train.evaluation.answers import shown

    return redact_secrets(shown(tokenizer, ids))
