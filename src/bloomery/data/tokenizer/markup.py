"""Control tokens that a chat template wrote, and the same letters in a message, which stay letters.

A tokenizer turns "<|im_end|>" into one token wherever it stands: a message that holds it would end its own turn. So the
letters are broken before the template is rendered; what matches afterwards is the template's, and a tokenizer encodes
it under names that nobody can write.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from bloomery.core.errors import UserError

Json = dict[str, Any]
Encode = Callable[[str], list[int]]
# Letters that nobody uses, at the end of Unicode.
_BREAKS = [chr(code) for code in range(0x10FFFD, 0x10FF00, -1)]
_WHERE = "the chat template"


@final
class Markup:
    """The control tokens of a tokenizer. `load`: makes the encoder of a tokenizer.json."""

    def __init__(
        self,
        ids: Mapping[str, int],
        description: Callable[[], Json],
        load: Callable[[Json], Encode],
    ) -> None:
        self._ids = {name: token for name, token in ids.items() if len(name) > 1}
        self._description = description
        self._load = load
        names = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._secret: tuple[dict[str, str], Encode] | None = None

    def occurs(self, value: object) -> bool:
        """Whether a control token is spelled out anywhere in a JSON value."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.occurs(key) or self.occurs(entry) for key, entry in value.items())
        return isinstance(value, list | tuple) and any(map(self.occurs, value))

    def broken(self, value: Any) -> tuple[Any, str]:
        """The value with every spelled-out control token broken, and the letter that breaks it."""
        json_text = json.dumps(value, ensure_ascii=False)
        mark = next((mark for mark in _BREAKS if mark not in json_text), None)
        if mark is None:
            problem = (
                "the conversation uses every letter that could tell its text from control tokens"
            )
            raise UserError(problem, where=_WHERE, fix="remove letters above U+10FF00")
        return self._broken(value, mark), mark

    def _broken(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        if isinstance(value, Mapping):
            return {
                self._broken(key, mark): self._broken(entry, mark) for key, entry in value.items()
            }
        return (
            [self._broken(entry, mark) for entry in value]
            if isinstance(value, list | tuple)
            else value
        )

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Ids of a rendered text: control tokens that are whole are the template's, broken ones are letters.

        Raises UserError for a tokenizer whose control tokens cannot be renamed.
        """
        if self._secret is None:
            self._secret = self._renamed()
        names, encode = self._secret
        secret_text = self._pattern.sub(lambda match: names[match[0]], text)
        return encode(secret_text.replace(mark, "") if mark else secret_text)

    def _renamed(self) -> tuple[dict[str, str], Encode]:
        """Names that no message holds, and the encoder that knows the control tokens by these names alone."""
        prefix = "".join(chr(0xF0000 + secrets.randbelow(0xFFF0)) for _ in range(4))
        names = {name: prefix + chr(0xE000 + order) for order, name in enumerate(self._ids)}
        described = renamed(self._description(), names)
        encode = self._load(described)
        for name, token in self._ids.items():
            if encode(names[name]) != [token]:
                problem = f"a message holds {name}, and this tokenizer cannot encode it as text"
                raise UserError(problem, where=_WHERE, fix=f"remove {name} from the message")
        return names, encode


def renamed(description: Json, names: Mapping[str, str]) -> Json:
    """A tokenizer.json whose tokens have other names, and the same ids."""
    model = dict(description["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        {**entry, "content": names.get(entry["content"], entry["content"])}
        for entry in description.get("added_tokens") or []
    ]
    # What the post-processor adds to a text is not asked for, but its names would have to exist.
    return {**description, "model": model, "added_tokens": added, "post_processor": None}


def ids_of(names: Iterable[str], id_of: Callable[[str], int | None]) -> dict[str, int]:
    return {name: token for name in names if (token := id_of(name)) is not None}
