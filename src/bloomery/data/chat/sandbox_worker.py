"""A process that renders untrusted chat templates, with limits on time and memory and without file access."""

import json
import re
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, final

import jinja2
import jinja2.ext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bloomery.core.child import accept, reply, requests
from bloomery.data.chat.masks import (
    Refused,
    RenderedConversation,
    Turn,
    Unclear,
    free_plane,
    generated_spans,
    generation_marks,
    unmarked,
)
from bloomery.data.chat.written import LeftOut
from bloomery.data.examples import PICTURE

MEMORY_BYTES = 2**30
MAX_OUTPUT = 2**25  # characters of one rendering
_MEMORY = "it needs more than 1 GiB of memory"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Json = dict[str, Any]


@final
class Generation(jinja2.ext.Extension):
    """The tag of transformers: `generation` and `endgeneration` are around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        begin_mark, end_mark = getattr(self.environment, "generation_marks", ("", ""))
        return f"{begin_mark}{caller()}{end_mark}"


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as transformers has it: jinja's own escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers (utils/chat_template_utils.py), so that templates render equally."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        cache_size=0,
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


@final
@dataclass
class Template:
    """A compiled template and its variables in addition to messages."""

    text: str
    names: Json  # bos_token, eos_token, ...
    enders: re.Pattern[str]
    seconds: float = 2.0  # CPU time of one conversation
    cuts: dict[tuple[str, ...], int] = field(default_factory=dict)  # of RenderedConversation
    takes_parts: bool = False  # contents are lists of texts and pictures

    def __post_init__(self) -> None:
        self._environment = environment()
        self._compiled = self._environment.from_string(self.text)
        self.marks_itself = bool(_GENERATION.search(self.text))
        self._takes_text: bool | None = None  # arguments of calls; None: not tried yet
        self._left_out = LeftOut(self._written)

    def render(
        self,
        turns: Sequence[Turn],
        tools: list[Json] | None,
        *,
        prompt: bool = False,
        plane: int = 0,
        variables: Json | None = None,
    ) -> str:
        """The conversation as text. Raises Refused with the reason when the template fails.

        `variables`: of the request, such as `enable_thinking`; they replace none of the conversation's.
        `plane`: of Unicode, for marks around `{% generation %}` blocks; 0: without marks.
        """
        vars(self._environment)["generation_marks"] = generation_marks(plane) if plane else ("", "")
        all_variables = {
            **(variables or {}),
            **self.names,
            "messages": [_in_parts(turn) for turn in turns] if self.takes_parts else list(turns),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

        # Piece by piece: a template without an end must not fill the memory.
        pieces = list[str]()
        size = 0
        try:
            for piece in self._compiled.generate(**all_variables):
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise Refused(
                        f"it writes more than {MAX_OUTPUT:,} characters for one conversation"
                    )
                pieces.append(piece)
            return "".join(pieces)
        except (Refused, Unclear):
            raise
        except Exception as error:  # a template may raise any exception
            raise Refused(_reason(error)) from error

    def read(self, job: Json) -> Json:
        """The text of a conversation, and the spans to train on unless all of it is."""
        tools = job.get("tools") or None
        self.takes_parts = job.get("takes_parts", False)
        turns = self._with_arguments(job["messages"], tools)
        answer = self._read(turns, tools, job)
        if job.get("parts"):
            answer["parts"] = self._left_out.counts(turns, tools, prompt=job.get("prompt", False))
        return answer

    def _written(self, turns: Sequence[Turn], tools: list[Json] | None, prompt: bool) -> str:
        try:
            return self.render(turns, tools, prompt=prompt)
        except Refused:
            return ""

    def _read(self, turns: list[Turn], tools: list[Json] | None, job: Json) -> Json:
        if job["train_on"] is None:
            variables = job.get("variables")
            text = self.render(turns, tools, prompt=job.get("prompt", False), variables=variables)
            return {"text": text}
        if self.marks_itself:
            return self._read_marks(turns, tools, job["train_on"])

        def render(turns: Sequence[Turn], *, prompt: bool = False) -> str:
            return self.render(turns, tools, prompt=prompt)

        bos = self.names.get("bos_token")
        rendered = RenderedConversation(render, turns, tools, self.enders, self.cuts, bos)
        spans = rendered.spans(job["train_on"])
        return {"text": rendered.text, "spans": spans}

    def _with_arguments(self, turns: list[Turn], tools: list[Json] | None) -> list[Turn]:
        """The turns with the arguments of their calls in the form that this template takes: objects, or JSON text."""
        if not any(turn.get("tool_calls") for turn in turns):
            return turns
        if self._takes_text is None:
            self._takes_text = self._arguments_as_text(turns, tools)
        return _with_calls(turns, _as_text) if self._takes_text else turns

    def _arguments_as_text(self, turns: list[Turn], tools: list[Json] | None) -> bool | None:
        """Whether this template takes arguments as JSON text. None when it writes no call of this conversation.

        Both forms are tried: a template that adds arguments to a text fails on an object, one that writes them as they
        are writes Python's form of it, and one with `tojson` writes a text in quotation marks.
        """
        key, value = "bloomery_key", "bloomery_value"

        def written(arguments: Any) -> str:
            return self._written(_with_calls(turns, lambda _: arguments), tools, prompt=False)

        of_object = written({key: value})
        if key in of_object and f"'{key}'" not in of_object:
            return False
        of_text = written(json.dumps({key: value}))
        if f'"{key}"' in of_text:
            return True
        return False if key in of_object else None

    def _read_marks(
        self, turns: Sequence[Turn], tools: list[Json] | None, train_on: Sequence[int]
    ) -> Json:
        """The text, and the `{% generation %}` blocks of the turns with these numbers."""
        plane = free_plane(turns, tools)
        marked = unmarked(self.render(turns, tools, plane=plane), plane)
        blocks = generated_spans(marked)
        assistant_turns = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        if list(train_on) == assistant_turns:
            return {"text": marked.text, "spans": blocks}

        # The blocks of a turn are those that the turns before it do not have.
        num_blocks: dict[int, int] = {}
        for turn in train_on:
            for num_turns in (turn, turn + 1):
                num_blocks[num_turns] = self._num_blocks(turns[:num_turns], tools, plane)
        spans = [
            block for turn in train_on for block in blocks[num_blocks[turn] : num_blocks[turn + 1]]
        ]
        return {"text": marked.text, "spans": spans}

    def _num_blocks(self, turns: Sequence[Turn], tools: list[Json] | None, plane: int) -> int:
        if not turns:
            return 0
        return len(generated_spans(unmarked(self.render(turns, tools, plane=plane), plane)))


def _in_parts(turn: Turn) -> Turn:
    """The turn with a list of its texts and pictures as content."""
    content = turn["content"]
    parts = list[Json]()
    for index, text in enumerate(content.split(PICTURE) if turn.get("pictures") else [content]):
        if index:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**{key: turn[key] for key in turn if key != "pictures"}, "content": parts}


def _with_calls(turns: Sequence[Turn], arguments: Callable[[Any], Any]) -> list[Turn]:
    """Copies of the turns with other arguments in their calls."""
    changed_turns = []
    for turn in turns:
        changed_turn = dict(turn)
        if turn.get("tool_calls"):
            changed_turn["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": arguments(call["function"]["arguments"]),
                    },
                }
                for call in turn["tool_calls"]
            ]
        changed_turns.append(changed_turn)
    return changed_turns


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _one_line(message: object) -> str:
    """One line without its full stop, in characters that every terminal can print."""
    return (
        " ".join(str(message).split())[:240]
        .removesuffix(".")
        .encode(errors="backslashreplace")
        .decode()
    )


def _reason(error: Exception) -> str:
    message = _one_line(error)
    match error:
        case jinja2.exceptions.SecurityError():
            return f"it accesses a forbidden attribute: {message}"
        case jinja2.UndefinedError():
            return f"it uses an undefined value: {message}"
        case jinja2.TemplateError():
            return f"it refuses the conversation: {message}"
        case MemoryError():
            return _MEMORY
        case RecursionError():
            return "it has an endless recursion"
    return f"it fails with {type(error).__name__}: {message}"


def _answer(template: Template, job: Json) -> Json:
    """The rendering of a conversation, or the error of the template."""
    # SIGPROF ends this process: Python code could not stop a template in time.
    signal.setitimer(signal.ITIMER_PROF, template.seconds)
    try:
        answer = template.read(job)
        # Half of a surrogate pair could not be sent as UTF-8.
        try:
            answer["text"].encode()
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(answer['text'][error.start]):04x}"
            return {"error": f"it writes half of a surrogate pair, {surrogate}"}
        return answer
    except Refused as error:
        return {"error": str(error)}
    except Unclear as error:
        return {"error": str(error), "unclear": True}
    except RecursionError:
        return {"error": "it has an endless recursion"}
    except MemoryError:
        return {"error": _MEMORY}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compile(settings: Json) -> Template | str:
    """The compiled template, or the reason why it cannot be compiled."""
    signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
    try:
        enders = re.compile("|".join(map(re.escape, settings["enders"])) or "(?!)")
        return Template(settings["text"], settings["names"], enders, settings["seconds"])
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {_one_line(error.message)}"
    except MemoryError:
        return _MEMORY
    except (RecursionError, SyntaxError):
        return "it is nested too deeply"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Reads the template, then lists of conversations, and answers each list."""
    # The limits come before the template: it can neither fill the memory nor write a file.
    job = accept()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    template = _compile(job)
    reply(job, {"error": template} if isinstance(template, str) else {"ready": True})
    if isinstance(template, Template):
        for request in requests(job):
            answers = [_answer(template, conversation) for conversation in request["jobs"]]
            reply(job, {"answers": answers})


if __name__ == "__main__":
    main()
