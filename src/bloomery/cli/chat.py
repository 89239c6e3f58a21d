"""`bloomery chat MODEL`: a conversation on the terminal or over a pipe"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
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
from bloomery.cli.generate import (
    SETTINGS,
    draft_folder,
    finite,
    sampling_options,
    setting,
    speculation_options,
)
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean, expanded, harmless
from bloomery.data.examples import Message
from bloomery.runs.folder import chosen_use, model_path

if TYPE_CHECKING:
    from bloomery.data.chat.render import ChatFormat
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.model.decoder import Decoder
    from bloomery.model.decoding import Sampling, Speculation

SHARE = 4  # old messages are dropped for max_new_tokens, but for at most a quarter of the context


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
    ) -> None:
        from bloomery.model.decoding import Past
        from bloomery.runs.generate import Speed

        self.decoder = decoder
        self.tokenizer = tokenizer
        self.form = form
        self.system = system
        self.sampling = replace(sampling, stop_ids=form.stop_ids)
        self.history: list[Message] = []
        self.past = Past(decoder)
        self.speed = Speed(speculation)  # of the last reply
        self.dropped = 0  # messages that no longer fit into the context
        self._replies = 0

    @property
    def opening(self) -> list[Message]:
        return [Message("system", self.system)] if self.system else []

    @property
    def turns(self) -> list[Message]:
        return [*self.opening, *self.history]

    def reply(self, text: str) -> Iterator[str]:
        """The reply in pieces. An interrupted reply stays in the history as far as it was generated.

        Raises UserError; the history is then unchanged.
        """
        from bloomery.runs.generate import Speed, continued

        message = Message("user", text)
        ids = self._fitting([*self.history, message])
        self.history.append(message)
        # a repeated message gets new tokens
        sampling = replace(self.sampling, seed=self.sampling.seed + self._replies)
        self._replies += 1
        pieces: list[str] = []
        try:
            ends = self.form.stop_strings
            self.speed = Speed(self.speed.speculation)
            for piece in continued(
                self.decoder, self.tokenizer, ids, sampling, ends, self.past, self.speed
            ):
                pieces.append(piece)
                yield piece
        finally:
            self.history.append(Message("assistant", "".join(pieces)))

    def _fitting(self, history: list[Message]) -> list[int]:
        """The ids of the newest messages that fit, with room for a reply. Drops the oldest up to a user message."""
        context = self.decoder.config.max_positions
        room = max(1, min(self.sampling.max_new_tokens, context // SHARE))
        starts = [at for at, message in enumerate(history) if message.role == "user"]
        for start in [at for at in starts if at >= self.dropped] or starts[-1:]:
            ids = self.form.encode([*self.opening, *history[start:]])
            if len(ids) + room <= context or (start == starts[-1] and len(ids) < context):
                self.dropped = start
                return ids
        raise UserError(
            f"message too long: {len(ids):,} tokens, and the context with the reply is {context:,}",
            where="the chat",
            fix="shorten the message" + (" or the system prompt" if self.system else ""),
        )

    def reset(self) -> None:
        self.history.clear()
        self.dropped = 0

    def save(self, path: Path) -> None:
        """Appends the conversation to a JSONL file that can be a dataset. Raises UserError."""
        row = {"messages": [{"role": turn.role, "content": turn.content} for turn in self.turns]}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            problem = f"cannot write the file: {error.strerror}"
            raise UserError(problem, where=str(path), fix="use another file") from error


INTERRUPTED = 130
HELP = """\
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
    **settings: Any,
) -> int:
    """Chat with MODEL. From a pipe, each line is a message; replies go to stdout.

    Example: bloomery chat last --system "You answer in one sentence." --temperature 0.3
    """
    finite(settings)
    where = model_path(model)
    drafts = draft_folder(prompt_lookup, draft)
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.data.chat.render import chat_format
    from bloomery.model.decoding import Sampling
    from bloomery.runs.generate import load_model, speculation_of

    decoder, tokenizer = load_model(where, step=step, use=use, on_load=loading)
    guesses = speculation_of(
        decoder, tokenizer, lookup=prompt_lookup, draft=drafts, use=use, on_load=loading
    )
    with text_flags(), chat_format(tokenizer, template) as form:
        session = Session(
            decoder, tokenizer, form, Sampling(**settings), system=system, speculation=guesses
        )
        _note(f"{model}: context {decoder.config.max_positions:,} tokens; {form.description}")
        _note("/help lists the commands, Ctrl+C stops a reply, Ctrl+D ends the chat")
        return Terminal(session).talk()


