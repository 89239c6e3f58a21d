"""Keys and values of the past, for generating tokens: slots for several texts, each with a length of its own.

B texts, T new tokens, S tokens that the new ones see, K key/value heads, E head width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers

# Tokens that short prompts and guesses fill a forward up to: as many as a compiled step reads faster than PyTorch. A
# preference, no limit: the step takes one token of each slot always, and with quantized weights eight times as many.
STEP_TOKENS = 32


class VisiblePast(NamedTuple):
    """Keys and values [B, K, S, E] that the new queries see; the last T of one text's are the new ones.

    `mask`: True where a query sees the key, [B, 1, 1, S], of texts of several lengths; the window is then applied.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


@final
class LayerCache:
    """One layer's keys and values [slots, K, capacity, E]; with a window, a ring of those that later queries see."""

    def __init__(self, cache: "Cache", window: int | None) -> None:
        self.cache = cache
        self.window = window
        self.capacity = cache.capacity if window is None else min(cache.capacity, window)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def rolls(self) -> bool:
        """Whether new keys replace old ones."""
        return self.capacity < self.cache.capacity

    def memory(self, heads: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, both [slots, heads, capacity, width].

        The first call makes them, in the dtype and on the device of `like`.
        """
        if self.keys is None or self.values is None:
            # Zeros: masked keys still are multiplied, and memory may hold NaN.
            shape = self.cache.slots, heads, self.capacity, width
            self.keys = like.new_zeros(shape)
            self.values = like.new_zeros(shape)
        return self.keys, self.values

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> VisiblePast:
        """Appends to the cache's current slots, and returns what the new queries see."""
        all_keys, all_values = self.memory(k_BKTE.shape[1], k_BKTE.shape[3], k_BKTE)
        rows = self.cache.rows
        count = k_BKTE.shape[2]
        device = k_BKTE.device

        # Texts of several lengths get one token each, at a position of its own. A mask hides the
        # keys beyond the end of each shorter text.
        if not self.cache.equal_lengths:
            slots, positions = self.cache.slots_and_positions(self.capacity, device)
            all_keys[slots, :, positions] = k_BKTE[:, :, 0]
            all_values[slots, :, positions] = v_BKTE[:, :, 0]
            mask = self.cache.mask(self.capacity, device)
            num_keys = mask.shape[-1]
            return VisiblePast(
                all_keys[: len(rows), :, :num_keys], all_values[: len(rows), :, :num_keys], mask
            )

        # Texts of one length fill the same positions, in order while there is space for them.
        keys = all_keys[rows.start : rows.stop]
        values = all_values[rows.start : rows.stop]
        start = self.cache.lengths[rows.start]
        end = start + count
        if end <= self.capacity:
            keys[:, :, start:end] = k_BKTE
            values[:, :, start:end] = v_BKTE
            return VisiblePast(keys[:, :, :end], values[:, :, :end], None)

        # A full ring holds the key of a position at its remainder by the capacity. The order of
        # the keys does not matter to a single query.
        new_indices = torch.arange(max(start, end - self.capacity), end, device=device)
        new_indices = new_indices % self.capacity
        if count == 1:
            keys[:, :, new_indices] = k_BKTE
            values[:, :, new_indices] = v_BKTE
            return VisiblePast(keys, values, None)

        # The first of several queries see old keys that the last new keys replace: these are copied
        # before they are overwritten.
        old_indices = torch.arange(max(0, start - self.capacity + 1), start, device=device)
        old_indices = old_indices % self.capacity
        visible_keys = torch.cat((keys[:, :, old_indices], k_BKTE), dim=2)
        visible_values = torch.cat((values[:, :, old_indices], v_BKTE), dim=2)
        keys[:, :, new_indices] = k_BKTE[:, :, -len(new_indices) :]
        values[:, :, new_indices] = v_BKTE[:, :, -len(new_indices) :]
        return VisiblePast(visible_keys, visible_values, None)

    def num_keys(self, device: torch.device) -> Tensor | None:
        """How many keys, the first ones, the new token of each slot sees: int32 [B]. None: all of them."""
        return None if self.cache.equal_lengths else self.cache.num_keys(self.capacity, device)


@final
class Cache:
    """The cache of a decoder for `slots` texts of at most `capacity` tokens; `lengths` of them are in it.

    A forward appends to the slots `rows`: any number of tokens where their lengths are equal, as of one slot; else one
    token to each of the first n.
    """

    def __init__(self, config: ModelConfig, capacity: int, slots: int = 1) -> None:
        self.capacity = capacity
        self.slots = slots
        self.lengths = [0] * slots
        self.rows = range(1)
        self.layers = [LayerCache(self, layer.window) for layer in layers(config)]
        self.pasts: list[Any] = [None] * slots  # the caches of transformers' layers
        self._shared = dict[tuple[str, int], Any]()  # of one forward: what layers share

    @property
    def length(self) -> int:
        """The tokens of the longest text among the current slots."""
        return max(self.lengths[row] for row in self.rows)

    @property
    def equal_lengths(self) -> bool:
        """Whether the current slots hold equally many tokens."""
        return len(self.rows) == 1 or len({self.lengths[row] for row in self.rows}) == 1

    def positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of `count` new tokens: [T] where lengths are equal, else [B, 1]."""
        if self.equal_lengths:
            return torch.arange(self.length, self.length + count, device=device)
        assert count == 1, "slots of several lengths take one token each"
        return self._lengths(device)[:, None]

    def advance(self, count: int) -> None:
        """Must run after a forward: every current slot has `count` more tokens."""
        self.append(self.rows.start, [count] * len(self.rows))

    def append(self, first: int, counts: Sequence[int]) -> None:
        """Must run when the slots from `first` on have got so many more tokens."""
        for row, count in enumerate(counts, first):
            self.lengths[row] += count
            assert self.lengths[row] <= self.capacity, (
                f"{self.lengths[row]} tokens do not fit into {self.capacity}"
            )
        self._shared.clear()

    def cut(self, length: int, row: int = 0) -> bool:
        """Forgets all but the first `length` tokens of a slot; False where a window has dropped some of these."""
        old_length = self.lengths[row]
        if 0 < length < old_length and any(old_length > layer.capacity for layer in self.layers):
            return False
        if self.pasts[row] is not None and length == 0:
            self.pasts[row] = None
        elif self.pasts[row] is not None and length < old_length:
            self.pasts[row].crop(length - old_length)  # a negative number drops as many
        self.lengths[row] = min(old_length, length)
        return True

    def clear(self, row: int) -> None:
        """Forgets a slot, and zeroes it: numbers that are not finite would reach other texts as 0 * NaN."""
        self.cut(0, row)
        self._shared.clear()
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[row].zero_()

    def swap(self, slot: int, other_slot: int) -> None:
        """Exchanges the contents of two slots."""
        length = max(self.lengths[slot], self.lengths[other_slot])
        for layer in self.layers:
            num_keys = min(length, layer.capacity)
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    # A list of both slots as an index would be sent to the device, and the host would wait.
                    numbers, other_numbers = (
                        tensor[slot, :, :num_keys],
                        tensor[other_slot, :, :num_keys],
                    )
                    own_numbers = numbers.clone()
                    numbers.copy_(other_numbers)
                    other_numbers.copy_(own_numbers)
        lengths = self.lengths
        lengths[slot], lengths[other_slot] = lengths[other_slot], lengths[slot]
        pasts = self.pasts
        pasts[slot], pasts[other_slot] = pasts[other_slot], pasts[slot]

    def slots_and_positions(self, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The slots of the new tokens, and their positions in a layer of that capacity: int64 [B] each."""
        key = ("slots and positions", capacity)
        if key not in self._shared:
            lengths = self._lengths(device)
            slots = torch.arange(len(lengths), device=device)
            self._shared[key] = slots, lengths % capacity
        slots_and_positions: tuple[Tensor, Tensor] = self._shared[key]
        return slots_and_positions

    def mask(self, capacity: int, device: torch.device) -> Tensor:
        """The keys that the new tokens of several slots see, their own included: bool [B, 1, 1, S]."""
        key = ("mask", capacity)
        if key not in self._shared:
            positions = torch.arange(min(self.length + 1, capacity), device=device)
            self._shared[key] = (positions <= self._lengths(device)[:, None])[:, None, None]
        mask: Tensor = self._shared[key]
        return mask

    def num_keys(self, capacity: int, device: torch.device) -> Tensor:
        """The keys that the new tokens of several slots see, their own included, as in `mask`: int32 [B]."""
        key = ("num keys", capacity)
        if key not in self._shared:
            self._shared[key] = (self._lengths(device) + 1).clamp(max=capacity).int()
        num_keys: Tensor = self._shared[key]
        return num_keys

    def _lengths(self, device: torch.device) -> Tensor:
        """Of the current slots, before the new tokens: int64 [B]."""
        key = ("lengths", 0)
        if key not in self._shared:
            assert self.rows.start == 0
            self._shared[key] = sent(torch.tensor(self.lengths[: len(self.rows)]), device)
        lengths: Tensor = self._shared[key]
        return lengths
