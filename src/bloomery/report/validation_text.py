"""Per-token loss of a validation text, and responses to validation prompts, before and after training."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.text import redact_secrets
from bloomery.data.shards import Split, open_split
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.plan.types import RunPlan

if TYPE_CHECKING:
    from bloomery.train.evaluation.answers import PromptAndResponse
    from bloomery.train.model_folder import ModelFiles
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


def score_validation_text(
    plan: RunPlan, checkpoints: Path, parameters: int, use: "Use | None" = None
) -> ValidationText | str:
    """Both losses of the first long enough document of the validation split, or the reason why there are none."""
    from bloomery.train.sealed import newest_valid

    if plan.objective.spec.values:
        return "a reward model has no next-token loss"
    if parameters > MOST_PARAMETERS:
        return "the model is too large to load it twice"
    checkpoint = newest_valid(checkpoints, on_damage=lambda _: None) if checkpoints.is_dir() else None
    if checkpoint is None:
        return "there is no checkpoint"
    try:
        tokenizer = load_tokenizer(plan.data.prepared)
        tokens, mask = excerpt(_validation(open_split(plan.data.prepared, "validation")), tokenizer)
    except UserError as error:
        return f"cannot read the validation split: {error.where} {error.problem}"
    if len(tokens) < 2:
        return "the validation split is empty"
    import torch

    from bloomery.model.io.weights import fresh_decoder
    from bloomery.train.evaluation.scoring import score_documents
    from bloomery.train.model_folder import ModelFiles, find_model
    from bloomery.train.use import Use, load_used

    use, trained = use or Use("cpu"), find_model(checkpoint)
    if plan.model.source is None:
        before = fresh_decoder(plan.model.config, seed=plan.train.seed, device=use.device)
    else:
        base = ModelFiles(plan.model.source, None, trained.tokenizer, trained.trained)
        before = load_used(base, use, dtype=torch.float32, vocab_size=plan.model.config.vocab_size)
    first = next(score_documents(before, [tokens]))
    del before  # one model at a time
    last = next(score_documents(load_used(trained, use, dtype=torch.float32), [tokens]))
    spans = [scored_spans(tokens, nats, tokenizer, mask) for nats in (first, last)]
    return ValidationText(spans[0], spans[1], int(checkpoint.name.rpartition("-")[2]))


def _validation(split: Split) -> Iterable[Excerpt]:
    for index in range(len(split)):
        tokens: list[int] = split.document(index)[:_TOKENS].tolist()
        start = int(split.bounds[index])
        flags = None if split.loss_mask is None else split.loss_mask[start : start + len(tokens)].astype(bool).tolist()
        yield tokens, [True] * len(tokens) if flags is None else flags


def excerpt(documents: Iterable[Excerpt], tokenizer: Tokenizer) -> Excerpt:
    """The first tokens of the first long enough document without secrets (one could be split between two spans)."""
    found: Excerpt = ([], [])
    for whole, flags in islice(documents, _DOCUMENTS):
        tokens, mask = whole[:_TOKENS], flags[:_TOKENS]
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
        start, shown = end, text
    return [one for one in found if one.text]


def heat_level(nats: float | None) -> int:
    """0 (no color) to 6."""
    return 0 if nats is None else sum(nats >= edge for edge in _EDGES)


@dataclass(frozen=True)
class ResponsePair:
    prompt: str
    reference: str
    before: str
    after: str


def compare_responses(
    plan: RunPlan, checkpoints: Path, parameters: int, use: "Use | None" = None
) -> list[ResponsePair]:
    """The shortest validation prompts with both responses.

    Empty without a base model, conversations or a checkpoint, and for a model that is too large to load it twice.
    """
    from bloomery.train.evaluation.answers import validation_prompts
    from bloomery.train.model_folder import ModelFiles, find_model
    from bloomery.train.sealed import newest_valid

    objective = plan.objective.spec
    if plan.model.source is None or objective.reads_text or objective.values or parameters > MOST_PARAMETERS:
        return []
    checkpoint = newest_valid(checkpoints, on_damage=lambda _: None) if checkpoints.is_dir() else None
    if checkpoint is None:
        return []
    try:
        tokenizer = load_tokenizer(plan.data.prepared)
        prompts = validation_prompts(plan.data.prepared, _PROMPTS_TRIED)
        once = {tuple(each.prompt): each for each in reversed(prompts)}.values()  # pairs share a prompt
        chosen = sorted(once, key=lambda each: len(each.prompt))[:_PROMPTS]
        size = plan.model.config.vocab_size  # a base may lack tokens that the run added
        found = find_model(checkpoint)
        base = ModelFiles(plan.model.source, None, found.tokenizer, found.trained)
        before, after = (_responses(one, chosen, tokenizer, size, use) for one in (base, found))
    except UserError:  # score_validation_text returns the reason
        return []
    before_it, after_it = _around(tokenizer)  # kept after another system message or turn
    bare = [_text(tokenizer, q.prompt).removesuffix(after_it).removeprefix(before_it).strip() for q in chosen]
    asked = zip(bare, (_text(tokenizer, q.reference) for q in chosen), strict=True)
    return [ResponsePair(*texts, old, new) for texts, old, new in zip(asked, before, after, strict=True)]


def _responses(
    model: "ModelFiles", prompts: "list[PromptAndResponse]", tokenizer: Tokenizer, vocab_size: int, use: "Use | None"
) -> list[str]:
    """Loads one model at a time."""
    import torch

    from bloomery.train.evaluation.answers import answer
    from bloomery.train.use import Use, load_used

    decoder = load_used(model, use or Use("cpu"), dtype=torch.float32, vocab_size=vocab_size)
    completions = [answer(decoder, tokenizer, prompt, max_new_tokens=MAX_TOKENS) for prompt in prompts]
    return [_text(tokenizer, one.ids) + ("" if one.ended else " …") for one in completions]


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
