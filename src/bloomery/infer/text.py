"""Tokens as text: pieces that are whole characters, and no part of a stop text."""

from collections.abc import Iterator, Sequence
from typing import final

from bloomery.data.tokenizer.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # decoded from bytes that are not a character, or not yet one
CONTEXT_TOKENS = 8  # before new ones that are decoded with them
MAX_HELD_TOKENS = 8  # that wait for the end of a character: then they are none


@final
class TextStream:
    """Token ids to text whose every piece ends at a whole character.

    Decodes new ids together with the last few written ones: some tokenizers decode a token differently at the start of
    a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self.written = len(self.ids)  # ids whose text was returned

    def push(self, token: int) -> str:
        """The new text; empty while a character is incomplete."""
        self.ids.append(token)
        text = self._new()
        if text.endswith(UNFINISHED) and len(self.ids) - self.written < MAX_HELD_TOKENS:
            return ""
        return self._out(text)

    def flush(self) -> str:
        """The rest of the text, complete or not."""
        return self._out(self._new())

    def _new(self) -> str:
        written_text = self.tokenizer.decode(self.ids[: self.written])
        return self.tokenizer.decode(self.ids)[len(written_text) :]

    def _out(self, text: str) -> str:
        self.ids = self.ids[-CONTEXT_TOKENS:]
        self.written = len(self.ids)
        return text


@final
class Stops:
    """Holds back text that may be the start of a stop text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = [text for text in texts if text]
        self.held = ""
        self.stop: str | None = None  # the stop text that ended the text

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, piece: str) -> str:
        """Text that can be returned; nothing after a stop text is."""
        text = self.held + piece
        self.held = ""
        positions = [(text.find(stop), stop) for stop in self.texts if stop in text]
        if positions:
            position, self.stop = min(positions)
            return text[:position]
        num_held = max((self._overlap(text, stop) for stop in self.texts), default=0)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        text = self.held
        self.held = ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The number of characters at the end of `text` that start the stop text."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


@final
class OutputText:
    """The text of new tokens after a prompt: whole characters, up to the first of the stop texts."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._stream = TextStream(tokenizer, prompt_ids)
        self._stops = Stops(stops)

    @property
    def stop(self) -> str | None:
        """The stop text that ended the text."""
        return self._stops.stop

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, token: int) -> str:
        """The new text; empty while it may become another character, or a stop text."""
        return self._stops.push(self._stream.push(token))

    def finish(self) -> str:
        """What was held back, once decoding has ended; a text that a stop text ended has nothing more."""
        if self.stopped:
            return ""
        return self._stops.push(self._stream.flush()) + self._stops.flush()


def text_pieces(tokens: Iterator[int], text: OutputText) -> Iterator[str]:
    for token in tokens:
        piece = text.push(token)
        if piece:
            yield piece
        if text.stopped:
            return
    last_piece = text.finish()
    if last_piece:
        yield last_piece
