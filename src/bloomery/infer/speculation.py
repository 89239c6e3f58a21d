"""Guesses of a text's next tokens, several of which one forward checks: by prompt lookup, or by a draft model."""

from array import array
from pathlib import Path
from typing import final
from weakref import WeakKeyDictionary

import torch

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.facts.counting import layers
from bloomery.infer.decode import RunningText, Speculation
from bloomery.infer.generate import load_model
from bloomery.infer.load import OnText, Use
from bloomery.infer.past import Past
from bloomery.infer.sampling import sample_token
from bloomery.model.decoder import Decoder


def speculation_of(
    decoder: Decoder,
    tokenizer: Tokenizer,
    *,
    lookup: int | None,
    draft: Path | None,
    use: Use | None = None,
    on_load: OnText = lambda _: None,
) -> Speculation | None:
    """Prompt lookup of so many tokens, or a draft model.

    Raises UserError for a draft model of another vocabulary, and for a model with states that cannot forget a guess.
    """
    mixers = {layer.mixer for layer in layers(decoder.config)} - {"attention"}
    if mixers and (lookup is not None or draft is not None):
        name = sorted(mixers)[0].replace("_", " ")
        raise UserError(
            f"layers with a {name} cannot forget tokens that were guessed wrong",
            where="--draft" if lookup is None else "--prompt-lookup",
            fix="leave it out: this model generates one token at a time",
            code=2,
        )
    if lookup is not None:
        return Speculation(PromptLookup(lookup))
    if draft is None:
        return None
    smaller, draft_tokenizer = load_model(draft, use=use, on_load=on_load)
    if draft_tokenizer.hash != tokenizer.hash:
        problem = "the draft model has another tokenizer"
        fix = "take a smaller model of the same family"
        raise UserError(problem, where="--draft", fix=fix, code=2)
    return Speculation(DraftModel(smaller, decoder))


NGRAMS = (3, 2)  # tokens at the end of a text that are searched in it, the longer first


@final
class PromptLookup:
    """Guesses the tokens that followed the last ones where these occurred before.

    transformers calls it `prompt_lookup_num_tokens`.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: RunningText, limit: int) -> list[int]:
        """At most `limit` tokens; none where the end of the text did not occur before."""
        # The search of bytes is quick; a match that begins within a number is none.
        ids = array("q", [*text.prompt, *text.new])
        text_bytes = ids.tobytes()
        for size in NGRAMS:
            ngram_bytes = ids[-size:].tobytes()
            offset = 1
            end = len(text_bytes) - ids.itemsize
            while offset > 0 and offset % ids.itemsize:
                offset = text_bytes.rfind(ngram_bytes, 0, end)
                end = offset + len(ngram_bytes) - 1
            if offset >= 0 and len(ids) > size:
                first = offset // ids.itemsize + size
                return ids[first : first + min(limit, self.tokens)].tolist()
        return []


@final
class DraftModel:
    """Guesses with a smaller model of the same vocabulary, sampled with the text's own random numbers.

    The same random numbers with nearly the same probabilities mostly give the same token, at any temperature.
    """

    def __init__(self, decoder: Decoder, target: Decoder, tokens: int = 4) -> None:
        """Raises UserError where the vocabularies differ."""
        target_size = target.config.vocab_size
        draft_size = decoder.config.vocab_size
        if draft_size != target_size:
            raise UserError(
                f"the draft model has {draft_size:,} tokens in its vocabulary, the model {target_size:,}",
                where="--draft",
                fix="take a smaller model of the same family",
                code=2,
            )
        self.decoder = decoder
        self.tokens = tokens
        self._pasts = WeakKeyDictionary[RunningText, Past]()

    def __call__(self, text: RunningText, limit: int) -> list[int]:
        """At most `limit` tokens; none where the draft model's positions end before the text does."""
        past = self._pasts.get(text)
        if past is None:
            past = Past(self.decoder)
            self._pasts[text] = past
        max_positions = self.decoder.config.max_positions
        capacity = len(text.prompt) + text.max_new_tokens + 1
        num_free_positions = max_positions - len(text.prompt) - len(text.new) - 1
        num_guesses = min(limit, self.tokens, num_free_positions)
        if num_guesses < 1 or capacity > max_positions:
            return []

        # A copy of the text's random stream: drawing the text itself must not notice the guesses.
        unread = past.reuse([*text.prompt, *text.new], capacity)
        new = list(text.new)
        random = torch.Generator()
        random.set_state(text.random.get_state())
        for _ in range(num_guesses):
            [logits] = past.read([unread]).cpu()
            if not bool(logits.isfinite().all()):
                break
            token = sample_token(logits, text.prompt, new, text.sampling, random)
            new.append(token)
            if token in text.sampling.stop_ids:
                break
            unread = [token]
        return new[len(text.new) :]
