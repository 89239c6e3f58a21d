"""Log-probabilities of the tokens of prompts, as `echo` with `logprobs` reports them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.infer.sampling import NotFinite
from bloomery.model.cache import Cache
from bloomery.model.forward_input import ALL_LOGITS
from bloomery.serve.engine import Chance, End
from bloomery.serve.served import Served

# Of one prompt: of each token after those before it; the first has none.
Scores = list[Chance | None]


@final
@dataclass(eq=False)
class PromptScores:
    """The prompts of one request. A step reads a piece of one prompt, so that answers continue between them.

    `top`: how many of the likeliest tokens it reports; the prompt's own token always is one of them.
    """

    model: Served
    prompts: Sequence[Sequence[int]]
    adapter: str | None
    top: int
    put: Callable[[list[Scores] | End], None]
    canceled: bool = False
    born: float = field(default_factory=time.monotonic)
    _finished: list[Scores] = field(default_factory=list)
    _scores: Scores = field(default_factory=lambda: [None])
    _read: int = 0  # tokens of the current prompt
    _cache: Cache | None = None

    def step(self) -> bool:
        """True when every prompt is read, and `put` was called. Raises NotFinite."""
        ids = self.prompts[len(self._finished)]
        if self._cache is None:
            self._cache = Cache(self.model.decoder.config, len(ids))
        logits_TV = self.model.read_piece(
            ids, read=self._read, cache=self._cache, adapter=self.adapter, head=ALL_LOGITS
        )
        following = ids[self._read + 1 : self._read + len(logits_TV) + 1]
        self._read += len(logits_TV)
        with torch.no_grad():
            self._scores += self._chances(logits_TV[: len(following)].float(), following)
        if self._read == len(ids):
            self._finished.append(self._scores)
            self._scores = [None]
            self._read = 0
            self._cache = None
        if len(self._finished) < len(self.prompts):
            return False
        self.put(self._finished)
        return True

    def fail(self, end: End) -> None:
        self.put(end)

    def _chances(self, logits_TV: Tensor, following: Sequence[int]) -> list[Chance]:
        """Of the token that follows each row of logits."""
        if not following:
            return []
        if not bool(logits_TV.isfinite().all()):
            raise NotFinite()
        logprobs_TV = logits_TV.log_softmax(-1)
        chosen = sent(torch.tensor(following), logprobs_TV.device)
        logprobs_T = logprobs_TV.gather(1, chosen[:, None])[:, 0].tolist()
        likeliest = logprobs_TV.topk(min(self.top, logprobs_TV.shape[-1]), dim=-1)
        spelled = self.model.spelled
        chances = list[Chance]()
        rows = zip(
            following,
            logprobs_T,
            likeliest.indices.tolist(),
            likeliest.values.tolist(),
            strict=True,
        )
        for token, logprob, top_ids, top_logprobs in rows:
            top = tuple(
                Chance(top_id, spelled(top_id), top_logprob)
                for top_id, top_logprob in zip(top_ids, top_logprobs, strict=True)
            )
            chances.append(Chance(token, spelled(token), logprob, top))
        return chances
