"""What layers keep of the past, for generating tokens: slots for several texts, each with a length of its own.

Attention keeps keys and values; a layer with another mixer a state, which does not grow with the text.

B texts, T new tokens, S tokens that the new ones see, K key/value heads, E head width.
"""

from collections.abc import Sequence
from copy import deepcopy
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
    """One layer's keys and values [slots, K, capacity, E]; with a window, a ring of those that later queries see.

    Values may have another width, and none where they are made of the keys.
    """

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

    def memory(
        self, heads: int, width: int, like: Tensor, value_width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, [slots, heads, capacity, width]; values as wide as keys unless `value_width` is stated.

        The first call makes them, in the dtype and on the device of `like`.
        """
        if self.keys is None or self.values is None:
            # Zeros: masked keys still are multiplied, and memory may hold NaN.
            shape = self.cache.slots, heads, self.capacity
            self.keys = like.new_zeros(*shape, width)
            self.values = like.new_zeros(*shape, width if value_width is None else value_width)
        return self.keys, self.values

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> VisiblePast:
        """Appends to the cache's current slots, and returns what the new queries see."""
        all_keys, all_values = self.memory(
            k_BKTE.shape[1], k_BKTE.shape[3], k_BKTE, v_BKTE.shape[3]
        )
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

    def fill(self, rows: range, source: "LayerCache", source_slot: int, length: int) -> None:
        """Makes each of the slots `rows` the first `length` tokens of a slot of another cache."""
        if source.keys is None or source.values is None:  # a layer that uses the keys of another
            return
        _, heads, _, width = source.keys.shape
        keys, values = self.memory(heads, width, source.keys, source.values.shape[3])
        num_keys = min(length, source.capacity)  # a sliding window keeps the last ones
        keys[rows.start : rows.stop, :, :num_keys] = source.keys[source_slot, :, :num_keys]
        values[rows.start : rows.stop, :, :num_keys] = source.values[source_slot, :, :num_keys]

    def zero(self, slot: int) -> None:
        for tensor in (self.keys, self.values):
            if tensor is not None:
                tensor[slot].zero_()

    def swap(self, slot: int, other_slot: int, length: int) -> None:
        """Exchanges two slots of at most `length` tokens."""
        num_keys = min(length, self.capacity)
        for tensor in (self.keys, self.values):
            if tensor is not None:
                _swap(tensor[slot, :, :num_keys], tensor[other_slot, :, :num_keys])


@final
class StateCache:
    """One layer's state of each text, [slots, ...] by name; it holds all tokens so far, and none can be taken out."""

    def __init__(self, cache: "Cache") -> None:
        self.cache = cache
        self._states: dict[str, Tensor] = {}

    def every(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The states of all slots, [slots, *shape], to be overwritten in place; zeros where a text begins.

        The first call makes them, in the dtype and on the device of `like`.
        """
        if name not in self._states:
            self._states[name] = like.new_zeros(self.cache.slots, *shape)
        return self._states[name]

    def current(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Those of the current slots, [B, *shape]."""
        rows = self.cache.rows
        return self.every(name, shape, like)[rows.start : rows.stop]

    def fill(self, rows: range, source: "StateCache", source_slot: int) -> None:
        """Makes each of the slots `rows` a slot of another cache."""
        for name, states in source._states.items():
            if name not in self._states:
                self._states[name] = states.new_zeros(self.cache.slots, *states.shape[1:])
            self._states[name][rows.start : rows.stop] = states[source_slot]

    def zero(self, slot: int) -> None:
        for states in self._states.values():
            states[slot].zero_()

    def swap(self, slot: int, other_slot: int, length: int) -> None:
        """Exchanges two slots."""
        del length
        for states in self._states.values():
            _swap(states[slot], states[other_slot])


def _swap(numbers: Tensor, other_numbers: Tensor) -> None:
    # A list of both slots as an index would be sent to the device, and the host would wait.
    own_numbers = numbers.clone()
    numbers.copy_(other_numbers)
    other_numbers.copy_(own_numbers)


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
        self.layers: list[LayerCache | StateCache] = [
            LayerCache(self, layer.window) if layer.mixer == "attention" else StateCache(self)
            for layer in layers(config)
        ]
        self.pasts: list[Any] = [None] * slots  # the caches of transformers' layers
        self._shared = dict[tuple[str, int], Any]()  # of one forward: what layers share

    @property
    def length(self) -> int:
        """The tokens of the longest text among the current slots."""
        return max(self.lengths[row] for row in self.rows)

    @property
    def keeps_all(self) -> int:
        """So many tokens of a text can be forgotten one by one: a window drops keys, and a state cannot be undone."""
        if any(isinstance(layer, StateCache) for layer in self.layers):
            return 0
        return self.shortest_window

    @property
    def shortest_window(self) -> int:
        """So many tokens of a text fit before a layer with a window drops the first."""
        windows = [layer.capacity for layer in self.layers if isinstance(layer, LayerCache)]
        return min(windows, default=self.capacity)

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
        """Forgets all but the first `length` tokens of a slot; False where the cache no longer has these alone."""
        old_length = self.lengths[row]
        if 0 < length < old_length and old_length > self.keeps_all:
            return False
        if length == 0:  # a text begins with states of zero
            for layer in self.layers:
                if isinstance(layer, StateCache):
                    layer.zero(row)
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
            layer.zero(row)

    def fill(
        self, rows: range, source: "Cache", source_slot: int, length: int | None = None
    ) -> None:
        """Makes each of the slots the text in a slot of another cache of the same model, or its first `length` tokens.

        Fewer than all only where the source's cache keeps all (`keeps_all`).
        """
        if length is None:
            length = source.lengths[source_slot]
        assert (
            length == source.lengths[source_slot] or source.lengths[source_slot] <= source.keeps_all
        )
        for row in rows:
            self.cut(0, row)
            self.pasts[row] = deepcopy(source.pasts[source_slot])
        for layer, source_layer in zip(self.layers, source.layers, strict=True):
            if isinstance(layer, LayerCache) and isinstance(source_layer, LayerCache):
                layer.fill(rows, source_layer, source_slot, length)
            elif isinstance(layer, StateCache) and isinstance(source_layer, StateCache):
                layer.fill(rows, source_layer, source_slot)
        self.append(rows.start, [length] * len(rows))

    def swap(self, slot: int, other_slot: int) -> None:
        """Exchanges the contents of two slots."""
        length = max(self.lengths[slot], self.lengths[other_slot])
        for layer in self.layers:
            layer.swap(slot, other_slot, length)
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
