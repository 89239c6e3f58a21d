"""Guesses of a text's next tokens, several of which one forward checks: prompt lookup, and a smaller draft model."""

from array import array
from typing import final
from weakref import WeakKeyDictionary

import torch

from bloomery.core.errors import UserError
from bloomery.model.decoder import Decoder
from bloomery.model.decoding import Past, Text
from bloomery.model.sampling import draw

NGRAMS = (3, 2)  # tokens at the end of a text that are searched in it, the longer first


@final
class PromptLookup:
    """Guess what followed the last tokens where they occurred before (`prompt_lookup_num_tokens` of transformers)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: Text, most: int) -> list[int]:
        """At most `most` tokens; none where the end of the text is new."""
        ids = array("q", [*text.prompt, *text.new])
        whole = ids.tobytes()
        for size in NGRAMS:
            last, at, end = ids[-size:].tobytes(), 1, len(whole) - ids.itemsize
            while at > 0 and at % ids.itemsize:  # elsewhere it begins within a number
                at = whole.rfind(last, 0, end)
                end = at + len(last) - 1
            if at >= 0 and len(ids) > size:
                first = at // ids.itemsize + size
                return ids[first : first + min(most, self.tokens)].tolist()
        return []


@final
class DraftModel:
    """Guess with a smaller model of the same vocabulary, sampled with the noise that the text itself will be.

    The same noise over nearly the same probabilities mostly gives the same token, at any temperature.
    """

    def __init__(self, decoder: Decoder, target: Decoder, tokens: int = 4) -> None:
        """Raises UserError where the vocabularies differ."""
        ours, theirs = target.config.vocab_size, decoder.config.vocab_size
        if ours != theirs:
            raise UserError(
                f"the draft model has {theirs:,} tokens in its vocabulary, the model {ours:,}",
                where="--draft", fix="take a smaller model of the same family", code=2,
            )  # fmt: skip
        self.decoder, self.tokens = decoder, tokens
        self._pasts = WeakKeyDictionary[Text, Past]()

    def __call__(self, text: Text, most: int) -> list[int]:
        """At most `most` tokens."""
        past = self._pasts.get(text)
        if past is None:
            past = self._pasts[text] = Past(self.decoder)
        capacity = len(text.prompt) + text.room + 1
        most = min(most, self.tokens, self.decoder.config.max_positions - len(text.prompt) - len(text.new) - 1)
        if most < 1 or capacity > self.decoder.config.max_positions:
            return []
        unread = past.rest([*text.prompt, *text.new], capacity)
        random, new = torch.Generator(), list(text.new)
        random.set_state(text.random.get_state())
        for _ in range(most):
            [logits] = past.read([unread])
            if not bool(logits.isfinite().all()):
                break
            token = draw(logits, text.prompt, new, text.sampling, random)
            new.append(token)
            if token in text.sampling.stop_ids:
                break
            unread = [token]
        return new[len(text.new) :]
