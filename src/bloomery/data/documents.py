"""Files of many formats to a stream of documents, in constant memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text, or tokens that somebody else made, and where it stood ("file.jsonl:17")."""

    source: str
    text: str = ""
    tokens: tuple[int, ...] | None = None
