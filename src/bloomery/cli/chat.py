"""`bloomery chat MODEL`: a conversation on the terminal, or with the lines of a pipe"""

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

from bloomery.cli.common import devices_option, loading, quantize_option, refuse_undecoded, text_flags
from bloomery.cli.sampling import SETTINGS, drawing_options, finite, setting
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean, expanded, harmless
from bloomery.data.chat.examples import Message
from bloomery.runs.names import chosen_use, model_path

if TYPE_CHECKING:
    from bloomery.data.chat.render import ChatFormat
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.model.decoder import Decoder
    from bloomery.model.sampling import Sampling

SHARE = 4  # an answer gets max_tokens, but makes a chat forget no more than a quarter of the context for that


@final
class Session:
    """What was said, and the model that answers. `system` goes before it all and is never forgotten."""

    def __init__(
        self, decoder: "Decoder", tokenizer: "Tokenizer", form: "ChatFormat", sampling: "Sampling", *,
        system: str | None = None,
    ) -> None:  # fmt: skip
        from bloomery.model.sampling import Past

        self.decoder, self.tokenizer, self.form, self.system = decoder, tokenizer, form, system
        self.sampling = replace(sampling, stop_ids=form.stop_ids)
        self.said: list[Message] = []
        self.past = Past(decoder)
        self.forgotten = 0  # turns that the model no longer sees
        self._answers = 0

    @property
    def opening(self) -> list[Message]:
        return [Message("system", self.system)] if self.system else []

    @property
    def turns(self) -> list[Message]:
        return [*self.opening, *self.said]

    def answer(self, text: str) -> Iterator[str]:
        """The answer in pieces; an answer that is broken off stays as far as it came.

        Raises UserError, and then nothing was said.
        """
        from bloomery.runs.generate import continued

        question = Message("user", text)
        ids = self._fitting([*self.said, question])
        self.said.append(question)
        sampling = replace(self.sampling, seed=self.sampling.seed + self._answers)  # the same words may draw anew
        self._answers += 1
        pieces: list[str] = []
        try:
            for piece in continued(self.decoder, self.tokenizer, ids, sampling, self.form.stop_strings, self.past):
                pieces.append(piece)
                yield piece
        finally:
            self.said.append(Message("assistant", "".join(pieces)))

    def _fitting(self, said: list[Message]) -> list[int]:
        """The ids of what still fits, with room for an answer: the oldest turns go first, up to the next question."""
        context = self.decoder.config.max_positions
        room = max(1, min(self.sampling.max_tokens, context // SHARE))
        starts = [at for at, message in enumerate(said) if message.role == "user"]
        for start in [at for at in starts if at >= self.forgotten] or starts[-1:]:
            ids = self.form.encode([*self.opening, *said[start:]])
            if len(ids) + room <= context or (start == starts[-1] and len(ids) < context):
                self.forgotten = start
                return ids
        raise UserError(
            f"this message has {len(ids):,} tokens, and the model reads {context:,} with its answer",
            where="the chat",
            fix="say it in fewer words" + (", or shorten the system prompt" if self.system else ""),
        )  # fmt: skip

    def reset(self) -> None:
        self.said.clear()
        self.forgotten = 0

    def save(self, path: Path) -> None:
        """Appends the conversation to a JSONL file, as a row that can be trained on. Raises UserError."""
        row = {"messages": [{"role": turn.role, "content": turn.content} for turn in self.turns]}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise UserError(problem, where=str(path), fix="name another file") from error


INTERRUPTED = 130
HELP = """\
/system TEXT       what the model is told before everything; alone it shows it, /system off ends it
/set NAME VALUE    how tokens are drawn: /set temperature 0.7; without a name all settings are shown
/save FILE         append this conversation to FILE, a row of JSONL that can be trained on
/reset             forget what was said
/help, /quit       Ctrl+C stops an answer; twice, or Ctrl+D, leaves
A line that begins with two slashes is said with one; a line that ends in \\ goes on in the next."""


@click.command()
@click.argument("model")
@click.option("--system", help="What the model is told before everything.")
@click.option("--template", help="A chat template: chatml, llama2, llama3, qwen, mistral, gemma or a file.")
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@devices_option
@quantize_option
@drawing_options
def command(
    model: str, system: str | None, template: str | None, step: str, devices: str, quantize: str | None, **drawing: Any
) -> int:
    """Talk to MODEL (a run, a folder, a Hub id, or BASE+ADAPTER). Piped, each line is a message; answers go to stdout.

    Example: bloomery chat last --system "You answer in one sentence." --temperature 0.3
    """
    finite(drawing)
    where = model_path(model)
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.data.chat.render import chat_format
    from bloomery.model.sampling import Sampling
    from bloomery.runs.generate import load_model

    decoder, tokenizer = load_model(where, step=step, use=use, tell=loading)
    with text_flags(), chat_format(tokenizer, template) as form:
        session = Session(decoder, tokenizer, form, Sampling(**drawing), system=system)
        _tell(f"{model}: reads {decoder.config.max_positions:,} tokens; {form.description}")
        _tell("/help lists the commands, Ctrl+C stops an answer, Ctrl+D leaves")
        return Terminal(session).talk()


@final
class Terminal:
    """Lines of a person or a pipe, and what becomes of each."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.person = sys.stdin.isatty()
        self.prompt = "> " if self.person and sys.stdout.isatty() else ""
        if self.prompt and find_spec("readline"):
            import_module("readline")  # `input` then edits its line, and knows those before
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: click.echo(HELP), "reset": self._reset, "system": self._system, "set": self._set,
            "save": self._save,
        }  # fmt: skip

    def talk(self) -> int:
        """Until the lines end, /quit, or Ctrl+C twice; returns the exit code."""
        warned = failed = False
        while True:
            try:
                line = self._line()
            except KeyboardInterrupt:
                if warned or not self.person:
                    _tell("")
                    return INTERRUPTED
                warned = True
                _tell("\n(Ctrl+C once more leaves)")
                continue
            if line is None or line.strip() in ("/quit", "/exit"):
                return 1 if failed and not self.person else 0
            try:
                with text_flags():
                    self._do(line)
                warned = False
            except KeyboardInterrupt:
                warned = True
                _tell("\n(stopped; Ctrl+C once more leaves)")
            except UserError as error:
                failed = True
                _tell(harmless(str(error)))

    def _line(self) -> str | None:
        """A line, with those that it goes on in; None at the end."""
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
            _tell("")
            return None

    def _do(self, line: str) -> None:
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            if name.lower() not in self.commands:
                fix = did_you_mean(name.lower(), [*self.commands, "quit"], "/help lists them", shown="/{}")
                raise UserError(f"there is no command /{name.lower()[:40]}", where="the chat", fix=fix)
            self.commands[name.lower()](rest.strip())
        elif text:
            refuse_undecoded(line, what="this line", where="the chat")
            self._answer(line[1:] if text.startswith("//") else line)

    def _answer(self, text: str) -> None:
        """Prints it without blank lines before and after."""
        before = self.session.forgotten
        held = begun = ""
        for piece in self.session.answer(text):
            if not begun and self.session.forgotten > before:
                count, context = self.session.forgotten - before, self.session.decoder.config.max_positions
                _tell(f"({count} earlier messages no longer fit into {context:,} tokens: the model has forgotten them)")
                before = self.session.forgotten
            shown = held + harmless(piece)
            held = shown[len(shown.rstrip()) :]
            shown = shown.rstrip() if begun else shown.strip()
            begun = begun or shown
            click.echo(shown, nl=False)
            sys.stdout.flush()
        click.echo()

    def _reset(self, _rest: str) -> None:
        self.session.reset()
        _tell("(forgotten)")

    def _system(self, rest: str) -> None:
        if rest:
            self.session.system = None if rest == "off" else rest
        _tell(f"(the model is told: {self.session.system})" if self.session.system else "(there is no system prompt)")

    def _set(self, rest: str) -> None:
        if rest:
            name, value = setting(rest)
            changed: dict[str, Any] = {name: value}
            self.session.sampling = replace(self.session.sampling, **changed)
        shown = {name: getattr(self.session.sampling, name) for name in SETTINGS}
        _tell(", ".join(f"{name} {'off' if value is None else value}" for name, value in shown.items()))

    def _save(self, rest: str) -> None:
        if not rest:
            raise UserError("/save lacks the file's name", where="the chat", fix="for example: /save talk.jsonl")
        try:
            path = expanded(Path(shlex.split(rest)[0]) if rest[0] in "'\"" else rest)
        except ValueError as error:
            fix = "close it: /save 'my talk.jsonl'"
            raise UserError("a quote is never closed", where=f"/save {rest}", fix=fix) from error
        if not self.session.said:
            raise UserError("nothing has been said yet", where=f"/save {rest}", fix="ask something first")
        self.session.save(path)
        _tell(f"({len(self.session.turns)} messages were appended to {path})")


def _tell(line: str) -> None:
    """To the person; stdout is the model's."""
    click.echo(line, err=True)
