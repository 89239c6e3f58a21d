"""Per-token loss of a validation text, and responses to validation prompts, before and after training."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.text import redact_secrets
from bloomery.data.shards import Split, open_split
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.plan.types import RunPlan

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder
    from bloomery.train.use import Use

_TOKENS = 260  # of one document, for two columns
_ENOUGH = 64  # tokens of a useful document
_DOCUMENTS = 200  # that are tried
MOST_PARAMETERS = 1_500_000_000  # above, two models take too long to load
_EDGES = (0.5, 1.0, 2.0, 3.5, 5.5, 8.0)  # nats; a token of probability 1/2 has 0.69
HEAT_LEGEND = (f"below {_EDGES[0]:g}", *(f"from {edge:g}" for edge in _EDGES))
_PROMPTS = 4
_PROMPTS_TRIED = 64  # the shortest are shown
MAX_TOKENS = 160
RESPONSES_NOTE = f"same sampling settings for all models, at most {MAX_TOKENS} tokens; … marks a response without EOS"
_MARK = "PROMPT"
Excerpt = tuple[list[int], list[bool]]  # tokens and their loss mask


@dataclass(frozen=True)
class ScoredText:
    """A span of text and the summed loss of its tokens in nats; None: masked."""

    text: str
    nats: float | None


@dataclass(frozen=True)
class ValidationText:
    before: list[ScoredText]
    after: list[ScoredText]
    step: int  # of the checkpoint that `after` is from


@dataclass(frozen=True)
class ResponsePair:
    prompt: str
    reference: str
    before: str
    after: str


def compare_models(
    plan: RunPlan, checkpoints: Path, parameters: int, use: "Use | None" = None
) -> tuple[ValidationText | str, list[ResponsePair]]:
    """The model before and after training, one in memory at a time: both losses of the first long enough document of
    the validation split, or the reason why there are none; both responses to the shortest validation prompts.

    No responses without a base model or conversations. Raises UserError for a model that cannot be loaded.
    """
    from bloomery.train.model_folder import best_on_disk, damage, folder_of_step, newest_valid

    objective = plan.objective.spec
    if objective.values:
        return "a reward model has no next-token loss", []
    if parameters > MOST_PARAMETERS:
        return "the model is too large to load it twice", []
    best = best_on_disk(checkpoints)
    # the one that all commands use
    checkpoint = None if best is None else folder_of_step(checkpoints, best)
    if checkpoint is None or damage(checkpoint) is not None:
        checkpoint = (
            newest_valid(checkpoints, on_damage=lambda _: None) if checkpoints.is_dir() else None
        )
    if checkpoint is None:
        return "there is no checkpoint", []
    import torch

    from bloomery.model.io.weights import fresh_decoder
    from bloomery.train.evaluation.answers import answer, validation_prompts
    from bloomery.train.evaluation.scoring import score_documents
    from bloomery.train.model_folder import ModelFiles, find_model
    from bloomery.train.use import Use, load_used

    chosen = []
    try:
        tokenizer = load_tokenizer(plan.data.prepared)
        tokens, mask = excerpt(_validation(open_split(plan.data.prepared, "validation")), tokenizer)
        if plan.model.source is not None and not objective.reads_text:
            prompts = validation_prompts(plan.data.prepared, _PROMPTS_TRIED)
            # pairs share a prompt
            once = {tuple(each.prompt): each for each in reversed(prompts)}.values()
            chosen = sorted(once, key=lambda each: len(each.prompt))[:_PROMPTS]
    except UserError as error:
        return f"cannot read the validation split: {error.where} {error.problem}", []
    if len(tokens) < 2 and not chosen:
        return "the validation split is empty", []
    use = use or Use("cpu")
    trained = find_model(checkpoint)
    config = plan.model.config

    def results(decoder: "Decoder", when: str) -> tuple[list[ScoredText], list[str]]:
        spans = []
        completions = []
        progress(f"loss of a validation text {when} training")
        if len(tokens) > 1:
            spans = scored_spans(tokens, next(score_documents(decoder, [tokens])), tokenizer, mask)
        for number, prompt in enumerate(chosen, 1):
            progress(f"response {number} of {len(chosen)} {when} training")
            completions.append(answer(decoder, tokenizer, prompt, max_new_tokens=MAX_TOKENS))
        return spans, [
            _text(tokenizer, one.ids) + ("" if one.ended else " …") for one in completions
        ]

    progress("loading the model before training")
    if plan.model.source is None:
        before = results(fresh_decoder(config, seed=plan.train.seed, device=use.device), "before")
    else:  # a base may lack tokens that the run added
        base = ModelFiles(plan.model.source, None, trained.tokenizer, trained.trained)
        before = results(
            load_used(base, use, dtype=torch.float32, vocab_size=config.vocab_size), "before"
        )
    progress("loading the trained model")
    after = results(load_used(trained, use, dtype=torch.float32), "after")
    # kept after another system message or turn
    before_it, after_it = _around(tokenizer) if chosen else ("", "")
    bare = [
        _text(tokenizer, q.prompt).removesuffix(after_it).removeprefix(before_it).strip()
        for q in chosen
    ]
    references = [_text(tokenizer, q.reference) for q in chosen]
    responses = [
        ResponsePair(*texts) for texts in zip(bare, references, before[1], after[1], strict=True)
    ]
    if len(tokens) < 2:
        return "the validation split is empty", responses
    return ValidationText(before[0], after[0], int(checkpoint.name.rpartition("-")[2])), responses


def _validation(split: Split) -> Iterable[Excerpt]:
    for index in range(len(split)):
        tokens: list[int] = split.document(index)[:_TOKENS].tolist()
        start = int(split.bounds[index])
        flags = (
            None
            if split.loss_mask is None
            else split.loss_mask[start : start + len(tokens)].astype(bool).tolist()
        )
        yield tokens, [True] * len(tokens) if flags is None else flags


def excerpt(documents: Iterable[Excerpt], tokenizer: Tokenizer) -> Excerpt:
    """The first tokens of the first long enough document without secrets (one could be split between two spans)."""
    found: Excerpt = ([], [])
    for whole, flags in islice(documents, _DOCUMENTS):
        tokens = whole[:_TOKENS]
        mask = flags[:_TOKENS]
        text = tokenizer.decode(tokens)
        if len(tokens) > len(found[0]) and any(mask[1:]) and redact_secrets(text) == text:
            found = tokens, mask
        if len(found[0]) >= _ENOUGH:
            break
    return found


def scored_spans(
    tokens: list[int], nats: np.ndarray, tokenizer: Tokenizer, mask: list[bool] | None = None
) -> list[ScoredText]:
    """The text token by token, without BOS; tokens of one character share a span.

    `nats`: float [len(tokens) - 1], of every token but the first. Masked tokens are shown without a loss.
    """
    flags = np.array(mask[1:] if mask else [True] * len(nats))
    found: list[ScoredText] = []
    start = 1 if tokens[0] == tokenizer.bos_id else 0
    shown = tokenizer.decode(tokens[:start])
    for end in range(start + 1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        if text.endswith("�") and end < len(tokens):
            continue
        here = slice(max(start - 1, 0), end - 1)
        losses = nats[here][flags[here]]
        found.append(ScoredText(text[len(shown) :], float(losses.sum()) if len(losses) else None))
        start = end
        shown = text
    return [one for one in found if one.text]


def heat_level(nats: float | None) -> int:
    """0 (no color) to 6."""
    return 0 if nats is None else sum(nats >= edge for edge in _EDGES)


def _around(tokenizer: Tokenizer) -> tuple[str, str]:
    """Text of the chat template before and after a prompt; empty without a template."""
    from bloomery.data.chat.render import Renderer
    from bloomery.data.examples import Message

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
