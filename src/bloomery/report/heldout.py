"""A held-out text with the price of each of its tokens, before training and after."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.text import scrub
from bloomery.data.shards.format import Split, open_split
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.plan.types import Plan
from bloomery.report.html import Html, el, join

if TYPE_CHECKING:
    from bloomery.train.use import Use

_TOKENS = 260  # of one document: what two columns show without scrolling for long
_ENOUGH = 64  # a document with fewer tokens says little
_LOOKED_AT = 200  # documents
MOST_PARAMETERS = 1_500_000_000  # above that, loading the model twice costs more than the picture is worth
_EDGES = (0.5, 1.0, 2.0, 3.5, 5.5, 8.0)  # nats; a token given half its probability costs 0.69
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


def price_held_out(plan: Plan, checkpoints: Path, parameters: int, use: "Use | None" = None) -> HeldOut | str:
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
        tokens, learned = _document(plan.data.prepared, tokenizer)
    except UserError as error:
        return f"the held-out text cannot be read: {error.where} {error.problem}"
    if len(tokens) < 2:
        return "the validation split is empty"
    return _price(plan, checkpoint, tokens, learned, tokenizer, use)


def _price(
    plan: Plan, checkpoint: Path, tokens: list[int], learned: list[bool], tokenizer: Tokenizer, use: "Use | None"
) -> HeldOut:
    import torch

    from bloomery.model.io.weights import fresh_decoder
    from bloomery.train.evaluation.scoring import score_documents
    from bloomery.train.model_folder import Found, find_model
    from bloomery.train.use import Use, load_used

    use, found = use or Use("cpu"), find_model(checkpoint)
    if plan.model.source is None:
        before = fresh_decoder(plan.model.config, seed=plan.train.seed, device=use.device)
    else:
        base, size = Found(plan.model.source, None, found.tokenizer, found.trained), plan.model.config.vocab_size
        before = load_used(base, use, dtype=torch.float32, vocab_size=size)
    first = next(score_documents(before, [tokens]))
    del before  # only one model at a time
    last = next(score_documents(load_used(found, use, dtype=torch.float32), [tokens]))
    step = int(checkpoint.name.rpartition("-")[2])
    told = [stretches(tokens, nats, tokenizer, learned) for nats in (first, last)]
    return HeldOut(told[0], told[1], step)


def _document(prepared: Path, tokenizer: Tokenizer) -> Excerpt:
    split = open_split(prepared, "validation")
    return excerpt((_flagged(split, index) for index in range(len(split))), tokenizer)


def _flagged(split: Split, index: int) -> Excerpt:
    tokens: list[int] = split.document(index)[:_TOKENS].tolist()
    if split.learned is None:
        return tokens, [True] * len(tokens)
    start = int(split.bounds[index])
    return tokens, split.learned[start : start + len(tokens)].astype(bool).tolist()


def excerpt(documents: Iterable[Excerpt], tokenizer: Tokenizer) -> Excerpt:
    """The beginning of the first document that is long enough and holds no secret (a token could hide in two pieces),
    and which of its tokens are learned.
    """
    found: Excerpt = ([], [])
    for whole, flags in islice(documents, _LOOKED_AT):
        tokens, learned = whole[:_TOKENS], flags[:_TOKENS]
        text = tokenizer.decode(tokens)
        if len(tokens) > len(found[0]) and any(learned[1:]) and scrub(text) == text:
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


def draw(told: HeldOut) -> Html:
    return draw_priced([("before training", told.before), (f"after step {told.step:,}", told.after)])


def draw_priced(columns: Sequence[tuple[str, list[Priced]]]) -> Html:
    """Columns of the same text, each with its title; darker cost more."""
    names = [f"below {_EDGES[0]:g}", *(f"from {edge:g}" for edge in _EDGES)]
    keys = [el("span", name, class_=f"n{index}") for index, name in enumerate(names)]
    read = [el("span", "only read", class_="read")] if any(one.nats is None for one in columns[-1][1][1:]) else []
    figures = [_column(title, text) for title, text in columns]
    return join(el("p", "nats a token: ", *keys, *read, class_="legend"), el("div", *figures, class_="two"))


def _column(title: str, text: list[Priced]) -> Html:
    scored = [one.nats for one in text if one.nats is not None]
    mean = f"{sum(scored) / len(scored):.2f} nats each on average" if scored else ""
    parts = [
        el("span", one.text, class_="read")
        if one.nats is None
        else el("span", one.text, class_=f"n{level(one.nats)}", title=f"{one.nats:.2f} nats")
        for one in text
    ]
    caption = el("figcaption", el("b", title), el("span", mean, class_="unit"))
    return el("figure", caption, el("div", *parts, class_="heat"))
