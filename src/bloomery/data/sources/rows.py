"""A row by the roles of its columns, which are read, refused or noted as not read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from bloomery.data.examples import BadRow, Message, Turns, check_turns, text_of
from bloomery.data.sources.turns import (
    ROLES,
    parsed,
    plain_json,
    read_turns,
    refuse_media,
    refuse_size,
    without_nulls,
)
from bloomery.facts.columns import (
    COLUMN_NAMES,
    LISTS,
    ROLE_KEYS,
    SAME_ROLE,
    TEXT_KEYS,
    ColumnUse,
    first_name,
    is_empty,
    named_column,
)

Columns = Mapping[str, str]  # roles to columns of other names
MEDIA_ROLES = ("images", "videos", "audios")
UNREAD_ROLES = ("videos", "audios")


def cells_of(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row: text with turns is parsed, as CSV files have it, and the object that holds the prompt of
    OpenAI's preferences is a column for each of its keys.
    """
    cells = _with_turns(row)
    asked = cells.get("input")
    if isinstance(asked, dict) and isinstance(asked.get("messages"), list):
        cells = {name: value for name, value in cells.items() if name != "input"}
        for key, value in asked.items():
            column = "prompt" if key == "messages" else key
            cells[f"input.{key}" if column in cells else column] = value
    return cells


def _with_turns(cells: dict[str, Any]) -> dict[str, Any]:
    """Parse text columns with a list of turns, or with one turn, as JSON."""
    turns = {}
    for name, value in cells.items():
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            continue
        content = parsed(value)
        is_list = isinstance(content, list) and content and all(map(_is_turn, content))
        if is_list or (_is_turn(content) and _is_whole_turn(content)):
            turns[name] = content
    return {**cells, **turns} if turns else cells


def _is_turn(value: object) -> bool:
    return isinstance(value, dict) and any(key in value for key in ROLE_KEYS)


def _is_whole_turn(turn: Mapping[str, Any]) -> bool:
    """Whether an object is one turn, and no answer in JSON that happens to have a role."""
    role = next((turn[key] for key in ROLE_KEYS if isinstance(turn.get(key), str)), None)
    return role in ROLES and any(key in turn for key in TEXT_KEYS)


def is_list_of_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def list_column(cells: Mapping[str, Any], named: Columns) -> str | None:
    """The column with the turns of a conversation: that of data.columns, one of a usual name, else the only one that
    holds turns.
    """
    for column in (named.get("messages"), named.get("conversations"), *LISTS):
        value = cells.get(column) if column else None
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return column
    taken = {
        *named.values(),
        *(name for names in _SIDES for name in COLUMN_NAMES[names]),
        *COLUMN_NAMES["tools"],
    }
    others = [
        name for name, value in cells.items() if name not in taken and is_list_of_turns(value)
    ]
    return others[0] if len(others) == 1 and others[0] not in ("prompt", "completion") else None


# Roles that the first row decides: a later row without their columns is invalid.
_REQUIRED = ("prompt", "completion", "instruction", "output", "chosen", "rejected")
_SIDES = ("chosen", "rejected", "history")


