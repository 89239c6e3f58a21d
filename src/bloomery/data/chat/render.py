"""Examples as token ids with their loss mask; conversations as prompts of a model, and the ends of its responses."""

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, final

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.data.chat.masks import loss_tokens
from bloomery.data.examples import BadRow, Example, Message, check_turns, num_equal
from bloomery.data.tokenizer.fast_bpe import LONGEST_PLACED
from bloomery.data.tokenizer.templates import (
    BUILTIN,
    NONE,
    ChatTemplate,
    find_template,
    formats_texts,
    own_templates,
)
from bloomery.data.tokenizer.tokenizer import Tokenizer

TrainOn = Literal["assistant", "all", "last"]
BATCH = 256  # conversations per message to the child
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
# Markup that templates use as one token.
_MARKUP = re.compile(r"<\|[\w ]{1,40}\|>|<(?:start|end)_of_turn>|</?s>")
_FIX = "remove the row, set data.on_error=skip, or set data.chat.template to another"
_UNCLEAR = "add {% generation %} and {% endgeneration %} to the template, or set data.chat.template to another"
_TRIAL = (Message("user", "a"), Message("assistant", "b"))
CPU_SECONDS = 2.0  # for one conversation
WALL_SECONDS = 30.0  # plus CPU_SECONDS for every conversation of a batch
_PATIENCE = 3  # conversations that may kill the process; one more per thousand
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
_TEMPLATE_FIX = f"correct the template, or set data.chat.template to another: {', '.join(BUILTIN)}"
_SOURCES = Path(__file__).parents[3]  # where the child finds this package
Json = dict[str, Any]


@dataclass(frozen=True)
class EncodedText:
    """Tokens and their loss mask, of the same length."""

    ids: list[int]
    loss_mask: list[bool]


EncodedExample = tuple[EncodedText, ...]


