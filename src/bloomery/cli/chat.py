"""`bloomery chat MODEL`: a conversation on the terminal or over a pipe"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click

from bloomery.cli.common import (
    devices_option,
    loading,
    quantize_option,
    refuse_undecoded,
    step_option,
    text_flags,
)
from bloomery.cli.sampling import (
    SETTINGS,
    draft_folder,
    finite,
    sampling_options,
    setting,
    speculation_options,
)
from bloomery.cli.tools import episodes_of, tools_options
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean, expanded, harmless
from bloomery.core.units import counted
from bloomery.data.examples import PICTURE, Message, with_pictures_before
from bloomery.runs.chosen_model import chosen_use, model_path

Json = dict[str, Any]

if TYPE_CHECKING:
    from bloomery.data.chat.render import ChatFormat
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.infer.decode import Speculation
    from bloomery.infer.picture_prompts import Eyes
    from bloomery.infer.sampling import Sampling
    from bloomery.model.decoder import Decoder
    from bloomery.train.rl.live_episodes import LiveEpisode

MAX_REPLY_SHARE = (
    4  # old messages are dropped for max_new_tokens, but for at most a quarter of the context
)


@final
class Session:
    """The messages and the model of a conversation. `system` comes first and is never dropped."""

    def __init__(
        self,
        decoder: "Decoder",
        tokenizer: "Tokenizer",
        form: "ChatFormat",
        sampling: "Sampling",
        *,
        system: str | None = None,
        speculation: "Speculation | None" = None,
        eyes: "Eyes | None" = None,
        tools: "LiveEpisode | None" = None,
        template: str | None = None,
    ) -> None:
        """`eyes`: None: the model reads text alone. `tools`: what it calls, in chats of this `template`. Raises
        UserError for a template without tools.
        """
        from bloomery.infer.generate import Speed
        from bloomery.infer.past import Past
        from bloomery.infer.sampling import known_ids

        self.decoder = decoder
        self.tokenizer = tokenizer
        self.form = form
        self.system = system
        self.sampling = replace(sampling, stop_ids=form.stop_ids)
        self.history: list[Message] = []
        self.past = Past(decoder)
        self.speed = Speed(speculation)  # of the last reply
        self.dropped = 0  # messages that no longer fit into the context
        self.pictures: list[str] = []  # references, for the next message
        self._eyes = eyes
        self._tools = tools
        self._has_begun = False  # the environment
        self.on_step: Callable[[str], None] = lambda _line: None
        self._ends = known_ids(tokenizer.eos_id, decoder.config.eos_token_id, *form.stop_ids)
        if tools is not None:
            from bloomery.data.chat.tool_forms import tool_format

            assert form.render is not None, "a chat with tools has a template"
            self._ends = known_ids(*self._ends, *tools.use_template(tokenizer, template))
            self._call_form = tool_format(form.render)
        self._paths: dict[str, Path] = {}  # of pictures, by reference
        self._replies = 0

    @property
    def opening(self) -> list[Message]:
        return [Message("system", self.system)] if self.system else []

    @property
    def turns(self) -> list[Message]:
        return [*self.opening, *self.history]

    def show(self, path: Path) -> None:
        """The next message has this picture. Raises UserError for what is none, and for a model that reads text."""
        if self._eyes is None:
            raise UserError(
                "this model reads text, and no images",
                where=f"/image {path}",
                fix="chat with a vision-language model",
            )
        reference = self._eyes.reference(path)
        self.pictures.append(reference)
        self._paths[reference] = path

    def reply(self, text: str) -> Iterator[str]:
        """The reply in pieces. An interrupted reply stays in the history as far as it was generated.

        Raises UserError; the history is then unchanged.
        """
        from bloomery.infer.generate import Speed, continued

        # The message joins the history once it is known to fit; a repeated message gets new tokens.
        message = with_pictures_before(Message("user", text), self.pictures)
        if self._tools is not None:
            message = self._begun(message)
        ids = self._fitting([*self.history, message])
        self.history.append(message)
        self.pictures = []
        sampling = replace(self.sampling, seed=self.sampling.seed + self._replies)
        self._replies += 1
        if self._tools is not None:
            yield from self._turns(self._tools, ids, sampling)
            return
        pieces: list[str] = []
        try:
            stop_strings = self.form.stop_strings
            self.speed = Speed(self.speed.speculation)
            for piece in continued(
                self.decoder, self.tokenizer, ids, sampling, stop_strings, self.past, self.speed
            ):
                pieces.append(piece)
                yield piece
        finally:
            self.history.append(Message("assistant", "".join(pieces)))

    def _begun(self, message: Message) -> Message:
        """The user's message; the first one with what the environment adds to it."""
        assert self._tools is not None
        if self._has_begun:
            return message
        from bloomery.train.rl.episodes import opening_messages

        row = {"prompt": [{"role": "user", "content": message.content}]}
        added_text = self._tools.begin(row, seed=self.sampling.seed)
        self._has_begun = True
        return opening_messages([message], added_text)[-1]

    def _turns(self, tools: "LiveEpisode", ids: list[int], sampling: "Sampling") -> Iterator[str]:
        """The answers to a message, with calls of tools between them, as in training."""
        from bloomery.data.chat.tools import parser_of
        from bloomery.infer.decode import sample_tokens
        from bloomery.infer.text import OutputText

        num_earlier = sum(len(message.calls) for message in self.history)
        tools.begin_answer(ids, num_earlier=num_earlier)
        next_ids: list[int] | None = ids
        num_shown = 0
        try:
            while next_ids is not None:
                parser = parser_of(self._call_form, tools.schemas)
                output = OutputText(self.tokenizer, next_ids)
                new = list[int]()
                is_ended = False
                # The token that ends an answer belongs to it.
                seed = sampling.seed + len(tools.messages)
                free = replace(sampling, stop_ids=(), seed=seed)
                for token in sample_tokens(self.decoder, next_ids, free, self.past):
                    new.append(token)
                    is_ended = token in self._ends
                    if is_ended:
                        break
                    for delta in parser.push(output.push(token)):
                        yield delta.thought + delta.content
                for delta in [*parser.push(output.finish()), *parser.flush()]:
                    yield delta.thought + delta.content
                longest = self.decoder.config.max_positions
                next_ids = tools.go_on(new, truncated=not is_ended, longest=longest)
                for turn in tools.messages[num_shown:]:
                    for line in _shown_turn(turn):
                        self.on_step(line)
                num_shown = len(tools.messages)
        finally:
            self.history += tools.history

    def _fitting(self, history: list[Message]) -> list[int]:
        """The ids of the newest messages that fit, with room for a reply. Drops the oldest up to a user message."""
        context = self.decoder.config.max_positions
        reply_tokens = max(1, min(self.sampling.max_new_tokens, context // MAX_REPLY_SHARE))
        user_turns = [index for index, message in enumerate(history) if message.role == "user"]
        newest_turn = user_turns[-1]

        # A message that was dropped once stays dropped. The newest one alone may leave less room for its reply.
        for start in [turn for turn in user_turns if turn >= self.dropped] or [newest_turn]:
            turns = [*self.opening, *history[start:]]
            schemas = () if self._tools is None else self._tools.schemas
            ids = self.form.encode(turns, schemas) if schemas else self.form.encode(turns)
            leaves_room = len(ids) + reply_tokens <= context
            if leaves_room or (start == newest_turn and len(ids) < context):
                self.dropped = start
                return ids
        size = f"{len(ids):,} tokens, and the context with the reply is {context:,}"
        fix = "shorten the message" + (" or the system prompt" if self.system else "")
        if history[-1].pictures:
            fix = "send fewer or smaller images: /image off removes them"
        raise UserError(f"message too long: {size}", where="the chat", fix=fix)

    def reset(self) -> None:
        self.history.clear()
        self._has_begun = False
        self.pictures = []
        self.dropped = 0

    def save(self, path: Path) -> None:
        """Appends the conversation to a JSONL file that can be a dataset. Raises UserError."""
        turns = [{"role": turn.role, "content": self._saved(turn, path)} for turn in self.turns]
        row = {"messages": turns}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            problem = f"cannot write the file: {error.strerror}"
            raise UserError(problem, where=str(path), fix="use another file") from error

    def _saved(self, turn: Message, path: Path) -> "str | list[Json]":
        """The content of a turn in a dataset at `path`: paths of pictures begin there where they lie below."""
        if not turn.pictures:
            return turn.content
        parts = list[Json]()
        for reference in turn.pictures:
            picture = self._paths[reference].resolve()
            folder = path.resolve().parent
            is_below = picture.is_relative_to(folder)
            parts.append(
                {
                    "type": "image",
                    "image": str(picture.relative_to(folder) if is_below else picture),
                }
            )
        return [*parts, {"type": "text", "text": turn.content.replace(PICTURE, "")}]


def _shown_turn(turn: Mapping[str, Any]) -> Iterator[str]:
    """Lines about the calls of an answer, or about a result."""
    if turn["role"] == "tool":
        text = " ".join(turn["content"].split())
        yield f"[{turn['name']} -> {text[:_SHOWN] + ('...' if len(text) > _SHOWN else '')}]"
        return
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        yield f"[{function['name']} {function['arguments'][:_SHOWN]}]"


_SHOWN = 200  # characters of a call or a result
INTERRUPTED = 130
HELP = """\
/image FILE        send an image with the next message; /image prints them, /image off removes them
/system TEXT       set the system prompt; /system prints it, /system off removes it
/set NAME VALUE    change a sampling setting: /set temperature 0.7; /set prints all of them
/save FILE         append this conversation to FILE (JSONL, usable as a dataset)
/reset             clear the conversation
/help, /quit       Ctrl+C stops a reply; twice, or Ctrl+D, ends the chat
Start a line with // to send a slash; end a line with \\ to write more lines."""


@click.command()
@click.argument("model")
@click.option("--system", metavar="TEXT", help="Set the system prompt.")
@click.option("--template", help="Chat template: chatml, llama2, llama3, qwen, ... or a file.")
@step_option
@devices_option
@quantize_option
@speculation_options
@tools_options
@sampling_options
def command(
    model: str,
    system: str | None,
    template: str | None,
    step: str,
    devices: str,
    quantize: str | None,
    prompt_lookup: int | None,
    draft: str | None,
    tools: tuple[str, ...],
    environment: str | None,
    max_turns: int,
    **settings: Any,
) -> int:
    """Chat with MODEL. From a pipe, each line is a message; replies go to stdout.

    Example: bloomery chat last --system "You answer in one sentence." --temperature 0.3
    """
    # Everything that the user can have mistyped is checked before torch is imported.
    finite(settings)
    folder = model_path(model)
    draft_path = draft_folder(prompt_lookup, draft)
    use = chosen_use(devices, quantize)
    episodes = episodes_of(tools, environment, max_turns)
    from bloomery.data.chat.render import chat_format
    from bloomery.infer.generate import load_files
    from bloomery.infer.held_model import held_model
    from bloomery.infer.picture_prompts import Eyes, picture_source
    from bloomery.infer.sampling import Sampling
    from bloomery.infer.speculation import speculation_of

    with ExitStack() as holds:
        files = holds.enter_context(held_model(folder, step))
        decoder, tokenizer = load_files(files, where=str(folder), use=use, on_load=loading)
        # What reads pictures is read from the files with the first of them; all else is in memory now.
        source = picture_source(files)
        held = ExitStack() if source is None else holds.pop_all()
    speculation = speculation_of(
        decoder, tokenizer, lookup=prompt_lookup, draft=draft_path, use=use, on_load=loading
    )
    eyes = None if source is None else Eyes(decoder, files, source)
    encoder = None if eyes is None else eyes.encoder
    with (
        held,
        text_flags(),
        chat_format(tokenizer, template, encoder) as form,
        ExitStack() as stack,
    ):
        sampling = Sampling(**settings)
        live = None
        if episodes is not None:
            from bloomery.train.rl.live_episodes import LiveEpisode

            live = LiveEpisode(episodes)
            stack.callback(live.close)
        session = Session(
            decoder,
            tokenizer,
            form,
            sampling,
            system=system,
            speculation=speculation,
            eyes=eyes,
            tools=live,
            template=template,
        )
        if live is not None:
            names = [tool["function"]["name"] for tool in live.schemas]
            _note(f"tools: {', '.join(names)}")
            for note in live.notes:
                _note(f"warning: {note}")
        _note(f"{model}: context {decoder.config.max_positions:,} tokens; {form.description}")
        if eyes is not None:
            _note("/image FILE sends an image with the next message")
        _note("/help lists the commands, Ctrl+C stops a reply, Ctrl+D ends the chat")
        return Terminal(session).talk()


@final
class Terminal:
    """Reads lines from a terminal or a pipe; answers messages and runs /commands."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        session.on_step = self._show_step
        self._is_line_open = False  # text was printed without the end of its line
        self._is_after_step = False
        self.interactive = sys.stdin.isatty()
        self.prompt = "> " if self.interactive and sys.stdout.isatty() else ""
        if self.prompt and find_spec("readline"):
            import_module("readline")  # line editing and history for `input`
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: click.echo(HELP),
            "image": self._image,
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "save": self._save,
        }

    def talk(self) -> int:
        """Runs until the input ends, /quit, or Ctrl+C twice; returns the exit code."""
        interrupted_before = False
        has_failed = False
        while True:
            # The first Ctrl+C at the prompt warns; the next one ends the chat, unless a message was answered between.
            try:
                line = self._line()
            except KeyboardInterrupt:
                if interrupted_before or not self.interactive:
                    _note("")
                    return INTERRUPTED
                interrupted_before = True
                _note("\n(press Ctrl+C again to end the chat)")
                continue

            # A script that pipes messages in learns of a failure by the exit code; a person has seen it.
            if line is None or line.strip() in ("/quit", "/exit"):
                return 1 if has_failed and not self.interactive else 0
            try:
                with text_flags():
                    self._handle(line)
                interrupted_before = False
            except KeyboardInterrupt:
                interrupted_before = True
                _note("\n(stopped; press Ctrl+C again to end the chat)")
            except UserError as error:
                has_failed = True
                _note(harmless(str(error)))

    def _line(self) -> str | None:
        """A line, with its continuation lines; None at the end."""
        parts: list[str] = []
        while True:
            part = self._read(self.prompt if not parts else "  ")
            if part is None:
                return "\n".join(parts) if parts else None
            if not part.endswith("\\"):
                return "\n".join([*parts, part])
            parts.append(part[:-1])

    def _read(self, prompt: str) -> str | None:
        if not self.prompt:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        click.echo("" if prompt != self.prompt else "\n", nl=False)
        try:
            return input(prompt)
        except EOFError:
            _note("")
            return None

    def _handle(self, line: str) -> None:
        """Run a /command or answer a message. Raises UserError for an unknown command."""
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            typed_name, _, argument = text[1:].partition(" ")
            name = typed_name.lower()
            if name not in self.commands:
                names = [*self.commands, "quit"]
                fix = did_you_mean(name, names, "/help lists them", shown="/{}")
                raise UserError(f"no such command: /{name[:40]}", where="the chat", fix=fix)
            self.commands[name](argument.strip())
        elif text:
            refuse_undecoded(line, subject="this line", where="the chat")
            self._reply(line[1:] if text.startswith("//") else line)

    def _reply(self, text: str) -> None:
        """Prints the reply without blank lines before and after."""
        num_dropped = self.session.dropped
        pending_space = ""  # white space is printed when text follows it
        has_text = False
        for piece in self.session.reply(text):
            if self._is_after_step:  # the text of a further turn
                self._is_after_step = False
                pending_space = ""
                has_text = False
            # The session drops messages as it begins the reply, so the note stands before the text.
            if not has_text and self.session.dropped > num_dropped:
                count = self.session.dropped - num_dropped
                context = self.session.decoder.config.max_positions
                _note(f"(context of {context:,} tokens is full: dropped {count} earlier messages)")
                num_dropped = self.session.dropped
            pending_text = pending_space + harmless(piece)
            pending_space = pending_text[len(pending_text.rstrip()) :]
            printed_text = pending_text.rstrip() if has_text else pending_text.strip()
            has_text = has_text or bool(printed_text)
            click.echo(printed_text, nl=False)
            self._is_line_open = self._is_line_open or bool(printed_text)
            sys.stdout.flush()
        click.echo()
        self._is_line_open = False
        if self.prompt:
            _note(f"({self.session.speed})")

    def _show_step(self, line: str) -> None:
        """A call of a tool, or its result, on a line of its own."""
        if self._is_line_open:
            click.echo()
            self._is_line_open = False
        self._is_after_step = True
        _note(harmless(line))

    def _reset(self, _argument: str) -> None:
        self.session.reset()
        _note("(conversation cleared)")

    def _image(self, argument: str) -> None:
        if argument == "off":
            self.session.pictures = []
        elif argument:
            self.session.show(_typed_path(argument, "/image 'my photo.jpg'"))
        count = len(self.session.pictures)
        _note(f"({counted(count, 'images')} with the next message)" if count else "(no images)")

    def _system(self, argument: str) -> None:
        if argument:
            self.session.system = None if argument == "off" else argument
        system = self.session.system
        _note(f"(system prompt: {system})" if system else "(no system prompt)")

    def _set(self, argument: str) -> None:
        """Change a setting (`/set NAME VALUE`), then print all of them; `/set` alone only prints them."""
        if argument:
            name, value = setting(argument)
            changes: dict[str, Any] = {name: value}
            self.session.sampling = replace(self.session.sampling, **changes)
        values = {name: getattr(self.session.sampling, name) for name in SETTINGS}
        settings = [f"{name} {'off' if value is None else value}" for name, value in values.items()]
        _note(", ".join(settings))

    def _save(self, argument: str) -> None:
        if not argument:
            raise UserError("missing file name", where="/save", fix="for example: /save talk.jsonl")
        path = _typed_path(argument, "/save 'my talk.jsonl'")
        if not self.session.history:
            problem = "the conversation is empty"
            raise UserError(problem, where=f"/save {argument}", fix="send a message first")
        self.session.save(path)
        _note(f"({len(self.session.turns)} messages appended to {path})")


def _typed_path(typed: str, example: str) -> Path:
    """Terminals quote a file that is dropped onto them, or put backslashes before its spaces. Raises UserError."""
    if typed[0] not in "'\"" and "\\ " not in typed:
        return expanded(typed)
    try:
        return expanded(shlex.split(typed)[0])
    except ValueError as error:
        where = f"{example.partition(' ')[0]} {typed}"
        raise UserError("unclosed quote", where=where, fix=f"close it: {example}") from error


def _note(line: str) -> None:
    """Print on stderr; stdout is for replies."""
    click.echo(line, err=True)
