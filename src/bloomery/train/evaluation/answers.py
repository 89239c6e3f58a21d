"""What a model writes and answers: to the prompts of a recipe, and to held-out questions of prepared conversations"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bloomery.core.errors import UserError
from bloomery.data.chat.examples import Message
from bloomery.data.chat.render import chat_format, continuation
from bloomery.data.shards.format import DOCUMENTS_PER_UNIT, Split, open_split, read_manifest
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.model.decoder import Decoder
from bloomery.model.sampling import Sampling, known_ids, sample_tokens
from bloomery.plan.types import RunPlan
from bloomery.train.forward import eval_mode, precision_context

CHARACTERS_SHOWN = 2000
DRAWN = Sampling(temperature=0.6, top_p=0.95, seed=0)  # the likeliest tokens go round in circles in small models


@dataclass(frozen=True)
class PromptAndResponse:
    """Ids up to the first answer, and that answer with the token that ends it."""

    prompt: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Completion:
    """What a model said, and whether it ended by itself."""

    ids: list[int]
    ended: bool


def validation_prompts(prepared: Path, most: int) -> list[PromptAndResponse]:
    """Of the validation split, spread over all of it; of pairs with the chosen answer, of marked answers with the
    desirable ones. Empty for plain text. Raises UserError.
    """
    split = open_split(prepared, "validation")
    if split.loss_mask is None:
        return []
    numbers = range(0, len(split), DOCUMENTS_PER_UNIT[split.kind])
    found = [n for n in numbers if (split.kto_labels is None or split.kto_labels[n]) and not split.is_plain(n)]
    chosen = [found[place * len(found) // most] for place in range(most)] if len(found) > most else found
    made = [_prompt_and_response(split, number) for number in chosen]
    return [question for question in made if question.prompt and question.reference]


def _prompt_and_response(split: Split, number: int) -> PromptAndResponse:
    ids = split.document(number)
    assert split.loss_mask is not None
    learned = split.loss_mask[int(split.bounds[number]) : int(split.bounds[number + 1])].astype(bool)
    starts = np.flatnonzero(learned)
    if not len(starts):
        return PromptAndResponse([], [])
    ends = np.flatnonzero(~learned[starts[0] :])
    end = int(starts[0] + ends[0]) if len(ends) else len(ids)
    return PromptAndResponse(ids[: starts[0]].tolist(), ids[starts[0] : end].tolist())


def answer(decoder: Decoder, tokenizer: Tokenizer, question: PromptAndResponse, *, max_new_tokens: int) -> Completion:
    """Until the token that ends the reference, the text, or `max_new_tokens`. Drawn as DRAWN says, always alike."""
    last = question.reference[-1]
    ends = [last] if tokenizer.token_bytes()[last] == 0 else []
    return drawn(decoder, tokenizer, question.prompt, max_new_tokens=max_new_tokens, ends=ends)


def drawn(
    decoder: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], *, max_new_tokens: int, ends: Iterable[int] = ()
) -> Completion:
    """What follows the prompt, up to one of the `ends` or what ends every text. Drawn as DRAWN says, always alike."""
    room = min(max_new_tokens, decoder.config.max_positions - len(prompt))
    stops = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *ends)
    ids = list(sample_tokens(decoder, prompt, replace(DRAWN, max_new_tokens=room, stop_ids=stops)))
    return Completion(ids, len(ids) < room)


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Ids as text without the tokens that stand for none, and without those of a padded vocabulary."""
    sizes = tokenizer.token_bytes()
    return tokenizer.decode([token for token in ids if token < len(sizes) and sizes[token]]).strip()[:CHARACTERS_SHOWN]


@dataclass(frozen=True)
class Prompts:
    """`sample.prompts` with their ids, what ends the text after each, and whether that text answers them."""

    asked: tuple[tuple[str, list[int]], ...]
    ends: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    answers: bool = False


def open_prompts(plan: RunPlan, tokenizer: Tokenizer) -> Prompts:
    """Of a run that learns answers to turns they are questions, put as its own chat template puts them; of others the
    beginning of a text. Raises UserError for one that the template refuses.
    """
    prompts = plan.sample.prompts
    if not prompts or plan.objective.spec.reads_text or not read_manifest(plan.data.prepared).turns:
        put = continuation(tokenizer)
        return Prompts(tuple((prompt, put([Message("user", prompt)])) for prompt in prompts))
    try:
        with chat_format(tokenizer, None) as form:
            asked = tuple((prompt, form.encode([Message("user", prompt)])) for prompt in prompts)
            return Prompts(asked, form.stop_ids, form.stop_strings, answers=True)
    except UserError as error:
        fix = "set sample.prompts to questions that the template takes, or to []"
        raise UserError(error.problem, where=f"sample.prompts, {error.where}", fix=fix) from error


def samples(model: Decoder, tokenizer: Tokenizer, prompts: Prompts, *, plan: RunPlan) -> Iterator[tuple[str, str]]:
    """(prompt, text) for each prompt, drawn from a generator of its own, the same at every step."""
    sampling = Sampling(
        max_new_tokens=plan.sample.max_new_tokens,
        temperature=plan.sample.temperature,
        top_p=plan.sample.top_p,
        seed=plan.train.seed,
        stop_ids=known_ids(tokenizer.eos_id, model.config.eos_token_id, *prompts.ends),
    )
    # Every length of a growing text would be compiled anew.
    eager = torch.compiler.set_stance("force_eager")
    with eval_mode(model), precision_context(plan.train.precision, plan.train.device), eager:
        for prompt, ids in prompts.asked:
            text = tokenizer.decode(list(sample_tokens(model, ids, sampling)))
            yield prompt, cut(text, prompts.stops)


def cut(text: str, stops: Iterable[str]) -> str:
    """Up to the first of the texts that end it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
