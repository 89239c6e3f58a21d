"""Text small enough to see through."""

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box".split()


def sentences(count: int, length: int = 12, *, first: int = 0) -> list[str]:
    """Different texts without any randomness, from the `first` on."""
    return [
        " ".join(WORDS[(i * 7 + j * j + i // 5) % len(WORDS)] for j in range(length)) + f" {i}.\n"
        for i in range(first, first + count)
    ]
