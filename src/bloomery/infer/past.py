"""The past of texts: their tokens, and the slots of the KV cache that hold them."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import final

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.data.pictures.prompts import PicturePrompt, keys_of
from bloomery.facts.config import ModelConfig
from bloomery.infer.picture_prompts import axes_in_piece, has_axes, seen_in_piece
from bloomery.model.cache import STEP_TOKENS, Cache
from bloomery.model.decoder import Decoder, Output
from bloomery.model.forward_input import ALL_LOGITS
from bloomery.model.heads import LastLogits

LAST = LastLogits()


Adapter = str | None  # the name of a text's adapter


SetAdapters = Callable[[Sequence[Adapter]], None]


def is_length_independent(config: ModelConfig) -> bool:
    """Whether texts of several lengths can share a forward; some rotations depend on the longest of them."""
    stretched = config.rope_scaling is not None and config.rope_scaling.kind in (
        "dynamic",
        "longrope",
    )
    return config.transformers_backend is None and not stretched


@final
class Past:
    """The tokens and KV cache of a decoder's slots, reused for texts that begin alike, such as the turns of a chat.

    `capacity`: tokens in a slot; a single slot grows. `set_adapters` gets the adapter of each row before a forward.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: int = 1,
        capacity: int = 0,
        set_adapters: SetAdapters | None = None,
    ) -> None:
        self.decoder = decoder
        self.slots = slots
        self.set_adapters = set_adapters
        # What tells the tokens of each slot from those of other texts: their ids, or keys of pictures.
        self.ids: list[list[int]] = [[] for _ in range(slots)]
        self.prompts: list[Sequence[int]] = [()] * slots
        self.adapters: list[Adapter] = [None] * slots
        self.cache = Cache(decoder.config, capacity, slots)

    def num_shared(self, slot: int, ids: Sequence[int], adapter: Adapter = None) -> int:
        """How many tokens of `ids` a slot holds already, at most all but the last."""
        # The cache has keys and values, and no logits: those after the prompt come from reading its last token again.
        if adapter != self.adapters[slot]:
            return 0
        slot_ids = self.ids[slot]
        pairs = zip(slot_ids, keys_of(ids)[:-1], strict=False)
        for position, (slot_id, new_id) in enumerate(pairs):
            if slot_id != new_id:
                return position
        return min(len(slot_ids), len(ids) - 1)

    def reuse(
        self, ids: Sequence[int], capacity: int, slot: int = 0, adapter: Adapter = None
    ) -> list[int]:
        """Keeps the beginning that a slot has in common with `ids`, and returns the tokens that are not read yet.

        Afterwards `capacity` tokens fit into the slot.
        """
        num_shared = self.num_shared(slot, ids, adapter)
        if capacity > self.cache.capacity:
            assert self.slots == 1, (
                f"{capacity} tokens do not fit into a slot of {self.cache.capacity}"
            )
            larger_capacity = max(capacity, min(2 * capacity, self.decoder.config.max_positions))
            num_shared = 0
            self.cache = Cache(self.decoder.config, larger_capacity)
        elif not self.cache.cut(num_shared, slot):
            num_shared = 0
            self.cache.cut(0, slot)
        self.ids[slot] = list(keys_of(ids)[:num_shared])
        self.prompts[slot] = ids
        self.adapters[slot] = adapter
        return list(ids[num_shared:])

    def copy_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        cache: Cache,
        source_slots: Sequence[int],
        *,
        first: int,
    ) -> None:
        """Makes the slots from `first` on those prompts, which are in the slots `source_slots` of another cache."""
        slot = first
        for source_slot, equal_slots in groupby(source_slots):
            end = slot + len(list(equal_slots))
            self.cache.fill(range(slot, end), cache, source_slot)
            slot = end
        for slot, prompt in enumerate(prompts, first):
            self.ids[slot] = list(keys_of(prompt))
            self.prompts[slot] = prompt
            self.adapters[slot] = None

    def read(
        self, tokens: Sequence[Sequence[int]], first: int = 0, *, every: bool = False
    ) -> Tensor:
        """Appends tokens to the slots from `first` on, and returns logits, float32 on the decoder's device.

        They are [slots, V], after the last token of each slot, or with `every` [N, V], after each token, of as many as
        `max_guesses` allows. A slot may get no tokens, `[]`, only where the compiled step takes all. An interruption
        leaves nothing of the slots' past.
        """
        # Compiled code takes few tokens of any slots; a forward of PyTorch takes equally many of
        # each, and some models one slot at a time.
        rows = range(first, first + len(tokens))
        step = self.decoder.step
        if step is not None and self.can_step(tokens, first):
            step_logits = step(tokens, first, self.cache, every=every)
            for row, new_ids in zip(rows, tokens, strict=True):
                self.ids[row].extend(self._keys(row, new_ids, len(self.ids[row])))
            return step_logits
        # Such a model has no guesses (`max_guesses`): `every` would ask for no more than the last logits.
        one_by_one = not is_length_independent(self.decoder.config) or any(
            self._is_seen(row, len(ids)) for row, ids in zip(rows, tokens, strict=True)
        )
        if len(rows) > 1 and one_by_one:
            return torch.cat([self.read([ids], row) for row, ids in zip(rows, tokens, strict=True)])

        # While the forward runs, the slots have no valid tokens.
        old_ids = [self.ids[row] for row in rows]
        self.cache.rows = rows
        for row in rows:
            self.ids[row] = []
        if self.set_adapters is not None:
            self.set_adapters([self.adapters[row] for row in rows])
        device = self.decoder.device
        head = ALL_LOGITS if every else LAST
        spans = [(len(ids), len(ids) + len(tokens[0])) for ids in old_ids]
        axes = None
        if any(has_axes(self.prompts[row]) for row in rows):
            of_rows = [
                axes_in_piece(self.prompts[row], *span)
                for row, span in zip(rows, spans, strict=True)
            ]
            axes = sent(torch.stack(of_rows, 1), device)
        try:
            with torch.no_grad():
                output: Output = self.decoder(
                    sent(torch.tensor(tokens), device),
                    head=head,
                    cache=self.cache,
                    pictures=seen_in_piece(self.decoder, self.prompts[first], *spans[0]),
                    axes_3BT=axes,
                )
        except BaseException:  # Ctrl+C too: half a forward would stay in the cache
            for row in rows:
                self.cache.clear(row)
            raise
        for row, ids, new_ids in zip(rows, old_ids, tokens, strict=True):
            ids.extend(self._keys(row, new_ids, len(ids)))
            self.ids[row] = ids
        logits: Tensor = output.head.flatten(0, -2).float()
        return logits

    def read_prompts(self, tokens: Sequence[Sequence[int]], first: int) -> Tensor:
        """As `read`, by the compiled step, of any number of tokens: bitwise what it gives each slot alone.

        The slots have no pictures, and no window that their texts outgrow.
        """
        step = self.decoder.step
        assert step is not None
        logits = step(tokens, first, self.cache)
        for row, ids in enumerate(tokens, first):
            self.ids[row].extend(ids)
        return logits

    def can_step(self, tokens: Sequence[Sequence[int]], first: int) -> bool:
        """Whether the compiled step takes these tokens: it reads no pictures, and has no positions in three axes."""
        step = self.decoder.step
        if step is None:
            return False
        for row, ids in enumerate(tokens, first):
            if ids and (has_axes(self.prompts[row]) or self._is_seen(row, len(ids))):
                return False
        return step.takes(tokens, first, self.cache)

    def whole_piece(self, slot: int, count: int) -> int:
        """How many of a slot's next tokens, from `count` on, do not end inside a picture that is read as a whole."""
        prompt = self.prompts[slot]
        start = len(self.ids[slot])
        if not isinstance(prompt, PicturePrompt):
            return count
        return prompt.whole_until(start + count) - start

    def _is_seen(self, slot: int, count: int) -> bool:
        """Whether the next tokens of a slot have one of a picture among them."""
        start = len(self.ids[slot])
        keys = self._keys(slot, [0] * count, start)
        return any(key < 0 for key in keys)

    def _keys(self, slot: int, new_ids: Sequence[int], start: int) -> Sequence[int]:
        """What `ids` gets for the tokens from place `start` on."""
        prompt = self.prompts[slot]
        if not isinstance(prompt, PicturePrompt):
            return new_ids
        end = start + len(new_ids)
        return [*prompt.keys[start:end], *new_ids[max(0, len(prompt) - start) :]]

    def max_guesses(self, slots: int) -> int:
        """How many guessed tokens of each of the first slots one forward can check, and drop again.

        A token that a window's ring has lost to a guess would not come back, nor a state before it: all of them must
        fit.
        """
        has_step = self.decoder.step is not None and not any(map(has_axes, self.prompts[:slots]))
        if not is_length_independent(self.decoder.config) or (not has_step and slots > 1):
            return 0
        length = max(self.cache.lengths[:slots])
        return max(0, min(STEP_TOKENS // slots, self.cache.keeps_all - length) - 1)

    def drop(self, slot: int, count: int) -> None:
        """Forgets the last tokens of a slot, guesses that `max_guesses` allowed."""
        length = len(self.ids[slot]) - count
        self.cache.cut(length, slot)
        del self.ids[slot][length:]

    def forget(self, slot: int) -> None:
        """Clears a slot: numbers of a text that were not finite must not reach another text."""
        self.ids[slot] = []
        self.cache.clear(slot)

    def swap(self, slot: int, other_slot: int) -> None:
        """Exchanges the contents of two slots."""
        if slot == other_slot:
            return
        self.cache.swap(slot, other_slot)
        ids = self.ids
        ids[slot], ids[other_slot] = ids[other_slot], ids[slot]
        prompts = self.prompts
        prompts[slot], prompts[other_slot] = prompts[other_slot], prompts[slot]
        adapters = self.adapters
        adapters[slot], adapters[other_slot] = adapters[other_slot], adapters[slot]