def _as_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates expect it. OpenAI's older list, LLaMA-Factory and xLAM have the functions themselves,
    OpenAI's Responses API has their keys next to the type.
    """
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    if tool.get("type", "function") != "function":
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Row:
    """A row, its place, and `named`: the roles of data.columns, with the columns of other names. `unparsed`: its cells
    as they were read, where JSON in texts stays text. `taken`: the columns that a reader took, by role; `use`: what
    the readers of several rows took.
    """

    cells: Mapping[str, Any]
    named: Columns
    where: str
    unparsed: Mapping[str, Any]
    use: ColumnUse = field(default_factory=ColumnUse)
    strict: bool = True  # a column of a role's own name must hold what the role needs
    guesses: bool = (
        False  # usual names count for sides, too: the recipe names the format, and no columns
    )
    taken: dict[str, str] = field(default_factory=dict)

    def column(self, role: str) -> str | None:
        """The column of a role: the one of data.columns, the one of the same name, else, where data.columns names
        none, a usual name that no other role has taken. None without any.
        """
        stated = named_column(role, self.named) or self.taken.get(role)
        if stated is not None:
            return stated
        others = {*self.named.values(), *self.taken.values()}
        free = {name: value for name, value in self.cells.items() if name not in others}
        if role in free and (self.named or not is_empty(free[role])):
            return role
        usual = (
            None
            if self.named or (role in _REQUIRED and not self.guesses)
            else first_name(COLUMN_NAMES.get(SAME_ROLE.get(role, role), ()), free)
        )
        return usual or (role if role in free else None)

    def has(self, role: str) -> bool:
        """Whether a column has that role, and holds something."""
        column = self.column(role)
        return column is not None and not is_empty(self.cells.get(column))

    def cell(self, role: str, *, required: bool = True) -> tuple[Any, str]:
        """The value for a role, and its place. Raises BadRow without that column, if it is `required` or in `named`."""
        column = self.column(role)
        if column is not None and column in self.cells:
            self.taken[role] = column
            return self.cells[column], f"{self.where}, {column}"
        if column is None and not required:
            return None, f"{self.where}, {role}"
        name = column or role
        present = ", ".join(str(key)[:40] for key in list(self.cells)[:12]) or "nothing"
        mapped = "set data.columns={}: it maps another dataset"
        fix = mapped if role in self.cells else f"name it: data.columns={{{role}: NAME}}"
        raise BadRow(self.where, f"has no column {name!r}; it has: {present}", fix)

    def text(self, role: str) -> str:
        """The text of an optional role, "" without it. Raises BadRow."""
        column = self.column(role)
        value = None if column is None else self.cells.get(column)
        if role not in self.named:
            is_own = column == role and self.strict
            if value is None or not (is_own or isinstance(value, str)):
                return ""
        value, location = self.cell(role, required=False)
        return "" if value is None else text_of(value, location)

    def turns(self, value: object, where: str) -> tuple[Message, ...]:
        """Messages of a list of turns, or of one; `named` may rename their "role" and "content". Raises BadRow."""
        return read_turns(value, where, self.named, self.use)

    def list_of_turns(self) -> tuple[tuple[Message, ...], str]:
        """The conversation of the row, and its place. Raises BadRow without any."""
        column = list_column(self.cells, self.named)
        named_role = next(
            (role for role in ("messages", "conversations") if role in self.named), None
        )
        if named_role is not None or column is None:
            value, location = self.cell(named_role or "messages")
            return self.turns(value, location), location
        self.taken["messages"] = column
        location = f"{self.where}, {column}"
        return self.turns(self.cells[column], location), location

    def side(self, role: str) -> tuple[Turns, str]:
        """A text or messages, and their place. One message is a list of one."""
        value, location = self.cell(role)
        if isinstance(value, list | dict):
            return self.turns(value, location), location
        text = text_of(value, location)
        refuse_size(len(text), location)
        return text, location

    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools, which are a list or JSON text. Raises BadRow."""
        column = self.column("tools")
        tools = parsed(self.cells.get(column or ""))
        are_tools = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        if column is None or (
            column not in self.named.values() and column != "tools" and not are_tools
        ):
            return ()
        value, location = self.cell("tools", required=False)
        if tools is None or tools == "" or tools == []:
            return ()
        if not are_tools:
            raise BadRow(location, "is not a list of tools, each an object")
        checked = cast(list[dict[str, Any]], plain_json(tools, location))
        if not isinstance(value, str):
            checked = [without_nulls(tool) for tool in checked]
        return tuple(map(_as_tool, checked))

    def history(self) -> tuple[Message, ...]:
        """Earlier turns: pairs of a prompt and its response, as LLaMA-Factory and ms-swift have them, or messages."""
        value, location = self.cell("history", required=False)
        pairs = parsed(value)
        if is_empty(pairs):
            return ()
        if is_list_of_turns(pairs):
            turns = self.turns(pairs, location)
        elif isinstance(pairs, list) and all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            parts = [
                text_of(part, f"{location}[{index}]")
                for index, pair in enumerate(pairs)
                for part in pair
            ]
            turns = tuple(
                Message("assistant" if index % 2 else "user", part)
                for index, part in enumerate(parts)
            )
        else:
            raise BadRow(location, "is not a list of pairs of a prompt and its response")
        check_turns(turns, location, responses=False)
        return turns

    def with_system(self, turns: tuple[Message, ...]) -> tuple[Message, ...]:
        """The turns after the system message of a column, unless they begin with the same one."""
        system = self.text("system").strip()
        own_system = next((turn.content for turn in turns if turn.role == "system"), None)
        if not system or (own_system is not None and own_system.strip() == system):
            return turns
        if own_system is not None:
            problem = (
                f"has a system message in {self.column('system')!r}, and another one in its turns"
            )
            raise BadRow(self.where, problem, "remove one of them, or set data.on_error=skip")
        system = self.text("system")
        return (Message("system", system), *turns)

    def prompt(self, role: str = "prompt") -> tuple[Turns, str]:
        """The prompt and its place: the input follows a text on a line of its own, as in Alpaca's rows; the system
        message and earlier turns of other columns come before it. Raises BadRow.
        """
        prompt, location = self.side(role)
        if isinstance(prompt, str):
            extra = self.text("input")
            if extra.strip():
                prompt = "\n".join(part for part in (prompt, extra) if part.strip())
        history = self.history()
        if not history and not self.text("system").strip():
            return prompt, location
        turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        own_system = turns[:1] if turns[0].role == "system" else ()
        return self.with_system((*own_system, *history, *turns[len(own_system) :])), location

    def refuse_media(self) -> None:
        """Raises BadRow for sound or video in a column."""
        refuse_media(self.cells, self.where)
        for role in UNREAD_ROLES:
            column = self.named.get(role)
            if column is not None and not is_empty(self.cells.get(column)):
                refuse_media({role: self.cells[column]}, f"{self.where}, {column}")

    def note_use(self, *, keeps_columns: bool = False) -> None:
        """Adds the columns that were taken, and those that hold something and were not, to `use`. `keeps_columns`: the
        example has all of them.
        """
        self.use.roles |= {
            role: name for role, name in self.taken.items() if not is_empty(self.cells.get(name))
        }
        if keeps_columns:
            return
        taken_columns = set(self.taken.values())
        for name, value in self.cells.items():
            if name not in taken_columns and not is_empty(value):
                self.use.unread_columns[str(name)] = None
