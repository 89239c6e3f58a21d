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
from bloomery.data.tokenizer.roles import named_tokens
from bloomery.data.tokenizer.templates import find_template, own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export.card import license_of
from bloomery.export.gguf import export_gguf
from bloomery.export.layouts import Exported, draft_of
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.configs import read_config
from bloomery.model.io.stored import read_object

MOST_CONTEXT = 8192  # tokens: Ollama reserves the memory of all of them
SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
_MARKS = tuple(f"@@{letter}@@" for letter in "ABCDE")
# A translation must write these as the chat template does.
_CONVERSATIONS = (
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
        start = self.head
        if self.system is not None:
            before, after = self.system
            start = (
                f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}"
                f"{{{{ else }}}}{self.head}{{{{ end }}}}"
            )
        turns = "".join(
            f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for word, role, (before, after) in (
                ("if", "user", self.user),
                ("else if", "assistant", self.assistant),
            )
        )
        return f"{start}{{{{ range .Messages }}}}{turns}{{{{ end }}}}{{{{ end }}}}{self.prompt}"

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
    # Three questions and two answers show the text before, between and after them.
    turns = [
        Message("assistant" if number % 2 else "user", mark) for number, mark in enumerate(_MARKS)
    ]
    parts = _cut(render(turns), _MARKS)
    if parts is None:
        return None
    first, to_answer, to_question, to_second_answer, _, last = parts
    if to_answer != to_second_answer:
        return None

    # What stands after every question ends it, what stands before every question begins it; the rest belongs to the
    # start, to answers and to the prompt.
    after_user = _shared_start(to_answer, last)
    before_user = _shared_start(first[::-1], to_question[::-1])[::-1]
    head = first.removesuffix(before_user)
    before_answer = to_answer.removeprefix(after_user)
    after_answer = to_question.removesuffix(before_user)
    prompt = last.removeprefix(after_user)

    translation = Translation(
        head,
        _around_system(render, before_user),
        (before_user, after_user),
        (before_answer, after_answer),
        prompt,
    )
    if "{{" in json.dumps(vars(translation)) or '"""' in translation.go():
        return None
    for conversation in _CONVERSATIONS:
        if conversation[0].role == "system" and translation.system is None:
            continue
        if translation.render(conversation) != render(conversation):
            return None
    return translation


def _around_system(render: Render, before_user: str) -> tuple[str, str] | None:
    """The text before and after a system message; None where the template takes none of its own."""
    system, question, *_ = _MARKS
    conversation = [Message("system", system), Message("user", question)]
    try:
        parts = _cut(render(conversation), (system, question))
    except UserError:  # some templates refuse a system message
        return None
    if parts is None or not parts[1].endswith(before_user):
        return None
    return parts[0], parts[1].removesuffix(before_user)


def _shared_start(text: str, other_text: str) -> str:
    """The longest text that both begin with."""
    pairs = zip(text, other_text, strict=False)
    return text[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """The text before, between and after the marks; None where one is not there once, in this order."""
    parts = []
    for mark in marks:
        before, separator, text = text.partition(mark)
        if not separator or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def modelfile(file: str, files: ModelFiles, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """Its text, and what Ollama does differently."""
    lines = [f"FROM ./{file}"]
    notes: list[str] = []
    if own_templates(tokenizer.config):
        translation = _translated_template(tokenizer)
        if translation is None:
            notes.append(
                "the chat template has no Go form here; Ollama chooses a template of its own"
            )
        else:
            lines.append(f'TEMPLATE """{translation.go()}"""')
            if translation.system is None:
                notes.append(
                    "Ollama ignores system messages: the chat template has no text of its own for "
                    "them"
                )
        with chat_format(tokenizer, None) as form:
            stop_texts = [tokenizer.decode([index]) for index in form.stop_ids]
        lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in stop_texts]
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')

    # Context, sampling and license are those of the model, or of an adapter's base.
    source = files.weights if files.base is None else files.base
    lines.append(f"PARAMETER num_ctx {min(MOST_CONTEXT, read_config(source).max_positions)}")
    path = source / "generation_config.json"
    settings = read_object(path, fix="correct or delete that file") if path.is_file() else {}
    for key, parameter in SETTINGS.items():
        value = settings.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            lines.append(f"PARAMETER {parameter} {value:g}")
    license_name = license_of(files.weights, files.base)
    if license_name is not None:
        lines.append(f'LICENSE """{license_name}"""')
    return "\n".join(lines) + "\n", notes


def _translated_template(tokenizer: Tokenizer) -> Translation | None:
    """The tokenizer's chat template as a Go template; None where it has no such form."""
    special_tokens = named_tokens(tokenizer.config)
    template = find_template(None, tokenizer.config)
    process = TemplateProcess(template, special_tokens, tokenizer.control_tokens())
    # Ollama adds the BOS token before the prompt.
    bos = special_tokens.get("bos_token", "") if tokenizer.bos_id in tokenizer.prefix else ""

    def render(messages: Sequence[Message]) -> str:
        job = {
            "messages": [as_turn(message) for message in messages],
            "tools": [],
            "train_on": None,
            "prompt": True,
        }
        (answer,) = process.read([job])
        if "error" in answer:
            raise process.error(answer["error"])
        text: str = answer["text"]
        return text.removeprefix(bos)

    try:
        return translate(render)
    finally:
        process.close()


def export_ollama(
    files: ModelFiles, out: Path, *, kind: str = "q8_0", verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the new folder `out`, completely or not at all. Other arguments as for `export_gguf`. Raises UserError."""
    name = f"{out.name}.gguf"
    with draft_of(out) as draft:
        done = export_gguf(files, draft / name, kind=kind, verify=verify, use=use)
        text, notes = modelfile(name, files, load_tokenizer(files.tokenizer))
        if done.mmproj is not None:
            # As people import multimodal models of llama.cpp: the second FROM is the projector.
            text = text.replace("\n", f"\nFROM ./{done.mmproj.name}\n", 1)
            notes.append("no Ollama has opened the mmproj file here: ask the model about a picture")
        (draft / "Modelfile").write_text(text, encoding="utf-8")
    size = sum(path.stat().st_size for path in out.iterdir())
    proofs = (*done.proofs, *(f"differs    {note}" for note in notes))
    return Exported(out, size, proofs, f"cd {out} && ollama create {out.name.lower()} -f Modelfile")
