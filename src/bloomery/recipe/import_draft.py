"""A recipe that is being made of another tool's file: what each key became, and what has no counterpart."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from bloomery.recipe.aliases import Alias, plain

_ABSENT = object()


@dataclass(frozen=True)
class ToolFile:
    """The keys of a file of another tool.

    `command`: the method that a command line, a class of a script or its keys name, such as "dpo"; `is_guess`: nothing
    names it. `unread`: what stands in the file and was not read, with the reason.
    """

    tool: str
    keys: Mapping[str, Any]
    command: str = ""
    is_guess: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A key of the recipe: its value as YAML, the other tool's keys that it comes from, and why it is so."""

    text: str
    names: tuple[str, ...]
    reason: str = ""


@final
class Draft:
    """`settings`: by recipe key. `left`: reasons by the other tool's key. `empty`: keys without a value.

    `answered`: keys of the file that have become settings or have a reason.
    """

    def __init__(self, file: ToolFile, defaults: Mapping[str, Any]) -> None:
        self.file = file
        self.defaults = defaults
        self.settings: dict[str, Setting] = {}
        self.left: dict[str, str] = dict(file.unread)
        self.empty: list[str] = []
        self.answered: set[str] = set()

    # What the file says.

    def given(self, name: str) -> bool:
        """Whether the file has a value under this dotted name."""
        return _at(self.file.keys, name) not in (_ABSENT, None, "")

    def written(self, name: str) -> bool:
        """Whether the file has this key, also without a value."""
        return _at(self.file.keys, name) is not _ABSENT

    def get(self, name: str) -> Any:
        """The value in the file, else the tool's default, else None."""
        return _at(self.file.keys, name) if self.given(name) else self.defaults.get(name)

    def number(self, name: str) -> float | None:
        """As `get`, where it is a number or the text of one."""
        return as_number(self.get(name))

    def word(self, name: str) -> str:
        """As `get`, in lower case; the first one of a list; "" for none."""
        value = self.get(name)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else ""
        return str(value).strip().lower() if isinstance(value, str | int | float) else ""

    def is_on(self, name: str) -> bool:
        value = self.get(name)
        return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "1"))

    def mapping(self, name: str) -> dict[str, Any]:
        """The keys of a section; of a text in JSON, too."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return {}
        return value if isinstance(value, dict) else {}

    # What becomes of it.

    def set(self, key: str, value: Any, *names: str, reason: str = "") -> None:
        """A setting of the recipe. `names`: the other tool's keys that decide it; where the file has none of them, it
        is the tool's default."""
        computed = [name for name in names if name in self.file.unread and not self.given(name)]
        if computed:
            reason = f"set it: {computed[0]} is computed in the file"
        self.settings[key] = Setting(str(plain(value)), self._of_file(names), reason)

    def set_from(self, key: str, value: Any, names: Iterable[str]) -> None:
        """As `set`, of keys in lists, which are named with their number."""
        self.settings[key] = Setting(str(plain(value)), tuple(names))
        self.answered.update(names)

    def set_default(self, key: str, value: Any, *, reason: str = "") -> None:
        """What the tool does where its file says nothing; no more than a setting that is there."""
        if key not in self.settings:
            self.settings[key] = Setting(str(plain(value)), (), reason)

    def leave(self, name: str, reason: str) -> None:
        """A key that has no counterpart; nothing where the file does not have it."""
        if self.given(name):
            self.left[name] = reason
            self.answered.add(name)

    def leave_all(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            if name not in self.answered:
                self.leave(name, reason)

    def add(self, alias: Alias) -> None:
        """The answer of the table for a key."""
        if not alias.edits or alias.guess:
            self.left.setdefault(alias.name, _reason(alias))
        for edit in () if alias.guess else alias.edits:
            key, equals, value = edit.partition("=")
            setting = self.settings.get(key)
            if not equals:
                self.left[alias.name] = f"set {key} yourself" + (
                    f": {alias.reason}" if alias.reason else ""
                )
            elif setting is None:
                self.settings[key] = Setting(value, (alias.name,), alias.reason)
            elif setting.text == value:
                names = (*setting.names, alias.name)
                self.settings[key] = Setting(value, names, setting.reason or alias.reason)
            else:
                self.left[alias.name] = f"{key} is {setting.text} already, from {self.origin(key)}"

    def add_default(self, alias: Alias) -> None:
        """The answer of the table for a key that the file leaves out."""
        for edit in () if alias.guess else alias.edits:
            key, equals, value = edit.partition("=")
            if equals and key not in self.settings:
                is_computed = alias.name in self.file.unread
                reason = f"set it: {alias.name} is computed in the file" if is_computed else ""
                self.settings[key] = Setting(value, (), reason or alias.reason)

    def drop(self, key: str, reason: str) -> None:
        """Takes a setting out again; its origin is listed, but for a default of the tool."""
        setting = self.settings.pop(key)
        for name in setting.names:
            self.left.setdefault(name, reason)

    def origin(self, key: str) -> str:
        setting = self.settings[key]
        return ", ".join(setting.names) or f"the default of {self.file.tool}"

    def comment(self, key: str) -> str:
        """Where a setting comes from, and why it is so."""
        reason = self.settings[key].reason
        if not self.settings[key].names and reason.startswith(("of ", "set it: ")):
            return reason
        return self.origin(key) + (f": {reason}" if reason else "")

    def value(self, key: str) -> str:
        """The text of a setting, "" where there is none."""
        return self.settings[key].text if key in self.settings else ""

    def _of_file(self, names: Iterable[str]) -> tuple[str, ...]:
        names_of_file = tuple(dict.fromkeys(name for name in names if self.given(name)))
        self.answered.update(names_of_file)
        return names_of_file


def as_number(value: Any) -> float | None:
    """A number, or a text that is one (YAML 1.1 reads 1e-4 as text)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1e18 else None


def _at(keys: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name, which may be one key with dots."""
    if name in keys:
        return keys[name]
    outer, _, inner = name.partition(".")
    section = keys.get(outer)
    return _at(section, inner) if inner and isinstance(section, dict) else _ABSENT


def _reason(alias: Alias) -> str:
    reason = alias.reason
    for beginning in ("leave it out: ", "leave it out"):
        reason = reason.removeprefix(beginning)
    if alias.reason == "leave it out":
        return "nothing to set: it is off"
    return reason or "no such setting"
