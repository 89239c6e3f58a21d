"""Several completions of each prompt at once: the rollouts of reinforcement learning.

Every token is sampled with a number that is keyed by prompt, completion and position, so that a completion depends
neither on the number of slots nor on what is decoded with it. On a CPU the compiled step, which also reads the prompts,
gives bitwise the same logits for any number of slots; PyTorch's matmuls of other shapes do not. So with the compiled
step no token is read twice: a prompt is read from where it differs from the one before, and turns go on in their slots.

Legend: N completions, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.data.pictures.prompts import PicturePrompt
from bloomery.infer.decode import RunningBatch, RunningText, TextUpdate
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling, sample_each_row
from bloomery.model.cache import Cache
from bloomery.model.decoder import Decoder
from bloomery.model.heads import PositionLogits

PROMPT_TOKENS = 1024  # of prompts that are read at once


@final
@dataclass(frozen=True)
class Episode:
    """What a completion of several turns has beside its tokens.

    `prompt_ids`: with the tools, and what the environment began with. `given`: from where to where `ids` were not
    sampled: results of tools, and markup. `messages`: answers and results, as chat templates take them. `calls`: how
    many, of which `failed`. `reward`: of the environment, None without one; `metrics`: what else it measures.
    `opening`: the messages of its prompt.
    """

    prompt_ids: list[int]
    given: list[list[int]]
    messages: list[dict[str, Any]]
    turns: int
    calls: int
    failed: int
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    opening: list[dict[str, Any]] = field(default_factory=list)


@final
@dataclass
class Completion:
    """A completion of a prompt: completion `number` of the prompt at index `prompt`.

    `ids`: the sampled tokens, with the stop id that ended it. `logps`: the log-probability of each when it was sampled,
    after temperature and filters. `truncated`: it had no stop id after `max_new_tokens`. `episode`: of several turns,
    whose given tokens are among `ids`, with a log-probability of 0.
    """

    prompt: int
    number: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    truncated: bool = False
    episode: Episode | None = None

    @property
    def given(self) -> list[list[int]]:
        """From where to where `ids` were not sampled."""
        return [] if self.episode is None else self.episode.given

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - sum(end - start for start, end in self.given)

    @property
    def sampled_ids(self) -> list[int]:
        """`ids` without those that were given."""
        is_given = {place for start, end in self.given for place in range(start, end)}
        return [token for place, token in enumerate(self.ids) if place not in is_given]


# The numbers in [0, 1) that the next tokens of completions are sampled with: float64 [N], on any device.
Uniforms = Callable[[Sequence[Completion]], Tensor]


@final
@dataclass(frozen=True)
class _Prefixes:
    """Keys and values of some prompts, which all of their completions begin with, and the logits after them.

    `rows`: of each prompt its slot and its row of logits; equal prompts have one. `last_ids`: of the last prompt; none
    of one with pictures.
    """

    prompts: range
    rows: list[int]
    cache: Cache
    logits_NV: Tensor
    last_ids: list[int]


def past_of_turns(decoder: Decoder, slots: int, capacity: int) -> Past | None:
    """What several turns of the same texts are decoded in, each in a slot that it keeps; `capacity`: tokens of a text.

    None where a turn reads its text anew: without the compiled step, and with a window that a text may outgrow.
    """
    if decoder.step is None:
        return None
    past = Past(decoder, slots, capacity)
    return past if past.cache.shortest_window == capacity else None


@torch.no_grad()
def sample_completions(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    num_generations: int,
    sampling: Sampling,
    uniforms: Uniforms,
    *,
    slots: int,
    longest: int | None = None,
    limits: Sequence[int] | None = None,
    past: Past | None = None,
    on_step: Callable[[int], None] = lambda _done: None,
) -> list[Completion]:
    """Samples `num_generations` completions of each prompt. The list has those of the first prompt first.

    `limits`: the most tokens of a completion, of each prompt; None: `sampling.max_new_tokens` of all. At most `slots`
    of them are decoded at once; one that ends makes room for the next. `on_step` gets the number of completions that
    have ended, before each forward; it may raise. `longest`: tokens of the longest prompt; None: all are counted, which
    makes those that are made when they are read. `past`: of `past_of_turns`, with a slot for each completion; the first
    prompts may go on from what its slots hold, and only what is new of them is read. The decoder must be in evaluation
    mode. Raises NotFinite.
    """
    longest = max(map(len, prompts)) if longest is None else longest
    if limits is None:
        most_new = [sampling.max_new_tokens] * len(prompts)
        capacity = longest + sampling.max_new_tokens
    else:
        most_new = list(limits)
        capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    completions = [
        Completion(prompt, number)
        for prompt in range(len(prompts))
        for number in range(num_generations)
    ]
    completion_of = dict[RunningText, Completion]()  # of those that are running

    def sample(texts: Sequence[RunningText], logits_NV: Tensor) -> list[TextUpdate]:
        sampled_completions = [completion_of[text] for text in texts]
        ids, logps = sample_each_row(logits_NV, uniforms(sampled_completions), sampling)
        updates = []
        for text, completion, token, logp in zip(
            texts, sampled_completions, ids, logps, strict=True
        ):
            completion.ids.append(token)
            completion.logps.append(logp)
            text.new.append(token)
            text.unread = [token]
            is_stopped = token in sampling.stop_ids
            completion.truncated = not is_stopped and len(text.new) == text.max_new_tokens
            ended: Literal["stop", "length"] | None = None
            if is_stopped or completion.truncated:
                ended = "stop" if is_stopped else "length"
                del completion_of[text]
            updates.append(TextUpdate(text, token, ended, logp))
        return updates

    def texts_of(new_completions: Sequence[Completion]) -> list[RunningText]:
        new_texts = [
            RunningText(prompts[completion.prompt], sampling, most_new[completion.prompt], [])
            for completion in new_completions
        ]
        completion_of.update(zip(new_texts, new_completions, strict=True))
        return new_texts

    num_begun = 0
    if past is None:
        past = Past(decoder, min(slots, len(completions)), capacity)
    else:
        assert num_generations == 1 and len(prompts) <= past.slots
        num_begun = _find_slots(past, prompts)
    batch = RunningBatch(past, sample_rows=sample)

    # Texts that go on: their new tokens are read behind the old ones.
    if num_begun > 0:
        on_step(0)
        batch.go_on(texts_of(completions[:num_begun]), _read_on(past, prompts[:num_begun]))
    prefixes: _Prefixes | None = None
    while num_begun < len(completions) or batch.texts:
        # 1. Fill the free slots: the first token of a completion comes from the logits of its prompt.
        while not batch.full and num_begun < len(completions):
            next_prompt = completions[num_begun].prompt
            if prefixes is None or next_prompt not in prefixes.prompts:
                on_step(num_begun - len(batch.texts))
                prefixes = _read(decoder, prompts, next_prompt, longest, prefixes)
            num_ready = prefixes.prompts.stop * num_generations
            num_free = past.slots - len(batch.texts)
            new_completions = completions[num_begun : min(num_begun + num_free, num_ready)]
            new_texts = texts_of(new_completions)
            source_slots = [
                prefixes.rows[completion.prompt - prefixes.prompts.start]
                for completion in new_completions
            ]
            rows = sent(torch.tensor(source_slots), prefixes.logits_NV.device)
            batch.add_read(new_texts, prefixes.logits_NV[rows], prefixes.cache, source_slots)
            num_begun += len(new_completions)

        # 2. One forward and one sampling for all of them; those that end leave.
        if batch.texts:
            on_step(num_begun - len(batch.texts))
            batch.step()
    return completions


def _find_slots(past: Past, prompts: Sequence[list[int]]) -> int:
    """Moves to the first slots what the first prompts go on from; returns of how many, up to the first without any."""
    for number, prompt in enumerate(prompts):
        for slot in range(number, past.slots):
            ids = past.ids[slot]
            if 0 < len(ids) < len(prompt) and prompt[: len(ids)] == ids:
                past.swap(number, slot)
                break
        else:
            return number
    return len(prompts)


def _read_on(past: Past, prompts: Sequence[list[int]]) -> Tensor:
    """Reads what the first slots lack of the prompts; the logits [N, V] after them."""
    rows = list[Tensor]()
    first = 0
    while first < len(prompts):
        # As many prompts as are read at once; a long one in pieces.
        tokens = [prompts[first][len(past.ids[first]) :]]
        num_tokens = len(tokens[0])
        for slot in range(first + 1, len(prompts)):
            num_new = len(prompts[slot]) - len(past.ids[slot])
            if num_tokens + num_new > PROMPT_TOKENS:
                break
            tokens.append(prompts[slot][len(past.ids[slot]) :])
            num_tokens += num_new
        while len(tokens[0]) > PROMPT_TOKENS:
            past.read_prompts([tokens[0][:PROMPT_TOKENS]], first)
            tokens[0] = tokens[0][PROMPT_TOKENS:]
        rows.append(past.read_prompts(tokens, first))
        first += len(tokens)
    return torch.cat(rows)


def _num_shared(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(ids, other_ids, strict=False)
    shortest = min(len(ids), len(other_ids))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shortest)


def _read(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    first: int,
    capacity: int,
    before: _Prefixes | None,
) -> _Prefixes:
    """The prompts from `first` on, as many as are read at once. One with pictures is read alone. `capacity`: tokens of
    the longest of all. `before`: the prompts that were read before them.

    Of several lengths only where no window drops tokens of them; with PyTorch, also not where a layer without attention
    would have their padding in its state.
    """
    prompt = prompts[first]
    if isinstance(prompt, PicturePrompt):
        past = Past(decoder, capacity=len(prompt))
        logits_1V = past.read([past.reuse(prompt, len(prompt))])
        return _Prefixes(range(first, first + 1), [0], past.cache, logits_1V, [])
    step = decoder.step
    empty_cache = Cache(decoder.config, capacity)
    window = empty_cache.keeps_all if step is None else empty_cache.shortest_window
    read_prompts = [list(prompt)]
    rows = [0]
    longest = len(prompt)
    end = first + 1
    while end < len(prompts):
        prompt = prompts[end]
        if isinstance(prompt, PicturePrompt):
            break
        if list(prompt) == read_prompts[-1]:
            rows.append(rows[-1])
            end += 1
            continue
        # The compiled step reads the first prompt alone, for what the others share with it.
        if step is not None and before is None:
            break
        next_longest = max(longest, len(prompt))
        is_padded = not longest == next_longest == len(prompt)
        if is_padded and next_longest > window:
            break
        if next_longest * (len(read_prompts) + 1) > PROMPT_TOKENS:
            break
        longest = next_longest
        read_prompts.append(list(prompt))
        rows.append(rows[-1] + 1)
        end += 1
    cache = Cache(decoder.config, longest, len(read_prompts))

    # The compiled step gives each prompt the numbers that it has alone, also in pieces of a long one, and behind what
    # it shares with another: logits come from its own last token.
    if step is not None and longest <= window:
        shared = [0] * len(read_prompts)
        last = 0 if before is None else before.rows[-1]
        if before is not None and before.cache.lengths[last] <= before.cache.keeps_all:
            for row, ids in enumerate(read_prompts):
                shared[row] = _num_shared(before.last_ids, ids[:-1])
                if shared[row] > 0:
                    cache.fill(range(row, row + 1), before.cache, last, shared[row])
        for start in range(0, longest, PROMPT_TOKENS):
            pieces = [
                ids[num_shared:][start : start + PROMPT_TOKENS]
                for ids, num_shared in zip(read_prompts, shared, strict=True)
            ]
            if any(pieces):
                logits_NV = step(pieces, 0, cache)
        return _Prefixes(range(first, end), rows, cache, logits_NV, read_prompts[-1])

    # PyTorch reads padded prompts; what it has cached of the padding is cut off.
    device = decoder.device
    tokens = [ids + [0] * (longest - len(ids)) for ids in read_prompts]
    last_indices = sent(torch.tensor([len(ids) - 1 for ids in read_prompts]), device)
    cache.rows = range(len(read_prompts))
    output = decoder(
        sent(torch.tensor(tokens), device), head=PositionLogits(last_indices), cache=cache
    )
    for place, ids in enumerate(read_prompts):
        cache.cut(len(ids), place)
    return _Prefixes(range(first, end), rows, cache, output.head.float(), read_prompts[-1])
