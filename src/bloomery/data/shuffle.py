"""A shuffle that is a function of the index: no list, no generator state, no library's random stream."""

_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """64 well-mixed bits of some integers: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), chained."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def feistel(position: int, *, size: int, key: int) -> int:
    """A keyed bijection of 0 .. size - 1: four Feistel rounds over the next even power of two, walked until the
    result is inside.
    """
    assert 0 <= position < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = position >> half, position & low
        for turn in range(4):
            left, right = right, left ^ mix(key, turn, right) & low
        position = left << half | right
        if position < size:
            return position
