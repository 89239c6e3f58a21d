"""Chat templates: the tokenizer's own, a file, or one of Bloomery."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.text import closest
from bloomery.core.units import MIB

BUILTIN = ("chatml", "llama2", "llama3", "qwen", "mistral", "gemma")
NONE = "none"  # as data.chat.template: prompts and responses that are texts are not formatted
KEY = "chat_template"  # in tokenizer_config.json
NOT_OWN = "not the tokenizer's own"
_FOLDER = Path(__file__).parent / "templates"
_WHERE = "data.chat.template"
_CHOICES = f"set {_WHERE} to {', '.join(BUILTIN)} or a file"
VARIABLES = "data.chat.template_kwargs"
# What a conversation sets: no variable of a recipe may replace it.
_OF_CONVERSATIONS = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja text and its name. `tool_use`: the template for conversations with tools, if it is another one.

    `replaces_own`: the tokenizer has templates of its own, and this is none of them.
    """

    text: str
    origin: str
    tool_use: str | None = None
    replaces_own: bool = False

    @property
    def description(self) -> str:
        return f"{self.origin}, {NOT_OWN}" if self.replaces_own else self.origin


def builtin_template(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def formats_texts(template: str | None, config: Mapping[str, Any]) -> bool:
    """Whether prompts and responses that are texts are formatted as turns: where there is a chat template."""
    return template != NONE and (template is not None or bool(own_templates(config)))


def find_template(name: str | None, config: Mapping[str, Any]) -> ChatTemplate:
    """The template of `data.chat.template` for a tokenizer_config.json. Raises UserError."""
    templates = own_templates(config)
    if name is None and "default" in templates:
        return ChatTemplate(
            templates["default"], "the tokenizer's own template", templates.get("tool_use")
        )
    if name is None and templates:
        raise UserError(
            f"the tokenizer has several chat templates and no default: {', '.join(templates)}",
            where=_WHERE,
            fix=f"set {_WHERE} to one of them",
        )
    if name is None:
        raise UserError("the tokenizer has no chat template", where=_WHERE, fix=_CHOICES)
    if name == NONE:
        problem = "conversations need a chat template"
        fix = f"{_CHOICES}, or remove the key for the tokenizer's own"
        raise UserError(problem, where=f"{_WHERE}={NONE}", fix=fix, code=2)
    if name in templates:
        return ChatTemplate(templates[name], f"the tokenizer's own template {name!r}")
    path = Path(name)
    named_template = None
    if name in BUILTIN:
        named_template = ChatTemplate(builtin_template(name), f"the built-in template {name}")
    elif "{%" in name or "{{" in name:
        named_template = ChatTemplate(name, "the template in the recipe")
    elif path.is_file():
        named_template = ChatTemplate(_read(path), str(path))
    if named_template is not None:
        replaces_own = bool(templates) and named_template.text not in templates.values()
        return replace(named_template, replaces_own=replaces_own)
    similar = closest(name, [*templates, *BUILTIN])
    meant = f"; did you mean {similar[0]}?" if similar else ""
    raise UserError(f"no such chat template or file: {name!r}{meant}", where=_WHERE, fix=_CHOICES)


def with_variables(
    template: ChatTemplate,
    variables: Mapping[str, bool | int | float | str],
    where: str = VARIABLES,
) -> ChatTemplate:
    """The template with other values for its variables, such as `enable_thinking`; a request may still set them.
    `where`: the key of the recipe that has them.

    Raises UserError for a variable that it does not have.
    """
    texts = [text for text in (template.text, template.tool_use) if text is not None]
    for name in variables:
        if name in _OF_CONVERSATIONS or not name.isidentifier() or name.endswith("_token"):
            raise UserError(
                f"{name[:60]!r} is no variable that a recipe sets",
                where=where,
                fix="leave it out: it comes from the conversation or the tokenizer",
                code=2,
            )
        if not any(re.search(rf"\b{name}\b", text) for text in texts):
            raise UserError(
                f"{template.origin} has no variable {name[:60]!r}",
                where=where,
                fix="leave it out, or look at the template for the names that it tests",
                code=2,
            )
    tool_use = template.tool_use
    return replace(
        template,
        text=_with_defaults(template.text, variables),
        tool_use=None if tool_use is None else _with_defaults(tool_use, variables),
    )


def _with_defaults(text: str, variables: Mapping[str, bool | int | float | str]) -> str:
    """Nothing is added twice: a prepared dataset's tokenizer has the template with them already."""
    settings = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}{{%- endif %}}"
        for name, value in sorted(variables.items())
    )
    if not settings or text.startswith(settings):
        return text
    # A newline behind a block is not written: that of the template itself stays.
    return settings + ("{{ '' }}" if text[:1].isspace() else "") + text


def own_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a tokenizer, by name; a single one is called "default"."""
    value = config.get(KEY)
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):  # named templates in transformers
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    entries = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def _read(path: Path) -> str:
    try:
        return read_input(path, MIB).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("chat template is not UTF-8", where=str(path), fix=_CHOICES) from error


def templates_in(folder: Path) -> dict[str, str]:
    """Templates in separate files of a tokenizer's folder, as transformers writes them."""
    single = folder / "chat_template.jinja"
    templates = {"default": _read(single)} if single.is_file() else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    return templates
