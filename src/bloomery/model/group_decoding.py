"""Drawing several completions of each prompt at once: the rollouts of reinforcement learning.

Every draw takes a number that is keyed by prompt, completion and position, so that a completion depends neither on the
number of slots nor on what is decoded with it. On a CPU the compiled step gives bitwise the same logits for any number
of slots; PyTorch's matmuls of other shapes do not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.decoding import NotFinite
from bloomery.model.heads import LastLogits

LAST = LastLogits()
# A draw's uniform number in [0, 1). Arguments: the number of the prompt, of its completion, of the completion's token.
Uniform = Callable[[int, int, int], float]


@dataclass(frozen=True)
class GroupSampling:
    """`stop_ids` end a completion and are part of it. None and 1.0 switch a filter off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()


@final
@dataclass
class Completion:
    """A completion of a prompt: completion `number` of the prompt at index `prompt`.

    `ids`: the drawn tokens, with the stop id that ended it. `logps`: the log-probability of each when it was drawn,
    after temperature and filters. `truncated`: it had no stop id after `max_new_tokens`.
    """

    prompt: int
    number: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    truncated: bool = False


@final
class _Prefix:
    """Keys and values of a prompt, which all of its completions begin with, and the logits after it."""

    def __init__(self, decoder: Decoder, ids: Sequence[int], capacity: int) -> None:
        # Alone in a cache of its own, so that keys, values and logits depend on the prompt alone.
        self.cache = Cache(decoder.config, capacity)
        device = next(decoder.parameters()).device
        output = decoder(torch.tensor([list(ids)], device=device), head=LAST, cache=self.cache)
        self.logits_V = output.head[0].float().cpu()

    def copy_to(self, cache: Cache, slot: int) -> None:
        """The slot holds this prompt alone afterwards."""
        length = self.cache.lengths[0]
        for source, target in zip(self.cache.layers, cache.layers, strict=True):
            assert source.keys is not None and source.values is not None
            keys, values = target.memory(source.keys.shape[1], source.keys.shape[3], source.keys)
            num_keys = min(length, source.capacity)  # a sliding window keeps the last ones
            keys[slot, :, :num_keys] = source.keys[0, :, :num_keys]
            values[slot, :, :num_keys] = source.values[0, :, :num_keys]
        cache.cut(0, slot)
        cache.append(slot, [length])


@torch.no_grad()
def draw_completions(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    sampling: GroupSampling,
    uniform: Uniform,
    *,
    slots: int,
    on_step: Callable[[int], None] = lambda _done: None,
) -> list[Completion]:
    """Draws `num_generations` completions of each prompt. The list has those of the first prompt first.

    At most `slots` of them are decoded at once; one that ends makes room for the next. `on_step` gets the number of
    completions that have ended, before each forward; it may raise. The decoder must be in evaluation mode. Raises
    NotFinite.
    """
    capacity = max(map(len, prompts)) + sampling.max_new_tokens
    completions = [
        Completion(prompt, number)
        for prompt in range(len(prompts))
        for number in range(num_generations)
    ]
    slots = min(slots, len(completions))
    cache = Cache(decoder.config, capacity, slots)
    waiting = iter(completions)
    running: list[Completion] = []  # `running[i]` is in slot i of the cache
    prefixes = _prefixes(decoder, prompts, capacity)
    prefix: _Prefix | None = None
    num_done = 0

    while True:
        # 1. Fill the free slots: the first token of a completion comes from the logits of its prompt.
        new_completions: list[Completion] = []
        prompt_logits: list[Tensor] = []
        while len(running) + len(new_completions) < slots:
            completion = next(waiting, None)
            if completion is None:
                break
            # Completions of a prompt follow each other: its keys and values are computed with the first one.
            if prefix is None or completion.number == 0:
                on_step(num_done)
                prefix = next(prefixes)
            prefix.copy_to(cache, len(running) + len(new_completions))
            new_completions.append(completion)
            prompt_logits.append(prefix.logits_V)

        # 2. One forward gives every running completion its next logits.
        if not running and not new_completions:
            return completions
        logits: list[Tensor] = []
        if running:
            on_step(num_done)
            last_ids = [completion.ids[-1] for completion in running]
            logits.append(_next_logits(decoder, cache, last_ids))
        running += new_completions
        all_logits_NV = torch.cat([*logits, *(logits_V[None] for logits_V in prompt_logits)])

        # 3. One draw for all of them.
        uniforms = [
            uniform(completion.prompt, completion.number, len(completion.ids))
            for completion in running
        ]
        ids, logps = draw_all(all_logits_NV, torch.tensor(uniforms, dtype=torch.float64), sampling)
        for completion, token, logp in zip(running, ids.tolist(), logps.tolist(), strict=True):
            completion.ids.append(token)
            completion.logps.append(logp)

        # 4. Completions that have ended leave their slots; the others move up, so that theirs are the first ones.
        unfinished: list[Completion] = []
        for slot, completion in enumerate(running):
            is_stopped = completion.ids[-1] in sampling.stop_ids
            completion.truncated = not is_stopped and len(completion.ids) == sampling.max_new_tokens
            if is_stopped or completion.truncated:
                num_done += 1
                continue
            if slot != len(unfinished):
                cache.swap(len(unfinished), slot)
            unfinished.append(completion)
        running = unfinished


