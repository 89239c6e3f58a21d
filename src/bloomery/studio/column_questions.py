"""Which column of a table is which, where no name says it: its first rows, and a field per role. No torch."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, final

from nicegui import ui

from bloomery.core.text import harmless
from bloomery.studio.components import note, text
from bloomery.studio.data_choices import DataFacts

MOST_CHARACTERS = 120  # of a cell
ROLES = {  # of a recipe's data.columns, and what a page calls them
    "instruction": "Prompt",
    "prompt": "Prompt",
    "output": "Response",
    "chosen": "Better response",
    "rejected": "Worse response",
    "text": "Text",
}


@final
class ColumnQuestions:
    """Mutable: the fields of one dataset. `on_choice(columns)`: a column by role."""

    def __init__(self, on_choice: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        self._on_choice = on_choice
        self._shown: tuple[object, ...] | None = None
        self._place = ui.element("div").classes("columns")

    def show(self, facts: DataFacts | None, purpose: str, chosen: Mapping[str, str]) -> None:
        """`chosen`: the columns that count; none before the button was pressed."""
        roles = facts.roles_of(purpose) if facts is not None else {}
        # Drawn again, a field would lose the keyboard's focus.
        shown = facts, tuple(roles), tuple(chosen.items())
        if shown == self._shown:
            return
        self._shown = shown
        self._place.clear()
        if facts is None or not roles:
            return
        with self._place:
            if not chosen:
                note("No column has a usual name for this. Which one is which?", "warn")
            _show_rows(facts)
            fields = dict[str, Any]()
            for role, likeliest in roles.items():
                column = chosen.get(role, likeliest)
                field = ui.select(list(facts.texts), value=column, label=ROLES[role])
                fields[role] = field.props("outlined dense").mark(f"column-{role}")
            take = partial(self._take, fields)
            if chosen:
                # From now on each choice counts at once.
                for field in fields.values():
                    field.on_value_change(take)
            else:
                ui.button("Use these columns", on_click=take).props("outline dense no-caps")

    async def _take(self, fields: Mapping[str, Any]) -> None:
        await self._on_choice({role: str(field.value) for role, field in fields.items()})


def _show_rows(facts: DataFacts) -> None:
    """The first rows of the table, so that it is plain what each column holds."""
    with ui.element("div").classes("table-shown").props("tabindex=0 role=region") as box:
        box.props["aria-label"] = "The first rows"
        with ui.element("table"), ui.element("tbody"):
            with ui.element("tr"):
                for name in facts.columns:
                    text(harmless(name), "th").props("scope=col")
            for row in facts.rows:
                with ui.element("tr"):
                    for name in facts.columns:
                        value = row.get(name)
                        cell = "" if value is None else harmless(str(value))
                        is_long = len(cell) > MOST_CHARACTERS
                        text(f"{cell[:MOST_CHARACTERS]} ..." if is_long else cell, "td")
