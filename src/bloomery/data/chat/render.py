"""Examples as token ids with their loss mask; conversations as prompts of a model, and the ends of its responses."""

import os
import re
import signal
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, final

from bloomery.core.child import Child
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.data.chat.masks import Span, loss_tokens
from bloomery.data.chat.written import PartCounts, added
from bloomery.data.examples import (
    BadRow,
    Example,
    Message,
    check_turns,
    num_equal,
    pictures_of,
)
from bloomery.data.pictures.encoder import PictureEncoder
from bloomery.data.tokenizer.fast_bpe import LONGEST_PLACED
from bloomery.data.tokenizer.roles import named_tokens
from bloomery.data.tokenizer.templates import (
    BUILTIN,
    NONE,
    VARIABLES,
    ChatTemplate,
    find_template,
    formats_texts,
    own_templates,
    with_variables,
)
from bloomery.data.tokenizer.tokenizer import Tokenizer

TrainOn = Literal["assistant", "all", "last"]
BATCH = 256  # conversations per message to the child
# Markup that templates use as one token.
_MARKUP = re.compile(r"<\|[\w ]{1,40}\|>|<(?:start|end)_of_turn>|</?s>")
_FIX = "remove the row, set data.on_error=skip, or set data.chat.template to another"
_UNCLEAR = "add {% generation %} and {% endgeneration %} to the template, or set data.chat.template to another"
_QUESTION = "bloomeryquestion"
_ANSWER = "bloomeryanswer"
_TRIAL = (Message("user", _QUESTION), Message("assistant", _ANSWER))
CPU_SECONDS = 2.0  # for one conversation
WALL_SECONDS = 30.0  # plus CPU_SECONDS for every conversation of a batch
_PATIENCE = 3  # conversations that may kill the process; one more per thousand
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "TZ")
_TEMPLATE_FIX = f"correct the template, or set data.chat.template to another: {', '.join(BUILTIN)}"
_SOURCES = Path(__file__).parents[3]  # where the child finds this package
Json = dict[str, Any]


