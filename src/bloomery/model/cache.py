"""Keys and values of the past, for generating one token at a time.

B batch, T new tokens, S tokens that the new ones see, K key/value heads, E head width.
"""

from typing import Any, final

import torch
from torch import Tensor

from bloomery.model.config import ModelConfig


@final
class LayerCache:
    """One layer's keys and values; with a window only those that a later query can still see."""

    def __init__(self, capacity: int, window: int | None) -> None:
        self.capacity, self.window, self.length = capacity, window, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def rolls(self) -> bool:
        """Whether old keys make room for new ones."""
        return self.window is not None and self.window <= self.capacity

    def extend(self, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Appends and returns what the new queries see, [B, K, S, E]; the last T of them are the new ones."""
        if self.keys is None or self.values is None:
            self.keys, self.values = self._allocate(k_BKTE), self._allocate(v_BKTE)
        if self.window is not None and self.rolls:
            keys = torch.cat((self.keys[:, :, : self.length], k_BKTE), dim=2)
            values = torch.cat((self.values[:, :, : self.length], v_BKTE), dim=2)
            self.length = min(keys.shape[2], self.window - 1)
            kept = slice(keys.shape[2] - self.length, keys.shape[2])
            self.keys[:, :, : self.length] = keys[:, :, kept]
            self.values[:, :, : self.length] = values[:, :, kept]
            return keys, values
        end = self.length + k_BKTE.shape[2]
        assert end <= self.capacity, f"{end} tokens do not fit into a cache of {self.capacity}"
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k_BKTE, v_BKTE
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _allocate(self, like_BKTE: Tensor) -> Tensor:
        B, K, _, E = like_BKTE.shape
        kept = self.capacity if self.window is None else min(self.capacity, self.window)
        return like_BKTE.new_empty((B, K, kept, E))


@final
class Cache:
    """The cache of a whole decoder for sequences of at most `capacity` tokens; `length` of them are in it."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.layers = [LayerCache(capacity, config.window(layer)) for layer in range(config.num_layers)]
        self.capacity, self.length = capacity, 0
        self.past: Any = None  # the cache of transformers' layers

    def cut(self, length: int) -> bool:
        """Forget all but the first `length` tokens; False where a window has already let some of these go."""
        if length < self.length and any(layer.rolls for layer in self.layers):
            return False
        if self.past is not None and length == 0:
            self.past = None
        elif self.past is not None and length < self.length:
            self.past.crop(length - self.length)  # negative: so many go
        for layer in self.layers:
            layer.length = min(layer.length, length)
        self.length = min(self.length, length)
        return True
