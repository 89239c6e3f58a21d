"""Text generation: completions and chat replies, in pieces that are whole characters"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import Message, Role
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, refuse_unknown_ids
from bloomery.model.compiled_step import compile_step
from bloomery.model.config import ModelConfig, refuse_values
from bloomery.model.decoder import Decoder
from bloomery.model.decoding import Past, sample_tokens
from bloomery.model.sampling import Sampling, known_ids
from bloomery.train.model_folder import find_model
from bloomery.train.use import OnText, Use, load_used

UNFINISHED = "\ufffd"  # decoded from bytes that are not a character, or not yet one


def load_model(
    model: Path, *, step: str = "best", use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """Decoder and tokenizer of `model`, on the device of `use` (default: the GPU if available).

    Raises UserError, also for a reward model.
    """
    loaded = Model.load(model, step=step, use=use, on_load=on_load)
    refuse_values(loaded.decoder.config, where=str(model))
    return loaded.decoder, loaded.tokenizer


@final
class Model:
    """A decoder with its tokenizer, in evaluation mode. `settings` are the fields of Sampling."""

    def __init__(self, decoder: Decoder, tokenizer_folder: Path) -> None:
        self.decoder, self._tokenizer_folder = decoder, tokenizer_folder

    @staticmethod
    def load(model: Path, *, step: str = "best", use: Use | None = None, on_load: OnText = lambda _: None) -> "Model":
        """The model that `find_model` finds. Raises UserError."""
        files = find_model(model, step)
        decoder = load_used(files, use or Use.local(), on_load=on_load)
        compile_step(decoder, on_load)
        return Model(decoder, files.tokenizer)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._tokenizer_folder)

    def generate(self, prompt: str, *, stop: Sequence[str] = (), **settings: Any) -> str:
        """The completion of `prompt`, up to one of the `stop` texts. Raises UserError."""
        refuse_values(self.decoder.config, where="the model")
        return "".join(generate(self.decoder, self.tokenizer, prompt, Sampling(**settings), stop))

    def chat(
        self, messages: str | Sequence[Mapping[str, str]], *, template: str | None = None, stop: Sequence[str] = (),
        **settings: Any,
    ) -> str:  # fmt: skip
        """The reply to a message, or to a conversation of {"role", "content"} messages, in the chat `template`
        (default: the model's own). Raises UserError.
        """
        refuse_values(self.decoder.config, where="the model")
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        with _chat_writer(self.decoder, self.tokenizer, Sampling(**settings), stop, template) as reply:
            return "".join(reply([Message(cast(Role, turn["role"]), turn["content"]) for turn in turns]))


@final
class Speed:
    """The tokens of completions, and the seconds that they took from prompt to end."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def measured(self, tokens: Iterator[int]) -> Iterator[int]:
        """The same tokens; the time of the caller does not count."""
        while True:
            began = time.perf_counter()
            token = next(tokens, None)
            self.seconds += time.perf_counter() - began
            if token is None:
                return
            self.tokens += 1
            yield token

    def __str__(self) -> str:
        each_second = self.tokens / max(self.seconds, 1e-9)
        return f"{counted(self.tokens, 'tokens')} in {self.seconds:.1f} s: {each_second:.1f} tokens/s"


def generate(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, sampling: Sampling, stop: Sequence[str] = (),
    speed: Speed | None = None,
) -> Iterator[str]:  # fmt: skip
    """The completion of `prompt`, in pieces that are whole characters, up to an EOS token or the first `stop` text.

    The prompt starts with the BOS token, if the tokenizer has one. Raises UserError when the prompt fills the context,
    or has no tokens.
    """
    ids = tokenizer.encode_prompt(prompt)
    if not ids:
        problem = "the prompt is empty, and this tokenizer has no BOS token"
        raise UserError(problem, where="--prompt", fix="write a prompt")
    return continued(decoder, tokenizer, ids, sampling, stop, speed=speed)


@contextmanager
def writer(
    decoder: Decoder,
    tokenizer: Tokenizer,
    sampling: Sampling,
    stop: Sequence[str] = (),
    *,
    chat: bool = False,
    speed: Speed | None = None,
) -> Iterator[Callable[[str], Iterator[str]]]:
    """A function from a prompt to the pieces of its completion or, with `chat`, of the reply in the chat template.

    Raises UserError for a chat with a model without a chat template.
    """
    if not chat:
        yield lambda prompt: generate(decoder, tokenizer, prompt, sampling, stop, speed)
        return
    with _chat_writer(decoder, tokenizer, sampling, stop, None, speed) as reply:
        yield lambda prompt: reply([Message("user", prompt)])


@contextmanager
def _chat_writer(
    decoder: Decoder,
    tokenizer: Tokenizer,
    sampling: Sampling,
    stop: Sequence[str],
    template: str | None,
    speed: Speed | None = None,
) -> Iterator[Callable[[Sequence[Message]], Iterator[str]]]:
    if template is None and not own_templates(tokenizer.config):
        fix = "remove --chat, or use `bloomery chat MODEL --template chatml`"
        raise UserError("this model has no chat template", where="--chat", fix=fix)
    with chat_format(tokenizer, template) as form:
        settings, ends = replace(sampling, stop_ids=form.stop_ids), (*stop, *form.stop_strings)
        yield lambda messages: continued(decoder, tokenizer, form.encode(tuple(messages)), settings, ends, speed=speed)


def continued(
    decoder: Decoder, tokenizer: Tokenizer, ids: Sequence[int], sampling: Sampling, stop: Sequence[str] = (),
    past: Past | None = None, speed: Speed | None = None,
) -> Iterator[str]:  # fmt: skip
    """`generate` from token ids. With a `past`, tokens in its cache are not computed again; all new ones are added.

    Raises UserError when the ids fill the context.
    """
    refuse_prompt(ids, decoder.config)
    ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *sampling.stop_ids)
    sampling = replace(sampling, stop_ids=ends)
    tokens = sample_tokens(decoder, ids, sampling, past)
    return _pieces(tokens if speed is None else speed.measured(tokens), TextStream(tokenizer, ids), Stops(stop))


