"""Keys and values of the past, for generating tokens: slots for several texts, each with a length of its own.

B texts, T new tokens, S tokens that the new ones see, K key/value heads, E head width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from bloomery.model.config import ModelConfig

FEW = 32  # tokens that a compiled step takes at most; PyTorch reads more of them faster


class Seen(NamedTuple):
    """Keys and values [B, K, S, E] that the new queries see; the last T of one text's are the new ones.

    `mask`: True where seen, [B, 1, 1, S], of texts of several lengths; the window is then applied.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None


@final
class LayerCache:
    """One layer's keys and values [slots, K, kept, E]; with a window, a ring of those that a later query can see."""

    def __init__(self, cache: "Cache", window: int | None) -> None:
        self.cache = cache
        self.window = window
        self.kept = cache.capacity if window is None else min(cache.capacity, window)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def rolls(self) -> bool:
        """Whether old keys make room for new ones."""
        return self.kept < self.cache.capacity

    def memory(self, heads: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, both [slots, heads, kept, width].

        Made in the dtype and on the device of `like` where they are not yet.
        """
        if self.keys is None or self.values is None:
            # Zeros: masked keys still are multiplied, and memory may hold NaN.
            shape = self.cache.slots, heads, self.kept, width
            self.keys = like.new_zeros(shape)
            self.values = like.new_zeros(shape)
        return self.keys, self.values

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> Seen:
        """Appends to the cache's current slots, and returns what the new queries see."""
        whole_keys, whole_values = self.memory(k_BKTE.shape[1], k_BKTE.shape[3], k_BKTE)
        if not self.cache.alike:
            index, at = self.cache.places(self.kept, k_BKTE.device)
            whole_keys[index, :, at] = k_BKTE[:, :, 0]
            whole_values[index, :, at] = v_BKTE[:, :, 0]
            mask = self.cache.mask(self.kept, k_BKTE.device)
            seen = slice(len(self.cache.rows)), slice(None), slice(mask.shape[-1])
            return Seen(whole_keys[seen], whole_values[seen], mask)
        rows = self.cache.rows
        begin = self.cache.lengths[rows.start]
        count = k_BKTE.shape[2]
        keys = whole_keys[rows.start : rows.stop]
        values = whole_values[rows.start : rows.stop]
        if begin + count <= self.kept:
            keys[:, :, begin : begin + count] = k_BKTE
            values[:, :, begin : begin + count] = v_BKTE
            return Seen(keys[:, :, : begin + count], values[:, :, : begin + count], None)
        last = (
            torch.arange(max(begin, begin + count - self.kept), begin + count, device=k_BKTE.device)
            % self.kept
        )
        if count == 1:
            keys[:, :, last] = k_BKTE
            values[:, :, last] = v_BKTE
            return Seen(keys, values, None)  # their order does not matter to one query
        old = torch.arange(max(0, begin - self.kept + 1), begin, device=k_BKTE.device) % self.kept
        seen_keys = torch.cat((keys[:, :, old], k_BKTE), dim=2)
        seen_values = torch.cat((values[:, :, old], v_BKTE), dim=2)
        keys[:, :, last], values[:, :, last] = (
            k_BKTE[:, :, -len(last) :],
            v_BKTE[:, :, -len(last) :],
        )
        return Seen(seen_keys, seen_values, None)


@final
class Cache:
    """The cache of a whole decoder for `slots` texts of at most `capacity` tokens; `lengths` of them are in it.

    A forward appends to the slots `rows`: any number of tokens where their lengths are alike, as of one slot; else one
    token to each of the first n.
    """

    def __init__(self, config: ModelConfig, capacity: int, slots: int = 1) -> None:
        self.capacity = capacity
        self.slots = slots
        self.lengths = [0] * slots
        self.rows = range(1)
        self.layers = [LayerCache(self, config.window(layer)) for layer in range(config.num_layers)]
        self.pasts: list[Any] = [None] * slots  # the caches of transformers' layers
        self._shared = dict[tuple[str, int], Any]()  # of one forward: what layers share

    @property
    def length(self) -> int:
        """The tokens of the longest text among the current slots."""
        return max(self.lengths[row] for row in self.rows)

    @property
    def alike(self) -> bool:
        """Whether the current slots hold equally many tokens."""
        return len(self.rows) == 1 or len({self.lengths[row] for row in self.rows}) == 1

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Of `count` new tokens: [T] where lengths are alike, else [B, 1]."""
        if self.alike:
            return torch.arange(self.length, self.length + count, device=device)
        assert count == 1, "slots of several lengths take one token each"
        return self._lengths(device)[:, None]

    def advance(self, count: int) -> None:
        """The forward is over: every current slot has `count` more tokens."""
        self.append(self.rows.start, [count] * len(self.rows))

    def append(self, first: int, counts: Sequence[int]) -> None:
        """The slots from `first` on have so many more tokens."""
        for row, count in enumerate(counts, first):
            self.lengths[row] += count
            assert self.lengths[row] <= self.capacity, (
                f"{self.lengths[row]} tokens do not fit into {self.capacity}"
            )
        self._shared.clear()

    def cut(self, length: int, row: int = 0) -> bool:
        """Forget all but the first `length` tokens of a slot; False where a window has let some of these go."""
        had = self.lengths[row]
        if 0 < length < had and any(had > layer.kept for layer in self.layers):
            return False
        if self.pasts[row] is not None and length == 0:
            self.pasts[row] = None
        elif self.pasts[row] is not None and length < had:
            self.pasts[row].crop(length - had)  # negative: so many go
        self.lengths[row] = min(had, length)
        return True

    def clear(self, row: int) -> None:
        """Forget a slot, and the numbers in it: of a text that was not finite, they would reach others as 0 * NaN."""
        self.cut(0, row)
        self._shared.clear()
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                if kept is not None:
                    kept[row].zero_()

    def swap(self, one: int, other: int) -> None:
        """Exchange the contents of two slots."""
        for layer in self.layers:
            most = min(max(self.lengths[one], self.lengths[other]), layer.kept)
            for kept in (layer.keys, layer.values):
                if kept is not None:
                    kept[[one, other], :, :most] = kept[[other, one], :, :most]
        for of in (self.lengths, self.pasts):
            of[one], of[other] = of[other], of[one]

    def places(self, kept: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(slots, places in them) of the new tokens of several slots, int64 [B] each."""
        if ("places", kept) not in self._shared:
            lengths = self._lengths(device)
            self._shared["places", kept] = torch.arange(len(lengths), device=device), lengths % kept
        found: tuple[Tensor, Tensor] = self._shared["places", kept]
        return found

    def mask(self, kept: int, device: torch.device) -> Tensor:
        """The keys that the new tokens of several slots see, their own included: bool [B, 1, 1, S]."""
        if ("mask", kept) not in self._shared:
            seen = torch.arange(min(self.length + 1, kept), device=device)
            self._shared["mask", kept] = (seen <= self._lengths(device)[:, None])[:, None, None]
        found: Tensor = self._shared["mask", kept]
        return found

    def _lengths(self, device: torch.device) -> Tensor:
        if ("lengths", 0) not in self._shared:
            assert self.rows.start == 0
            self._shared["lengths", 0] = torch.tensor(self.lengths[: len(self.rows)], device=device)
        found: Tensor = self._shared["lengths", 0]
        return found