def _prefixes(
    decoder: Decoder, prompts: Sequence[Sequence[int]], capacity: int
) -> Iterator[_Prefix]:
    """The prefixes of the prompts in turn, each computed when the caller takes it."""
    for ids in prompts:
        yield _Prefix(decoder, ids, capacity)


def _next_logits(decoder: Decoder, cache: Cache, ids: Sequence[int]) -> Tensor:
    """float32 [N, V] on the CPU, after one more token in each of the first N slots."""
    tokens = [[token] for token in ids]
    step = decoder.step
    if step is not None and step.takes(tokens, 0, cache):
        return step(tokens, 0, cache)
    cache.rows = range(len(tokens))
    device = next(decoder.parameters()).device
    output = decoder(torch.tensor(tokens, device=device), head=LAST, cache=cache)
    logits: Tensor = output.head.float().cpu()
    return logits


def draw_all(
    logits_NV: Tensor, uniforms_N: Tensor, sampling: GroupSampling
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row. Returns the tokens and their log-probabilities, both [N].

    A row's token is the one at which the cumulative distribution passes the row's uniform number. Raises NotFinite.
    """
    logprobs_NV = (logits_NV / sampling.temperature).log_softmax(-1)
    if not bool(logprobs_NV.isfinite().all()):
        raise NotFinite
    logprobs_NV = filtered(logprobs_NV, sampling)
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    # All probabilities sum to 1 only up to rounding, so the uniform number is scaled to their sum.
    targets_N = uniforms_N * cumulative_NV[:, -1]
    ids_N = torch.searchsorted(cumulative_NV, targets_N[:, None], right=True)[:, 0]
    ids_N = ids_N.clamp(max=logits_NV.shape[1] - 1)
    return ids_N, logprobs_NV.gather(1, ids_N[:, None])[:, 0]


def filtered(logprobs_NV: Tensor, sampling: GroupSampling) -> Tensor:
    """The log-probabilities over the tokens that top-k, top-p and min-p leave; -inf for every other token.

    Each row has the distribution that `decoding.next_distribution` gives.
    """
    impossible = float("-inf")
    if sampling.top_k is not None and sampling.top_k < logprobs_NV.shape[1]:
        least_N1 = logprobs_NV.topk(sampling.top_k).values[:, -1:]
        logprobs_NV = logprobs_NV.masked_fill(logprobs_NV < least_N1, impossible)
        logprobs_NV = logprobs_NV.log_softmax(-1)
    if sampling.top_p < 1.0:
        # A token stays when those likelier than it do not reach p yet. The likeliest one stays also with p = 0.
        shares_NV, order_NV = logprobs_NV.exp().sort(descending=True, stable=True)
        is_dropped_NV = shares_NV.cumsum(-1) - shares_NV >= max(sampling.top_p, 1e-30)
        dropped_NV = torch.zeros_like(is_dropped_NV).scatter(1, order_NV, is_dropped_NV)
        logprobs_NV = logprobs_NV.masked_fill(dropped_NV, impossible).log_softmax(-1)
    if sampling.min_p > 0.0:
        largest_N1 = logprobs_NV.max(-1, keepdim=True).values
        is_rare_NV = logprobs_NV.exp() < sampling.min_p * largest_N1.exp()
        logprobs_NV = logprobs_NV.masked_fill(is_rare_NV, impossible).log_softmax(-1)
    return logprobs_NV
