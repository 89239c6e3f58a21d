"""A model continues a text, piece by piece."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.data.chat.examples import Message
from bloomery.data.chat.render import chat_format
from bloomery.data.chat.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, refuse_unknown_ids
from bloomery.model.config import ModelConfig, refuse_values
from bloomery.model.decoder import Decoder
from bloomery.model.sampling import Past, Sampling, known_ids, sample_tokens
from bloomery.train.model_folder import find_model
from bloomery.train.use import Tell, Use, load_used

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one


def load_model(
    model: Path, *, step: str = "best", use: Use | None = None, tell: Tell = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """Decoder and tokenizer of what `find_model` finds, used as `use` says: by default on the GPU where one is.

    Raises UserError, for a reward model too.
    """
    found = find_model(model, step)
    decoder = load_used(found, use or Use.local(), tell=tell)
    refuse_values(decoder.config, where=str(model))
    return decoder, load_tokenizer(found.tokenizer)


def generate(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, stop: Sequence[str] = ()
) -> Iterator[str]:
    """The text after `prompt`, in pieces that are whole characters; it ends before the first of the `stop` texts.

    The prompt begins as a training document does: with the BOS token, where the tokenizer has one. It also ends at the
    end-of-text token. Raises UserError when the prompt fills the model's context, or there is nothing to start from.
    """
    ids = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    if not ids:
        problem = "this tokenizer has no BOS token: an empty prompt gives the model nothing to start from"
        raise UserError(problem, where="--prompt", fix="write a prompt")
    return continued(decoder, tokenizer, ids, sampling, stop)


@contextmanager
def writer(
    decoder: Decoder, tokenizer: Tokenizer, sampling: Sampling, stop: Sequence[str] = (), *, chat: bool = False
) -> Iterator[Callable[[str], Iterator[str]]]:
    """What goes on with a prompt, or (`chat`) answers it by the model's own template, in pieces.

    Raises UserError for a chat with a model that has no template.
    """
    if not chat:
        yield lambda prompt: generate(decoder, tokenizer, prompt, sampling, stop)
        return
    if not own_templates(tokenizer.config):
        fix = "leave out --chat, or talk to it by `bloomery chat MODEL --template chatml`"
        raise UserError("this model has no chat template", where="--chat", fix=fix)
    with chat_format(tokenizer, None) as form:
        drawn, ends = replace(sampling, stop_ids=form.stop_ids), (*stop, *form.stop_strings)
        yield lambda prompt: continued(decoder, tokenizer, form.encode([Message("user", prompt)]), drawn, ends)


def continued(
    decoder: Decoder, tokenizer: Tokenizer, ids: Sequence[int], sampling: Sampling, stop: Sequence[str] = (),
    past: Past | None = None,
) -> Iterator[str]:  # fmt: skip
    """`generate` after ids; with a `past`, which then knows all of it, what it knows already is not read again.

    Raises UserError when the ids fill the model's context.
    """
    refuse_prompt(ids, decoder.config)
    ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *sampling.stop_ids)
    sampling = replace(sampling, stop_ids=ends)
    return _pieces(sample_tokens(decoder, ids, sampling, past), TextStream(tokenizer, ids), Stops(stop))


def refuse_prompt(ids: Sequence[int], config: ModelConfig) -> None:
    """Raises UserError for ids that the model lacks, or that leave it no room for an answer."""
    refuse_unknown_ids(ids, config.vocab_size)
    if len(ids) >= config.max_positions:
        raise UserError(
            f"the prompt has {len(ids):,} tokens; the model reads {config.max_positions:,} with its answer",
            where="--prompt", fix="shorten the prompt",
        )  # fmt: skip


def _pieces(tokens: Iterator[int], text: "TextStream", stops: "Stops") -> Iterator[str]:
    for token in tokens:
        piece = stops.push(text.push(token))
        if piece:
            yield piece
        if stops.found:
            return
    last = stops.push(text.flush()) + stops.flush()
    if last:
        yield last


@final
class TextStream:
    """Token ids to text whose every piece ends at a whole character.

    Ids are decoded after the last few that are already written, since some tokenizers write a token at the start of a
    text differently; only the end of what was written is decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(before[-8:])
        self.written = len(self.ids)  # ids whose text is out

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character still lacks bytes."""
        self.ids.append(token)
        text = self._new()
        if text.endswith(UNFINISHED) and len(self.ids) - self.written < 8:
            return ""
        return self._out(text)

    def flush(self) -> str:
        """What is left, certain or not."""
        return self._out(self._new())

    def _new(self) -> str:
        old = self.tokenizer.decode(self.ids[: self.written])
        return self.tokenizer.decode(self.ids)[len(old) :]

    def _out(self, text: str) -> str:
        self.ids = self.ids[-8:]
        self.written = len(self.ids)
        return text


@final
class Stops:
    """Holds back what may be the beginning of a stop text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.held, self.found = [text for text in texts if text], "", False

    def push(self, piece: str) -> str:
        """What can be shown; `found` turns true when a stop text was met, and nothing after it is shown."""
        text, self.held = self.held + piece, ""
        at = min((text.find(stop) for stop in self.texts if stop in text), default=None)
        if at is not None:
            self.found = True
            return text[:at]
        kept = max((self._overlap(text, stop) for stop in self.texts), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many characters at the end of the text begin the stop text."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
