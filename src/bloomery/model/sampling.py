"""Sampling tokens from a decoder, one at a time, with a KV cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LastLogits

__all__ = ["Cache", "Past", "Sampling", "next_distribution", "sample_tokens"]


COLDEST = 1e-4  # below it float32 logits overflow, and the likeliest token is certain anyway


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy; filters run in the order of the fields.

    `repetition_penalty` divides positive logits of tokens that occurred, and multiplies negative ones (Keskar et al.
    2019); `top_k` keeps the k likeliest; `top_p` the fewest whose probabilities add up to p; `min_p` those at least p
    times as likely as the likeliest. `stop_ids` end the text and are not part of it.
    """

    max_new_tokens: int = 200
    repetition_penalty: float = 1.0
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


@final
class Past:
    """The tokens and KV cache of a decoder, reused for texts with a common prefix: the turns of a chat."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.ids = decoder, list[int]()
        self.cache = Cache(decoder.config, 0)

    def rest(self, ids: Sequence[int], capacity: int) -> list[int]:
        """Keeps what is common with `ids` and returns what is left to read; there is room for `capacity` tokens."""
        pairs = zip(self.ids, ids[:-1], strict=False)
        common = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(self.ids), len(ids) - 1))
        if capacity > self.cache.capacity or not self.cache.cut(common):
            room = max(capacity, min(2 * capacity, self.decoder.config.max_positions))
            common, self.cache = 0, Cache(self.decoder.config, room)
        self.ids = list(ids[:common])
        return list(ids[common:])

    def read(self, ids: list[int]) -> Tensor:
        """The logits after `ids`, float32 [V] on the CPU. What interrupts it leaves nothing of the past."""
        past, cache = self.ids, self.cache
        self.ids, self.cache = [], Cache(self.decoder.config, 0)
        device = self.decoder.model.embed_tokens.weight.device
        with torch.no_grad():
            logits: Tensor = self.decoder(torch.tensor([ids], device=device), head=LastLogits(), cache=cache)
        self.ids, self.cache = past + ids, cache
        return logits[0].float().cpu()


class NotFinite(UserError):
    """The logits of a model hold NaN or infinity."""


def sample_tokens(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    past: Past | None = None,
    *,
    agree: Callable[[float], float] | None = None,
) -> Iterator[int]:
    """New tokens after `prompt_ids`, until a stop token, `max_new_tokens`, or the end of the decoder's positions. With
    a `past`, only tokens that are not in its cache are computed; the cache then holds all of them.

    The decoder should be in evaluation mode. The random stream is the sampling's own and lives on the CPU, so that the
    same logits give the same text on every device. `agree`: of several ranks, returns the first one's token.
    """
    assert prompt_ids, "a decoder needs at least one token to start from"
    room = min(sampling.max_new_tokens, decoder.config.max_positions - len(prompt_ids))
    past = past or Past(decoder)
    random = torch.Generator().manual_seed(sampling.seed)
    seen, fed = list(prompt_ids), past.rest(prompt_ids, len(prompt_ids) + max(room, 0))
    for _ in range(room):
        logits = past.read(fed)
        if not bool(logits.isfinite().all()):
            raise NotFinite(
                "the model answers with numbers that are not finite: its weights are damaged or have diverged",
                where="the model", fix="try an earlier checkpoint with --step, or another copy of the model",
            )  # fmt: skip
        token = _draw(logits, seen, sampling, random)
        token = token if agree is None else int(agree(token))
        if token in sampling.stop_ids:
            return
        yield token
        seen.append(token)
        fed = [token]


def _draw(logits: Tensor, seen: Sequence[int], sampling: Sampling, random: torch.Generator) -> int:
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(seen)))
        old, penalty = logits[ids], sampling.repetition_penalty
        logits = logits.index_copy(0, ids, torch.where(old > 0, old / penalty, old * penalty))
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    return int(torch.multinomial(next_distribution(logits, sampling), 1, generator=random))


def next_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V] after temperature, top-k, top-p and min-p; at least one token stays."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        shares, order = logits.softmax(-1).sort(descending=True)
        before = shares.cumsum(-1) - shares  # a token stays when those likelier than it do not reach p yet
        logits = logits.index_fill(0, order[before >= max(sampling.top_p, 1e-30)], float("-inf"))
    shares = logits.softmax(-1)
    if sampling.min_p > 0.0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0.0)
    return shares / shares.sum()
