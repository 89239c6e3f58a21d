"""A folder for `ollama create`: the GGUF file and a Modelfile with template, stop tokens and sampling settings.

Ollama writes prompts with Go templates. A chat template is translated by what it writes: the text before and after the
messages of each role. The translation is compared with the chat template on other conversations.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.data.chat.render import TemplateProcess, as_turn, chat_format
from bloomery.data.examples import Message
from bloomery.data.tokenizer.templates import find_template, own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export.card import license_of
from bloomery.export.gguf import export_gguf
from bloomery.export.layouts import Exported, draft_of
from bloomery.model.io.stored import read_object
from bloomery.model.presets import read_config
from bloomery.train.model_folder import ModelFiles
from bloomery.train.use import Use

MOST_CONTEXT = 8192  # tokens: Ollama reserves the memory of all of them
SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
_MARKS = tuple(f"@@{letter}@@" for letter in "ABCDE")
_TRIED = (
    (Message("user", "Hello!"),),
    (Message("user", "What is 2 + 2?"), Message("assistant", "4"), Message("user", "And\n\n3?")),
    (Message("system", "Be brief."), Message("user", "Hi")),
    (
        Message("system", "A\nB"),
        Message("user", "1"),
        Message("assistant", "2"),
        Message("user", "3"),
    ),
)
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class Translation:
    """The text that a chat template writes around a message: before and after it, by role. `head`: first, without a
    system message; `prompt`: last, for the next answer.
    """

    head: str
    system: tuple[str, str] | None  # None: the template takes no system message of its own
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str

    def go(self) -> str:
        """The Go template of Ollama."""
        first = self.head
        if self.system is not None:
            before, after = self.system
            first = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{self.head}{{{{ end }}}}"
        turns = "".join(
            f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for word, role, (before, after) in (
                ("if", "user", self.user),
                ("else if", "assistant", self.assistant),
            )
        )
        return f"{first}{{{{ range .Messages }}}}{turns}{{{{ end }}}}{{{{ end }}}}{self.prompt}"

    def render(self, messages: Sequence[Message]) -> str:
        """The text that Ollama writes with it."""
        text = ""
        around = {"user": self.user, "assistant": self.assistant, "system": self.system or ("", "")}
        if messages[0].role != "system":
            text = self.head
        for message in messages:
            before, after = around[message.role]
            text += before + message.content + after
        return text + self.prompt


def translate(render: Render) -> Translation | None:
    """None for a template that is no sequence of messages, each with its own text around it."""
    a, b, *_ = _MARKS
    turns = [
        Message("assistant" if number % 2 else "user", mark) for number, mark in enumerate(_MARKS)
    ]
    parts = _cut(render(turns), _MARKS)
    if parts is None:
        return None
    first, to_answer, to_question, again, _, last = parts
    if to_answer != again:
        return None
    after_user = _shared(to_answer, last)
    before_user = _shared(first[::-1], to_question[::-1])[::-1]
    head = first.removesuffix(before_user)
    before_answer = to_answer.removeprefix(after_user)
    prompt = last.removeprefix(after_user)
    system = None
    try:
        with_system = _cut(render([Message("system", a), Message("user", b)]), (a, b))
    except UserError:  # some templates refuse a system message
        with_system = None
    if with_system is not None and with_system[1].endswith(before_user):
        system = with_system[0], with_system[1].removesuffix(before_user)
    made = Translation(
        head,
        system,
        (before_user, after_user),
        (before_answer, to_question.removesuffix(before_user)),
        prompt,
    )
    if "{{" in json.dumps(vars(made)) or '"""' in made.go():
        return None
    for tried in _TRIED:
        if (system is not None or tried[0].role != "system") and made.render(tried) != render(
            tried
        ):
            return None
    return made


def _shared(one: str, other: str) -> str:
    """The longest text that both begin with."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return one[:same]


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text before, between and after the marks; None where one is not there once, in this order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def modelfile(file: str, files: ModelFiles, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """Its text, and what Ollama does differently."""
    lines = [f"FROM ./{file}"]
    notes = list[str]()
    stops = list[str]()
    if own_templates(tokenizer.config):
        template = find_template(None, tokenizer.config)
        names = {
            role: _text(tokenizer.config[role])
            for role in ("bos_token", "eos_token", "pad_token", "unk_token")
            if tokenizer.config.get(role)
        }
        process = TemplateProcess(template, names, tokenizer.control_tokens())

        def render(messages: Sequence[Message]) -> str:
            job = {
                "messages": [as_turn(message) for message in messages],
                "tools": [],
                "train_on": None,
            }
            (answer,) = process.read([{**job, "prompt": True}])
            if "error" in answer:
                raise process.error(answer["error"])
            text: str = answer["text"]
            # Ollama adds it before the prompt
            begin = names.get("bos_token", "") if tokenizer.prefix else ""
            return text.removeprefix(begin)

        try:
            translation = translate(render)
        finally:
            process.close()
        if translation is not None:
            lines.append(f'TEMPLATE """{translation.go()}"""')
            if translation.system is None:
                notes.append(
                    "Ollama ignores system messages: the chat template has no text of its own for them"
                )
        else:
            notes.append(
                "the chat template has no Go form here; Ollama chooses a template of its own"
            )
        with chat_format(tokenizer, None) as form:
            stops = [tokenizer.decode([index]) for index in form.stop_ids]
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    for stop in stops:
        lines.append(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}")
    source = files.weights if files.base is None else files.base
    lines.append(f"PARAMETER num_ctx {min(MOST_CONTEXT, read_config(source).max_positions)}")
    settings = source / "generation_config.json"
    stated = read_object(settings, fix="correct or delete that file") if settings.is_file() else {}
    for theirs, ours in SETTINGS.items():
        if isinstance(value := stated.get(theirs), int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {ours} {value:g}")
    if (known := license_of(files.weights, files.base)) is not None:
        lines.append(f'LICENSE """{known}"""')
    return "\n".join(lines) + "\n", notes


def _text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def export_ollama(
    files: ModelFiles, out: Path, *, kind: str = "q8_0", verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the new folder `out`, completely or not at all. Other arguments as for `export_gguf`. Raises UserError."""
    name = f"{out.name}.gguf"
    with draft_of(out) as draft:
        done = export_gguf(files, draft / name, kind=kind, verify=verify, use=use)
        text, notes = modelfile(name, files, load_tokenizer(files.tokenizer))
        (draft / "Modelfile").write_text(text, encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir())
    proofs = (*done.proofs, *(f"differs    {note}" for note in notes))
    return Exported(out, size, proofs, f"cd {out} && ollama create {out.name.lower()} -f Modelfile")
