"""Text generation: completions and chat replies, in pieces that are whole characters."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast, final

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.data.chat.render import ChatFormat, chat_format
from bloomery.data.examples import Example, Message, Role, with_pictures_before
from bloomery.data.pictures.encoder import PictureEncoder
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, refuse_unknown_ids
from bloomery.facts.config import ModelConfig, refuse_values
from bloomery.infer.decode import (
    Constraint,
    RunningBatch,
    RunningText,
    Speculation,
    TextUpdate,
    sample_tokens,
)
from bloomery.infer.grammar import JsonGrammars
from bloomery.infer.held_model import held_model
from bloomery.infer.load import OnText, Use, load_used
from bloomery.infer.model_folder import TOKENIZERS, ModelFiles
from bloomery.infer.past import Past
from bloomery.infer.picture_prompts import Eyes, picture_source, seeing_source
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.infer.text import OutputText, text_pieces
from bloomery.model.compiled_step import compile_step
from bloomery.model.decoder import Decoder

Prompt = str | Example  # a text, or an example of the kind "prompt"


def load_model(
    model: Path, *, step: str = "best", use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """Decoder and tokenizer of `model`, on the device of `use` (default: the GPU if available).

    Raises UserError, also for a reward model.
    """
    with held_model(model, step) as files:
        return load_files(files, where=str(model), use=use, on_load=on_load)


def load_files(
    files: ModelFiles, *, where: str, use: Use | None = None, on_load: OnText = lambda _: None
) -> tuple[Decoder, Tokenizer]:
    """`load_model` from `files`: everything is in memory, but for what reads pictures. Raises UserError."""
    decoder = load_used(files, use or Use.local(), on_load=on_load, decodes=True)
    refuse_values(decoder.config, where=where)
    compile_step(decoder, on_load)
    return decoder, load_tokenizer(files.tokenizer)


@final
class Model:
    """A decoder with its tokenizer, in evaluation mode. `settings` are the fields of Sampling."""

    def __init__(self, decoder: Decoder, files: ModelFiles) -> None:
        self.decoder = decoder
        self._files = files

    @staticmethod
    def load(
        model: Path, *, step: str = "best", use: Use | None = None, on_load: OnText = lambda _: None
    ) -> "Model":
        """The model that `find_model` finds. Raises UserError."""
        with ExitStack() as holds:
            files = holds.enter_context(held_model(model, step))
            decoder = load_used(files, use or Use.local(), on_load=on_load, decodes=True)
            compile_step(decoder, on_load)
            loaded = Model(decoder, files)

            # Read now, while the files are held. A model that sees holds them as long as it lives: it reads its tower
            # and its image processor with the first picture.
            if any((files.tokenizer / name).is_file() for name in TOKENIZERS):
                _ = loaded.tokenizer
            if picture_source(files) is not None:
                weakref.finalize(loaded, holds.pop_all().close)
            return loaded

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._files.tokenizer)

    def generate(self, prompt: str, *, stop: Sequence[str] = (), **settings: Any) -> str:
        """The completion of `prompt`, up to one of the `stop` texts. Raises UserError."""
        refuse_values(self.decoder.config, where="the model")
        return "".join(generate(self.decoder, self.tokenizer, prompt, Sampling(**settings), stop))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        images: Sequence[str | Path] = (),
        template: str | None = None,
        stop: Sequence[str] = (),
        **settings: Any,
    ) -> str:
        """The reply to a message, or to a conversation of {"role", "content"} messages, in the chat `template`
        (default: the model's own). `images`: files of pictures, before the text of the last message. Raises UserError.
        """
        refuse_values(self.decoder.config, where="the model")
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        conversation = [Message(cast(Role, turn["role"]), turn["content"]) for turn in turns]
        eyes = None
        if images:
            eyes = Eyes(self.decoder, self._files, seeing_source(self._files))
        with _chat_form(self.tokenizer, template, None if eyes is None else eyes.encoder) as form:
            if eyes is not None:
                references = tuple(eyes.reference(Path(image)) for image in images)
                conversation[-1] = with_pictures_before(conversation[-1], references)
            sampling = replace(Sampling(**settings), stop_ids=form.stop_ids)
            ends = (*stop, *form.stop_strings)
            return "".join(
                continued(self.decoder, self.tokenizer, form.encode(conversation), sampling, ends)
            )


@final
class Speed:
    """The tokens of completions, and the seconds that they took from prompt to end; with what was guessed of them."""

    def __init__(self, speculation: Speculation | None = None) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self.speculation = speculation

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

    def timed(self, step: Callable[[], Iterator[TextUpdate]]) -> Iterator[TextUpdate]:
        """Run a step; its time counts."""
        began = time.perf_counter()
        updates = step()
        self.seconds += time.perf_counter() - began
        return updates

    def __str__(self) -> str:
        each_second = self.tokens / max(self.seconds, 1e-9)
        guessed = "" if self.speculation is None else f", {self.speculation}"
        return f"{counted(self.tokens, 'tokens')} in {self.seconds:.1f} s: {each_second:.1f} tokens/s{guessed}"


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    stop: Sequence[str] = (),
    speed: Speed | None = None,
) -> Iterator[str]:
    """The completion of `prompt`, in pieces that are whole characters, up to an EOS token or the first `stop` text.

    The prompt starts with the BOS token, if the tokenizer adds one to texts. Raises UserError when the prompt fills the
    context, or has no tokens.
    """
    return continued(decoder, tokenizer, beginning(tokenizer, prompt), sampling, stop, speed=speed)


@dataclass(frozen=True)
class TextRequest:
    """A prompt to complete, up to an EOS token, one of `sampling.stop_ids` or one of the texts in `stops`."""

    ids: Sequence[int]
    sampling: Sampling
    stops: tuple[str, ...] = ()
    constrain: Callable[[], Constraint] | None = None


class Answer(NamedTuple):
    """A completion: its text and its tokens. `is_ended`: by a stop id, which is not among them."""

    text: str
    ids: list[int]
    is_ended: bool


def complete_requests(
    decoder: Decoder,
    tokenizer: Tokenizer,
    requests: Sequence[TextRequest],
    *,
    slots: int,
    speed: Speed | None = None,
) -> Iterator[tuple[int, Answer]]:
    """The index of each request and its completion, as they end. `slots` are decoded at once, in the order of requests.

    Raises UserError for logits that are not finite, and for a grammar that fails.
    """
    speed = speed or Speed()
    ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id)
    capacity = max(
        (len(request.ids) + request.sampling.max_new_tokens for request in requests), default=0
    )
    past = Past(
        decoder, max(1, min(slots, len(requests))), min(capacity, decoder.config.max_positions)
    )
    batch = RunningBatch(past, speculation=speed.speculation)
    waiting = deque(enumerate(requests))
    # Of each running text: the index of its request, its pieces until now, and what makes pieces of tokens.
    open_texts = dict[RunningText, tuple[int, list[str], OutputText]]()
    while waiting or batch.texts:
        # 1. Requests take the free slots.
        while waiting and not batch.full:
            index, request = waiting.popleft()
            stop_ids = known_ids(*ends, *request.sampling.stop_ids)
            text = batch.add(
                request.ids,
                replace(request.sampling, stop_ids=stop_ids),
                constraint=None if request.constrain is None else request.constrain(),
            )
            open_texts[text] = index, [], OutputText(tokenizer, request.ids, request.stops)

        # 2. A token of each text; those that have ended leave their slots.
        for update in speed.timed(batch.step):
            if isinstance(update.ended, UserError):
                raise update.ended
            index, pieces, output = open_texts[update.text]
            if update.token is not None:
                speed.tokens += 1
                pieces.append(output.push(update.token))
            if update.ended is not None:
                pieces.append(output.finish())
            if update.ended is not None or output.stopped:
                del open_texts[update.text]
                batch.remove(update.text)
                yield index, Answer("".join(pieces), update.text.new, update.ended == "stop")


@final
@dataclass(frozen=True)
class Writer:
    """Completes prompts alike. `encode`: a prompt to the ids that are continued; `constrain`: makes a constraint."""

    decoder: Decoder
    tokenizer: Tokenizer
    encode: Callable[[Prompt], list[int]]
    sampling: Sampling
    stop: tuple[str, ...]
    speed: Speed
    constrain: Callable[[], Constraint] | None = None

    def pieces(self, prompt: Prompt) -> Iterator[str]:
        """The completion in pieces. Raises UserError."""
        constraint = None if self.constrain is None else self.constrain()
        return continued(
            self.decoder,
            self.tokenizer,
            self.encode(prompt),
            self.sampling,
            self.stop,
            speed=self.speed,
            constraint=constraint,
        )

    def complete(self, prompts: Sequence[Prompt], slots: int = 8) -> Iterator[str]:
        """The completions in the order of the prompts; up to `slots` of them decode together. Raises UserError."""
        return (answer.text for _, answer in self.answers(prompts, slots))

    def answers(
        self, prompts: Sequence[Prompt], slots: int = 8
    ) -> Iterator[tuple[list[int], Answer]]:
        """As `complete`, the ids of each prompt and its completion."""
        rows = [self._fitting(prompt) for prompt in prompts]
        requests = [TextRequest(ids, self.sampling, self.stop, self.constrain) for ids in rows]
        completions = dict[int, Answer]()
        next_number = 0
        for number, completion in complete_requests(
            self.decoder, self.tokenizer, requests, slots=slots, speed=self.speed
        ):
            completions[number] = completion
            while next_number in completions:
                yield rows[next_number], completions.pop(next_number)
                next_number += 1

    @property
    def end_id(self) -> int | None:
        """The token that ends an answer: of a turn, where the prompts are turns."""
        return next(iter(self.sampling.stop_ids), self.tokenizer.eos_id)

    def _fitting(self, prompt: Prompt) -> list[int]:
        """Raises UserError that names the row of a dataset."""
        try:
            ids = self.encode(prompt)
            refuse_prompt(ids, self.decoder.config)
        except UserError as error:
            if isinstance(prompt, str) or not prompt.source:
                raise
            raise UserError(error.problem, where=prompt.source, fix=error.fix) from error
        return ids


@contextmanager
def writer(
    decoder: Decoder,
    tokenizer: Tokenizer,
    sampling: Sampling,
    stop: Sequence[str] = (),
    *,
    chat: bool = False,
    speed: Speed | None = None,
    schema: Mapping[str, Any] | None = None,
    pictures: PictureEncoder | None = None,
) -> Iterator[Writer]:
    """Completes prompts or, with `chat`, replies to them in the chat template; with `schema`, in JSON of that schema.
    Examples need `chat`, and those with pictures `pictures`, which is closed at the end.

    Raises UserError for a chat with a model without a chat template, and for a schema that is not supported.
    """
    speed = speed or Speed()

    def made(
        encode: Callable[[Prompt], list[int]], sampling: Sampling, stop: Sequence[str]
    ) -> Writer:
        constrain = None
        if schema is not None:
            ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *sampling.stop_ids)
            grammars = JsonGrammars(tokenizer, decoder.config.vocab_size, ends)
            stack.callback(grammars.close)
            constrain = partial(grammars.start, dict(schema))
            constrain()  # refuses a schema before any prompt is read
        return Writer(decoder, tokenizer, encode, sampling, tuple(stop), speed, constrain)

    with ExitStack() as stack:
        if not chat:

            def of_text(prompt: Prompt) -> list[int]:
                assert isinstance(prompt, str), "messages need a chat template"
                return beginning(tokenizer, prompt)

            yield made(of_text, sampling, stop)
            return
        form = stack.enter_context(_chat_form(tokenizer, None, pictures))
        settings = replace(sampling, stop_ids=form.stop_ids)
        ends = (*stop, *form.stop_strings)

        def encode(prompt: Prompt) -> list[int]:
            turns = prompt if isinstance(prompt, str) else prompt.prompt
            tools = () if isinstance(prompt, str) else prompt.tools
            return form.encode(
                (Message("user", turns),) if isinstance(turns, str) else turns, tools
            )

        yield made(encode, settings, ends)


def beginning(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt, after the BOS token if the tokenizer adds one. Raises UserError where there are none."""
    ids = tokenizer.encode_prompt(prompt)
    if not ids:
        problem = "the prompt is empty, and this tokenizer adds no BOS token"
        raise UserError(problem, where="--prompt", fix="write a prompt")
    return ids


@contextmanager
def _chat_form(
    tokenizer: Tokenizer, template: str | None, pictures: PictureEncoder | None = None
) -> Iterator[ChatFormat]:
    """Raises UserError for a model without a chat template."""
    if template is None and not own_templates(tokenizer.config):
        fix = "remove --chat, or use `bloomery chat MODEL --template chatml`"
        raise UserError("this model has no chat template", where="--chat", fix=fix)
    with chat_format(tokenizer, template, pictures) as form:
        yield form


def continued(
    decoder: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    sampling: Sampling,
    stop: Sequence[str] = (),
    past: Past | None = None,
    speed: Speed | None = None,
    constraint: Constraint | None = None,
) -> Iterator[str]:
    """`generate` from token ids. With a `past`, tokens in its cache are not computed again; all new ones are added.

    Raises UserError when the ids fill the context.
    """
    refuse_prompt(ids, decoder.config)
    ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *sampling.stop_ids)
    sampling = replace(sampling, stop_ids=ends)
    speculation = None if speed is None else speed.speculation
    tokens = sample_tokens(
        decoder, ids, sampling, past, speculation=speculation, constraint=constraint
    )
    return text_pieces(
        tokens if speed is None else speed.measured(tokens), OutputText(tokenizer, ids, stop)
    )


def refuse_prompt(ids: Sequence[int], config: ModelConfig) -> None:
    """Raises UserError for ids that are not in the vocabulary, or that leave no room for a completion."""
    refuse_unknown_ids(ids, config.vocab_size)
    if len(ids) >= config.max_positions:
        raise UserError(
            f"prompt too long: {len(ids):,} tokens, and the context is {config.max_positions:,}",
            where="--prompt",
            fix="shorten the prompt",
        )