@final
class TemplateProcess:
    """Renders batches of conversations with one template. The child starts with the first batch; `close` ends it."""

    def __init__(
        self, template: ChatTemplate, names: Mapping[str, str], enders: Sequence[str]
    ) -> None:
        self._template = template
        self._names = dict(names)
        self._enders = list(enders)
        self._child: Child | None = None
        self._deaths = self._answered = 0

    def read(self, jobs: Sequence[Json]) -> list[Json]:
        """One answer per job: {"text", "spans"} or {"error"}. Raises UserError for a template that always fails."""
        if not jobs:
            return []
        child = self._child or self._start()
        answer = child.ask({"jobs": jobs}, seconds=WALL_SECONDS + CPU_SECONDS * len(jobs))
        if not isinstance(answer, str):
            answers: list[Json] = answer["answers"]
            self._answered += len(answers)
            return answers
        reason = self._ended(answer)
        if len(jobs) > 1:  # one of them killed the child: one by one
            return [answer for job in jobs for answer in self.read([job])]
        self._deaths += 1
        if self._deaths >= _PATIENCE + self._answered // 1000:
            raise self.error(reason)
        return [{"error": reason}]

    def error(self, problem: str) -> UserError:
        return UserError(
            f"the chat template failed: {problem}", where=self._template.origin, fix=_TEMPLATE_FIX
        )

    def _start(self) -> Child:
        """Start the child with only the environment variables that Python needs: no token, no key."""
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        paths = (str(_SOURCES), os.environ.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
        settings = {
            "text": self._template.text,
            "names": self._names,
            "enders": self._enders,
            "seconds": CPU_SECONDS,
        }
        self._child = Child(
            "bloomery.data.chat.sandbox_worker", settings, environment=environment
        ).start()
        answer = self._child.next(WALL_SECONDS + CPU_SECONDS)
        if isinstance(answer, str):
            raise self.error(self._ended(answer))
        if "error" in answer:
            self.close()
            raise self.error(answer["error"])
        return self._child

    def _ended(self, silence: str) -> str:
        """The reason why the child ended. Closes it."""
        assert self._child is not None
        code = self._child.code if silence == "ended" else -signal.SIGKILL
        self.close()
        if code == -signal.SIGPROF:
            return f"it took more than {CPU_SECONDS:g} seconds for one conversation"
        if code == -signal.SIGKILL:
            return "its process was killed: it took too long, or the machine ran out of memory"
        return f"its process ended with code {code}"

    def close(self) -> None:
        child = self._child
        self._child = None
        if child is not None:
            child.close()


@final
class Renderer:
    """Tokens of examples for one tokenizer and one chat template. Has a child process: use it in a `with` block.

    Whole renderings are tokenized, never pieces. A token is trained on when at least one of its characters is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        train_on: TrainOn,
        verbatim: bool = False,
    ) -> None:
        """`template`: a name, a file, "none", or None for the tokenizer's own. It is loaded when a row needs it.

        With a template, a prompt and a response that are texts are formatted as a user turn and an assistant turn.
        `verbatim`: they are not, as for pretraining.
        """
        self._tokenizer = tokenizer
        self._name = template
        self._train_on = train_on
        self._formats = not verbatim and formats_texts(template, tokenizer.config)
        self._template: ChatTemplate | None = None
        self._processes: dict[str, TemplateProcess] = {}

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    @property
    def template(self) -> ChatTemplate:
        """Raises UserError when there is none, or an unknown one."""
        self._template = self._template or find_template(self._name, self._tokenizer.config)
        return self._template

    def missing_tokens(self) -> list[str]:
        """Markup of the template, such as <|im_end|>, that the tokenizer splits into several tokens."""
        names = dict.fromkeys(
            _MARKUP.findall(re.sub(r"\{#.*?#\}", "", self.template.text, flags=re.DOTALL))
        )
        return [name for name in names if self._tokenizer.id_of(name) is None]

    def encode(self, example: Example) -> EncodedExample:
        """One EncodedText per response. Raises UserError that names the example's source."""
        encoded = self.encode_batch([example])[0]
        if isinstance(encoded, BadRow):
            raise encoded
        return encoded

    def encode_batch(self, examples: list[Example]) -> list[EncodedExample | BadRow]:
        """One entry per example. Raises UserError when the template itself fails."""
        encoded = dict[int, EncodedExample | BadRow]()
        chats: dict[bool, dict[int, Example]] = {False: {}, True: {}}  # without and with tools
        for index, example in enumerate(examples):
            try:
                turned = self._turned(example)
                if isinstance(turned.responses[0], str):
                    encoded[index] = self._encode_texts(turned)
                else:
                    chats[bool(turned.tools)][index] = turned
            except BadRow as bad_row:
                encoded[index] = bad_row
        for tools, turned_ones in chats.items():
            for start in range(0, len(turned_ones), BATCH):
                chunk = dict(islice(turned_ones.items(), start, start + BATCH))
                encoded |= zip(chunk, self._render(list(chunk.values()), tools), strict=True)
        return [encoded[index] for index in range(len(examples))]

    def _turned(self, example: Example) -> Example:
        """A prompt and responses that are texts as turns, where the template formats them. Raises BadRow."""
        if (
            not self._formats
            or example.implicit
            or not isinstance(example.prompt, str)
            or not example.prompt
        ):
            return example
        if mark := next(
            (mark for mark in self._marks if example.prompt.lstrip().startswith(mark)), None
        ):
            problem = f"begins with {mark}, which {self.template.origin} writes: the prompt is already formatted"
            fix = f"set data.chat.template={NONE} to train on texts as they are"
            raise BadRow(f"{example.source}, prompt", problem, fix)
        prompt = Message("user", example.prompt)
        responses = [
            (Message("assistant", text),) for text in example.responses if isinstance(text, str)
        ]
        for response in responses:
            check_turns((prompt, *response), example.source)
        return replace(example, prompt=(prompt,), responses=tuple(responses))

    @cached_property
    def _marks(self) -> list[str]:
        """Markup that the template writes around turns."""
        text = self.template.text
        control = [name for name in self._tokenizer.control_tokens() if name in text]
        bos_names = (
            [_name(self._tokenizer.config["bos_token"])]
            if self._tokenizer.bos_id is not None
            else []
        )
        return list(
            dict.fromkeys(
                [*control, *bos_names, *_MARKUP.findall(text), *re.findall(r"\[INST\]", text)]
            )
        )

    def prompt(self, messages: Iterable[Message], tools: tuple[Json, ...] = ()) -> list[int]:
        """The prompt for the next assistant turn as ids. A control token that a message spells out stays text. Raises
        UserError when the template refuses.
        """
        turns = [as_turn(message) for message in messages]
        markup = self._tokenizer.markup
        if not markup.occurs([turns, tools]):
            return self._tokenizer.encode_rendered(self._rendered(turns, tools, prompt=True))
        (turns, offered), mark = markup.broken([turns, tools])
        return markup.encode(self._rendered(turns, tuple(offered), prompt=True), mark)

    def rendered(self, messages: Iterable[Message], tools: tuple[Json, ...] = ()) -> str:
        """The text of a conversation. Raises UserError."""
        return self._rendered([as_turn(message) for message in messages], tools, prompt=False)

    def _rendered(self, turns: list[Json], tools: tuple[Json, ...], *, prompt: bool) -> str:
        job = {"messages": turns, "tools": list(tools), "train_on": None, "prompt": prompt}
        answer = self._process(bool(tools)).read([job])[0]
        if "error" in answer:
            raise self._process(bool(tools)).error(answer["error"])
        text: str = answer["text"]
        return text

    def _encode_texts(self, example: Example) -> EncodedExample:
        """Prompt and response as one text, as in TRL: ids equal to those of the prompt are masked; EOS is trained
        on. The responses of one prompt have the same masked length. Raises BadRow for a text that is too long.
        """
        assert isinstance(example.prompt, str)
        prompt = example.prompt
        prefix = self._tokenizer.prefix
        texts = [
            prompt,
            *(prompt + answer for answer in example.responses if isinstance(answer, str)),
        ]
        for text in texts:
            if (error := self._tokenizer.too_long(text, special=True)) is not None:
                raise BadRow(example.source, error.problem, error.fix)
        prompt_ids, *wholes = self._tokenizer.encode_batch(texts, special=True)
        prefix = [] if prompt_ids[: len(prefix)] == prefix else prefix
        start = min(num_equal(prompt_ids, ids) for ids in wholes)
        if self._train_on == "all" and example.kind == "completion":
            start = 0
        end = self._tokenizer.eos_id
        encoded = []
        for ids in wholes:
            all_ids = [*prefix, *ids, *([end] if end is not None and ids[-1:] != [end] else [])]
            encoded.append(
                EncodedText(
                    all_ids, [index >= len(prefix) + start for index in range(len(all_ids))]
                )
            )
        return tuple(encoded)

    def _render(self, examples: list[Example], tools: bool) -> list[EncodedExample | BadRow]:
        jobs = [
            self._job(example, response) for example in examples for response in example.responses
        ]
        answers = self._process(tools).read(jobs)
        for answer in answers:  # a rendering too large to encode in memory
            if (size := len(answer.get("text", "").encode())) > LONGEST_PLACED:
                answer["error"] = f"it writes {format_bytes(size)} of text"
        rendered = [answer for answer in answers if "error" not in answer]
        placed = self._tokenizer.encode_places([answer["text"] for answer in rendered])
        for answer, (ids, offsets) in zip(rendered, placed, strict=True):
            mask = loss_tokens(offsets, answer["spans"]) if "spans" in answer else [True] * len(ids)
            answer["encoded"] = EncodedText(ids, mask)
        remaining = iter(answers)
        encoded = list[EncodedExample | BadRow]()
        for example in examples:
            example_answers = [next(remaining) for _ in example.responses]
            if refused := next((answer for answer in example_answers if "error" in answer), None):
                problem = f"cannot be formatted with {self.template.origin}: {refused['error']}"
                encoded.append(
                    BadRow(example.source, problem, _UNCLEAR if refused.get("unclear") else _FIX)
                )
            else:
                encoded.append(tuple(answer["encoded"] for answer in example_answers))
        return encoded

    def _job(self, example: Example, response: object) -> Json:
        """A conversation for the child. `train_on`: the numbers of the turns to train on; None: all of the text."""
        assert isinstance(response, tuple)
        prompt = example.prompt if isinstance(example.prompt, tuple) else ()
        messages = (*prompt, *response)
        trained = [
            index
            for index, message in enumerate(messages)
            if index >= len(prompt) and message.role == "assistant" and message.trained_on
        ]
        alone = example.kind in ("chat", "completion")  # pairs train on responses alone
        trained = trained[-1:] if self._train_on == "last" and alone else trained
        train_on = None if self._train_on == "all" and alone else trained
        turns = [as_turn(message) for message in messages]
        return {"messages": turns, "tools": list(example.tools), "train_on": train_on}

    def _process(self, tools: bool) -> TemplateProcess:
        text = self.template.tool_use if tools and self.template.tool_use else self.template.text
        if text not in self._processes:
            config = self._tokenizer.config
            tokenizer = self._tokenizer
            names = {role: _name(config[role]) for role in _ROLES if config.get(role)}
            template = ChatTemplate(text, self.template.origin)
            self._processes[text] = process = TemplateProcess(
                template, names, tokenizer.control_tokens()
            )
            trial = {
                "messages": [as_turn(message) for message in _TRIAL],
                "tools": [],
                "train_on": None,
            }
            error = process.read([trial])[0].get("error", "")
            # A template that fails for the simplest conversation fails for all.
            if error and not error.startswith("it refuses"):
                raise process.error(error)
        return self._processes[text]


def as_turn(message: Message) -> Json:
    """A message as templates expect it."""
    turn: Json = {"role": message.role, "content": message.content}
    if message.calls:
        turn["tool_calls"] = list(message.calls)
    if message.thinking is not None:  # templates differ in the name; transformers gives both
        turn |= {"reasoning_content": message.thinking, "thinking": message.thinking}
    if message.name is not None:
        turn["name"] = message.name
    if message.call_id is not None:
        turn["tool_call_id"] = message.call_id
    return turn


def _name(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


class EncodeTurns(Protocol):
    """Turns as the prompt of a response."""

    def __call__(self, messages: Sequence[Message], tools: tuple[Json, ...] = ()) -> list[int]: ...


RenderTurns = Callable[[Sequence[Message], tuple[Json, ...]], str]


@final
@dataclass(frozen=True)
class ChatFormat:
    """The encoder of turns, the tokens and strings that end a response, and a line about the template. `render`: turns
    as text, where there is a template.
    """

    encode: EncodeTurns
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    description: str
    render: RenderTurns | None = None


@contextmanager
def chat_format(tokenizer: Tokenizer, template: str | None) -> Iterator[ChatFormat]:
    """For the named template or the tokenizer's own; without one the model continues a text. Raises UserError."""
    if template is None and not own_templates(tokenizer.config):
        description = (
            "no chat template: the model continues your text. Set one with --template chatml"
        )
        yield ChatFormat(continuation(tokenizer), (), (), description)
        return
    with Renderer(tokenizer, template=template, train_on="assistant") as renderer:
        turns = (Message("user", "a"), Message("assistant", "b"))
        tried = [
            Example("the template", "chat", (), (turns_tried,))
            for turns_tried in (turns, (Message("system", "c"), *turns))
        ]
        encoded = next(
            (
                turns_tried[0]
                for turns_tried in renderer.encode_batch(tried)
                if not isinstance(turns_tried, BadRow)
            ),
            None,
        )
        if encoded is None:
            (encoded,) = renderer.encode(tried[0])  # raises its error
        control = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
        response = [
            token for token, trained in zip(encoded.ids, encoded.loss_mask, strict=True) if trained
        ]
        # Control tokens that are trained on come after the content: they end a turn.
        ends = tuple(token for token in dict.fromkeys(response) if token in control)
        stops = () if ends else tuple(renderer.missing_tokens())
        yield ChatFormat(renderer.prompt, ends, stops, renderer.template.origin, renderer.rendered)


def continuation(tokenizer: Tokenizer) -> EncodeTurns:
    """The encoder without a chat template: all turns are one text, which the model continues."""

    def encode(messages: Sequence[Message], tools: tuple[Json, ...] = ()) -> list[int]:
        del tools  # a template would write them
        text = ""
        for turn in messages:
            begins = turn.role == "user" and text and not text.endswith("\n")
            text += ("\n" if begins else "") + turn.content
        return tokenizer.encode_prompt(text)

    return encode