@dataclass(frozen=True)
class EncodedText:
    """Tokens and their loss mask, of the same length."""

    ids: list[int]
    loss_mask: list[bool]
    pictures: tuple[bytes, ...] = ()  # in the order of their tokens


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
        self._num_crashes = 0
        self._num_answers = 0
        self.takes_parts = False  # contents must be lists of parts

    def read(self, jobs: Sequence[Json]) -> list[Json]:
        """One answer per job: {"text", "spans"} or {"error"}. Raises UserError for a template that always fails."""
        if not jobs:
            return []
        child = self._child or self._start()
        if self.takes_parts:
            jobs = [{**job, "takes_parts": True} for job in jobs]
        answer = child.ask({"jobs": jobs}, seconds=WALL_SECONDS + CPU_SECONDS * len(jobs))
        if not isinstance(answer, str):
            answers: list[Json] = answer["answers"]
            self._num_answers += len(answers)
            return answers

        # A conversation of the batch killed the child: read one by one, only that one fails. A
        # template that does so again and again is refused.
        reason = self._end_reason(answer)
        if len(jobs) > 1:
            return [answer for job in jobs for answer in self.read([job])]
        self._num_crashes += 1
        if self._num_crashes >= _PATIENCE + self._num_answers // 1000:
            raise self.error(reason)
        return [{"error": reason}]

    def error(self, problem: str) -> UserError:
        return UserError(
            f"the chat template failed: {problem}", where=self._template.origin, fix=_TEMPLATE_FIX
        )

    def _start(self) -> Child:
        """The child, started with only the environment variables that Python needs: no token, no key.

        Raises UserError when the template cannot be compiled.
        """
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
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
            raise self.error(self._end_reason(answer))
        if "error" in answer:
            self.close()
            raise self.error(answer["error"])
        return self._child

    def _end_reason(self, silence: str) -> str:
        """Closes the child and returns why it gave no answer."""
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

    Complete renderings are tokenized, never pieces. A token is trained on when at least one of its characters is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        train_on: TrainOn,
        verbatim: bool = False,
        variables: Mapping[str, bool | int | float | str] | None = None,
        variables_key: str = VARIABLES,
        pictures: PictureEncoder | None = None,
    ) -> None:
        """`template`: a name, a file, "none", or None for the tokenizer's own. It is loaded when a row needs it.
        `variables`: of the template, where it has other defaults; `variables_key`: the recipe's key with them.

        With a template, a prompt and a response that are texts are formatted as a user turn and an assistant turn.
        `verbatim`: they are not, as for pretraining.
        """
        self._tokenizer = tokenizer
        self._template_name = template
        self._train_on = train_on
        self._variables = variables or {}
        self._variables_key = variables_key
        self._pictures = pictures
        self._formats_texts = not verbatim and formats_texts(template, tokenizer.config)
        self._template: ChatTemplate | None = None
        self._processes: dict[str, TemplateProcess] = {}
        self._parts: PartCounts = {}

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
        if self._pictures is not None:
            self._pictures.close()

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises UserError when there is none, or an unknown one."""
        if self._template is None:
            found_template = find_template(self._template_name, self._tokenizer.config)
            self._template = with_variables(found_template, self._variables, self._variables_key)
        return self._template

    def take_parts(self) -> PartCounts:
        """Which parts of the examples encoded since the last call the template leaves out."""
        parts = self._parts
        self._parts = {}
        return parts

    def missing_tokens(self) -> list[str]:
        """Markup of the template, such as <|im_end|>, that the tokenizer splits into several tokens."""
        text_without_comments = re.sub(r"\{#.*?#\}", "", self.template.text, flags=re.DOTALL)
        names = dict.fromkeys(_MARKUP.findall(text_without_comments))
        return [name for name in names if self._tokenizer.id_of(name) is None]

    def encode(self, example: Example) -> EncodedExample:
        """One EncodedText per response, one for a prompt alone. Raises UserError that names the example's source."""
        encoded_or_error = self.encode_batch([example])[0]
        if isinstance(encoded_or_error, BadRow):
            raise encoded_or_error
        return encoded_or_error

    def encode_batch(self, examples: list[Example]) -> list[EncodedExample | BadRow]:
        """One entry per example. Raises UserError when the template itself fails."""
        # Texts are encoded here. Conversations are collected for the child processes: one renders
        # those without tools, one those with tools, as a template may have a variant for these.
        results = dict[int, EncodedExample | BadRow]()
        chats: dict[bool, dict[int, Example]] = {False: {}, True: {}}
        for index, example in enumerate(examples):
            try:
                self._refuse_pictures(example)
                formatted_example = self._as_turns(example)
                if isinstance(formatted_example.prompt, str):
                    results[index] = self._encode_texts(formatted_example)
                else:
                    chats[bool(formatted_example.tools)][index] = formatted_example
            except BadRow as bad_row:
                results[index] = bad_row
        for with_tools, chats_by_index in chats.items():
            for start in range(0, len(chats_by_index), BATCH):
                batch = dict(islice(chats_by_index.items(), start, start + BATCH))
                encoded_chats = self._encode_chats(list(batch.values()), with_tools)
                results |= zip(batch, encoded_chats, strict=True)
        return [results[index] for index in range(len(examples))]

    def _refuse_pictures(self, example: Example) -> None:
        """Raises BadRow for pictures that the model does not see."""
        if self._pictures is None and any(map(pictures_of, (example.prompt, *example.responses))):
            raise BadRow(
                example.source,
                "has pictures, and the model reads text alone",
                "set model.from to a vision-language model, remove the pictures, or set data.on_error=skip",
            )

    def _as_turns(self, example: Example) -> Example:
        """The example with texts as turns, where the template formats them. Raises BadRow."""
        if (
            not self._formats_texts
            or example.implicit
            or not isinstance(example.prompt, str)
            or not example.prompt
        ):
            return example

        # A prompt that already has the template's markup would get it twice.
        text = example.prompt.lstrip()
        if mark := next((mark for mark in self._marks if text.startswith(mark)), None):
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
        marks = [name for name in self._tokenizer.control_tokens() if name in text]
        if self._tokenizer.bos_id is not None:
            marks.append(named_tokens(self._tokenizer.config)["bos_token"])
        marks += _MARKUP.findall(text)
        marks += re.findall(r"\[INST\]", text)
        return list(dict.fromkeys(marks))

    def prompt(
        self,
        messages: Iterable[Message],
        tools: tuple[Json, ...] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt for the next assistant turn as ids. A control token that a message spells out stays text.
        `variables`: what the template gets besides messages and tools, such as `enable_thinking`. A message may have
        pictures where the renderer was given an encoder of them: the ids are then a `PicturePrompt`.

        Raises UserError when the template refuses the messages, and for pictures as `PictureEncoder.encode` does.
        """
        messages = tuple(messages)
        references = pictures_of(messages)
        if references and self._pictures is None:
            raise UserError(
                "the conversation has pictures, and the model reads text alone",
                fix="choose a vision-language model, or remove the pictures",
            )
        turns = [as_turn(message) for message in messages]
        markup = self._tokenizer.markup
        mark = None
        if markup.occurs([turns, tools]):
            (turns, broken_tools), mark = markup.broken([turns, tools])
            tools = tuple(broken_tools)
        answer = self._answered(
            turns, tools, prompt=True, variables=variables, takes_parts=bool(references)
        )
        if references:
            self._add_pictures(answer, references, "the conversation")
            self._refuse_error(answer, with_tools=bool(tools))
        text: str = answer["text"]
        encode = self._tokenizer.encode_rendered
        ids = encode(text) if mark is None else markup.encode(text, mark)
        if self._pictures is None or not references:
            return ids
        return self._pictures.prompt(ids, answer["contents"])

    def continued(
        self,
        messages: Sequence[Message],
        results: Sequence[Message],
        tools: tuple[Json, ...],
        end: str,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids between the end of an answer and the next one: results of tools, and the header of the answer.

        `messages` end with an answer like the one before, `end` is the control token that ended it, `variables` are
        those of the prompt. The answer itself is never rendered again: what a model sampled may have other ids than its
        text. Raises UserError where the template has no such end, or writes the turns before another way once others
        follow.
        """
        turns = [as_turn(message) for message in (*messages, *results)]
        markup = self._tokenizer.markup
        mark = None
        if markup.occurs([turns, tools]):
            (turns, broken_tools), mark = markup.broken([turns, tools])
            tools = tuple(broken_tools)
        before, whole, place = self._renderings(turns, len(messages), tools, end, variables)
        if end in before and not whole.startswith(before[:place]):
            # Qwen3 writes an empty thought into an answer without one while it is the last; a thought it keeps.
            answer = turns[len(messages) - 1]
            thoughtful = {**answer, "reasoning_content": _ANSWER, "thinking": _ANSWER}
            turns = [*turns[: len(messages) - 1], thoughtful, *turns[len(messages) :]]
            before, whole, place = self._renderings(turns, len(messages), tools, end, variables)
        if end not in before or not whole.startswith(before[:place]):
            problem = (
                "writes the turns before a tool's result in another way once it follows"
                if end in before
                else f"does not end an answer that calls a tool with {end}"
            )
            raise UserError(
                f"the chat template {problem}",
                where=self.template.origin,
                fix="set data.chat.template to another, such as qwen",
            )
        # With the token before it: some tokenizers write the beginning of a text in a way of its own.
        text = whole[place - len(end) :]
        encode = self._tokenizer.encode_rendered
        ids = encode(text) if mark is None else markup.encode(text, mark)
        assert ids[0] == self._tokenizer.id_of(end), "a control token is one token"
        return ids[1:]

    def _renderings(
        self,
        turns: list[Json],
        num_before: int,
        tools: tuple[Json, ...],
        end: str,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, str, int]:
        """The first turns, all turns with the header of an answer, and where the first ones end in theirs."""
        rendered = partial(self._answered, tools=tools, variables=variables)
        before: str = rendered(turns[:num_before], prompt=False)["text"]
        all_text: str = rendered(turns, prompt=True)["text"]
        if all_text.startswith(before) and all_text[len(before) :].lstrip().startswith(end):
            # The header of the results ends the answer, as with GLM.
            space = len(all_text[len(before) :]) - len(all_text[len(before) :].lstrip())
            before = all_text[: len(before) + space + len(end)]
        return before, all_text, before.rfind(end) + len(end)

    def rendered(self, messages: Iterable[Message], tools: tuple[Json, ...] = ()) -> str:
        """The text of a conversation. Raises UserError."""
        turns = [as_turn(message) for message in messages]
        text: str = self._answered(turns, tools, prompt=False)["text"]
        return text

    def space_before_answers(self) -> str:
        """The space that the template writes between the header of an answer and its text, as that of Llama 2 does."""
        system = Message("system", _QUESTION)
        answers = self._process(False).read(
            [
                {
                    "messages": [as_turn(message) for message in turns],
                    "tools": [],
                    "train_on": None,
                    "prompt": turns[-1].role == "user",
                    "variables": {},
                }
                # Some templates require a system turn.
                for trial in (_TRIAL, (system, *_TRIAL))
                for turns in (trial[:-1], trial)
            ]
        )
        for header, whole in zip(answers[::2], answers[1::2], strict=True):
            if "error" in header or "error" in whole:
                continue
            if whole["text"].startswith(header["text"]):
                space = whole["text"].removeprefix(header["text"]).partition(_ANSWER)[0]
                return space if space.isspace() else ""
        return ""

    def _answered(
        self,
        turns: list[Json],
        tools: tuple[Json, ...],
        *,
        prompt: bool,
        variables: Mapping[str, Any] | None = None,
        takes_parts: bool = False,
    ) -> Json:
        job: Json = {"messages": turns, "tools": list(tools), "train_on": None, "prompt": prompt}
        job["variables"] = dict(variables or {})
        job["takes_parts"] = takes_parts
        answer = self._process(bool(tools)).read([job])[0]
        self._refuse_error(answer, with_tools=bool(tools))
        return answer

    def _refuse_error(self, answer: Json, *, with_tools: bool) -> None:
        if "bad_row" in answer:  # of a picture
            fix = "send another picture, or the same one in another format"
            raise UserError(f"the conversation {answer['error']}", where="messages", fix=fix)
        if "error" in answer:
            raise self._process(with_tools).error(answer["error"])

    def _encode_texts(self, example: Example) -> EncodedExample:
        """Prompt and response as one text, as in TRL: ids equal to those of the prompt are masked; EOS is trained on.

        The responses of one prompt have the same masked length. Raises BadRow for a text that is too long.
        """
        assert isinstance(example.prompt, str)
        prompt = example.prompt
        responses = [response for response in example.responses if isinstance(response, str)]
        texts = [prompt, *(prompt + response for response in responses)]
        for text in texts:
            if (error := self._tokenizer.too_long(text, special=True)) is not None:
                raise BadRow(example.source, error.problem, error.fix)

        # The last token of the prompt may be another one with a response behind it: only equal ids
        # are the prompt's.
        prompt_ids, *sequences = self._tokenizer.encode_batch(texts, special=True)
        num_prompt_tokens = min((num_equal(prompt_ids, ids) for ids in sequences), default=0)
        if self._train_on == "all" and example.kind == "completion":
            num_prompt_tokens = 0

        # Every sequence gets the tokenizer's prefix and EOS, unless it has them. A prompt without
        # responses gets no EOS: the model continues it.
        prefix = self._tokenizer.prefix
        missing_prefix = [] if prompt_ids[: len(prefix)] == prefix else prefix
        if example.kind == "prompt":
            return (_masked([*missing_prefix, *prompt_ids]),)
        num_masked = len(missing_prefix) + num_prompt_tokens
        eos_id = self._tokenizer.eos_id
        encoded_texts = []
        for ids in sequences:
            missing_eos = [] if eos_id is None or ids[-1:] == [eos_id] else [eos_id]
            all_ids = [*missing_prefix, *ids, *missing_eos]
            loss_mask = [index >= num_masked for index in range(len(all_ids))]
            encoded_texts.append(EncodedText(all_ids, loss_mask))
        return tuple(encoded_texts)

    def _encode_chats(
        self, examples: list[Example], with_tools: bool
    ) -> list[EncodedExample | BadRow]:
        # The child renders every response with its prompt. A rendering that is too large to encode
        # in memory counts as refused.
        jobs = [self._jobs(example) for example in examples]
        answers = self._process(with_tools).read([job for of_example in jobs for job in of_example])
        for answer in answers:
            self._parts = added(self._parts, answer.get("parts", {}))
            if (size := len(answer.get("text", "").encode())) > LONGEST_PLACED:
                answer["error"] = f"it writes {format_bytes(size)} of text"

        # The mark of a picture becomes the tokens that stand for it.
        references_of_jobs = [
            (references, example.source)
            for example in examples
            for references in _references(example)
        ]
        for (references, where), answer in zip(references_of_jobs, answers, strict=True):
            if references and "error" not in answer:
                self._add_pictures(answer, references, where)

        # Renderings become ids; spans of characters become the loss mask.
        renderings = [answer for answer in answers if "error" not in answer]
        encodings = self._tokenizer.encode_places([rendering["text"] for rendering in renderings])
        for rendering, (ids, offsets) in zip(renderings, encodings, strict=True):
            spans = rendering.get("spans")  # none: every token is trained on
            loss_mask = [True] * len(ids) if spans is None else loss_tokens(offsets, spans)
            if places := rendering.get("places"):
                of_pictures = loss_tokens(offsets, places)  # never a target
                loss_mask = [
                    is_target and not is_picture
                    for is_target, is_picture in zip(loss_mask, of_pictures, strict=True)
                ]
            rendering["encoded"] = EncodedText(ids, loss_mask, rendering.get("contents", ()))

        # An example with one response that is refused is refused.
        remaining_answers = iter(answers)
        results = list[EncodedExample | BadRow]()
        for example, jobs_of_example in zip(examples, jobs, strict=True):
            example_answers = [next(remaining_answers) for _ in jobs_of_example]
            refusal = next((answer for answer in example_answers if "error" in answer), None)
            if refusal is None and example.kind == "prompt":
                encoded = example_answers[0]["encoded"]
                results.append((_masked(encoded.ids, encoded.pictures),))
                continue
            if refusal is None:
                results.append(tuple(answer["encoded"] for answer in example_answers))
                continue
            if "bad_row" in refusal:  # of a picture
                results.append(refusal["bad_row"])
                continue
            problem = f"cannot be formatted with {self.template.origin}: {refusal['error']}"
            fix = _UNCLEAR if refusal.get("unclear") else _FIX
            results.append(BadRow(example.source, problem, fix))
        return results

    def _add_pictures(self, answer: Json, references: list[str], where: str) -> None:
        """In place: the text with what stands for each picture, its spans, and the bytes of the pictures."""
        assert self._pictures is not None
        texts = answer["text"].split(self._pictures.mark)
        if len(texts) - 1 != len(references):
            answer["error"] = (
                f"it writes {self._pictures.mark} {len(texts) - 1} times for {len(references)} pictures: it has no"
                " place for some, or a text holds that mark"
            )
            return
        try:
            encoded = self._pictures.encode(references, where)
        except BadRow as bad_row:
            answer["bad_row"] = bad_row
            answer["error"] = bad_row.reason
            return
        # Where each text between two marks was, and where it is now.
        moved = list[tuple[int, int]]()
        places = list[Span]()
        start = end = 0
        for text, picture in zip_longest(texts, encoded):
            moved.append((start, end))
            start += len(text) + len(self._pictures.mark)
            end += len(text)
            if picture is not None:
                places.append((end, end + len(picture.text)))
                end += len(picture.text)
        starts = [old for old, _ in moved]

        def new_place(place: int) -> int:
            old, new = moved[bisect_right(starts, place) - 1]
            return new + place - old

        answer["text"] = "".join(
            text + ("" if picture is None else picture.text)
            for text, picture in zip_longest(texts, encoded)
        )
        if answer.get("spans") is not None:
            answer["spans"] = [
                (new_place(first), new_place(last)) for first, last in answer["spans"]
            ]
        answer["places"] = places
        answer["contents"] = tuple(picture.content for picture in encoded)

    def _jobs(self, example: Example) -> list[Json]:
        """Conversations for the child, one per response. A prompt without responses is rendered alone, with the header
        of the response that the model will write.
        """
        if example.kind != "prompt":
            jobs = [self._job(example, response) for response in example.responses]
            jobs[0]["parts"] = True  # the responses of a pair share the prompt
            return jobs
        assert isinstance(example.prompt, tuple)
        turns = [as_turn(message) for message in example.prompt]
        job: Json = {"messages": turns, "tools": list(example.tools), "train_on": None}
        takes_parts = any(_references(example))
        return [{**job, "prompt": True, "parts": True, "takes_parts": takes_parts}]

    def _job(self, example: Example, response: object) -> Json:
        """A conversation for the child. `train_on`: the numbers of the turns to train on; None: all of the text."""
        assert isinstance(response, tuple)
        prompt = example.prompt if isinstance(example.prompt, tuple) else ()
        messages = (*prompt, *response)
        trained_turns = [
            index
            for index, message in enumerate(messages)
            if index >= len(prompt) and message.role == "assistant" and message.trained_on
        ]
        # Pairs train on responses alone, whatever a chat trains on.
        is_pair = example.kind not in ("chat", "completion")
        if self._train_on == "last" and not is_pair:
            trained_turns = trained_turns[-1:]
        trains_on_all = self._train_on == "all" and not is_pair
        return {
            "messages": [as_turn(message) for message in messages],
            "tools": list(example.tools),
            "train_on": None if trains_on_all else trained_turns,
            "takes_parts": any(_references(example)),
        }

    def _process(self, with_tools: bool) -> TemplateProcess:
        """The process of the template, or of its variant for tools. Raises UserError when the template fails."""
        template = self.template
        text = template.tool_use if with_tools and template.tool_use else template.text
        if text in self._processes:
            return self._processes[text]
        names = named_tokens(self._tokenizer.config)
        process = TemplateProcess(
            ChatTemplate(text, template.origin), names, self._tokenizer.control_tokens()
        )
        self._processes[text] = process

        # A template that fails for the simplest conversation fails for all; it may still refuse it. One of a
        # vision-language model may write contents only where they are lists of parts.
        turns = [as_turn(message) for message in _TRIAL]
        trial = {"messages": turns, "tools": [], "train_on": None}
        as_text, as_parts = process.read([trial, {**trial, "takes_parts": True}])
        error = as_text.get("error", "")
        parts_text = as_parts.get("text", "")
        process.takes_parts = (
            _QUESTION not in as_text.get("text", _QUESTION)
            and _QUESTION in parts_text
            and "{'type'" not in parts_text  # the list itself, as Python writes it
        )
        if error and not error.startswith("it refuses"):
            raise process.error(error)
        return process


def _masked(ids: list[int], pictures: tuple[bytes, ...] = ()) -> EncodedText:
    """A prompt alone, of which no token is trained on."""
    return EncodedText(ids, [False] * len(ids), pictures)


def _references(example: Example) -> list[list[str]]:
    """Of the pictures of each response with its prompt, or of a prompt alone."""
    of_prompt = pictures_of(example.prompt)
    if example.kind == "prompt":
        return [of_prompt]
    return [of_prompt + pictures_of(response) for response in example.responses]


def as_turn(message: Message) -> Json:
    """A message as templates expect it."""
    turn: Json = {"role": message.role, "content": message.content}
    if message.pictures:  # for the child: without any, PICTURE is a letter of the text
        turn["pictures"] = len(message.pictures)
    if message.calls:
        turn["tool_calls"] = list(message.calls)
    if message.thinking is not None:  # templates differ in the name; transformers gives both
        turn |= {"reasoning_content": message.thinking, "thinking": message.thinking}
    if message.name is not None:
        turn["name"] = message.name
    if message.call_id is not None:
        turn["tool_call_id"] = message.call_id
    return turn


def as_message(turn: Mapping[str, Any]) -> Message:
    """The message that `as_turn` wrote, without pictures."""
    return Message(
        turn["role"],
        turn["content"],
        calls=tuple(turn.get("tool_calls", ())),
        name=turn.get("name"),
        thinking=turn.get("reasoning_content"),
        call_id=turn.get("tool_call_id"),
    )


class EncodeTurns(Protocol):
    """Turns as the prompt of a response."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: tuple[Json, ...] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


RenderTurns = Callable[[Sequence[Message], tuple[Json, ...]], str]


@final
@dataclass(frozen=True)
class ChatFormat:
    """The encoder of turns, the tokens and strings that end a response, and a line about the template.

    `render` returns turns as text; it is None without a template.
    """

    encode: EncodeTurns
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    description: str
    render: RenderTurns | None = None


@contextmanager
def chat_format(
    tokenizer: Tokenizer, template: str | None, pictures: PictureEncoder | None = None
) -> Iterator[ChatFormat]:
    """The format of the named template or the tokenizer's own; without one the model continues a text.

    `pictures`: of a model that sees them; it is closed at the end. Raises UserError.
    """
    if template is None and not own_templates(tokenizer.config):
        description = (
            "no chat template: the model continues your text. Set one with --template chatml"
        )
        if pictures is not None:
            pictures.close()
        yield ChatFormat(continuation(tokenizer), (), (), description)
        return
    with Renderer(
        tokenizer, template=template, train_on="assistant", pictures=pictures
    ) as renderer:
        stop_ids = _stop_ids(renderer, tokenizer)
        yield ChatFormat(
            encode=renderer.prompt,
            stop_ids=stop_ids,
            stop_strings=() if stop_ids else tuple(renderer.missing_tokens()),
            description=renderer.template.origin,
            render=renderer.rendered,
        )


def _stop_ids(renderer: Renderer, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The control tokens that end a response: those behind its content that are trained on.

    Raises UserError for a template that refuses the simplest conversations.
    """
    # A short conversation shows how turns end. Some templates require a system turn.
    trial = (Message("user", "a"), Message("assistant", _ANSWER))
    trials: list[tuple[Message, ...]] = [trial, (Message("system", "c"), *trial)]
    results = renderer.encode_batch(
        [Example("the template", "chat", (), (turns,)) for turns in trials]
    )
    number = next((n for n, result in enumerate(results) if not isinstance(result, BadRow)), 0)
    result = results[number]
    if isinstance(result, BadRow) and result.fix != _UNCLEAR:
        raise result

    # The content shows where the end of the turn begins: a response may begin with control tokens, too.
    text = renderer.rendered(trials[number])
    end = text.rpartition(_ANSWER)[2] if _ANSWER in text else text
    control_ids = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
    end_ids = [token for token in tokenizer.encode_rendered(end) if token in control_ids]
    if not isinstance(result, BadRow) and not end_ids:
        # The template writes no end: training adds the token that would begin the next turn.
        end_ids = [token for token in result[0].ids[-1:] if token in control_ids]
    if isinstance(result, BadRow):
        # A template without a provable mask cannot train, and still answers: its first control token ends the turn.
        return tuple(end_ids[:1])
    (encoded,) = result
    trained_ids = {
        token
        for token, is_loss_token in zip(encoded.ids, encoded.loss_mask, strict=True)
        if is_loss_token
    }
    return tuple(token for token in dict.fromkeys(end_ids) if token in trained_ids)


def continuation(tokenizer: Tokenizer) -> EncodeTurns:
    """The encoder without a chat template: all turns are one text, which the model continues. It raises UserError for
    pictures.
    """

    def encode(
        messages: Sequence[Message],
        tools: tuple[Json, ...] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        del tools, variables  # a template would write them
        text = ""
        if pictures_of(tuple(messages)):
            raise UserError(
                "the conversation has pictures, and without a chat template they have no place",
                fix="choose a chat template, or remove the pictures",
            )
        for turn in messages:
            needs_newline = turn.role == "user" and text and not text.endswith("\n")
            text += ("\n" if needs_newline else "") + turn.content
        return [*tokenizer.prefix, *tokenizer.encode(text)]  # messages spell no control tokens

    return encode
