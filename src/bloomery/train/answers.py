"""Held-out questions of prepared conversations, and what a model answers: for reports and for the demo"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bloomery.data.shards import ANSWERS, Split, open_split
from bloomery.data.tokenizer import Tokenizer
from bloomery.model.decoder import Decoder
from bloomery.model.sampling import Sampling, sample_tokens

CHARACTERS_SHOWN = 2000
DRAWN = Sampling(temperature=0.6, top_p=0.95, seed=0)  # the likeliest tokens go round in circles in small models


@dataclass(frozen=True)
class Question:
    """Ids up to the first answer, and that answer with the token that ends it."""

    prompt: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Answer:
    """What a model said, and whether it ended by itself."""

    ids: list[int]
    ended: bool


def held_out_questions(prepared: Path, most: int) -> list[Question]:
    """Of the validation split, spread over all of it; of pairs with the chosen answer, of marked answers with the
    desirable ones. Empty for plain text. Raises UserError.
    """
    split = open_split(prepared, "validation")
    if split.learned is None:
        return []
    numbers = range(0, len(split), ANSWERS[split.kind])
    found = [number for number in numbers if split.marks is None or split.marks[number]]
    chosen = [found[place * len(found) // most] for place in range(most)] if len(found) > most else found
    made = [_question(split, number) for number in chosen]
    return [question for question in made if question.prompt and question.reference]


def _question(split: Split, number: int) -> Question:
    ids = split.document(number)
    assert split.learned is not None
    learned = split.learned[int(split.bounds[number]) : int(split.bounds[number + 1])].astype(bool)
    starts = np.flatnonzero(learned)
    if not len(starts):
        return Question([], [])
    ends = np.flatnonzero(~learned[starts[0] :])
    end = int(starts[0] + ends[0]) if len(ends) else len(ids)
    return Question(ids[: starts[0]].tolist(), ids[starts[0] : end].tolist())


def answer(decoder: Decoder, tokenizer: Tokenizer, question: Question, *, max_tokens: int) -> Answer:
    """Until the token that ends the reference, the text, or `max_tokens`. Drawn as DRAWN says, always alike."""
    last = question.reference[-1]
    ends = {tokenizer.eos_id, decoder.config.eos_token_id, last if tokenizer.token_bytes()[last] == 0 else None}
    room = min(max_tokens, decoder.config.max_positions - len(question.prompt))
    stops = tuple(sorted(end for end in ends if end is not None))
    ids = list(sample_tokens(decoder, question.prompt, replace(DRAWN, max_tokens=room, stop_ids=stops)))
    return Answer(ids, len(ids) < room)


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Ids as text without the tokens that stand for none, and without those of a padded vocabulary."""
    sizes = tokenizer.token_bytes()
    return tokenizer.decode([token for token in ids if token < len(sizes) and sizes[token]]).strip()[:CHARACTERS_SHOWN]
