"""Sampling of the next token: the settings, and the distribution that they make of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bloomery.core.errors import UserError

COLDEST = 1e-4  # below it float32 logits overflow, and the likeliest token is certain anyway
HEAD = 1024  # the likeliest tokens, which nearly always reach top_p: sorting a whole vocabulary takes milliseconds


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy; filters run in the order of the fields.

    `repetition_penalty` divides positive logits of tokens that occurred, and multiplies negative ones (Keskar et al.
    2019); `frequency_penalty` is subtracted for each time that a token was generated, `presence_penalty` once, as by
    OpenAI; no sequence of `no_repeat_ngram_size` tokens occurs twice; `stop_ids` end the text and are not part of it,
    and are not drawn before `min_new_tokens`. `top_k` keeps the k likeliest; `top_p` the fewest whose probabilities
    add up to p; `min_p` those at least p times as likely as the likeliest.
    """

    max_new_tokens: int = 200
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and self.repetition_penalty > 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1


def known_ids(*ids: int | None) -> tuple[int, ...]:
    """The distinct ids that are not None: end tokens of a tokenizer, a model and a template."""
    return tuple(sorted({token for token in ids if token is not None}))


class NotFinite(UserError):
    """The logits of a model hold NaN or infinity."""

    def __init__(self) -> None:
        super().__init__(
            "the model answers with numbers that are not finite: its weights are damaged or have diverged",
            where="the model", fix="try an earlier checkpoint with --step, or another copy of the model",
        )  # fmt: skip


def draw(logits: Tensor, prompt: Sequence[int], new: Sequence[int], sampling: Sampling, random: torch.Generator) -> int:
    """A token from float32 logits [V] on the CPU, after the prompt and the tokens that are new since."""
    logits = penalized(logits, prompt, new, sampling)
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    return int(torch.multinomial(next_distribution(logits, sampling), 1, generator=random))


def penalized(logits: Tensor, prompt: Sequence[int], new: Sequence[int], sampling: Sampling) -> Tensor:
    """Logits [V] after the penalties of what occurred; the same tensor where there are none."""
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*prompt, *new}))
        old, penalty = logits[ids], sampling.repetition_penalty
        logits = logits.index_copy(0, ids, torch.where(old > 0, old / penalty, old * penalty))
    if new and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = torch.tensor(new).unique(return_counts=True)
        logits = logits.index_add(0, ids, -(sampling.frequency_penalty * counts + sampling.presence_penalty))
    banned = list(sampling.stop_ids) if len(new) < sampling.min_new_tokens else []
    if size := sampling.no_repeat_ngram_size:
        whole = [*prompt, *new]
        begun = whole[len(whole) - size + 1 :]
        starts = range(len(whole) - size + 1)
        banned += [whole[at + size - 1] for at in starts if whole[at : at + size - 1] == begun]
    return logits.index_fill(0, torch.tensor(banned), float("-inf")) if banned else logits


def next_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V] after temperature, top-k, top-p and min-p; at least one token stays."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        most = max(sampling.top_p, 1e-30)
        shares = logits.softmax(-1)
        head, order = shares.topk(min(HEAD, len(shares)))
        if len(head) < len(shares) and head.sum() < most:
            head, order = shares.sort(descending=True)
        before = head.cumsum(-1) - head  # a token stays when those likelier than it do not reach p yet
        kept = order[before < most]
        logits = torch.full_like(logits, float("-inf")).index_copy(0, kept, logits[kept])
    shares = logits.softmax(-1)
    if sampling.min_p > 0.0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0.0)
    return shares / shares.sum()