def refuse_prompt(ids: Sequence[int], config: ModelConfig) -> None:
    """Raises UserError for ids that are not in the vocabulary, or that leave no room for a completion."""
    refuse_unknown_ids(ids, config.vocab_size)
    if len(ids) >= config.max_positions:
        raise UserError(
            f"prompt too long: {len(ids):,} tokens, and the context is {config.max_positions:,}",
            where="--prompt", fix="shorten the prompt",
        )  # fmt: skip


def _pieces(tokens: Iterator[int], text: "TextStream", stops: "Stops") -> Iterator[str]:
    for token in tokens:
        piece = stops.push(text.push(token))
        if piece:
            yield piece
        if stops.stopped:
            return
    last = stops.push(text.flush()) + stops.flush()
    if last:
        yield last


@final
class TextStream:
    """Token ids to text whose every piece ends at a whole character.

    Decodes new ids together with the last few written ones: some tokenizers decode a token differently at the start of
    a text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(before[-8:])
        self.written = len(self.ids)  # ids whose text was returned

    def push(self, token: int) -> str:
        """The new text; empty while a character is incomplete."""
        self.ids.append(token)
        text = self._new()
        if text.endswith(UNFINISHED) and len(self.ids) - self.written < 8:
            return ""
        return self._out(text)

    def flush(self) -> str:
        """The rest of the text, complete or not."""
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
    """Holds back text that may be the start of a stop text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.held, self.stopped = [text for text in texts if text], "", False

    def push(self, piece: str) -> str:
        """Text that can be returned; a stop text sets `stopped`, and nothing after it is returned."""
        text, self.held = self.held + piece, ""
        at = min((text.find(stop) for stop in self.texts if stop in text), default=None)
        if at is not None:
            self.stopped = True
            return text[:at]
        kept = max((self._overlap(text, stop) for stop in self.texts), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The number of characters at the end of `text` that start the stop text."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
