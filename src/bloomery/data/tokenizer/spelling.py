"""How vocabularies spell bytes: GPT-2's alphabet of a letter per byte, and SentencePiece's pieces."""

import re

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The byte of each letter: a printable byte is written as itself, the others as 256, 257, ... in order.
BYTES = {chr(byte): byte for byte in _PRINTABLE}
BYTES |= {chr(256 + order): byte for order, byte in enumerate(_OTHERS)}


def bytes_of_letters(token: str) -> bytes:
    """The bytes of a token of byte-level BPE; those of its text where it holds a letter of another alphabet."""
    spelled = [BYTES[letter] for letter in token if letter in BYTES]
    return bytes(spelled) if len(spelled) == len(token) else token.encode()


def bytes_of_piece(piece: str) -> bytes:
    """The bytes of a piece of SentencePiece, which writes spaces as U+2581 and single bytes as <0x0A>."""
    match = _BYTE.fullmatch(piece)
    return piece.replace("▁", " ").encode() if match is None else bytes([int(match[1], 16)])
