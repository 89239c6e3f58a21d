"""Reading somebody else's config.json: only keys that we know, only values that make sense."""

import math
from collections.abc import Mapping
from typing import Any

from bloomery.errors import UserError

MEND = "mend that value; a published model is best downloaded again"
LARGEST = {"vocab_size": 2**24, "max_positions": 2**31, "num_layers": 2**12, "num_heads": 2**12, "num_kv_heads": 2**12,
           "hidden_size": 2**18, "intermediate_size": 2**21, "head_dim": 2**14}  # fmt: skip


class Fields:
    """A JSON object read key by key. Whatever is never asked for is dropped: `auto_map` and the like do nothing."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, where: str) -> None:
        self.values, self.defaults, self.where = values, defaults, where

    def get(self, key: str) -> Any:
        """The value, the family's default where the key is absent; None where neither exists, or null is written."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def refuse(self, key: str, expected: str) -> UserError:
        shown = repr(self.get(key))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return UserError(f"{key} is {shown}; it must be {expected}", where=self.where, remedy=MEND)

    def size(self, key: str, largest: int, *, default: int | None = None) -> int:
        """A positive whole number of at most `largest`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UserError(f"{key} is missing", where=self.where, remedy=MEND)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= largest:
            raise self.refuse(key, f"a whole number from 1 to {largest:,}")
        return value

    def number(self, key: str, *, low: float = 0.0, high: float = 1e12, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{key} is missing", where=self.where, remedy=MEND)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not math.isfinite(value) or not low <= value <= high:
            raise self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, *, high: float = 1e12) -> float | None:
        return None if self.get(key) is None else self.number(key, low=1e-12, high=high)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.refuse(key, "true or false")
        return bool(value)

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id; of several (some families list their end tokens) the first."""
        value = self.get(key)
        value = value[0] if isinstance(value, list) and value else value
        plain = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not plain or value >= 2**31):
            raise self.refuse(key, f"a token id below {vocab_size:,}")
        return value if plain and 0 <= value < vocab_size else None

    def choice(self, key: str, known: Mapping[str, str]) -> str:
        value = self.get(key)
        if not isinstance(value, str) or value not in known:
            raise self.refuse(key, "one of " + ", ".join(sorted(known)))
        return known[value]

    def entries(self, key: str, length: int) -> list[Any] | None:
        """A list with an entry per layer (more are dropped, as in transformers)."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or len(value) < length):
            raise self.refuse(key, f"a list of {length} entries, one per layer")
        return None if value is None else value[:length]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value = self.get(key)
        fits = isinstance(value, list) and len(value) == length
        if not fits or not all(isinstance(x, int | float) and 0 < x < 1e12 for x in value):
            raise self.refuse(key, f"a list of {length} positive numbers")
        return tuple(float(x) for x in value)

    def inside(self, key: str) -> "Fields | None":
        """A nested object, or None where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return None if not value else Fields(value, {}, where=f"{self.where}, {key}")
