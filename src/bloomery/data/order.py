"""The data order of a run: position is one integer, and sample i is f(seed, i) on every machine."""

from dataclasses import dataclass

_64_BITS = 2**64 - 1
FEISTEL_ROUNDS = 4


@dataclass(frozen=True)
class Cursor:
    """The data state of a run: `consumed` sequences of the order that `seed` keys are behind it."""

    seed: int
    consumed: int


def mix(*values: int) -> int:
    """64 well-mixed bits of some integers: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), chained."""
    state = 0
    for value in values:
        state = (state ^ (value & _64_BITS)) + 0x9E3779B97F4A7C15 & _64_BITS
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _64_BITS
        state ^= state >> 31
    return state


def feistel(position: int, *, size: int, key: int) -> int:
    """A keyed bijection of 0 .. size - 1: Feistel rounds over the next even power of two, walked until the result is
    inside.
    """
    assert 0 <= position < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left = position >> half_bits
        right = position & half_mask
        for feistel_round in range(FEISTEL_ROUNDS):
            left, right = right, left ^ mix(key, feistel_round, right) & half_mask
        position = left << half_bits | right
        if position < size:
            return position
