"""Several completions of each prompt at once: the rollouts of reinforcement learning.

Every token is sampled with a number that is keyed by prompt, completion and position, so that a completion depends
neither on the number of slots nor on what is decoded with it. On a CPU the compiled step, which also reads the prompts,
gives bitwise the same logits for any number of slots; PyTorch's matmuls of other shapes do not.

Legend: N completions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import final

import torch
from torch import Tensor

from bloomery.infer.sampling import GroupSampling, sample_rows
from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LastLogits, PositionLogits

LAST = LastLogits()


PROMPT_TOKENS = 1024  # of prompts that are read at once


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


# The numbers in [0, 1) that the next tokens of completions are drawn with: float64 [N], on any device.
Uniforms = Callable[[Sequence[Completion]], Tensor]


@final
@dataclass(frozen=True)
class _Prefixes:
    """Keys and values of some prompts, which all of their completions begin with, and the logits after them."""

    prompts: range
    cache: Cache
    logits_NV: Tensor

    def copy_to(self, cache: Cache, first: int, completions: Sequence[Completion]) -> None:
        """Makes the slots from `first` on the beginnings of these completions."""
        for prompt, group in groupby(completions, lambda completion: completion.prompt):
            place = prompt - self.prompts.start
            length = self.cache.lengths[place]
            end = first + len(list(group))
            for source, target in zip(self.cache.layers, cache.layers, strict=True):
                assert source.keys is not None and source.values is not None
                keys, values = target.memory(
                    source.keys.shape[1], source.keys.shape[3], source.keys
                )
                num_keys = min(length, source.capacity)  # a sliding window keeps the last ones
                keys[first:end, :, :num_keys] = source.keys[place, :, :num_keys]
                values[first:end, :, :num_keys] = source.values[place, :, :num_keys]
            for slot in range(first, end):
                cache.cut(0, slot)
            cache.append(first, [length] * (end - first))
            first = end


@torch.no_grad()
def sample_completions(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    num_generations: int,
    sampling: GroupSampling,
    uniforms: Uniforms,
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
    running: list[Completion] = []  # `running[i]` is in slot i of the cache
    num_begun = 0
    num_done = 0
    prefixes: _Prefixes | None = None

    def sample_token(drawn_completions: Sequence[Completion], logits_NV: Tensor) -> None:
        ids, logps = sample_rows(logits_NV, uniforms(drawn_completions), sampling)
        for completion, token, logp in zip(drawn_completions, ids, logps, strict=True):
            completion.ids.append(token)
            completion.logps.append(logp)
            is_full = len(completion.ids) == sampling.max_new_tokens
            completion.truncated = is_full and token not in sampling.stop_ids

    def is_over(completion: Completion) -> bool:
        return completion.truncated or completion.ids[-1] in sampling.stop_ids

    while num_done < len(completions):
        # 1. Fill the free slots: the first token of a completion comes from the logits of its prompt.
        while len(running) < slots and num_begun < len(completions):
            next_prompt = completions[num_begun].prompt
            if prefixes is None or next_prompt not in prefixes.prompts:
                on_step(num_done)
                prefixes = _read(decoder, prompts, next_prompt)
            num_ready = prefixes.prompts.stop * num_generations
            new_completions = completions[
                num_begun : min(num_begun + slots - len(running), num_ready)
            ]
            places = [completion.prompt - prefixes.prompts.start for completion in new_completions]
            sample_token(new_completions, prefixes.logits_NV[places])
            staying = [completion for completion in new_completions if not is_over(completion)]
            prefixes.copy_to(cache, len(running), staying)
            running += staying
            num_begun += len(new_completions)
            num_done += len(new_completions) - len(staying)
        if not running:
            continue

        # 2. One forward and one draw for all of them.
        on_step(num_done)
        sample_token(
            running, _next_logits(decoder, cache, [completion.ids[-1] for completion in running])
        )

        # 3. Completions that are over leave; the last ones move into their slots.
        slot = 0
        while slot < len(running):
            if not is_over(running[slot]):
                slot += 1
                continue
            num_done += 1
            last = running.pop()
            if slot < len(running):
                cache.swap(slot, len(running))
                running[slot] = last
    return completions


def _read(decoder: Decoder, prompts: Sequence[Sequence[int]], first: int) -> _Prefixes:
    """The prompts from `first` on, as many as are read at once; one alone where a window drops tokens of it."""
    window = min(layer.capacity for layer in Cache(decoder.config, max(map(len, prompts))).layers)
    longest = len(prompts[first])
    end = first + 1
    while end < len(prompts) and longest <= window:
        longest = max(longest, len(prompts[end]))
        if longest > window or longest * (end + 1 - first) > PROMPT_TOKENS:
            break
        end += 1
    read_prompts = [list(ids) for ids in prompts[first:end]]
    longest = max(map(len, read_prompts))
    cache = Cache(decoder.config, longest, len(read_prompts))

    # The compiled step gives each prompt the numbers that it has alone, also in pieces of a long one.
    step = decoder.step
    if step is not None and longest <= window:
        for start in range(0, longest, PROMPT_TOKENS):
            logits_NV = step([ids[start : start + PROMPT_TOKENS] for ids in read_prompts], 0, cache)
        return _Prefixes(range(first, end), cache, logits_NV)

    # PyTorch reads padded prompts; what it has cached of the padding is cut off.
    device = next(decoder.parameters()).device
    tokens = [ids + [0] * (longest - len(ids)) for ids in read_prompts]
    last_indices = torch.tensor([len(ids) - 1 for ids in read_prompts], device=device)
    cache.rows = range(len(read_prompts))
    output = decoder(
        torch.tensor(tokens, device=device), head=PositionLogits(last_indices), cache=cache
    )
    for place, ids in enumerate(read_prompts):
        cache.cut(len(ids), place)
    return _Prefixes(range(first, end), cache, output.head.float())


def _next_logits(decoder: Decoder, cache: Cache, ids: Sequence[int]) -> Tensor:
    """float32 [N, V], after one more token in each of the first N slots."""
    tokens = [[token] for token in ids]
    step = decoder.step
    if step is not None and step.takes(tokens, 0, cache):
        return step(tokens, 0, cache)
    cache.rows = range(len(tokens))
    device = next(decoder.parameters()).device
    output = decoder(torch.tensor(tokens, device=device), head=LAST, cache=cache)
    logits: Tensor = output.head.float()
    return logits