@final
class Terminal:
    """Reads lines from a terminal or a pipe; answers messages and runs /commands."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.interactive = sys.stdin.isatty()
        self.prompt = "> " if self.interactive and sys.stdout.isatty() else ""
        if self.prompt and find_spec("readline"):
            import_module("readline")  # line editing and history for `input`
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: click.echo(HELP),
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "save": self._save,
        }

    def talk(self) -> int:
        """Runs until the input ends, /quit, or Ctrl+C twice; returns the exit code."""
        warned = failed = False
        while True:
            try:
                line = self._line()
            except KeyboardInterrupt:
                if warned or not self.interactive:
                    _note("")
                    return INTERRUPTED
                warned = True
                _note("\n(press Ctrl+C again to end the chat)")
                continue
            if line is None or line.strip() in ("/quit", "/exit"):
                return 1 if failed and not self.interactive else 0
            try:
                with text_flags():
                    self._handle(line)
                warned = False
            except KeyboardInterrupt:
                warned = True
                _note("\n(stopped; press Ctrl+C again to end the chat)")
            except UserError as error:
                failed = True
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
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            if name.lower() not in self.commands:
                fix = did_you_mean(
                    name.lower(), [*self.commands, "quit"], "/help lists them", shown="/{}"
                )
                raise UserError(f"no such command: /{name.lower()[:40]}", where="the chat", fix=fix)
            self.commands[name.lower()](rest.strip())
        elif text:
            refuse_undecoded(line, what="this line", where="the chat")
            self._reply(line[1:] if text.startswith("//") else line)

    def _reply(self, text: str) -> None:
        """Prints the reply without blank lines before and after."""
        before = self.session.dropped
        held = begun = ""
        for piece in self.session.reply(text):
            if not begun and self.session.dropped > before:
                count = self.session.dropped - before
                context = self.session.decoder.config.max_positions
                _note(f"(context of {context:,} tokens is full: dropped {count} earlier messages)")
                before = self.session.dropped
            shown = held + harmless(piece)
            held = shown[len(shown.rstrip()) :]
            shown = shown.rstrip() if begun else shown.strip()
            begun = begun or shown
            click.echo(shown, nl=False)
            sys.stdout.flush()
        click.echo()
        if self.prompt:
            _note(f"({self.session.speed})")

    def _reset(self, _rest: str) -> None:
        self.session.reset()
        _note("(conversation cleared)")

    def _system(self, rest: str) -> None:
        if rest:
            self.session.system = None if rest == "off" else rest
        _note(
            f"(system prompt: {self.session.system})"
            if self.session.system
            else "(no system prompt)"
        )

    def _set(self, rest: str) -> None:
        """`/set NAME VALUE` changes a setting; that and `/set` alone show all of them."""
        if rest:
            name, value = setting(rest)
            changed: dict[str, Any] = {name: value}
            self.session.sampling = replace(self.session.sampling, **changed)
        shown = {name: getattr(self.session.sampling, name) for name in SETTINGS}
        _note(
            ", ".join(
                f"{name} {'off' if value is None else value}" for name, value in shown.items()
            )
        )

    def _save(self, rest: str) -> None:
        if not rest:
            raise UserError("missing file name", where="/save", fix="for example: /save talk.jsonl")
        try:
            path = expanded(Path(shlex.split(rest)[0]) if rest[0] in "'\"" else rest)
        except ValueError as error:
            fix = "close it: /save 'my talk.jsonl'"
            raise UserError("unclosed quote", where=f"/save {rest}", fix=fix) from error
        if not self.session.history:
            raise UserError(
                "the conversation is empty", where=f"/save {rest}", fix="send a message first"
            )
        self.session.save(path)
        _note(f"({len(self.session.turns)} messages appended to {path})")


def _note(line: str) -> None:
    """Print on stderr; stdout is for replies."""
    click.echo(line, err=True)
